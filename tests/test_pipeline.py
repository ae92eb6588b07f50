"""What a real `dvc repro` reruns, and what it must not. `python -m pytest tests/test_pipeline.py`, about four minutes

One smoke run is shared. Each test edits it further and leaves it finished, so that any of them can run alone.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from pipeline import RUNNING, Clone, clone

pytestmark = pytest.mark.xdist_group("pipeline")

OF_A_POLICY = ("plan", "quantize", "logits", "generate", "latency", "drill", "verdict")
PREFLIGHT = "stages/preflight.py profile=smoke model=tiny corpus=smoke"
PLOTS = [
    f"plots/{name}.{kind}"
    for name in ("heatmap", "attention", "recall", "frontier", "latency")
    for kind in ("json", "png")
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    """A committed cold run of the smoke profile, in a folder with a space in its name."""
    run = clone(tmp_path_factory.mktemp("pipeline") / "a clone", ["k8v4", "auto"])
    run.repro()
    run.commit()
    return run


def test_a_run_leaves_no_ignore_files_and_no_logs(finished: Clone) -> None:
    found = {path.relative_to(finished.root).as_posix() for path in finished.root.rglob(".gitignore")}
    assert found == {".gitignore", ".dvc/.gitignore"}
    assert not (finished.root / "outputs").exists()
    assert finished.run("git", "status", "--porcelain").stdout == ""


def test_nothing_but_preflight_runs_again(finished: Clone) -> None:
    assert finished.repro() == {"preflight"}


def test_a_comment_reruns_nothing_and_a_figure_only_the_frontier(finished: Clone) -> None:
    for path in sorted((finished.root / "conf").rglob("*.yaml")):
        finished.append(path.relative_to(finished.root).as_posix(), "# a comment")
    finished.append("kvdrift/report/figures.py", "# a comment")
    assert finished.repro() == {"preflight", "frontier"}


def test_what_dvc_shows(finished: Clone, tmp_path: Path) -> None:
    shown = finished.dvc("metrics", "show").stdout.rstrip().splitlines()
    assert {line.split()[0] for line in shown[1:]} == {f"metrics/{name}.json" for name in finished.policies()}
    assert len(shown[0].split()) in range(9, 13)
    assert max(map(len, shown)) <= 160
    finished.edit(f"metrics/{finished.policies()[0]}.json", '"kl": ', '"kl": 1')
    changed = json.loads(finished.dvc("metrics", "diff", "--json").stdout)
    finished.run("git", "checkout", "--quiet", "metrics")
    assert changed[f"metrics/{finished.policies()[0]}.json"].keys() == {"kl"}
    plots = json.loads(finished.dvc("plots", "show", "--json", "--out", str(tmp_path)).stdout)
    assert sorted(plots["data"]) == sorted(PLOTS)
    assert not plots.get("errors")


def test_generated_tokens_have_figures_of_their_own(finished: Clone) -> None:
    verdict = json.loads((finished.root / f"data/verdict/{finished.policies()[0]}.json").read_text())
    assert [gate["passed"] for gate in verdict["gates"] if gate["name"] == "evidence"] == [True]
    told = {row["at"]: row for row in verdict["slices"] if row["slice"] == "region"}
    assert told.keys() == {"prompt", "generated"}
    assert all(value is not None for row in told.values() for value in row.values())


@pytest.mark.parametrize(
    ("command", "outputs", "absent"),
    [
        ("quantize profile=smoke plan=k8v4", ("out",), {"transformers"}),
        ("verdict gates=smoke plan=k8v4", ("out", "metrics"), {"transformers", "torch"}),
        (
            "frontier profile=smoke model=tiny corpus=smoke gates=smoke",
            ("out", "changed", "plots"),
            {"transformers", "torch"},
        ),
    ],
)
def test_light_stages_import_nothing_heavy(
    finished: Clone, command: str, outputs: tuple[str, ...], absent: set[str], tmp_path: Path
) -> None:
    """The whole stage runs, on the run's real data; what it writes goes elsewhere."""
    name, *overrides = command.split()
    elsewhere = [f"{key}={tmp_path / key}" for key in outputs]
    done = finished.run(sys.executable, "-X", "importtime", f"stages/{name}.py", *overrides, *elsewhere)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "kvdrift.config" in imported
    assert imported & absent == set()


