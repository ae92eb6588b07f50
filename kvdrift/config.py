"""How a stage gets its configuration: Hydra composes `conf/`, and the stage's own frozen dataclass checks it.

This file knows files, keys and types. It knows no stage and no meaning of a key, and imports nothing heavy.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import time
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, Union, get_args, get_origin, get_type_hints, runtime_checkable

import hydra
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvdrift.ranges import require

QUIET = ("hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none")
"""Overrides that keep Hydra from writing run directories and logs."""

SPINS = "1000"
"""How often GNU's OpenMP looks for work before a thread sleeps. Decoding's many short calls then take a sixth less time
than with none, and beside two busy cores a tenth more; with 20,000, twice as much."""

C = TypeVar("C")


UNREADABLE = (HydraException, yaml.YAMLError, UnicodeDecodeError)
"""What Hydra raises on input that it can't compose."""


class ConfigError(ValueError):
    """Input that a user can mend. Shown without a traceback, a line for each argument.

    A line says the value, what is allowed and what to do.
    """

    def __str__(self) -> str:
        return "\n".join(map(str, self.args))


@dataclass(frozen=True)
class Profile:
    """`conf/profile/*.yaml`: the machine side of a run, shared by every stage that computes."""

    device: Literal["cpu", "cuda", "auto"]
    threads: int
    seed: int

    def __post_init__(self) -> None:
        require(self, threads=(1, 1024), seed=(0, 2**32 - 1))

    @property
    def torch_device(self) -> Literal["cpu", "cuda"]:
        """`auto` resolved by what torch sees."""
        if self.device != "auto":
            return self.device
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Composition:
    """What Hydra composed for one stage, before it is checked."""

    file: str
    """The primary YAML, relative to the repository."""
    values: Any
    """The file's plain data: a mapping, unless it is ill-formed."""
    choices: dict[str, str]
    """Group → chosen option, whose keys lie under the group's name."""

    @property
    def files(self) -> tuple[str, ...]:
        """Every YAML that took part, relative to the repository: what `dvc.yaml` has to track."""
        return (self.file, *(f"conf/{group}/{choice}.yaml" for group, choice in self.choices.items()))

    def file_of(self, key: str) -> str:
        """The YAML that a dotted key comes from."""
        group = key.partition(".")[0]
        return f"conf/{group}/{self.choices[group]}.yaml" if group in self.choices else self.file


@runtime_checkable
class Stage(Protocol):
    """What `@stage` makes of a script's `main`: call it to run; `name` and `schema` let others check its input."""

    name: str
    schema: type

    def __call__(self) -> None: ...


def stage(name: str, threads_spin: bool = False) -> Callable[[Callable[[Any], None]], Stage]:
    """Run `main(config)` on `conf/<name>.yaml`, checked against the dataclass that annotates `config`.

    `conf/` lies beside the script's folder. A key that is unknown, missing, ill-typed or out of range, and any
    ConfigError of `main` itself, ends the process with status 1 and a line each on stderr; what else is raised is a bug
    and shows its traceback. The stage's seconds are printed at the end.

    OpenMP's idle threads soon sleep, which keeps a stage fast beside other work; a stage that times kernels lets them
    spin, as OpenMP's own default and so a server does. `OMP_WAIT_POLICY` in the environment overrides either.
    """

    def decorate(main: Callable[[Any], None]) -> Stage:
        script = Path(inspect.getfile(main)).resolve()
        schema = get_type_hints(main)[next(iter(inspect.signature(main).parameters))]

        def refuse(error: ConfigError) -> None:
            sys.exit("\n".join(f"[{name}] error: {line}" for line in str(error).splitlines()))

        def task(composed: DictConfig) -> None:
            started = time.perf_counter()
            try:
                main(check(_composition(name, composed, HydraConfig.get().runtime.choices), schema))
            except ConfigError as error:
                refuse(error)
            print(f"[{name}] {time.perf_counter() - started:.1f} s", flush=True)

        @functools.wraps(main)
        def run() -> None:
            sys.argv[1:1] = QUIET
            if not threads_spin and "OMP_WAIT_POLICY" not in os.environ:
                os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
                os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
            os.environ["HYDRA_FULL_ERROR"] = "1"  # raise what is wrong, rather than print it in Hydra's own words
            try:
                hydra.main(version_base=None, config_path=str(script.parent.parent / "conf"), config_name=name)(task)()
            except UNREADABLE as error:
                refuse(_unreadable(name, error))
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)  # all is written, and the interpreter takes a second to take torch and a model apart

        run.name, run.schema = name, schema  # type: ignore[attr-defined]
        return run  # type: ignore[return-value]

    return decorate


def compose(name: str, overrides: Sequence[str] = (), conf: Path = Path("conf")) -> Composition:
    """Compose `conf/<name>.yaml` with command-line style `overrides`. Raises ConfigError if Hydra can't."""
    outer, GlobalHydra.instance().hydra = GlobalHydra.instance().hydra, None  # a stage may compose for another
    try:
        with hydra.initialize_config_dir(str(conf.resolve()), version_base=None):
            composed = hydra.compose(name, overrides=list(overrides), return_hydra_config=True)
        return _composition(name, composed, composed.hydra.runtime.choices)
    except UNREADABLE as error:
        raise _unreadable(name, error) from error
    finally:
        GlobalHydra.instance().hydra = outer


def check(composition: Composition, schema: type[C]) -> C:
    """The values as `schema`, a frozen dataclass.

    Raises ConfigError, a line for each key that doesn't fit, with its file and what is allowed.
    """
    wrong: Wrong = []
    made: C = _typed(composition.values, schema, "", wrong)
    if wrong:
        lines = (f"{composition.file_of(key)}: {key or 'the file'} {message}" for key, message in wrong)
        raise ConfigError(*(f"{line}. Edit it and run again." for line in lines))
    return made


