"""Before any work: is the whole configuration sound, and on what machine does it run?

This file knows what must hold between settings, and what makes evidence stale. What a single key may hold is the
business of each stage's dataclass. It loads neither torch nor transformers, so that it may run each time.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from kvdrift.config import Composition, ConfigError, Profile, Stage, check, compose
from kvdrift.ledger import CacheShape
from kvdrift.models import ModelError, ModelSource, read_config, require_kv_cache, unsupported
from kvdrift.policy import PolicyError, from_dict

BACKENDS = ("definition", "native", "cuda")
DISK_HEADROOM = 1.5
"""Disk for everything under data/, as a multiple of the reference's keys and values."""


@dataclass(frozen=True)
class Selections:
    """`params.yaml`: which option of each group under `conf/` a run uses."""

    profile: str
    model: str
    corpus: str
    gates: str
    policies: list[str]

    def __post_init__(self) -> None:
        if not self.policies or len(set(self.policies)) < len(self.policies):
            raise ValueError(f"policies is {self.policies}; list at least one, each once")


@dataclass(frozen=True)
class SearchSpace:
    """`search` of a policy whose bits are searched for: the budget, and the quantizers to choose from."""

    bits_per_element: float
    choices: dict[int | str, dict[str, Any]]


def read_selections(root: Path) -> Selections:
    """`params.yaml`, checked; every option that it names exists. Raises ConfigError naming the allowed ones."""
    values: Any = OmegaConf.to_container(OmegaConf.load(root / "params.yaml"), resolve=True)
    selections = check(Composition("params.yaml", values, {}), Selections)
    groups = {"profile": [selections.profile], "model": [selections.model], "corpus": [selections.corpus]}
    for group, chosen in (groups | {"gates": [selections.gates], "policy": selections.policies}).items():
        options = sorted(path.stem for path in (root / "conf" / group).glob("*.yaml"))
        for option in chosen:
            if option not in options:
                raise ConfigError(
                    f"params.yaml: {group} {option!r} is unknown; allowed: {', '.join(options)}. "
                    f"Choose one of these or write conf/{group}/{option}.yaml."
                )
    return selections


def check_stages(root: Path, selections: Selections) -> int:
    """Compose and check every stage under every selected policy; the number of compositions. Raises ConfigError."""
    count = 0
    for script in sorted((root / "stages").glob("*.py")):
        stage = load_stage(script)
        for overrides in stage_overrides(root, stage.name, selections):
            check(compose(stage.name, overrides, root / "conf"), stage.schema)
            count += 1
    return count


def load_stage(script: Path) -> Stage:
    """The `main` of a stage script, imported by its path."""
    name = f"stages.{script.stem}"
    spec = importlib.util.spec_from_file_location(name, script)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{script} is no Python script; keep only stages in stages/")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    main: Stage = module.main
    return main


def stage_overrides(root: Path, name: str, selections: Selections) -> Iterator[list[str]]:
    """The selections that `conf/<name>.yaml` has a group or a key for; once a policy where it leaves one open (???)."""
    primary: Any = OmegaConf.to_container(OmegaConf.load(root / "conf" / f"{name}.yaml"))
    defaults = {
        k.split()[-1]: v for item in primary.pop("defaults", []) if isinstance(item, dict) for k, v in item.items()
    }
    taken = defaults | primary
    fixed = [f"{key}={getattr(selections, key)}" for key in ("profile", "model", "corpus", "gates") if key in taken]
    if "policies" in taken:
        fixed.append(f"policies=[{','.join(selections.policies)}]")
    each = [key for key in ("policy", "plan", "name") if taken.get(key) == "???"]
    if not each:
        yield fixed
    else:
        yield from ([*fixed, *(f"{key}={policy}" for key in each)] for policy in selections.policies)


def check_model(source: ModelSource) -> CacheShape:
    """The model's cache shape. Raises ConfigError if it isn't there, has no KV cache, or unsupported layers."""
    try:
        config = read_config(source)
        shape = require_kv_cache(config, source.id)
    except ModelError as error:
        raise ConfigError(error) from error
    if found := unsupported(config):
        raise ConfigError(f"model {source.id!r} has unsupported layers: {'; '.join(found)}. Choose one without them.")
    return shape


def used_policies(root: Path, selections: Selections) -> list[str]:
    """The selected policies, what they escalate to, and those that `sensitivity` probes. Raises ConfigError."""
    sensitivity = compose("sensitivity", (), root / "conf")
    probed = [sensitivity.choices["policy"], *sensitivity.values["probe_policies"]]
    used = dict.fromkeys([*selections.policies, *probed, "exact"])
    options = sorted(path.stem for path in (root / "conf" / "policy").glob("*.yaml"))
    for name in list(used):
        steps = _policy_yaml(root, name).get("escalation") if name in options else None
        used |= dict.fromkeys(steps if isinstance(steps, list) else ())
    for name in used:
        if name not in options:
            raise ConfigError(
                f"policy {name!r}, to be probed or escalated to, is unknown; allowed: {', '.join(options)}. "
                f"Choose one of these or write conf/policy/{name}.yaml."
            )
    return list(used)


