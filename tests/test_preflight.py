"""Bad input is refused before any work, and the fingerprint is stable. `python -m pytest tests/test_preflight.py`"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvdrift import preflight
from kvdrift.config import ConfigError
from kvdrift.ledger import CacheShape

HERE = Path(__file__).parent.parent
SHAPE = CacheShape(layers=4, kv_heads=2, head_dim=64, query_heads=4, positions=512)
TAKEN = ("conf/corpus", "conf/model", "conf/policy", "conf/profile")
TAKEN += ("conf/model.yaml", "conf/preflight.yaml", "conf/sensitivity.yaml")
TAKEN_STAGES = ("stages/model.py", "stages/preflight.py")
PACK = """
from dataclasses import dataclass
from typing import Any

from kvdrift.config import Profile, stage


@dataclass(frozen=True)
class PackConfig:
    profile: Profile
    policy: dict[str, Any]
    block: int


@stage("pack")
def main(config: PackConfig) -> None: ...
"""


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """A repository of two real stages, and one stand-in that takes a policy."""
    root = tmp_path / "a clone"
    for name in (*TAKEN, *TAKEN_STAGES):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (HERE / name).is_dir() else shutil.copy)(HERE / name, root / name)
    files = {
        "params.yaml": "{profile: smoke, model: tiny, corpus: smoke, gates: small, policies: [exact, int4, auto]}\n",
        "conf/gates/small.yaml": "kl: 0.05\n",
        "conf/pack.yaml": "defaults: [{profile: laptop}, {policy: '???'}, _self_]\nblock: 64\n",
        "stages/pack.py": PACK,
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def run(repo: Path, *overrides: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "stages/preflight.py", "profile=smoke", "model=tiny", "corpus=smoke", *overrides]
    return subprocess.run(command, cwd=repo, capture_output=True, text=True, env=os.environ | environment)


def fingerprint(repo: Path) -> dict[str, object]:
    content: dict[str, object] = json.loads((repo / "data/preflight/device.json").read_text())
    return content


def test_good_input_leaves_a_fingerprint_that_does_not_vary(repo: Path) -> None:
    done = run(repo)
    assert done.returncode == 0, done.stderr
    assert "5 configurations fit random-llama" in done.stdout
    first = fingerprint(repo)
    assert first["device"] == "cpu"
    assert first["scheduler"] == {"batching": "static", "chunk_tokens": 16}
    assert set(json.loads((repo / "data/preflight/software.json").read_text())) == {
        "torch",
        "transformers",
        "cupy",
        "kvdrift",
    }
    run(repo)
    assert fingerprint(repo) == first


def test_a_changed_driver_or_backend_changes_the_fingerprint(repo: Path) -> None:
    run(repo, KVDRIFT_FAKE_DRIVER="999.9", KVDRIFT_BACKEND="definition")
    assert fingerprint(repo)["driver"] == "999.9"
    assert fingerprint(repo)["backend"] == "definition"


def test_no_compiler_is_a_warning_and_the_definition_runs(repo: Path, tmp_path: Path) -> None:
    done = run(repo, PATH=str(tmp_path))
    assert done.returncode == 0
    assert "no C++ compiler" in done.stderr
    assert fingerprint(repo)["backend"] == "definition"


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("params.yaml", "int4", "int5", "params.yaml: policy 'int5' is unknown; allowed: auto, exact, fp8_e4m3, int4"),
        ("params.yaml", "profile: smoke", "profile: fast", "params.yaml: profile 'fast' is unknown; allowed: gpu"),
        ("params.yaml", "policies:", "policy:", "params.yaml: policy is an unknown key; allowed: corpus, gates"),
        ("params.yaml", "[exact, int4, auto]", "exact", "params.yaml: policies is 'exact'; allowed: a list of str"),
        ("params.yaml", "int4", "exact", "list at least one, each once"),
        ("conf/profile/smoke.yaml", "threads", "thread", "conf/profile/smoke.yaml: profile.thread is an unknown key"),
        ("conf/profile/smoke.yaml", "threads: 2", "threads: two", "profile.threads is 'two'; allowed: int"),
        ("conf/profile/smoke.yaml", "device: cpu", "device: cuda", "device is 'cuda', but"),
        (
            "conf/pack.yaml",
            "block: 64",
            "blocks: 64",
            "conf/pack.yaml: blocks is an unknown key; allowed: block, policy",
        ),
        (
            "conf/policy/int4.yaml",
            "bits: 4",
            "bits: 3",
            "conf/policy/int4.yaml: bits of uniform is 3; allowed: 2, 4, 8",
        ),
        ("conf/policy/int4.yaml", "bits:", "bit:", "conf/policy/int4.yaml: policy 'int4'"),
        ("conf/policy/auto.yaml", "group: 32", "group: 48", "conf/policy/auto.yaml: key.group is 48; it must divide"),
        ("conf/policy/auto.yaml", "bits_per_element: 4.7", "bits: 4.7", "auto.yaml: bits is an unknown key; allowed"),
        ("conf/policy/kivi2.yaml", "group: 32", "group: 48", "conf/policy/kivi2.yaml: key.group is 48; it must divide"),
        ("conf/policy/int4.yaml", "[int8, exact]", "[int9]", "policy 'int9', to be probed or escalated to, is unknown"),
        ("conf/corpus/smoke.yaml", "batch_size", "batch", "corpus has an unknown key 'batch'; allowed: batch_size"),
        ("conf/corpus/smoke.yaml", "{256: 3}", "{512: 3}", "asks for a prefix of 512 tokens and 17 more"),
        ("conf/corpus/smoke.yaml", '"256": [', '"512": [', "asks for a prefix of 512 tokens and 17 more"),
        ("conf/corpus/smoke.yaml", "{256: 3}", "{256: 9000000}", "are free. Free some disk"),
        ("conf/model/tiny.yaml", "source: tiny", "source: hub", "'random-llama' (revision None) is no local folder"),
    ],
)
def test_bad_input_is_refused_and_earlier_output_untouched(
    repo: Path, file: str, old: str, new: str, message: str
) -> None:
    (repo / "data/preflight").mkdir(parents=True)
    (repo / "data/preflight/device.json").write_text('"earlier"')
    text = (repo / file).read_text()
    assert old in text
    (repo / file).write_text(text.replace(old, new))
    failed = run(repo, HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="", PATH="/usr/bin:/bin")
    assert failed.returncode == 1
    assert message in failed.stderr
    assert "Traceback" not in failed.stderr
    assert (repo / "data/preflight/device.json").read_text() == '"earlier"'


def test_a_model_with_unsupported_layers_is_refused_by_name(repo: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sliding"
    folder.mkdir()
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 256, "sliding_window": 128}
    (folder / "config.json").write_text(json.dumps(config))
    failed = run(repo, "model=hub", f"model.id={folder}")
    assert failed.returncode == 1
    assert "unsupported layers: layer 0: sliding_attention; layer 1: sliding_attention" in failed.stderr


def test_a_group_that_does_not_divide_the_head_is_refused(repo: Path) -> None:
    """Case 3: head_dim 72 and 80 with groups of 64 are decided here, not in the middle of decoding."""
    (repo / "conf/policy/kivi4.yaml").write_text("value: {bits: 4, axis: token, group: 64}\n")
    with pytest.raises(ConfigError, match=r"group 64 does not divide head_dim 80; allowed groups: \[0, 8, 16\]"):
        preflight.check_policies(repo, ["kivi4"], CacheShape(layers=2, kv_heads=2, head_dim=80, query_heads=2))


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
            preflight.check_device(device, gpu, torch_version)
    else:
        assert preflight.check_device(device, gpu, torch_version) == resolved


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
    assert preflight.resolve_backend(device, compiler) == backend


def test_an_unknown_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVDRIFT_BACKEND", "triton")
    with pytest.raises(ConfigError, match="KVDRIFT_BACKEND is 'triton'; allowed: definition, native, cuda"):
        preflight.resolve_backend("cpu", None)
