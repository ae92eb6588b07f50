"""python -m pytest tests/prompts/test_build.py"""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
import yaml
from polars.testing import assert_frame_equal

from kvdrift.policy import CachePolicy, LayerPolicy, Quantizer, packed_until
from kvdrift.prompts.build import build, prefix_tokens
from kvdrift.prompts.graders import GRADERS, grade
from kvdrift.prompts.prompt import CALIBRATION, EVALUATION, Prompt, PromptError, from_frame, to_frame
from kvdrift.prompts.spec import CorpusSpec, resolve

ROOT = Path(__file__).parents[2]
POSITIONS = 512


@pytest.fixture(params=["smoke", "laptop"])
def prompts(request: pytest.FixtureRequest) -> list[Prompt]:
    return request.getfixturevalue(request.param)


def test_equal_arguments_give_equal_prompts_and_another_seed_gives_others(tokenizer, smoke, load_spec, corpus):
    assert build(tokenizer, load_spec("smoke"), corpus, POSITIONS, seed=0) == smoke
    others = build(tokenizer, load_spec("smoke"), corpus, POSITIONS, seed=1)
    assert [prompt.id for prompt in others] == [prompt.id for prompt in smoke]
    planted = [(a.tokens, b.tokens) for a, b in zip(smoke, others, strict=True) if a.task]
    assert all(a != b for a, b in planted)


def test_ids_are_unique_and_lengths_exact(prompts):
    assert len({prompt.id for prompt in prompts}) == len(prompts)
    for prompt in prompts:
        assert len(prompt.tokens) == len(prompt.roles)
        assert len(prompt.tokens) % 16 == 0
        assert f"-{len(prompt.tokens):05d}-" in prompt.id
        assert prompt.task == "" or prompt.task in GRADERS


def test_batches_are_rectangular_and_not_too_large(prompts):
    batches = defaultdict(list)
    for prompt in prompts:
        batches[prompt.batch].append(prompt)
    for batch in batches.values():
        assert len(batch) <= 36
        alike = {(p.split, len(p.tokens), len(p.continuation), p.max_new_tokens) for p in batch}
        assert len(alike) == 1


def test_continuations_hold_the_answer_and_end_in_padding(smoke, tokenizer):
    for prompt in smoke:
        eos = tokenizer.eos_token_id
        assert all(token == eos for token in prompt.continuation[prompt.scored :])
        assert (prompt.task == "") == (prompt.answer == "")


def test_the_gold_text_holds_the_answer(laptop, tokenizer):
    cut = [prompt for prompt in laptop if prompt.scored == len(prompt.continuation)]
    for prompt in laptop:
        if prompt.task not in ("", "refusal") and prompt not in cut:
            said = tokenizer.decode(prompt.continuation[: prompt.scored - 1])
            assert grade(prompt.task, said, prompt.answer).correct


@pytest.mark.parametrize("cohort", ["code", "long_code"])
def test_free_text_continues_as_its_source_does(cohort, smoke, tokenizer, corpus):
    source = (corpus / "python.txt").read_text() + (corpus / "c.txt").read_text()
    code = next(prompt for prompt in smoke if prompt.cohort == cohort and prompt.split == EVALUATION)
    assert tokenizer.decode([*code.tokens, *code.continuation]) in source


def test_a_long_continuation_does_not_repeat_its_prompt(prompts):
    for prompt in (each for each in prompts if each.cohort == "long_code"):
        text = [*prompt.tokens, *prompt.continuation]
        runs = [tuple(text[at : at + 96]) for at in range(len(text) - 95)]
        assert len(set(runs)) == len(runs)


@pytest.mark.parametrize("name", ["smoke", "laptop", "gpu"])
def test_every_policy_packs_some_of_a_long_continuation(name, load_spec):
    cohort = load_spec(name).cohorts["long_code"]
    for path in sorted((ROOT / "conf" / "policy").glob("*.yaml")):
        raw = yaml.safe_load(path.read_text())
        kept = {key: raw[key] for key in ("sink_tokens", "residual_window", "block") if key in raw}
        policy = CachePolicy("p", (LayerPolicy(Quantizer()),), **kept)
        for length in cohort.prompts:
            assert packed_until(policy, length + cohort.continuation - 1) >= length + 16, path.stem


def test_critical_items_ask_early(laptop):
    for prompt in laptop:
        if prompt.cohort in ("needle", "copy", "tool_arguments"):
            assert prompt.roles.index("needle") < len(prompt.tokens) / 2


