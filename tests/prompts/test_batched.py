"""Which prompts run together, and which of them are sampled. `python -m pytest tests/prompts/test_batched.py`"""

from collections import Counter, defaultdict

from kvdrift.prompts.batches import MOST_TOKENS, batched, modes_of
from kvdrift.prompts.prompt import Prompt


def prompt(number: int, cohort: str, length: int = 64) -> Prompt:
    shared = {"task": "number", "split": "evaluation", "scored": 1, "answer": "1", "depth": None, "batch": ""}
    return Prompt(
        id=f"{cohort}-{number}", cohort=cohort, tokens=(1,) * length, roles=("filler",) * length, continuation=(1, 2),
        max_new_tokens=4, **shared,
    )  # fmt: skip


def test_the_first_batch_of_a_shape_is_sampled_as_well_unless_it_is_small() -> None:
    assert modes_of("evaluation-00064-c02-n04-b00", 4) == ("greedy", "sampled")
    assert modes_of("evaluation-00064-c02-n04-b00", 3) == ("greedy",)
    assert modes_of("evaluation-00064-c02-n04-b01", 40) == ("greedy",)


def test_every_batch_of_a_shape_holds_its_share_of_every_cohort() -> None:
    asked = [prompt(n, cohort) for cohort, count in (("needle", 12), ("copy", 9), ("refusal", 3)) for n in range(count)]
    made = batched(asked, size=10)
    assert [p.id for p in made] == [p.id for p in asked]
    cohorts = defaultdict(Counter)
    for p in made:
        cohorts[p.batch][p.cohort] += 1
    assert len(cohorts) == 3
    assert all(c == {"needle": 4, "copy": 3, "refusal": 1} for c in cohorts.values())


def test_a_batch_holds_at_most_so_many_prompts_and_tokens_of_one_length() -> None:
    made = batched([prompt(n, "needle", length) for n in range(30) for length in (64, MOST_TOKENS // 4)], size=7)
    rows = Counter((p.batch, len(p.tokens)) for p in made)
    assert all(count <= (7 if length == 64 else 4) for (_, length), count in rows.items())
    assert len({batch for batch, _ in rows}) == len(rows)
