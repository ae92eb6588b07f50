"""Composition and checking of a stage's configuration. `python -m pytest tests/test_config.py`"""

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from kvdrift.config import Composition, ConfigError, check, compose

SCRIPT = """
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvdrift.config import ConfigError, Profile, stage


@dataclass(frozen=True)
class DemoConfig:
    profile: Profile
    lengths: list[int]
    out: Path
    limit: float | None = None


@stage("demo")
def main(config: DemoConfig) -> None:
    if config.limit == 0:
        raise ConfigError("limit is 0.0; allowed: more than 0")
    config.out.write_text(repr(config))


if __name__ == "__main__":
    main()
"""


@dataclass(frozen=True)
class Inner:
    bits: int
    kind: Literal["a", "b"] = "a"


@dataclass(frozen=True)
class Outer:
    inner: Inner
    rate: float = 0.5
    out: Path = Path("x")
    maybe: Inner | None = None
    many: list[Inner] = field(default_factory=list)
    pair: tuple[int, ...] = ()
    named: dict[str, Inner] = field(default_factory=dict)
    free: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.rate > 1:
            raise ValueError(f"rate is {self.rate}; allowed: at most 1")


def checked(**values: Any) -> Outer:
    return check(Composition("conf/demo.yaml", values, {"inner": "small"}), Outer)


def test_nested_values_become_the_real_dataclasses() -> None:
    outer = checked(
        inner={"bits": 4},
        rate=1,
        out="a/b",
        maybe={"bits": 2, "kind": "b"},
        many=[{"bits": 8}],
        pair=[1, 2],
        named={"x": {"bits": 1}},
        free={"any": [1, {"thing": None}]},
    )
    assert outer == Outer(
        Inner(4), 1.0, Path("a/b"), Inner(2, "b"), [Inner(8)], (1, 2), {"x": Inner(1)}, {"any": [1, {"thing": None}]}
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"inner": {"bits": 4}, "foo": 1}, "conf/demo.yaml: foo is an unknown key; allowed: free, inner, many"),
        ({"inner": {"bit": 4}}, "conf/inner/small.yaml: inner.bit is an unknown key; allowed: bits, kind"),
        ({"inner": {}}, "inner.bits is missing"),
        ({"inner": {"bits": "4"}}, "inner.bits is '4'; allowed: int"),
        ({"inner": {"bits": True}}, "inner.bits is True; allowed: int"),
        ({"inner": {"bits": 4.5}}, "inner.bits is 4.5; allowed: int"),
        ({"inner": {"bits": 4, "kind": "c"}}, "inner.kind is 'c'; allowed: 'a' or 'b'"),
        ({"inner": None}, "inner is None; allowed: the keys bits, kind"),
        ({"inner": {"bits": 4}, "many": [{"bits": 1}, {"bits": None}]}, r"many\[1\].bits is None; allowed: int"),
        ({"inner": {"bits": 4}, "many": {"bits": 1}}, r"many is {'bits': 1}; allowed: a list of Inner"),
        ({"inner": {"bits": 4}, "named": {"x": {"y": 1}}}, "named.x.y is an unknown key"),
        ({"inner": {"bits": 4}, "maybe": {"bits": []}}, r"maybe.bits is \[\]; allowed: int"),
        ({"inner": {"bits": 4}, "rate": 2}, "rate is 2.0; allowed: at most 1"),
    ],
)
def test_a_misfit_names_file_key_and_what_is_allowed(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checked(**values)


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    root = tmp_path / "a path with spaces"
    files = {
        "stages/demo.py": SCRIPT,
        "conf/demo.yaml": "defaults: [{profile: small}, _self_]\nlengths: [1, 2]\nout: out.txt\n",
        "conf/profile/small.yaml": "{device: cpu, threads: 2, seed: 0}\n",
        "conf/profile/large.yaml": "{device: cpu, threads: 8, seed: 0}\n",
        "conf/profile/typo.yaml": "{device: cpu, thread: 8, seed: 0}\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def run(repo: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "stages/demo.py", *overrides], cwd=repo, capture_output=True, text=True)


def test_a_stage_runs_and_leaves_only_its_output(repo: Path) -> None:
    before = set(repo.rglob("*"))
    done = run(repo, "profile=large")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[demo] ")
    assert done.stdout.endswith(" s\n")
    assert "threads=8" in (repo / "out.txt").read_text()
    assert {path.name for path in set(repo.rglob("*")) - before} == {"out.txt"}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("+foo=1", "foo is an unknown key; allowed: lengths, limit, out, profile"),
        ("profile=typo", "conf/profile/typo.yaml: profile.thread is an unknown key"),
        ("profile=nope", "[demo] error: profile 'nope' is unknown; allowed: large, small, typo"),
        ("profile.threads=0", "conf/profile/small.yaml: profile.threads is 0; allowed: 1 to 1,024"),
        ("profile.seed=-1", "profile.seed is -1; allowed: 0 to 4,294,967,295"),
        ("lengths=[1", "conf/demo.yaml can't be composed: "),
        ("lengths=[a]", "lengths[0] is 'a'; allowed: int"),
        ("+limit=0", "limit is 0.0; allowed: more than 0"),
        ("out=???", "out"),
    ],
)
def test_bad_input_ends_a_stage_before_any_work(repo: Path, override: str, message: str) -> None:
    failed = run(repo, override)
    assert failed.returncode == 1
    assert message in failed.stderr
    assert "Traceback" not in failed.stderr
    assert all(line.startswith("[demo] error: ") for line in failed.stderr.splitlines())
    assert not (repo / "out.txt").exists()


