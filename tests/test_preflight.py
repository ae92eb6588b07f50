"""Bad input is refused before any work, and the fingerprint is stable. `python -m pytest tests/test_preflight.py`"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvdrift import fingerprint, policy_files
from kvdrift.config import ConfigError, compose
from kvdrift.ledger import CacheShape
from kvdrift.preflight import Sound, examine

HERE = Path(__file__).parent.parent
SELECTED = ("profile=smoke", "model=tiny", "corpus=smoke")
PARAMS = "{profile: smoke, model: tiny, corpus: smoke, gates: smoke, policies: [exact, int4, auto]}\n"


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The repository's stages and configuration, with the smoke profile selected."""
    root = tmp_path / "a clone"
    for name in ("conf", "stages"):
        shutil.copytree(HERE / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(HERE / "dvc.yaml", root)
    (root / "params.yaml").write_text(PARAMS)
    monkeypatch.chdir(root)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    return root


def run(repo: Path, *overrides: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "stages/preflight.py", *SELECTED, *overrides]
    return subprocess.run(command, cwd=repo, capture_output=True, text=True, env=os.environ | environment)


def fingerprinted(repo: Path) -> dict[str, object]:
    content: dict[str, object] = json.loads((repo / "data/preflight/device.json").read_text())
    return content


def examined(repo: Path, *overrides: str) -> Sound:
    given = compose("preflight", [*SELECTED, *overrides], repo / "conf").values
    return examine(repo, given, given["chunk_tokens"], float(given["disk_limit_gib"]))


def edit(repo: Path, file: str, old: str, new: str) -> None:
    text = (repo / file).read_text()
    assert old in text, f"{file} has no {old!r}"
    (repo / file).write_text(text.replace(old, new))


def wrong(repo: Path, *overrides: str) -> list[str]:
    """The lines of what is wrong."""
    with pytest.raises(ConfigError) as caught:
        examined(repo, *overrides)
    return str(caught.value).splitlines()


def keep(repo: Path, *stages: str) -> None:
    """Leave these stages alone, which takes less time than all of them."""
    for script in (repo / "stages").glob("*.py"):
        if script.stem not in stages:
            script.unlink()


def test_good_input_leaves_a_fingerprint_that_does_not_vary(repo: Path) -> None:
    done = run(repo)
    assert done.returncode == 0, done.stderr
    assert "18 configurations fit random-llama" in done.stdout
    first = fingerprinted(repo)
    assert first["device"] == "cpu"
    assert first["scheduler"] == {"batching": "static", "chunk_tokens": 16}
    assert set(json.loads((repo / "data/preflight/software.json").read_text())) == {
        "torch",
        "transformers",
        "cupy",
        "kvdrift",
    }
    run(repo)
    assert fingerprinted(repo) == first


def test_a_changed_driver_or_backend_changes_the_fingerprint(repo: Path) -> None:
    run(repo, KVDRIFT_FAKE_DRIVER="999.9", KVDRIFT_BACKEND="definition")
    assert fingerprinted(repo)["driver"] == "999.9"
    assert fingerprinted(repo)["backend"] == "definition"


def test_no_compiler_is_a_warning_and_the_definition_runs(repo: Path, tmp_path: Path) -> None:
    done = run(repo, PATH=str(tmp_path))
    assert done.returncode == 0
    assert "no C++ compiler" in done.stderr
    assert fingerprinted(repo)["backend"] == "definition"


def test_everything_that_is_wrong_is_told_at_once_and_earlier_output_untouched(repo: Path) -> None:
    (repo / "data/preflight").mkdir(parents=True)
    (repo / "data/preflight/device.json").write_text('"earlier"')
    edit(repo, "conf/profile/smoke.yaml", "threads: 2", "threads: 0")
    edit(repo, "conf/policy/int4.yaml", "bits: 4", "bits: 3")
    edit(repo, "conf/corpus/smoke.yaml", "{256: 3}, continuation: 17", "{256: 3}, continuation: 18")
    edit(repo, "conf/latency/smoke.yaml", "pairs: 4", "pairs: 0")
    failed = run(repo)
    assert failed.returncode == 1
    assert failed.stderr.splitlines() == [
        "[preflight] error: conf/profile/smoke.yaml: profile.threads is 0; allowed: 1 to 1,024. Edit it and run again.",
        "[preflight] error: conf/latency/smoke.yaml: latency.pairs is 0; allowed: 2 to 100,000. Edit it and run again.",
        "[preflight] error: conf/policy/int4.yaml: policy 'int4'.key: bits of uniform is 3; allowed: 2, 4, 8. Edit it "
        "and run again.",
        "[preflight] error: conf/policy/int4.yaml: policy 'int4'.value: bits of uniform is 3; allowed: 2, 4, 8. Edit "
        "it and run again.",
        "[preflight] error: conf/corpus/smoke.yaml: cohorts.needle.continuation is 18; it must be 1 plus a multiple of "
        "16: 17, 33, 49 …",
        "[preflight] error: conf/corpus/smoke.yaml: cohorts.copy.continuation is 18; it must be 1 plus a multiple of "
        "16: 17, 33, 49 …",
    ]
    assert (repo / "data/preflight/device.json").read_text() == '"earlier"'


PROFILE, CORPUS, GATES, LATENCY = (f"conf/{group}/smoke.yaml" for group in ("profile", "corpus", "gates", "latency"))
INT4, AUTO, TINY = "conf/policy/int4.yaml", "conf/policy/auto.yaml", "conf/model/tiny.yaml"

READERS = {PROFILE: "reference", TINY: "model", GATES: "verdict", LATENCY: "latency"}
"""A stage that composes this file."""

SELECTION = [
    ("params.yaml", "int4", "int5", "params.yaml: policy 'int5' is unknown; allowed: auto, exact, fp8_e4m3, int4"),
    ("params.yaml", "profile: smoke", "profile: fast", "params.yaml: profile 'fast' is unknown; allowed: gpu"),
    ("params.yaml", "gates: smoke", "gates: 4", "params.yaml: gates is 4; allowed: str"),
    ("params.yaml", "policies:", "policy:", "params.yaml: policy is an unknown key; allowed: corpus, gates"),
    ("params.yaml", "[exact, int4, auto]", "exact", "params.yaml: policies is 'exact'; allowed: a list of str"),
    ("params.yaml", "[exact, int4, auto]", "[]", "params.yaml: policies is []; list at least one, each once"),
    ("params.yaml", "int4", "exact", "policies is ['exact', 'exact', 'auto']; list at least one, each once"),
    (
        "params.yaml",
        "int4",
        "my/int4",
        "params.yaml: policies names 'my/int4'; allowed: a letter, then letters, digits, _ and -",
    ),
    ("params.yaml", "int4", "my int4", "params.yaml: policies names 'my int4'; allowed: a letter"),
    ("params.yaml", "policies: [", "policies: ", "params.yaml, line 1: not YAML: "),
    ("params.yaml", PARAMS, "- 1", "params.yaml: the file is [1]; allowed: the keys profile, model"),
]
"""File, what stands there, what is written instead, and what the error has to say."""

KEYS = [
    (PROFILE, "threads", "thread", "conf/profile/smoke.yaml: profile.thread is an unknown key; allowed: device, seed"),
    (PROFILE, "threads: 2", "threads: two", "conf/profile/smoke.yaml: profile.threads is 'two'; allowed: int"),
    (PROFILE, "threads: 2", "threads: -4", "profile.threads is -4; allowed: 1 to 1,024"),
    (PROFILE, "threads: 2", "threads: 100000", "profile.threads is 100000; allowed: 1 to 1,024"),
    (PROFILE, "seed: 0", "seed: -1", "profile.seed is -1; allowed: 0 to 4,294,967,295"),
    (PROFILE, "device: cpu", "device: tpu", "profile.device is 'tpu'; allowed: 'cpu' or 'cuda' or 'auto'"),
    (PROFILE, "device: cpu", "device: cuda", "device is 'cuda', but"),
    (PROFILE, "threads: 2", "threads: [", "conf/profile/smoke.yaml, line 5: not YAML: "),
    (TINY, "source: tiny", "source: gguf", "conf/model/tiny.yaml: model.source is 'gguf'; allowed: 'gguf_package' or"),
    (TINY, "seed: 0", "seed: -1", "conf/model/tiny.yaml: model.seed is -1; allowed: 0 to"),
    ("conf/quantize.yaml", "plan: ???", "plans_: ???", "conf/quantize.yaml: plans_"),
    (
        "conf/quantize.yaml",
        "data/quantize",
        "data/other",
        "conf/quantize.yaml: out is data/other, which dvc.yaml declares",
    ),
    ("conf/quantize.yaml", "out: data/quantize", "out: data/plans", "nothing names data/quantize/exact.parquet, which"),
    (
        "conf/quantize.yaml",
        "manifest: data/model",
        "manifest: data/mode",
        "manifest is data/mode/manifest.json, which dvc",
    ),
    (
        "conf/frontier.yaml",
        "plots: plots",
        "plots: /tmp/plots",
        "conf/frontier.yaml: plots is /tmp/plots, which dvc.yaml",
    ),
    ("conf/frontier.yaml", "[kvdrift, stages]", "[nowhere]", "conf/frontier.yaml: hashed is nowhere, which dvc.yaml"),
    (
        "conf/frontier.yaml",
        "[kvdrift, stages]",
        "[]",
        "conf/frontier.yaml: hashed is empty for code; allowed: files for each name",
    ),
    ("conf/reference.yaml", "floor_batches: 6", "floor_batches: -6", "floor_batches is -6; allowed: 1 to 1,000"),
    ("conf/calibrate.yaml", "margin: 1.5", "margin: .inf", "outlier_margin is inf; allowed: 1 to 1,000"),
    ("conf/sensitivity.yaml", "steps: 8", "steps: 12", "steps is 12; allowed: 8 to 1,024, in steps of 8"),
    ("conf/search.yaml", "trials: 24", "trials: -1", "conf/search.yaml: trials is -1; allowed: 0 to"),
    ("conf/attack.yaml", "cells: 4", "cells: 0", "conf/attack.yaml: cells is 0; allowed: 1 to"),
    ("conf/attack.yaml", "length: 512", "length: 500", "conf/attack.yaml: length is 500; allowed: 128 to"),
    (
        "conf/generate.yaml",
        "[greedy, sampled]",
        "[beam]",
        "conf/generate.yaml: modes[0] is 'beam'; allowed: 'greedy' or",
    ),
    (
        "conf/generate.yaml",
        "[greedy, sampled]",
        "[sampled]",
        "conf/generate.yaml: modes is ['sampled']; greedy is what",
    ),
    ("conf/drill.yaml", "new_tokens: 8", "new_tokens: 0", "conf/drill.yaml: new_tokens is 0; allowed: 1 to"),
    ("conf/preflight.yaml", "chunk_tokens: 16", "chunk_tokens: 32", "chunk_tokens is 32; allowed: 16"),
    ("conf/preflight.yaml", "64.0", "0", "conf/preflight.yaml: disk_limit_gib is 0.0; allowed: 0.001 to"),
    (LATENCY, "pairs: 4", "pairs: 0", "conf/latency/smoke.yaml: latency.pairs is 0; allowed: 2 to 100,000"),
    (LATENCY, "[64, 192, 304]", "[]", "conf/latency/smoke.yaml: latency.contexts is []; allowed: at least one item"),
    (
        LATENCY,
        "batches: [1, 2]",
        "batches: [0]",
        "conf/latency/smoke.yaml: latency.batches is [0]; allowed: 1 to 4,096",
    ),
    (
        LATENCY,
        "budget_mib: 4",
        "budget_mib: -1",
        "conf/latency/smoke.yaml: latency.capacity.budget_mib is -1; allowed: 1",
    ),
    (LATENCY, "quanto", "magic", "latency.peers[1] is 'magic'; allowed: 'static' or 'quanto' or 'hqq'"),
    (GATES, "batch: 2", "batch: 0", "conf/gates/smoke.yaml: gates.workload.batch is 0; allowed: 1 to"),
    (GATES, "max_kl: 0.02", "max_kl: .nan", "conf/gates/smoke.yaml: gates.max_kl is nan; allowed: 0"),
    (GATES, "max_p95_ratio: 1.05", "max_p95_ratio: .inf", "conf/gates/smoke.yaml: gates.max_p95_ratio is inf; allowed"),
    (
        GATES,
        "max_bytes_ratio: 0.6",
        "max_bytes_ratio: -1",
        "conf/gates/smoke.yaml: gates.max_bytes_ratio is -1.0; allowed",
    ),
]

POLICIES = [
    ("conf/sensitivity.yaml", "[code, needle_grid]", "[code, code]", "sensitivity.yaml: cohorts names 'code' twice"),
    ("conf/sensitivity.yaml", "[kivi2, int4]", "[int4, int4]", "probe_policies names 'int4' twice; remove one."),
    (INT4, "bits: 4", "bits: 3", "conf/policy/int4.yaml: policy 'int4'.key: bits of uniform is 3; allowed: 2, 4, 8"),
    (INT4, "bits:", "bit:", "conf/policy/int4.yaml: policy 'int4'.key has an unknown key 'bit'; allowed: axis"),
    (INT4, "[int8, exact]", "[int9]", "policy 'int9', to be probed or escalated to, is unknown; allowed: auto, exact"),
    (
        INT4,
        "[int8, exact]",
        "[int4, exact]",
        "int4.yaml: escalation is ['int4', 'exact']; 'int4' can't escalate to itself",
    ),
    (INT4, "[int8, exact]", "[]", "conf/policy/int4.yaml: escalation is []; name where a request goes"),
    (
        INT4,
        "[int8, exact]",
        "[auto]",
        "int4.yaml: escalation names 'auto', whose bits are searched for; allowed: any other",
    ),
    (INT4, "[int8, exact]", "4", "conf/policy/int4.yaml: policy 'int4': escalation is 4; pass a list of policy names"),
    (INT4, "escalation", "name: int8\nescalation", "int4.yaml: name is 'int8'; a policy is called as its file"),
    (
        INT4,
        "escalation",
        "min_length: 9\nmax_length: 8\nescalation",
        "int4.yaml: max_length is 8; it must be min_length",
    ),
    (
        INT4,
        "escalation",
        "sink_tokens: 512\nescalation",
        "int4.yaml: sink_tokens + residual_window is 512, min_length 0;",
    ),
    (INT4, "escalation", "min_length: 513\nescalation", "packed at 513 tokens, and the model has 512 positions"),
    (AUTO, "sink_tokens: 16", "sink_tokens: 1600000000", "conf/policy/auto.yaml: sink_tokens + residual_window is 16"),
    (INT4, "escalation", "search: {}\nescalation", "int4.yaml: search is set; allowed: only in auto.yaml"),
    (INT4, "[int8, exact]", "[int8", "conf/policy/int4.yaml, line 5: not YAML: "),
    (AUTO, "group: 32", "group: 48", "conf/policy/auto.yaml: key.group is 48; it must divide the block of 64"),
    (
        AUTO,
        "bits_per_element: 4.7",
        "bits: 4.7",
        "conf/policy/auto.yaml: search.bits is an unknown key; allowed: bits_per",
    ),
    (AUTO, "4.7", "0.1", "auto.yaml: search.bits_per_element is 0.1; allowed: 3.04 to 16"),
    (AUTO, "4.7", ".nan", "auto.yaml: search.bits_per_element is nan; allowed: 0 to 16"),
    (AUTO, "search:", "searched:", "conf/policy/auto.yaml: search is missing; conf/search.yaml selects this policy"),
    (AUTO, "sink_tokens", "key: null\nsink_tokens", "auto.yaml: key is set beside search; the search chooses it"),
    (AUTO, "      value: {format: uniform, bits: 2", "      # {", "auto.yaml: search.choices.2 is {'key': "),
    ("conf/policy/kivi2.yaml", "group: 32", "group: 48", "conf/policy/kivi2.yaml: key.group is 48; it must divide"),
    (
        "conf/sensitivity.yaml",
        "[kivi2, int4]",
        "[exact, int4]",
        "probe_policies names 'exact', which packs nothing, so",
    ),
    (
        "conf/sensitivity.yaml",
        "[kivi2, int4]",
        "[kivi4]",
        "dvc.yaml: sensitivity reads policy 'kivi4', to be probed or escalated to, and doesn't track it; add "
        "`- conf/policy/kivi4.yaml:` to the params of sensitivity",
    ),
    (INT4, "[int8, exact]", "[kivi4]", "add `- conf/policy/kivi4.yaml:` to the params of drill, or choose another"),
    ("conf/sensitivity.yaml", "[kivi2, int4]", "[kivi3]", "policy 'kivi3', to be probed or escalated to, is unknown"),
    (
        "conf/sensitivity.yaml",
        "[kivi2, int4]",
        "[auto]",
        "conf/sensitivity.yaml: probe_policies names auto, whose choices",
    ),
]

BETWEEN = [
    (CORPUS, "batch_size", "batch", "conf/corpus/smoke.yaml: corpus has an unknown key 'batch'; allowed: batch_size"),
    (CORPUS, "{256: 3}", "[320]", "conf/corpus/smoke.yaml: cohorts.needle.prompts is [320]; allowed: a mapping"),
    (CORPUS, "{256: 3}", "{}", "conf/corpus/smoke.yaml: cohorts.needle.prompts is {}; allowed: a mapping with one"),
    (
        CORPUS,
        "{256: 3}",
        "{512: 3}",
        "a prefix of 512 tokens and 17 more for its answer, as needle, copy ask for, is not within the",
    ),
    (
        CORPUS,
        '"256": [',
        '"512": [',
        "a prefix of 512 tokens and 17 more for its answer, as needle_grid ask for, is not within the",
    ),
    (CORPUS, "{256: 3}", "{256: 9000000000000}", "are free; with what follows it takes"),
    (CORPUS, "{256: 3}", "{256: 9000000}", "raise disk_limit_gib in conf/preflight.yaml to"),
    (
        CORPUS,
        "  copy:  ",
        "  # copy",
        "conf/gates/smoke.yaml: critical names 'copy', which has no answers in conf/corpus/",
    ),
    (
        CORPUS,
        "  code:           {prompts: {256: 2}",
        "  tables: {prompts: {256: 2}",
        "names 'code', which conf/corpus/smoke",
    ),
    (
        GATES,
        "tool_arguments]",
        "dialogue]",
        "critical names 'dialogue', which has no answers in conf/corpus/smoke.yaml",
    ),
    (GATES, "grid: needle_grid", "grid: needle", "conf/gates/smoke.yaml: grid is 'needle'; allowed: needle_grid"),
    (GATES, "context: 256", "context: 500", "workload asks for 500 + 16 tokens; the model has 512 positions"),
    (
        GATES,
        "batch: 2",
        "batch: 65",
        "workload.batch is 65; allowed: 1 to 64, conf/scheduler/static.yaml's batch_limit",
    ),
    (LATENCY, "batches: [1, 2]", "batches: [65]", "batches is [65]; allowed: at least one up to 64, conf/scheduler/"),
    (
        LATENCY,
        "budget_mib: 4",
        "budget_mib: null",
        "capacity.budget_mib is null, which is a GPU's free memory, but the",
    ),
    (
        "conf/logits.yaml",
        "[code, needle_grid]",
        "[poems]",
        "conf/logits.yaml: probes names 'poems', which conf/corpus/",
    ),
    ("conf/search.yaml", "[code, needle_grid]", "[poems]", "conf/search.yaml: cohorts names 'poems', which"),
    (
        "conf/search.yaml",
        "steps: 16",
        "steps: 32",
        "conf/search.yaml: steps is 32; allowed: at most 16, which conf/corpus/smoke.yaml scores of needle_grid",
    ),
    ("conf/logits.yaml", "probe_steps: 8", "probe_steps: 24", "probe_steps is 24; allowed: at most 16, which conf/"),
    (
        TINY,
        "source: tiny",
        "source: hub",
        "'random-llama' (revision None) is no local folder, and the hub did not give",
    ),
    (TINY, "source: tiny", "source: gguf_package", "model 'random-llama' names no GGUF in a package; write <package>/"),
]


@pytest.mark.parametrize(("file", "old", "new", "message"), [*SELECTION, *KEYS, *POLICIES, *BETWEEN])
def test_bad_input_is_refused_in_a_line(repo: Path, file: str, old: str, new: str, message: str) -> None:
    case = (file, old, new, message)
    if case in KEYS:
        keep(repo, READERS.get(file, Path(file).stem))
    else:
        keep(repo, *(("search", "sensitivity") if case in POLICIES else ("latency", "logits", "search", "verdict")))
    edit(repo, file, old, new)
    lines = wrong(repo)
    assert [line for line in lines if message in line], lines


@pytest.mark.parametrize("override", ["profile=nope", "model=nope", "corpus=nope"])
def test_an_option_that_there_is_not_is_told_in_a_line(repo: Path, override: str) -> None:
    failed = run(repo, override)
    assert failed.returncode == 1
    (line,) = failed.stderr.splitlines()
    group = override.partition("=")[0]
    assert line.startswith(f"[preflight] error: {group} 'nope' is unknown; allowed: ")
    assert line.endswith(f"write conf/{group}/nope.yaml.")


def test_an_emptied_policy_is_refused(repo: Path) -> None:
    keep(repo)
    (repo / INT4).write_text("# nothing\n")
    assert wrong(repo) == [
        "conf/policy/int4.yaml: policy 'int4' names neither key, value nor layers; "
        "for the exact cache write key: null. Edit it and run again."
    ]


def test_every_mistake_in_a_policy_is_told(repo: Path) -> None:
    """Those that stand in one file are told as those of several files are: all at once."""
    keep(repo, "search")
    edit(repo, INT4, "key: {format: uniform, bits: 4", "key: {format: int, bits: 3")
    edit(repo, INT4, "value: {format: uniform, bits: 4", "value: {format: uniform, bits: 5")
    edit(repo, INT4, "[int8, exact]", "[int8, auto]\nname: mine\nblock: 48\nrollback: -1\nsink_tokens: 1")
    edit(repo, AUTO, "group: 32", "group: 48")
    edit(repo, AUTO, "sink_tokens: 16", "sink_tokens: 8")
    lines = [line.removesuffix(". Edit it and run again.") for line in wrong(repo)]
    assert lines == [
        f"{INT4}: name is 'mine'; a policy is called as its file, so remove it",
        f"{INT4}: escalation names 'auto', whose bits are searched for; allowed: any other policy",
        f"{INT4}: policy 'int4'.key: format is 'int'; allowed: uniform, fp8_e4m3",
        f"{INT4}: policy 'int4'.value: bits of uniform is 5; allowed: 2, 4, 8",
        f"{INT4}: block is 48; allowed: 32, 64, 128",
        f"{INT4}: rollback is -1; it must be 0 or more",
        f"{INT4}: sink_tokens + residual_window is 1; it must be a multiple of 16, so that 16-token chunks see what "
        "token-by-token decoding sees",
        f"{AUTO}: sink_tokens + residual_window is 136; it must be a multiple of 16, so that 16-token chunks see what "
        "token-by-token decoding sees",
        f"{AUTO}: key.group is 48; it must divide the block of 64 tokens: [8, 16, 32, 64]",
    ]


def test_names_that_belong_together_are_hinted_at_where_something_is_wrong(repo: Path) -> None:
    keep(repo, "verdict")
    (repo / "params.yaml").write_text(PARAMS.replace("corpus: smoke", "corpus: laptop"))
    *others, hint = wrong(repo, "corpus=laptop")
    assert others
    assert hint == (
        "params.yaml: profile smoke, corpus laptop, gates smoke are selected together. If that isn't meant, set "
        "profile, corpus and gates to one name: smoke or laptop; `make evidence PROFILE=smoke` sets all three."
    )
    (repo / "params.yaml").write_text(PARAMS)
    edit(repo, PROFILE, "threads: 2", "threads: 0")
    assert len(wrong(repo)) == 1


def test_too_few_items_to_pass_are_a_warning(repo: Path) -> None:
    keep(repo, "verdict")
    doubts = examined(repo).doubts
    assert len(doubts) == 3
    assert doubts[0] == (
        "conf/gates/smoke.yaml: critical cohort needle has 3 items in conf/corpus/smoke.yaml; it takes 29 to show "
        "a drift of at most 0.1, so no candidate can pass."
    )
    edit(repo, CORPUS, "{256: 3}", "{256: 29}")
    edit(repo, CORPUS, "{320: 3}", "{320: 28}")
    (only,) = examined(repo).doubts
    assert "critical cohort tool_arguments has 28 items" in only


def test_the_disk_is_counted_as_the_reference_will_fill_it(repo: Path) -> None:
    """Keys and values of 4 layers and 2 heads of 64 in 2 bytes, and what else a scored position stores."""
    keep(repo)
    edit(repo, "conf/preflight.yaml", "64.0", "0.001")
    prefixes = 6 * 256 + 3 * 320 + 4 * 256 + 2 * 112 + 3 * (128 + 256) + 2 * 256
    scored = 16 * (6 + 3 + 4 + 6 + 2) + 160 * 2
    need = (prefixes + scored) * 4 * 2 * 2 * 64 * 2 + scored * (4 * (256 + 256) + 259) * 2
    (line,) = wrong(repo)
    assert line.startswith(
        f"conf/corpus/smoke.yaml: the reference needs {need / 2**30:.2f} GiB; disk_limit_gib is 0.001, "
    )
    assert line.endswith("are free; raise disk_limit_gib in conf/preflight.yaml to 1, or choose a smaller corpus.")


@pytest.mark.parametrize(
    ("files", "messages"),
    [
        ({}, ["has no config.json; pass the folder of a Hugging Face model"]),
        ({"config.json": "{"}, ["config.json is not JSON: Expecting property name"]),
        (
            {"config.json": {"sliding_window": 128}},
            [
                "lacks weights (*.safetensors); add it to the folder",
                "lacks a tokenizer",
                "has unsupported layers: layer 0: sliding_attention; layer 1: sliding_attention. Choose",
                "says no max_position_embeddings in its config",
            ],
        ),
        (
            {"config.json": {"num_attention_heads": 0}},
            ["num_attention_heads is 0; allowed: a whole number of 1 or more"],
        ),
        ({"config.json": {"architectures": ["BertModel"]}}, ["(BertModel) is no decoder with a KV cache"]),
    ],
)
def test_a_folder_that_is_no_model_is_refused(
    repo: Path, tmp_path: Path, files: dict[str, object], messages: list[str]
) -> None:
    keep(repo)
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 256}
    for name, content in files.items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(config | dict(content)))  # type: ignore[call-overload]
    (repo / "conf/model/tiny.yaml").write_text(f"{{source: hub, id: '{folder}', dtype: bfloat16}}\n")
    lines = wrong(repo)
    for message in messages:
        assert [line for line in lines if message in line], lines


