"""Before any work: is the whole configuration sound? Every problem that is found is told, a line each.

What a single key may hold is the business of each stage's dataclass, and what must hold between them is agreement.py's.
This file brings all of it together with what lies outside: the model, the disk, the device. It loads neither torch nor
transformers, so that it may run each time.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvdrift.composed import Composed, Problems, Selections, check_stages, options_of, read_selections
from kvdrift.config import Composition, ConfigError, Profile, check
from kvdrift.fingerprint import device_fingerprint
from kvdrift.ledger import CacheShape
from kvdrift.models import ModelError, ModelSource, missing_files, read_config, require_kv_cache, unsupported
from kvdrift.policy_files import check_policy, escalated

if TYPE_CHECKING:
    from kvdrift.prompts.spec import CorpusSpec

DISK_HEADROOM = 1.5
"""Disk for everything under data/, as a multiple of the reference."""


@dataclass(frozen=True)
class Sound:
    """A configuration in which nothing is wrong, and what it runs on."""

    compositions: int
    model: ModelSource
    device: dict[str, Any]
    doubts: list[str]
    """What isn't wrong, but won't do what one may hope for."""


@dataclass(frozen=True)
class Machine:
    """The selected profile and model."""

    profile: Profile
    model: ModelSource


def examine(root: Path, given: Mapping[str, Any], chunk_tokens: int, disk_limit_gib: float) -> Sound:
    """Look at everything; `given` holds the profile, model and corpus as composed.

    Raises ConfigError with a line for each thing that is wrong.
    """
    from kvdrift.agreement import disagreements, doubts  # brings polars

    selections, problems = read_selections(root), Problems()
    composed = check_stages(root, selections, problems)
    files = {group: f"conf/{group}/{getattr(selections, group)}.yaml" for group in ("profile", "model", "corpus")}
    files |= composed.files
    machine = model = spec = device = None
    with problems.noted():
        chosen = {"profile": selections.profile, "model": selections.model}
        machine = check(Composition("conf/preflight.yaml", {key: given[key] for key in chosen}, chosen), Machine)
        with problems.noted():
            model = check_model(machine.model)
        device = device_fingerprint(machine.profile, chunk_tokens)
    shape = model[1] if model else None
    check_policies(root, selections, composed, shape, problems)
    with problems.noted():
        spec = check_corpus(given["corpus"], shape.positions if shape else None, files["corpus"])
    if spec and model:
        with problems.noted():
            check_disk(root, reference_bytes(spec, *model), disk_limit_gib, files["corpus"])
    if spec and shape and device:
        problems.note(*disagreements(composed.configs, files, spec, shape.positions or 0, device["device"]))
    problems.end(apart(root, selections))
    assert machine is not None  # else that it couldn't be made was noted, as with the next two
    assert spec is not None
    assert device is not None
    return Sound(composed.count, machine.model, device, list(doubts(composed.configs, files, spec)))


def check_policies(
    root: Path, selections: Selections, composed: Composed, shape: CacheShape | None, problems: Problems
) -> None:
    """The selected policies, what they escalate to, and those that `sensitivity` probes."""
    searched = composed.choices.get("search", {}).get("policy", "auto")
    probed = composed.configs["sensitivity"].probe_policies if "sensitivity" in composed.configs else []
    options = options_of(root, "policy")
    named = dict.fromkeys([*selections.policies, searched, *probed])
    for name in named | dict.fromkeys(escalated(root, list(named))):
        if name not in options:
            problems.note(
                f"policy {name!r}, to be probed or escalated to, is unknown; allowed: {', '.join(options)}. "
                f"Choose one of these or write conf/policy/{name}.yaml."
            )
            continue
        with problems.noted():
            made = check_policy(root, name, searched, shape)
            if name in probed and made is not None and made.is_exact:
                problems.note(
                    f"conf/sensitivity.yaml: probe_policies names {name!r}, which packs nothing, so no cell of it "
                    "could be measured; allowed: policies that pack. Remove it."
                )
    for stage, read in (("sensitivity", probed), ("drill", escalated(root, selections.policies))):
        problems.note(
            *untracked(stage, [name for name in read if name in options and name != searched], composed.declared)
        )
    for name in sorted({name for name in probed if probed.count(name) > 1}):
        problems.note(f"conf/sensitivity.yaml: probe_policies names {name!r} twice; remove one.")
    if searched in probed:
        problems.note(
            f"conf/sensitivity.yaml: probe_policies names {searched}, whose choices are probed anyway; remove it."
        )
    other = composed.choices.get("sensitivity", {}).get("policy", searched)
    if other != searched:
        problems.note(f"conf/sensitivity.yaml selects policy {other!r}, conf/search.yaml {searched!r}; select one.")


def untracked(stage: str, policies: Sequence[str], declared: Mapping[str, Any]) -> Iterator[str]:
    """A line for each policy that a stage reads on its own and dvc.yaml doesn't track: DVC wouldn't notice an edit."""
    if stage not in declared:
        return
    entries = declared[stage].get("params", ())
    tracked = [entry if isinstance(entry, str) else next(iter(entry)) for entry in entries]
    for name in policies:
        if f"conf/policy/{name}.yaml" not in tracked:
            yield (
                f"dvc.yaml: {stage} reads policy {name!r}, to be probed or escalated to, and doesn't track it; add "
                f"`- conf/policy/{name}.yaml:` to the params of {stage}, or choose another policy."
            )


def apart(root: Path, selections: Selections) -> str | None:
    """A hint where only some of what belongs together was selected; some problems come of that alone."""
    chosen = {group: getattr(selections, group) for group in ("profile", "corpus", "gates")}
    shared = [name for name in dict.fromkeys(chosen.values()) if all(name in options_of(root, of) for of in chosen)]
    if len(set(chosen.values())) == 1 or not shared:
        return None
    told = ", ".join(f"{group} {name}" for group, name in chosen.items())
    return (
        f"params.yaml: {told} are selected together. If that isn't meant, set profile, corpus and gates to one name: "
        f"{' or '.join(shared)}; `make evidence PROFILE={shared[0]}` sets all three."
    )


def check_model(source: ModelSource) -> tuple[dict[str, Any], CacheShape]:
    """The model's config and cache shape.

    Raises ConfigError if it isn't there or not whole, has no KV cache, unsupported layers, or no end.
    """
    try:
        config = read_config(source)
        shape = require_kv_cache(config, source.id)
    except ModelError as error:
        raise ConfigError(*error.args) from error
    wrong = [f"model {source.id!r} lacks {what}; add it to the folder." for what in missing_files(source)]
    if found := unsupported(config):
        wrong.append(f"model {source.id!r} has unsupported layers: {'; '.join(found)}. Choose one without them.")
    if shape.positions is None:
        wrong.append(
            f"model {source.id!r} says no max_position_embeddings in its config, so no prompt is known to fit."
        )
    if wrong:
        raise ConfigError(*wrong)
    return config, shape


def check_corpus(corpus: Mapping[str, Any], positions: int | None, where: str) -> CorpusSpec:
    """The corpus. Raises ConfigError if it is malformed, or a prompt longer than the model."""
    from kvdrift.prompts.prompt import PromptError
    from kvdrift.prompts.spec import CorpusSpec

    try:
        spec = CorpusSpec.from_dict(corpus)
        if positions is not None:
            spec.check(positions)
    except PromptError as error:
        raise ConfigError(*(f"{where}: {line}" for line in error.args)) from error
    return spec


def reference_bytes(spec: CorpusSpec, config: Mapping[str, Any], shape: CacheShape) -> int:
    """Disk of the stored reference: keys and values of every prefix and scored position, and of the latter queries,
    hidden states and logits too."""
    config = config.get("text_config") or config
    wide = shape.query_heads * shape.head_dim
    tokens, scored = spec.prefix_tokens(shape.positions or 0) + spec.scored(), spec.scored()
    position = shape.layers * (wide + int(config.get("hidden_size") or wide)) + int(config.get("vocab_size") or 0)
    return tokens * shape.layers * shape.token_bytes + scored * position * shape.dtype_bytes


def check_disk(root: Path, need: int, limit_gib: float, where: str) -> None:
    """A reference of `need` bytes, and what is derived from it, is allowed and fits. Raises ConfigError."""
    held = sum(path.stat().st_size for path in (root / "data").rglob("*") if path.is_file())
    free = shutil.disk_usage(root).free
    wrong, room = [], held + free
    figures = f"{_gib(need)} GiB; disk_limit_gib is {limit_gib:g}, data/ holds {_gib(held)} and {_gib(free)} are free"
    if need > limit_gib * 2**30:
        raise_it = (
            f"raise disk_limit_gib in conf/preflight.yaml to {math.ceil(need / 2**30)}, or choose a smaller corpus"
        )
        wrong.append(f"{where}: the reference needs {figures}; {raise_it}.")
    if need * DISK_HEADROOM > room:
        wrong.append(
            f"{where}: the reference needs {figures}; with what follows it takes {_gib(need * DISK_HEADROOM)}. "
            "Free some disk, or choose a smaller corpus."
        )
    if wrong:
        raise ConfigError(*wrong)


def _gib(size: int | float) -> str:
    return f"{size / 2**30:,.2f}"
