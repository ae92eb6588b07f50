"""The verdict and frontier stages as dvc runs them, on a made-up run. `python -m pytest tests/report/test_stages.py`"""

import json
import os
import subprocess
import sys
from itertools import pairwise

import polars as pl
import pytest
from made_up import Run
from staging import ROOT, finish, read, written

PLOTS = ("heatmap", "attention", "recall", "frontier", "latency")


def test_the_accepted_candidate_ships_from_its_break_even_up_to_what_was_evaluated(finished: Run) -> None:
    policy = read(finished, "data/release/policy.json")
    assert (policy["name"], policy["min_length"], policy["max_length"]) == ("kivi4", 1600, 8128)
    decisions = read(finished, "data/release/decisions.json")
    assert {row["policy"]: row["decision"] for row in decisions["policies"]} == {
        "exact": "fallback",
        "kivi4": "accept",
        "kivi2": "reject",
    }
    for path in decisions["paths"].values():
        assert (finished.root / path).is_file()


def test_the_receipt_opens_with_the_decision_and_its_gates(finished: Run) -> None:
    lines = (finished.root / "data/release/receipt.md").read_text().splitlines()
    assert lines[0] == "# Decision: ship kivi4 on tiny"
    assert lines[2] == "## Why"
    assert "| gate | measured | limit | status | what is measured | detail |" in lines[:14]
    for title in (
        "Policy",
        "Tensors",
        "Memory",
        "Latency",
        "Capacity",
        "Needle recall",
        "Worst cells",
        "Cohorts",
        "Changed examples",
        "Not covered",
    ):
        assert f"## {title}" in lines
    for title in ("Fallback proof", "Rollout alarms", "Engine flags", "Hashes (sha256)"):
        assert f"## {title}" in lines
    for above, line in pairwise(lines):
        if above.startswith("|") and line.startswith("|"):
            assert line.replace("\\|", "").count("|") == above.replace("\\|", "").count("|")
    text = "\n".join(lines)
    assert "computed, not measured at this length" in text
    assert "faster from 1,600 tokens on" in text
    assert "Changed outcomes in all cohorts: greedy 0 right → wrong" in text
    page = (finished.root / "data/release/receipt.html").read_text()
    assert "<h1>Decision: ship kivi4 on tiny</h1>" in page


def test_every_threshold_stands_beside_its_figure(finished: Run) -> None:
    receipt = read(finished, "data/release/receipt.json")
    assert {"name", "measured", "limit", "sense", "status", "passed", "detail"} == set(receipt["gates"][0])
    assert len(receipt["gates"]) == 17
    hashed = {"manifest", "prompts", "reference", "config", "code", "kernels", "policy"}
    assert {row["of"] for row in receipt["hashes"]} == {"weights: model.safetensors", *hashed}
    target = next(row for row in receipt["memory"] if row["target"])
    assert (target["tokens"], target["held"]) == (4128, None)
    assert target["ideal"] < target["format"] < target["reference"]


def test_every_hash_is_shown_again_by_its_command(finished: Run) -> None:
    for row in read(finished, "data/release/receipt.json")["hashes"]:
        command = row["again"].split("`")[1]
        where = finished.root / row["again"].split("`")[0].removeprefix("in ").rstrip(" :")
        done = subprocess.run(["bash", "-c", command], cwd=where, capture_output=True, text=True, check=True)
        assert done.stdout.split()[0] == row["sha256"], row


def test_model_and_code_are_told(finished: Run) -> None:
    receipt = read(finished, "data/release/receipt.json")
    assert receipt["origin"]["commit"] is None  # the made-up run lies outside any checkout
    text = (finished.root / "data/release/receipt.md").read_text()
    assert "| model revision | none: local |" in text
    assert "| git commit of the code | none: not a git checkout |" in text
    assert f"with the id {receipt['policy']['id']}" in text


def test_the_release_folder_can_be_sent_elsewhere(finished: Run) -> None:
    release = finished.root / "data/release"
    for name in PLOTS:
        assert f"]({name}.png)" in (release / "receipt.md").read_text()
        assert (release / f"{name}.png").read_bytes() == (finished.root / f"plots/{name}.png").read_bytes()
    page = (release / "receipt.html").read_text()
    assert page.count('<img src="data:image/png;base64,') == len(PLOTS)
    assert ".png" not in page.replace("image/png", "").split("<h2")[1]


def test_changed_examples_are_kept_whole_and_shown_escaped(finished: Run) -> None:
    lines = (finished.root / "data/changed_examples.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert {(row["policy"], row["mode"]) for row in rows} == {
        (p, m) for p in ("kivi4", "kivi2") for m in ("greedy", "sampled")
    }
    assert rows[0]["output_reference"] == "It is <b>12345</b>."
    assert (rows[0]["cohort"], rows[0]["changed"], rows[0]["position"]) == ("copy", "other", 320)
    page = (finished.root / "data/release/changed_examples.html").read_text()
    assert "It is &lt;b&gt;12345&lt;/b&gt;." in page