@pytest.mark.parametrize(
    ("command", "file", "old", "new", "message"),
    [
        (
            "-m dvc repro",
            "params.yaml",
            "- auto",
            "- int9",
            "params.yaml: policy 'int9' is unknown; allowed: auto, exact",
        ),
        (
            "-m dvc repro",
            "conf/policy/auto.yaml",
            "group: 32",
            "group: 48",
            "auto.yaml: key.group is 48; it must divide",
        ),
        (PREFLIGHT, "conf/quantize.yaml", "plan:", "block: 64\nplan:", "conf/quantize.yaml: block is an unknown key"),
        (PREFLIGHT, "conf/drill.yaml", "new_tokens: ", "new_tokens: x", "conf/drill.yaml: new_tokens is 'x"),
        (PREFLIGHT, "conf/corpus/smoke.yaml", "{256: 3}", "{512: 3}", "prefix of 512 tokens and 17 more"),
        (PREFLIGHT, "conf/corpus/smoke.yaml", "{256: 3}", "{256: 9000000}", "Free some disk, or choose a smaller"),
        (PREFLIGHT, "conf/profile/smoke.yaml", "device: cpu", "device: cuda", "device is 'cuda', but"),
    ],
)
def test_bad_input_is_refused_and_leaves_outputs_untouched(
    finished: Clone, command: str, file: str, old: str, new: str, message: str
) -> None:
    before, text = finished.outputs(), (finished.root / file).read_text()
    finished.edit(file, old, new)
    try:
        refused = finished.run(sys.executable, *command.split(), fails=True, PATH=str(Path(sys.executable).parent))
    finally:
        (finished.root / file).write_text(text)
    assert message in refused.stderr
    assert "Traceback" not in refused.stderr
    assert set(RUNNING.findall(refused.stdout)) <= {"preflight"}
    assert finished.outputs() == before


def test_a_policy_reruns_alone_and_a_killed_stage_again(finished: Clone) -> None:
    """The first run is killed, DVC with it, while `generate` runs, and its output is left half-written."""
    policy = finished.policies()[0]
    finished.edit(f"conf/policy/{policy}.yaml", "residual_window: 128", "residual_window: 64")
    begun = _killed(finished, f"generate@{policy}")
    half = finished.root / "data/generate" / f"{policy}.parquet"
    half.parent.mkdir(exist_ok=True)
    half.write_bytes(b"PAR1 and no more")
    again = finished.repro()
    assert begun & again == {"preflight", f"generate@{policy}"}
    assert begun | again == {"preflight", "frontier"} | {f"{stage}@{policy}" for stage in OF_A_POLICY}
    assert half.read_bytes().endswith(b"PAR1")


def test_a_policy_that_was_removed_leaves_no_trace(finished: Clone) -> None:
    finished.edit("params.yaml", "- k8v4\n", "")
    assert finished.repro() == {"preflight", "frontier"}
    written = [*(finished.root / "data/release").iterdir(), *(finished.root / "plots").glob("*.json")]
    written.append(finished.root / "data/changed_examples.jsonl")
    assert [path.name for path in written if b"k8v4" in path.read_bytes()] == []
    assert "k8v4" not in finished.dvc("metrics", "show").stdout


def test_a_kernel_reruns_what_uses_kernels(finished: Clone) -> None:
    finished.append("kvdrift/kernels/dispatch.py", "# a comment")
    ran = finished.repro()
    assert "reference" not in ran
    assert ran == finished.users("kvdrift/kernels") | finished.stages("preflight", "verdict", "frontier")


def test_a_driver_reruns_what_depends_on_the_device(finished: Clone) -> None:
    """Up to `quantize@auto`: neither the model nor the prompts, and not the calibration on an equal reference."""
    ran = finished.repro("quantize@auto", KVDRIFT_FAKE_DRIVER="999.8")
    assert ran == {"preflight", "reference", "sensitivity", "search", "quantize@auto"}


@pytest.mark.slow
def test_a_driver_reruns_all_that_depends_on_the_device(finished: Clone) -> None:
    ran = finished.repro(KVDRIFT_FAKE_DRIVER="999.9")
    assert "reference" in ran
    assert ran == finished.users("data/preflight/device.json") | finished.stages("preflight", "verdict")


def _killed(run: Clone, stage: str) -> set[str]:
    """The stages begun by a `dvc repro` that, with all that it started, is killed once `stage` runs."""
    command = [sys.executable, "-m", "dvc", "repro"]
    begun: set[str] = set()
    with subprocess.Popen(
        command, cwd=run.root, env=run.environment(), stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            begun.update(RUNNING.findall(line))
            if stage in begun:
                os.killpg(process.pid, signal.SIGKILL)
                break
    assert process.returncode == -signal.SIGKILL
    return begun