def test_every_misfit_is_told_in_a_line_of_its_own(repo: Path) -> None:
    failed = run(repo, "+foo=1", "profile.threads=0", "profile.seed=-1", "lengths=[1,a]")
    assert failed.returncode == 1
    assert failed.stderr.splitlines() == [
        "[demo] error: conf/demo.yaml: foo is an unknown key; allowed: lengths, limit, out, profile. "
        "Edit it and run again.",
        "[demo] error: conf/profile/small.yaml: profile.threads is 0; allowed: 1 to 1,024. Edit it and run again.",
        "[demo] error: conf/profile/small.yaml: profile.seed is -1; allowed: 0 to 4,294,967,295. "
        "Edit it and run again.",
        "[demo] error: conf/demo.yaml: lengths[1] is 'a'; allowed: int. Edit it and run again.",
    ]


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("conf/demo.yaml", "lengths: [1, 2", "conf/demo.yaml, line 1: not YAML: expected ',' or ']'"),
        ("conf/profile/small.yaml", "threads: 2\n\tseed: 0", "conf/profile/small.yaml, line 2: not YAML: "),
        ("conf/demo.yaml", "lengths: ${nope}\nout: x", "conf/demo.yaml: lengths: Interpolation key 'nope' not found"),
        ("conf/profile/small.yaml", "- 1", "conf/profile/small.yaml: profile is [1]; allowed: the keys"),
    ],
)
def test_a_file_that_cannot_be_read_is_told_in_a_line(repo: Path, file: str, text: str, message: str) -> None:
    (repo / file).write_text(text)
    failed = run(repo)
    assert failed.returncode == 1
    (line,) = failed.stderr.splitlines()
    assert line.startswith("[demo] error: ")
    assert message in line


def test_a_bug_shows_its_traceback(repo: Path) -> None:
    (repo / "stages/demo.py").write_text(SCRIPT.replace("if config.limit", "if int('a bug') and config.limit"))
    failed = run(repo)
    assert failed.returncode == 1
    assert "Traceback" in failed.stderr
    assert "ValueError: invalid literal for int() with base 10: 'a bug'" in failed.stderr


def test_compose_tells_the_files_that_took_part(repo: Path) -> None:
    composition = compose("demo", ["profile=large"], repo / "conf")
    assert composition.files == ("conf/demo.yaml", "conf/profile/large.yaml")
    assert composition.values["profile"]["threads"] == 8


@pytest.mark.parametrize("text", ["lengths: [1, 2", "lengths: ${nope}", "lengths: ???"])
def test_a_broken_yaml_is_a_config_error(repo: Path, text: str) -> None:
    (repo / "conf" / "demo.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"conf/demo\.yaml"):
        compose("demo", conf=repo / "conf")


def test_the_configuration_imports_nothing_heavy() -> None:
    code = (
        "import sys, kvdrift.config, kvdrift.preflight; print({'torch', 'transformers', 'polars'} & set(sys.modules))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"