def test_the_needle_lies_at_its_depth_and_holds_the_answer(prompts, tokenizer):
    grid = [prompt for prompt in prompts if prompt.cohort == "needle_grid"]
    assert grid
    for prompt in grid:
        start = prompt.roles.index("needle")
        before = prompt.roles[:start].count("filler")
        assert before / prompt.roles.count("filler") == pytest.approx(prompt.depth, abs=0.03)
        fact = [token for token, role in zip(prompt.tokens, prompt.roles, strict=True) if role == "needle"]
        assert prompt.answer in tokenizer.decode(fact)


def test_the_grid_plants_the_same_content_everywhere(prompts):
    grid = [prompt for prompt in prompts if prompt.cohort == "needle_grid"]
    assert len({prompt.answer for prompt in grid}) == 1
    assert len({(len(prompt.tokens), prompt.depth) for prompt in grid}) == len(grid)


def test_calibration_and_evaluation_share_no_32_tokens(laptop):
    def runs(split: str) -> set[tuple[int, ...]]:
        # template text is the same everywhere, so it is left out
        texts = (
            [*(t for t, r in zip(p.tokens, p.roles, strict=True) if r != "template"), *p.continuation]
            for p in laptop
            if p.split == split
        )
        # a token is one byte here, about a quarter of a real one
        return {tuple(text[i : i + 96]) for text in texts for i in range(len(text) - 95)}

    assert not runs(EVALUATION) & runs(CALIBRATION)


def test_a_frame_and_a_parquet_file_keep_every_prompt(smoke, tmp_path):
    frame = to_frame(smoke)
    assert from_frame(frame) == smoke
    frame.write_parquet(tmp_path / "prompts.parquet")
    assert_frame_equal(pl.read_parquet(tmp_path / "prompts.parquet"), frame)
    assert from_frame(to_frame([])) == []


def test_a_prompt_beyond_the_models_positions_is_refused(tokenizer, load_spec, corpus):
    with pytest.raises(PromptError, match=r"a prefix of 320 .* 17 more .* as tool_arguments ask for, .* 320 positions"):
        build(tokenizer, load_spec("smoke"), corpus, 320, seed=0)


def test_a_prompt_too_short_for_its_question_is_refused(tokenizer, load_spec, corpus):
    spec = load_spec("smoke")
    short = replace(spec, cohorts={"needle": replace(spec.cohorts["needle"], prompts={32: 1})})
    with pytest.raises(PromptError, match=r"needle-00032-00 needs \d+ tokens before any filler"):
        build(tokenizer, short, corpus, POSITIONS, seed=0)


def test_the_longest_prompts_leave_room_for_the_answer(load_spec):
    assert resolve("max", 8192, load_spec("laptop").answer_room) == 7936


def test_the_laptop_corpus_keeps_to_its_budget(load_spec):
    spec = load_spec("laptop")
    assert spec.prefix_tokens(8192) <= 114_000
    assert all(sum(spec.cohorts[cohort].prompts.values()) == 56 for cohort in ("needle", "copy", "tool_arguments"))


def test_prefix_tokens_agree_with_the_specification(smoke, load_spec):
    assert prefix_tokens(smoke) == load_spec("smoke").prefix_tokens(POSITIONS)


def test_a_chat_template_frames_every_message_and_ends_with_the_assistants_header(chat_tokenizer, load_spec, corpus):
    tokenizer = chat_tokenizer
    prompts = build(tokenizer, load_spec("smoke"), corpus, POSITIONS, seed=0)
    for prompt in prompts:
        text = tokenizer.decode(prompt.tokens)
        if prompt.task:
            assert text.endswith("</>\n<assistant>")
            assert set(prompt.roles[-11:]) == {"template"}
    call = next(prompt for prompt in prompts if prompt.cohort == "tool_arguments")
    assert {"template", "system", "user", "assistant", "needle", "filler"} <= set(call.roles)
    assert "⁂" not in "".join(tokenizer.decode(prompt.tokens) for prompt in prompts)


@pytest.mark.parametrize("name", ["smoke", "laptop", "gpu"])
def test_the_committed_specifications_are_valid(name, load_spec):
    assert load_spec(name).batch_size >= 8


