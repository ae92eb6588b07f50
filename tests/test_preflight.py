"""Bad input is refused before any work, and the fingerprint is stable. `python -m pytest tests/test_preflight.py`

What bad input there is, and what is said of it, is test_bad_input.py's.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from bad_input import CORPUS
from clone import SELECTED, edit, examined, keep, wrong

from kvdrift import fingerprint, policy_files
from kvdrift.config import ConfigError
from kvdrift.ledger import CacheShape


def run(repo: Path, *overrides: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "stages/preflight.py", *SELECTED, *overrides]
    return subprocess.run(command, cwd=repo, capture_output=True, text=True, env=os.environ | environment)


def fingerprinted(repo: Path) -> dict[str, object]:
    content: dict[str, object] = json.loads((repo / "data/preflight/device.json").read_text())
    return content


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


@pytest.mark.parametrize("override", ["profile=nope", "model=nope", "corpus=nope"])
def test_an_option_that_there_is_not_is_told_in_a_line(repo: Path, override: str) -> None:
    failed = run(repo, override)
    assert failed.returncode == 1
    (line,) = failed.stderr.splitlines()
    group = override.partition("=")[0]
    assert line.startswith(f"[preflight] error: {group} 'nope' is unknown; allowed: ")
    assert line.endswith(f"write conf/{group}/nope.yaml.")


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