def check_policies(root: Path, names: list[str], shape: CacheShape) -> None:
    """Every policy is well formed and fits the model; a searched one with each of its choices. Raises ConfigError."""
    for name in names:
        raw = _policy_yaml(root, name)
        choices: dict[Any, dict[str, Any]] = {"": {}}
        if "search" in raw:
            choices = check(Composition(f"conf/policy/{name}.yaml", raw.pop("search"), {}), SearchSpace).choices
        try:
            for choice in choices.values():
                from_dict({**raw, **choice}, name).bind(shape.layers, shape.head_dim)
        except PolicyError as error:
            raise ConfigError(f"conf/policy/{name}.yaml: {error}") from error


def _policy_yaml(root: Path, name: str) -> dict[str, Any]:
    raw: Any = OmegaConf.to_container(OmegaConf.load(root / "conf" / "policy" / f"{name}.yaml"), resolve=True)
    return dict(raw or {})


def check_corpus(corpus: dict[str, Any], shape: CacheShape, where: str) -> int:
    """Prefix tokens of the whole corpus. Raises ConfigError if it is malformed, or a prompt longer than the model."""
    if shape.positions is None:
        raise ConfigError(f"{where}: the model's config says no max_position_embeddings, so no prompt is known to fit")
    from kvdrift.prompts.prompt import PromptError  # brings polars, which a no-op run can do without until here
    from kvdrift.prompts.spec import CorpusSpec

    try:
        spec = CorpusSpec.from_dict(corpus)
        spec.check(shape.positions)
    except PromptError as error:
        raise ConfigError(f"{where}: {error}") from error
    return sum(sum(lengths) for lengths in spec.prefix_lengths(shape.positions).values())


def check_disk(root: Path, tokens: int, shape: CacheShape) -> None:
    """The keys and values of so many tokens, and what is derived from them, fit on the disk. Raises ConfigError."""
    need = int(tokens * shape.layers * shape.token_bytes * DISK_HEADROOM)
    held = sum(path.stat().st_size for path in (root / "data").rglob("*") if path.is_file())
    free = shutil.disk_usage(root).free
    if need > held + free:
        raise ConfigError(
            f"data/ needs about {need / 2**30:.1f} GiB for {tokens} tokens; it holds {held / 2**30:.1f} and "
            f"{free / 2**30:.1f} are free. Free some disk, or choose a smaller corpus."
        )


def check_device(device: str, gpu: str | None, torch_version: str | None) -> str:
    """`auto` resolved to cpu or cuda. Raises ConfigError for `cuda` without a GPU, or a torch that can't use it."""
    usable = gpu is not None and not (torch_version or "").endswith("+cpu")
    if device == "cuda" and not usable:
        reason = "nvidia-smi shows no GPU" if gpu is None else f"torch {torch_version} has no CUDA in it"
        raise ConfigError(f"device is 'cuda', but {reason}; allowed here: cpu, auto. Set it in conf/profile/.")
    return ("cuda" if usable else "cpu") if device == "auto" else device


def device_fingerprint(profile: Profile, chunk_tokens: int) -> dict[str, Any]:
    """What makes a measurement on another machine, or set up otherwise, another measurement. Raises ConfigError.

    `KVDRIFT_FAKE_DRIVER` stands in for the driver's version.
    """
    gpu, driver = _gpu()
    device = check_device(profile.device, gpu, _version("torch"))
    cpu, flags = _cpu()
    compiler = (_output("c++", "--version") or "").partition("\n")[0] or None
    if compiler is None:
        print("warning: no C++ compiler `c++` on PATH; the CPU runs the slow torch definition", file=sys.stderr)
    return {
        "device": device,
        "gpu": gpu,
        "driver": os.environ.get("KVDRIFT_FAKE_DRIVER") or driver,
        "cuda_runtime": _version("nvidia-cuda-runtime") if device == "cuda" else None,
        "cpu": cpu,
        "cpu_flags": flags,
        "compiler": compiler,
        "backend": resolve_backend(device, compiler),
        "threads": profile.threads,
        "scheduler": {"batching": "static", "chunk_tokens": chunk_tokens},
    }


def resolve_backend(device: str, compiler: str | None) -> str:
    """The kernels that `kvdrift.kernels.dispatch` will choose, told without torch. Raises ConfigError."""
    chosen = os.environ.get("KVDRIFT_BACKEND") or {"cpu": "native", "cuda": "cuda"}[device]
    if chosen not in BACKENDS:
        raise ConfigError(f"KVDRIFT_BACKEND is {chosen!r}; allowed: {', '.join(BACKENDS)}. Unset it to go by device.")
    runs = {"definition": True, "native": device == "cpu" and compiler is not None, "cuda": device == "cuda"}
    return chosen if runs[chosen] else "definition"


def software_fingerprint() -> dict[str, str | None]:
    """The versions that a result depends on."""
    names = {"torch": "torch", "transformers": "transformers", "cupy": "cupy-cuda13x", "kvdrift": "kvdrift"}
    return {name: _version(package) for name, package in names.items()}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _gpu() -> tuple[str | None, str | None]:
    """Name and driver of the first GPU."""
    found = _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    name, _, driver = (found or "").partition("\n")[0].partition(", ")
    return name or None, driver or None


def _cpu() -> tuple[str, str]:
    """Model name, and a hash over its instruction set flags."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else (_output("sysctl", "-a") or "")
    name = re.search(r"^(?:model name|machdep.cpu.brand_string)\s*:\s*(.*)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features|machdep.cpu.features)\s*:\s*(.*)$", text, re.MULTILINE)
    listed = " ".join(sorted(flags[1].split())) if flags else ""
    return name[1] if name else "unknown", hashlib.sha256(listed.encode()).hexdigest()[:12]
