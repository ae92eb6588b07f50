"""The layer-position gates and their command line. `python -m pytest tests/report/test_gates.py`"""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from kvdrift.report.gates import at_least, at_most, main
from kvdrift.report.limits import CellLimits

FIXTURE = Path(__file__).parent.parent / "fixtures" / "layer_position.json"


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str]]:
    code = main(list(arguments))
    return code, capsys.readouterr().out.splitlines()


def test_fixture_passes_and_names_its_worst_cell(capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = said(capsys, str(FIXTURE))
    assert code == 0
    assert lines[-1] == "PASS: layer-position gates"
    assert any(line.startswith("worst cell: layer 23 at 2,048") for line in lines)


@pytest.mark.parametrize("figure", ["cos", "kl", "layer", "pos"])
@pytest.mark.parametrize("value", ["absent", None, math.nan, math.inf, "0.99", True])
def test_case_12_a_missing_figure_fails_by_name(
    figure: str, value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = json.loads(FIXTURE.read_text())
    rows[1][figure] = value
    if value == "absent":
        del rows[1][figure]
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(rows))
    code, lines = said(capsys, str(file))
    assert code == 1
    assert lines[-1] == "FAIL: layer-position gates"
    named = f"row 1: {figure}" if figure in ("layer", "pos") else f"layer 12 at 512: {figure}"
    assert any(line.startswith("failed:") and named in line for line in lines)


@pytest.mark.parametrize(
    ("flag", "named"), [("--min-cos=0.99", "23 at 2,048: cos"), ("--max-kl=0.04", "23 at 2,048: kl")]
)
def test_a_figure_beyond_its_limit_fails_by_name(flag: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = said(capsys, str(FIXTURE), flag)
    assert code == 1
    assert any(line.startswith("failed:") and named in line for line in lines)


@pytest.mark.parametrize(("figure", "value"), [("cos", 1.5), ("kl", -0.1)])
def test_a_figure_out_of_its_range_is_no_figure(
    figure: str, value: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = json.loads(FIXTURE.read_text())
    rows[0][figure] = value
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    code, lines = said(capsys, str(tmp_path / "rows.json"))
    assert code == 1
    assert any(f"layer 0 at 32: {figure} is" in line for line in lines)


def test_limits_may_stand_in_the_file_and_flags_go_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    file.write_text(json.dumps({"rows": json.loads(FIXTURE.read_text()), "limits": {"cos": 0.999}}))
    assert said(capsys, str(file))[0] == 1
    assert said(capsys, str(file), "--min-cos=0.98")[0] == 0


@pytest.mark.parametrize("content", ["[]", "{}", "[1]", "3", "{", '{"rows": [], "limits": {"speed": 1}}'])
def test_a_file_without_figures_fails(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.json").write_text(content)
    code, lines = said(capsys, str(tmp_path / "rows.json"))
    assert code == 1
    assert lines[-1].startswith("FAIL: layer-position gates")
    assert said(capsys, str(tmp_path / "absent.json"))[0] == 1


def test_a_gate_passes_only_on_a_finite_number_within_its_limit() -> None:
    assert at_most("x", 0.0, 0.0).passed
    assert at_least("x", 1, 1.0).passed
    assert not at_most("x", math.nan, 1.0).passed
    assert not at_least("x", math.inf, 1.0).passed
    assert at_most("x", None, 1.0).detail == "not measured"
    assert CellLimits() == CellLimits(0.98, 0.05)


@pytest.mark.parametrize("key", ["layer", "pos"])
@pytest.mark.parametrize("value", ["-1", "1.5", "1e400", "1" + "0" * 400, "{}", "true", "-1e-9"])
def test_a_place_is_a_whole_number_from_0(
    key: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"layer": "0", "pos": "32", "cos": "0.999", "kl": "0.01"} | {key: value}
    file = tmp_path / "rows.json"
    file.write_text("[{" + ", ".join(f'"{name}": {text}' for name, text in row.items()) + "}]")
    code, lines = said(capsys, str(file))
    assert code == 1
    assert any(line.startswith(f"failed: row 0: {key} is ") for line in lines)


@pytest.mark.parametrize("figure", ["cos", "kl"])
@pytest.mark.parametrize("value", ["1" + "0" * 400, "-1" + "0" * 400, "1e999", "[]", "{}", '"' + "x" * 10_000 + '"'])
def test_a_figure_that_no_float_holds_is_none(
    figure: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"layer": "0", "pos": "32", "cos": "0.999", "kl": "0.01"} | {figure: value}
    (tmp_path / "rows.json").write_text("[{" + ", ".join(f'"{name}": {text}' for name, text in row.items()) + "}]")
    code, lines = said(capsys, str(tmp_path / "rows.json"))
    assert code == 1
    assert any(line.startswith(f"failed: layer 0 at 32: {figure} is ") for line in lines)
    assert max(map(len, lines)) < 200


ROWS = '[{"layer": 0, "pos": 32, "cos": 0.999, "kl": 0.01}]'
REFUSED = {
    f'{{"rows": {ROWS}, "limits": null}}': "limits of .* are None; allowed: a number for cos",
    f'{{"rows": {ROWS}, "limits": []}}': "limits of .* are \\[\\]",
    f'{{"rows": {ROWS}, "limits": {{"kl": NaN}}}}': "limits of .* are {'kl': nan}",
    f'{{"rows": {ROWS}, "limits": {{"kl": -1}}}}': "kl is -1.0; allowed: 0",
    f'{{"rows": {ROWS}, "limits": {{"cos": true}}}}': "limits of .* are {'cos': True}",
    f'{{"rows": {ROWS}, "limit": {{"kl": 0.001}}}}': 'allowed: a list of rows, or {"rows", "limits"}',
    f'{{"rows": {ROWS}, "limits": {{"kl": 1, "kl": 2}}}}': "the key 'kl' comes twice",
    '[{"layer": 0, "pos": 32, "cos": 0.1, "cos": 0.999, "kl": 0.01}]': "the key 'cos' comes twice",
    "[" * 100_000: "nested too deeply",
    '{"a":' * 100_000: "nested too deeply",
    "\ud800": "can't be read",
    "": "can't be read",
}


@pytest.mark.parametrize("content", REFUSED, ids=lambda content: content[-24:])
def test_a_file_that_is_not_what_it_must_be_is_told_in_a_line(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.json"
    file.write_bytes(content.encode("utf-8", "surrogatepass"))
    code, lines = said(capsys, str(file))
    assert code == 1
    assert len(lines) == 1
    assert re.match(f"FAIL: layer-position gates: .*{REFUSED[content]}", lines[0])


@pytest.mark.parametrize("flag", ["--max-kl=inf", "--max-kl=nan", "--max-kl=-1", "--max-kl=60", "--min-cos=2"])
def test_a_limit_that_nothing_fails_is_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = said(capsys, str(FIXTURE), flag)
    assert code == 1
    assert lines[-1].startswith(f"FAIL: layer-position gates: {flag[6 : flag.index('=')]} is ")
    with pytest.raises(SystemExit, match="2"):
        main([str(FIXTURE), "--max-kl=much"])