def read_yaml(path: Path, resolve: bool = True) -> Any:
    """Plain data, with `resolve` its ${interpolations} filled in. Raises ConfigError where there is no such file, or it
    is not YAML."""
    try:
        return OmegaConf.to_container(OmegaConf.load(path), resolve=resolve)
    except UNREADABLE as error:
        raise _unreadable(path.stem, error) from error
    except (OSError, OmegaConfBaseException) as error:
        raise ConfigError(
            f"{os.path.relpath(path)} can't be read: {_one_line(error)}. Mend it and run again."
        ) from error


def _unreadable(name: str, error: Exception) -> ConfigError:
    """What Hydra says of `conf/<name>.yaml`, in a line."""
    if isinstance(error, MissingConfigException) and error.options:
        group, _, option = (error.missing_cfg_file or "").rpartition("/")
        known = f"{group} {option!r} is unknown; allowed: {', '.join(sorted(error.options))}"
        return ConfigError(f"{known}. Choose one of these or write conf/{group}/{option}.yaml.")
    mark = getattr(error, "problem_mark", None)
    if mark is not None:
        problem = getattr(error, "problem", None) or error
        where = f"{os.path.relpath(mark.name)}, line {mark.line + 1}"
        return ConfigError(f"{where}: not YAML: {_one_line(problem)}. Mend it and run again.")
    return ConfigError(f"conf/{name}.yaml can't be composed: {_one_line(error)}. Mend it and run again.")


def _one_line(error: object) -> str:
    return " ".join(str(error).split())


def _composition(name: str, composed: DictConfig, choices: Mapping[str, str | None]) -> Composition:
    groups = {group.partition("@")[0]: choice for group, choice in choices.items() if choice is not None}
    try:
        keys = [str(key) for key in composed if key != "hydra"]
        own = OmegaConf.masked_copy(composed, keys)
        values: Any = OmegaConf.to_container(own, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"conf/{name}.yaml: {error.full_key}: {_one_line(error.msg)}. Set it.") from error
    return Composition(f"conf/{name}.yaml", values, {g: c for g, c in groups.items() if not g.startswith("hydra/")})


Wrong = list[tuple[str, str]]
"""Dotted keys, and what is wrong with each."""


def _typed(value: Any, wanted: Any, key: str, wrong: Wrong) -> Any:
    """`value`, plain data from YAML, as `wanted`: a dataclass, a container or Union of such, a Literal or a scalar.

    What doesn't fit is added to `wrong`, and what is returned then is of no use.
    """
    origin, args = get_origin(wanted), get_args(wanted)
    if wanted is Any:
        return value
    if is_dataclass(wanted):
        return _dataclass(value, wanted, key, wrong)
    if origin in (Union, types.UnionType):
        return _either(value, args, key, wrong)
    if origin is Literal and value in args:
        return value
    if origin in (list, tuple) and isinstance(value, list):
        return origin(_typed(item, args[0], f"{key}[{index}]", wrong) for index, item in enumerate(value))
    if origin is dict and isinstance(value, dict):
        return {_typed(k, args[0], key, wrong): _typed(v, args[1], f"{key}.{k}", wrong) for k, v in value.items()}
    if wanted is Path and isinstance(value, str):
        return Path(value)
    if wanted is float and type(value) is int:
        return float(value)
    if isinstance(wanted, type) and type(value) is wanted:
        return value
    wrong.append((key, f"is {value!r}; allowed: {_words(wanted)}"))
    return None


def _words(wanted: Any) -> str:
    """A type as a user reads it."""
    origin, args = get_origin(wanted), get_args(wanted)
    if origin is Literal:
        return " or ".join(map(repr, args))
    if origin in (list, tuple):
        return f"a list of {_words(args[0])}"
    if origin is dict:
        return f"a mapping to {_words(args[1])}"
    return str(getattr(wanted, "__name__", wanted))


def _either(value: Any, options: tuple[Any, ...], key: str, wrong: Wrong) -> Any:
    if value is None and types.NoneType in options:
        return None
    options = tuple(option for option in options if option is not types.NoneType)
    for option in options[:-1]:
        tried: Wrong = []
        made = _typed(value, option, key, tried)
        if not tried:
            return made
    return _typed(value, options[-1], key, wrong)


def _dataclass(value: Any, wanted: Any, key: str, wrong: Wrong) -> Any:
    names = [field.name for field in fields(wanted)]
    if not isinstance(value, dict):
        wrong.append((key, f"is {value!r}; allowed: the keys {', '.join(names)}"))
        return None
    hints, prefix, found = get_type_hints(wanted), f"{key}." if key else "", len(wrong)
    for name in value:
        if name not in names:
            wrong.append((f"{prefix}{name}", f"is an unknown key; allowed: {', '.join(sorted(names))}"))
    for field in fields(wanted):
        if field.name not in value and field.default is MISSING and field.default_factory is MISSING:
            wrong.append((f"{prefix}{field.name}", "is missing; set it"))
    made = {name: _typed(value[name], hints[name], f"{prefix}{name}", wrong) for name in names if name in value}
    if len(wrong) > found:
        return None
    try:
        return wanted(**made)
    except ValueError as error:  # of its __post_init__, whose messages begin with the field that they are about
        for message in map(str, error.args):
            name, _, rest = message.partition(" ")
            about = name.partition(".")[0] in names
            wrong.append((f"{prefix}{name}", rest) if about else (key, f"does not fit: {message}"))
        return None
