"""python -m pytest tests/prompts/test_attack.py"""

from itertools import pairwise

import pytest

from kvdrift.prompts.attack import RUN, attack, repeated
from kvdrift.prompts.prompt import PromptError

CELLS = [(128, 320), (320, 512)]


@pytest.mark.parametrize("cells", [[(32, 128)], CELLS, [(512, 4096)]])
def test_every_fact_lies_wholly_inside_its_cell(tokenizer, cells):
    prompts = attack(tokenizer, cells, length=768, items=8, seed=3)
    assert len(prompts) == 8
    for index, prompt in enumerate(prompts):
        start, stop = cells[index % len(cells)]
        planted = [place for place, role in enumerate(prompt.roles) if role == "needle"]
        assert start <= min(planted) <= max(planted) < min(stop, 768)
        assert len(prompt.tokens) == 768
        assert prompt.cohort == "attack"
        assert prompt.continuation[: prompt.scored]


def test_both_forms_of_question_attack_a_wide_cell_and_several_codes_make_a_long_answer(tokenizer):
    prompts = attack(tokenizer, CELLS, length=768, items=8, seed=3, sizes=(129, 56))
    assert {prompt.task for prompt in prompts} == {"number", "arguments"}
    assert max(len(prompt.answer.split()) for prompt in prompts) == 3
    assert max(prompt.scored for prompt in prompts) > 64


def test_it_is_deterministic_with_unique_ids(tokenizer):
    prompts = attack(tokenizer, CELLS, 768, 8, seed=3)
    assert prompts == attack(tokenizer, CELLS, 768, 8, seed=3)
    assert len({prompt.id for prompt in prompts}) == 8


def test_a_cell_without_room_is_passed_over_and_none_at_all_is_an_error(tokenizer):
    assert all("p00128" in p.id for p in attack(tokenizer, [(0, 16), (128, 320)], 768, 4, seed=0))
    with pytest.raises(PromptError, match=r"no fact fits into the cells \[\(0, 16\)\] of a prompt of 768 tokens"):
        attack(tokenizer, [(0, 16)], 768, 4, seed=0)


def test_runs_of_one_large_token_replace_filler_and_nothing_else(tokenizer):
    first, second = repeated(tokenizer, [7, 9], length=768, items=2, seed=3)
    for prompt, token in ((first, 7), (second, 9)):
        spans = [place for place, role in enumerate(prompt.roles) if role == "outlier"]
        assert {prompt.tokens[place] for place in spans} == {token}
        runs = 1 + sum(later > place + 1 for place, later in pairwise(spans))
        assert 768 / (2 * RUN[1]) / 2 < runs < 768 / (2 * RUN[0])
        assert len(spans) <= runs * RUN[1]
        said = tokenizer.decode([t for t, role in zip(prompt.tokens, prompt.roles, strict=True) if role == "needle"])
        assert prompt.answer in said
    assert {prompt.cohort for prompt in (first, second)} == {"repeated_outliers"}