def test_every_layer_of_every_policy_is_in_one_table(finished: Run) -> None:
    table = pl.read_csv(finished.root / "data/release/layers.csv")
    assert table.group_by("policy", maintain_order=True).len().rows() == [("exact", 3), ("kivi4", 3), ("kivi2", 3)]
    layer = read(finished, "data/verdict/kivi2.json")["layers"][1]
    row = table.filter(policy="kivi2", layer=1).row(0, named=True)
    assert {name: value for name, value in row.items() if name != "policy"} == pytest.approx(layer)
    text = (finished.root / "data/release/receipt.md").read_text()
    assert "`kivi4`, chosen: 4-bit keys" in text
    assert "\n\n`kivi2`: 2-bit keys" in text
    assert (finished.root / "data/release/receipt.html").read_text().count("<details>") == 2


def test_the_probes_are_told_from_the_sensitivity_map(finished: Run) -> None:
    text = (finished.root / "data/release/receipt.md").read_text().split("## Probes")[1].split("\n## ")[0]
    assert "| kivi2 | both | 2 | 16–80 | 0.18 | 0.99 | 0.1 | 0.9 | 0.95 | 0.7 of 2 | needle-long |" in text
    assert len(read(finished, "data/release/receipt.json")["probes"]) == 6


@pytest.mark.parametrize("content", [None, b"PAR1 torn"])
def test_a_map_that_is_missing_or_torn_stops_no_receipt(run: Run, content: bytes | None) -> None:
    if content is not None:
        run.path("sensitivity", "cells.parquet").write_bytes(content)
    finish(run)
    text = (run.root / "data/release/receipt.md").read_text().split("## Probes")[1]
    assert text.strip().startswith("not measured.")


def test_latency_that_a_verdict_rejects_is_not_measured_in_the_receipt(run: Run) -> None:
    path = run.path("latency", "kivi2.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"attention_ms": [1.0]}))
    finish(run)
    receipt = read(run, "data/release/receipt.json")
    row = next(row for row in receipt["candidates"] if row["policy"] == "kivi2")
    assert "attention_ms is of 1 layers" in row["failed"][0]["detail"]
    assert {row["policy"] for row in read(run, "plots/latency.json")} == {"exact", "kivi4"}


def test_two_runs_write_the_same_bytes(finished: Run) -> None:
    before = written(finished)
    finish(finished)
    assert written(finished) == before
    assert {name for name in before if name.startswith("plots/")} == {
        f"plots/{p}.{e}" for p in PLOTS for e in ("json", "png")
    }


def test_a_policy_no_longer_listed_leaves_no_trace(run: Run) -> None:
    finish(run, ["exact", "kivi2"])
    texts = {name: content for name, content in written(run).items() if name.split("/")[0] != "metrics"}
    for name, content in texts.items():
        assert b"kivi4" not in content or name.startswith("data/verdict/"), name
    assert (run.root / "data/release/receipt.md").read_text().startswith("# Decision: stay exact on tiny")
    assert read(run, "data/release/policy.json")["name"] == "exact"


def test_a_run_that_measured_nothing_ships_nothing(run: Run) -> None:
    for folder in ("quantize", "logits", "generate", "latency", "drill", "preflight", "calibration"):
        for path in (run.root / "data" / folder).iterdir():
            path.unlink()
    out = finish(run)
    assert "does not restore the reference path" in out
    text = (run.root / "data/release/receipt.md").read_text()
    assert text.startswith("# Decision: ship nothing on tiny")
    assert "not measured" in text


def test_a_model_that_gets_nothing_right_keeps_the_exact_cache(run: Run) -> None:
    for name in run.policies:
        path = run.path("generate", f"{name}.parquet")
        wrong = {name: pl.lit(False) for name in ("correct", "correct_reference")}
        none = {name: pl.lit(0.0) for name in ("score", "score_reference")}
        owner = {"policy": pl.read_parquet_metadata(path)["policy"]}
        pl.read_parquet(path).with_columns(**wrong, **none).write_parquet(path, metadata=owner)
    finish(run)
    assert read(run, "metrics/kivi4.json")["recall"] is None
    assert (run.root / "data/release/receipt.md").read_text().startswith("# Decision: stay exact on tiny")


def test_show_prints_a_table_of_at_most_160_columns(finished: Run) -> None:
    command = [sys.executable, "-m", "kvdrift.report.show"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=finished.root, env=environment, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 160
    assert any(line.startswith("kivi4") and "chosen" in line for line in lines)
    assert "receipt   data/release/receipt.md" in lines
    nowhere = subprocess.run(command, cwd=finished.root / "plots", env=environment, capture_output=True, text=True)
    assert nowhere.returncode == 1
    assert "dvc repro" in nowhere.stderr


def test_neither_stage_imports_torch() -> None:
    script = (
        "import sys; import kvdrift.report.frontier, kvdrift.report.verdict, kvdrift.report.figures, "
        "kvdrift.report.receipt, kvdrift.report.page, kvdrift.report.sections, kvdrift.report.changed; "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)