RAW = {
    "batch_size": 4,
    "answer_room": 64,
    "cohorts": {"needle": {"prompts": {128: 1}, "continuation": 17, "max_new_tokens": 8}},
    "needle_grid": {"depths": {128: [0.5], "max": [0.5]}, "continuation": 17, "max_new_tokens": 8},
    "calibration": {"code": {"prompts": {128: 1}, "continuation": 17}},
}


def cohort(**change):
    return {"cohorts": {"needle": RAW["cohorts"]["needle"] | change}}


def grid(**change):
    return {"needle_grid": RAW["needle_grid"] | change}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batchsize": 3}, "unknown key 'batchsize'; allowed: batch_size"),
        ({"batch_size": 1}, "batch_size is 1; it must be an integer of at least 2"),
        ({"cohorts": {"nedle": {}}}, "unknown cohort 'nedle'; allowed: .*needle"),
        ({"cohorts": {"needle": {"prompts": {100: 1}, "continuation": 17}}}, "length 100; allowed: .* multiples of 16"),
        ({"cohorts": {"needle": {"prompts": {128: "x"}, "continuation": 17}}}, "'x'; it must be an integer"),
        ({"cohorts": {"needle": {"continuation": 17}}}, "lacks 'prompts'"),
        (
            {"cohorts": {"needle": None}},
            "cohorts.needle is None; allowed: a mapping with the keys prompts, continuation",
        ),
        ({"cohorts": {}}, "cohorts is {}; allowed: a mapping with one entry or more"),
        ({"cohorts": ["needle"]}, r"cohorts is \['needle'\]; allowed: a mapping"),
        (cohort(prompts=[320]), r"cohorts.needle.prompts is \[320\]; allowed: a mapping"),
        (cohort(prompts={}), "cohorts.needle.prompts is {}; allowed: a mapping with one entry or more"),
        (cohort(prompts={320: 0}), r"cohorts.needle.prompts\[320\] is 0; it must be an integer of at least 1"),
        (cohort(continuation=18), "cohorts.needle.continuation is 18; it must be 1 plus a multiple of 16"),
        (cohort(continuation=1), "cohorts.needle.continuation is 1; it must be an integer of at least 17"),
        (cohort(max_new_tokens=0), "cohorts.needle.max_new_tokens is 0; it must be an integer of at least 1"),
        (grid(continuation=32), "needle_grid.continuation is 32; it must be 1 plus a multiple of 16"),
        (grid(depths={128: [1.5]}), r"needle_grid.depths\[128\] holds 1.5; a depth is a number from 0 to 1"),
        (grid(depths={128: [float("nan")]}), "holds nan; a depth is a number from 0 to 1"),
        (grid(depths=0.5), "needle_grid.depths is 0.5; allowed: a mapping"),
        (grid(depths={128: 0.5}), r"needle_grid.depths\[128\] is 0.5; allowed: a list of depths"),
        (grid(depths={128: []}), r"needle_grid.depths\[128\] is \[\]; allowed: a list of depths"),
        (grid(depths={128: [0.5, 0.501]}), r"is \[0.5, 0.501\]; depths must differ by 0.01"),
        ({"calibration": {}}, "calibration is {}; allowed: a mapping with one entry or more"),
    ],
)
def test_a_wrong_specification_is_named(change, message):
    with pytest.raises(PromptError, match=message):
        CorpusSpec.from_dict(RAW | change)


def test_every_fault_of_a_specification_is_named():
    with pytest.raises(PromptError) as caught:
        CorpusSpec.from_dict(RAW | {"answer_room": 0} | cohort(continuation=18) | grid(items=0))
    assert [line.partition(";")[0] for line in caught.value.args] == [
        "answer_room is 0",
        "cohorts.needle.continuation is 18",
        "needle_grid.items is 0",
    ]


def test_a_length_asked_for_twice_is_named():
    with pytest.raises(PromptError, match=r"needle_grid.depths are \[960, 960\] tokens long on this model"):
        CorpusSpec.from_dict(RAW | grid(depths={960: [0.5], "max": [0.5]})).check(1024)


def test_tokens_are_not_listed_one_by_one():
    assert CorpusSpec.from_dict(RAW | cohort(prompts={128: 10**15})).prefix_tokens(1024) == 128 * (10**15 + 2) + 960


def test_scored_positions_agree_with_the_prompts(smoke, load_spec):
    assert sum(len(prompt.continuation) - 1 for prompt in smoke) == load_spec("smoke").scored()
