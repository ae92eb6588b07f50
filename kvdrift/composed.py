"""What `params.yaml` selects, composed: every stage of `stages/` on its `conf/<stage>.yaml`, beside what dvc.yaml says.

This file knows stages only by their scripts, and the meaning of none of their keys.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from kvdrift.config import Composition, ConfigError, Stage, check, compose, read_yaml

NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
"""What an option is called: a file, a part of dvc's stage names and an argument of Hydra's, all unquoted."""


@dataclass(frozen=True)
class Selections:
    """`params.yaml`: which option of each group under `conf/` a run uses."""

    profile: str
    model: str
    corpus: str
    gates: str
    policies: list[str]

    def __post_init__(self) -> None:
        wrong = []
        if not self.policies or len(set(self.policies)) < len(self.policies):
            wrong.append(f"policies is {self.policies}; list at least one, each once")
        one = [(group, getattr(self, group)) for group in ("profile", "model", "corpus", "gates")]
        for group, name in [*one, *(("policies", name) for name in self.policies)]:
            if not NAME.fullmatch(name):
                wrong.append(
                    f"{group} names {name!r}; allowed: a letter, then letters, digits, _ and -. Rename its file"
                )
        if wrong:
            raise ValueError(*wrong)


class Problems:
    """What was found wrong, each once, in the order of its finding."""

    def __init__(self) -> None:
        self._lines: dict[str, None] = {}

    @contextmanager
    def noted(self) -> Iterator[None]:
        """A ConfigError inside is noted, and what follows goes on."""
        try:
            yield
        except ConfigError as error:
            self.note(*str(error).splitlines())

    def note(self, *lines: str) -> None:
        self._lines |= dict.fromkeys(lines)

    def end(self, hint: str | None) -> None:
        """Raises ConfigError with all that was noted, and the hint, if anything was."""
        if self._lines:
            raise ConfigError(*self._lines, *([hint] if hint else []))


@dataclass
class Composed:
    """What Hydra made of each stage, by name: its first configuration as its dataclass, and its choices of groups."""

    configs: dict[str, Any]
    choices: dict[str, dict[str, str]]
    declared: dict[str, Any]
    """What dvc.yaml says of it."""
    count: int = 0

    @property
    def files(self) -> dict[str, str]:
        """A group's YAML, by group. Of the policies, which differ between stages, it is any."""
        return {
            group: f"conf/{group}/{choice}.yaml" for made in self.choices.values() for group, choice in made.items()
        }


def read_selections(root: Path) -> Selections:
    """`params.yaml`, checked; every option that it names exists. Raises ConfigError naming the allowed ones."""
    selections = check(Composition("params.yaml", read_yaml(root / "params.yaml"), {}), Selections)
    groups = {"profile": [selections.profile], "model": [selections.model], "corpus": [selections.corpus]}
    wrong = []
    for group, chosen in (groups | {"gates": [selections.gates], "policy": selections.policies}).items():
        options = options_of(root, group)
        wrong += [
            f"params.yaml: {group} {option!r} is unknown; allowed: {', '.join(options)}. "
            f"Choose one of these or write conf/{group}/{option}.yaml."
            for option in chosen
            if option not in options
        ]
    if wrong:
        raise ConfigError(*wrong)
    return selections


def options_of(root: Path, group: str) -> list[str]:
    """What can be selected of a group."""
    return sorted(path.stem for path in (root / "conf" / group).glob("*.yaml"))


def check_stages(root: Path, selections: Selections, problems: Problems) -> Composed:
    """Compose and check every stage, and a stage that takes a policy under each."""
    found = Composed({}, {}, {})
    with problems.noted():
        found.declared |= read_dvc(root)
    for script in sorted((root / "stages").glob("*.py")):
        stage = load_stage(script)
        with problems.noted():
            for overrides in stage_overrides(root, stage.name, selections):
                with problems.noted():
                    composition = compose(stage.name, overrides, root / "conf")
                    found.choices.setdefault(stage.name, composition.choices)
                    made: Any = check(composition, stage.schema)
                    found.count += 1
                    if found.configs.setdefault(stage.name, made) is made and stage.name in found.declared:
                        check_paths(stage.name, made, found.declared[stage.name], selections.policies[0])
    return found


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
    """The selections that `conf/<name>.yaml` has a group or a key for. Where it leaves the policy's file open (???),
    once a policy; where it leaves only its name open, any policy stands for all."""
    primary: Any = read_yaml(root / "conf" / f"{name}.yaml", resolve=False)
    if not isinstance(primary, dict):
        raise ConfigError(f"conf/{name}.yaml holds {primary!r}; allowed: a mapping. Mend it and run again.")
    defaults = {
        k.split()[-1]: v for item in primary.pop("defaults", []) if isinstance(item, dict) for k, v in item.items()
    }
    taken = defaults | primary
    fixed = [f"{key}={getattr(selections, key)}" for key in ("profile", "model", "corpus", "gates") if key in taken]
    if "latency" in defaults:
        fixed.append(f"latency={selections.profile}")
    if "policies" in taken:
        fixed.append(f"policies=[{','.join(selections.policies)}]")
    each = [key for key in ("policy", "plan", "name") if taken.get(key) == "???"]
    for policy in selections.policies if "policy" in each else selections.policies[:1]:
        yield [*fixed, *(f"{key}={policy}" for key in each)]


def read_dvc(root: Path) -> dict[str, Any]:
    """The stages of dvc.yaml by name, those of a `foreach` as it declares them for each item."""
    try:
        stages = yaml.safe_load((root / "dvc.yaml").read_text())["stages"]
        return {name: stage.get("do", stage) for name, stage in stages.items()}
    except (OSError, yaml.YAMLError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"dvc.yaml can't be read: {' '.join(str(error).split())}. Mend it and run again.") from error


def check_paths(name: str, config: Any, declared: Mapping[str, Any], policy: str) -> None:
    """Every path in a stage's configuration is one that dvc.yaml declares, and every output is named.

    Else DVC would neither keep what is written nor notice what changed. Raises ConfigError.
    """
    entries = [*declared.get("deps", ()), *declared.get("outs", ()), *declared.get("metrics", ())]
    listed = [entry if isinstance(entry, str) else next(iter(entry)) for entry in entries]
    paths = [path.replace("${item}", policy) for path in listed]
    outs = paths[len(declared.get("deps", ())) :]
    named = {field.name: list(_paths(getattr(config, field.name))) for field in fields(config)}
    where = f"conf/{name}.yaml"
    wrong = [
        f"{where}: {key} is {path}, which dvc.yaml declares neither as a dep nor as an out of {name}. Set it back."
        for key, each in named.items()
        for path in each
        if path != "params.yaml" and not any(_covers(path, other) or _covers(other, path) for other in paths)
    ]
    flat = [path for each in named.values() for path in each]
    wrong += [
        f"{where}: nothing names {out}, which dvc.yaml declares as an out of {name}. Set its key back, or change both."
        for out in outs
        if not any(out == path or out.rpartition("/")[0] == path for path in flat)
    ]
    if wrong:
        raise ConfigError(*wrong)


def _paths(value: Any) -> Iterator[str]:
    if isinstance(value, Path):
        yield value.as_posix()
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _paths(item)


def _covers(folder: str, path: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")
