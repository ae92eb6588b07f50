"""dvc.yaml says exactly what each stage imports, composes, reads and writes. `python -m pytest tests/test_dvc_yaml.py`

What those declarations cause is shown by real runs in test_pipeline.py.
"""

import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from closure import ROOT, closure

from kvdrift.composed import load_stage
from kvdrift.config import compose

DECLARED: dict[str, Any] = yaml.safe_load((ROOT / "dvc.yaml").read_text())
STAGES = sorted(DECLARED["stages"])
SELECTIONS = [
    {"profile": "smoke", "model": "tiny", "corpus": "smoke", "gates": "smoke", "item": "int4"},
    {"profile": "laptop", "model": "smollm2", "corpus": "laptop", "gates": "laptop", "item": "auto"},
    {"profile": "gpu", "model": "hub", "corpus": "gpu", "gates": "gpu", "item": "kivi4"},
]
LOADED = {"sensitivity": {"kivi2", "int4"}, "drill": {"exact", "int8"}}
"""Policies that a stage reads on its own, beside those that it composes."""
PARTLY = {"latency": {"conf/gates/${gates}.yaml": ["workload"]}}
"""Files of which a stage tracks some keys only: editing a limit doesn't repeat the measurement."""
FINGERPRINT = {"data/preflight/device.json", "data/preflight/software.json"}


@cache
def declared(name: str, *selections: tuple[str, str]) -> Any:
    """A stage as dvc resolves it under these selections."""
    text = yaml.safe_dump(DECLARED["stages"][name])
    for key, value in selections:
        text = text.replace(f"${{{key}}}", value)
    stage = yaml.safe_load(text)
    return stage.get("do", stage)


def paths(entries: list[Any]) -> set[str]:
    """File names in a list of deps, params, outs or metrics, whose entries are names or mappings from one."""
    return {name for entry in entries for name in ([entry] if isinstance(entry, str) else entry)}


def policy_yaml(name: str) -> Any:
    return yaml.safe_load((ROOT / "conf" / "policy" / f"{name}.yaml").read_text())


def configured(name: str, starts: tuple[str, ...]) -> set[str]:
    """Paths in the stage's configuration that start so."""
    overrides = declared(name, *SELECTIONS[0].items())["cmd"].split()[2:]
    return {text for text in _strings(compose(name, overrides, ROOT / "conf").values) if text.startswith(starts)}


def covered(path: str, by: set[str]) -> bool:
    """Is one of them this path, above it, or below it?"""
    return any(path == other or path.startswith(f"{other}/") or other.startswith(f"{path}/") for other in by)


def test_every_script_is_a_stage_and_every_stage_a_script() -> None:
    assert [path.stem for path in sorted((ROOT / "stages").glob("*.py"))] == STAGES


@pytest.mark.parametrize("name", STAGES)
def test_code_that_a_stage_depends_on_is_what_it_imports(name: str) -> None:
    """... and what it hashes for the receipt, as a whole folder instead of the files in it."""
    deps = {path for path in declared(name)["deps"] if not path.startswith("data/")}
    code = closure(f"stages/{name}.py") | configured(name, ("kvdrift", "stages"))
    assert deps == {path for path in code if not any(path.startswith(f"{other}/") for other in code)}
    assert all((ROOT / path).exists() for path in deps)


@pytest.mark.parametrize("selections", SELECTIONS, ids=lambda s: s["profile"])
@pytest.mark.parametrize("name", STAGES)
def test_files_that_a_stage_tracks_are_what_it_composes(name: str, selections: dict[str, str]) -> None:
    stage = declared(name, *selections.items())
    script, *overrides = stage["cmd"].removeprefix("python ").split()
    assert script == f"stages/{name}.py"
    composed = set(compose(name, overrides, ROOT / "conf").files)
    tracked = {path for path in paths(stage["params"]) if path.endswith(".yaml")}
    assert tracked == composed | {f"conf/policy/{policy}.yaml" for policy in LOADED.get(name, ())}
    keys = {path: found for params in stage["params"] if isinstance(params, dict) for path, found in params.items()}
    assert {path: found for path, found in keys.items() if found is not None} == {
        path.replace("${gates}", selections["gates"]): found for path, found in PARTLY.get(name, {}).items()
    }


@pytest.mark.parametrize("name", STAGES)
def test_data_that_a_stage_depends_on_or_writes_is_what_its_configuration_names(name: str) -> None:
    stage = declared(name, *SELECTIONS[0].items())
    named = configured(name, ("data/", "metrics", "plots"))
    deps = {path for path in stage["deps"] if path.startswith("data/")}
    outs = paths([*stage.get("outs", []), *stage.get("metrics", [])])
    assert {path for path in named if not covered(path, deps | outs)} == set()
    assert {path for path in (deps - FINGERPRINT) | outs if not covered(path, named)} == set()


@pytest.mark.parametrize("name", STAGES)
def test_every_key_of_a_stage_is_used(name: str) -> None:
    """So that no dep is declared for a path that nothing reads. The gates' workload is interpolated in latency.yaml."""
    script = ROOT / "stages" / f"{name}.py"
    text = script.read_text()
    fields = load_stage(script).schema.__annotations__
    unused = {key for key in fields if f"config.{key}" not in text}
    assert unused <= ({"gates"} if name == "latency" else set())


def test_policies_that_stages_read_on_their_own_are_tracked() -> None:
    sensitivity = compose("sensitivity", (), ROOT / "conf").values
    assert set(sensitivity["probe_policies"]) == LOADED["sensitivity"]
    steps = {step for path in (ROOT / "conf/policy").glob("*.yaml") for step in escalation(path.stem)}
    assert steps | {"exact"} == LOADED["drill"]


def escalation(policy: str) -> list[str]:
    return list(policy_yaml(policy).get("escalation", ["exact"]))


def test_rooms_that_count_as_one_thing_hold_no_stray_files() -> None:
    listed = _git("ls-files", "kvdrift/quantizers", "kvdrift/kernels", "kvdrift/cache")
    assert {Path(path).suffix for path in listed} == {".py", ".cpp", ".cu", ".h"}


def test_only_the_root_and_dvc_have_ignore_files() -> None:
    listed = _git("ls-files", "--cached", "--others", "--exclude-standard")
    assert {path for path in listed if Path(path).name == ".gitignore"} == {".gitignore", ".dvc/.gitignore"}


def test_every_plot_has_its_template_and_is_written_by_the_frontier() -> None:
    plots = {path: entry for plot in DECLARED["plots"] for path, entry in _plot(plot)}
    assert plots.keys() == {path for path in paths(declared("frontier")["outs"]) if path.startswith("plots/")}
    templates = {plot["template"] for plot in plots.values() if plot}
    assert templates == {path.stem for path in (ROOT / ".dvc/plots").glob("*.json")}
    assert {path for path, plot in plots.items() if plot} == {path for path in plots if path.endswith(".json")}


def _plot(entry: Any) -> list[tuple[str, Any]]:
    return [(entry, None)] if isinstance(entry, str) else list(entry.items())


def _strings(value: Any) -> list[str]:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [value] if isinstance(value, str) else [found for item in items for found in _strings(item)]


def _git(*arguments: str) -> list[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