def test_a_group_that_does_not_divide_the_head_is_refused(repo: Path) -> None:
    """Case 3: head_dim 72 and 80 with groups of 64 are decided here, not in the middle of decoding."""
    (repo / "conf/policy/kivi4.yaml").write_text("value: {bits: 4, axis: token, group: 64}\n")
    shape = CacheShape(layers=2, kv_heads=2, head_dim=80, query_heads=2)
    with pytest.raises(ConfigError, match=r"group 64 does not divide head_dim 80; allowed groups: \[0, 8, 16\]"):
        policy_files.check_policy(repo, "kivi4", "auto", shape)


@pytest.mark.parametrize(
    ("device", "gpu", "torch_version", "resolved"),
    [
        ("cpu", None, "2.13.0", "cpu"),
        ("auto", None, "2.13.0", "cpu"),
        ("auto", "H200", "2.13.0", "cuda"),
        ("auto", "H200", "2.13.0+cpu", "cpu"),
        ("cuda", "H200", "2.13.0", "cuda"),
        ("cuda", "H200", "2.13.0+cpu", None),
        ("cuda", None, "2.13.0", None),
    ],
)
def test_the_device_is_resolved_or_refused(
    device: str, gpu: str | None, torch_version: str, resolved: str | None
) -> None:
    if resolved is None:
        with pytest.raises(ConfigError, match="device is 'cuda', but"):
            fingerprint.check_device(device, gpu, torch_version)
    else:
        assert fingerprint.check_device(device, gpu, torch_version) == resolved


@pytest.mark.parametrize(
    ("wanted", "device", "compiler", "backend"),
    [
        ("", "cpu", "c++ 12", "native"),
        ("", "cpu", None, "definition"),
        ("", "cuda", None, "cuda"),
        ("cuda", "cpu", "c++ 12", "definition"),
        ("native", "cuda", "c++ 12", "definition"),
        ("definition", "cuda", "c++ 12", "definition"),
    ],
)
def test_the_backend_is_the_one_that_will_run(
    wanted: str, device: str, compiler: str | None, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVDRIFT_BACKEND", wanted)
    assert fingerprint.resolve_backend(device, compiler) == backend


def test_an_unknown_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVDRIFT_BACKEND", "triton")
    with pytest.raises(ConfigError, match="KVDRIFT_BACKEND is 'triton'; allowed: definition, native, cuda"):
        fingerprint.resolve_backend("cpu", None)
