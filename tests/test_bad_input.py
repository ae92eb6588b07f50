"""Bad input is refused in a line for each mistake. `python -m pytest tests/test_bad_input.py`"""

from pathlib import Path

import pytest
from bad_input import AUTO, BETWEEN, INT4, KEYS, POLICIES, PROFILE, READERS, SELECTION
from clone import PARAMS, edit, keep, wrong


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
