"""Which prompts run together, and which of them are sampled. `python -m pytest tests/prompts/test_batched.py`"""

from kvdrift.prompts.batches import SAMPLED, rows_of


def test_sampled_rows_are_few_and_evenly_spread():
    assert rows_of("greedy", 20) == list(range(20))
    assert rows_of("greedy", 3) == [0, 1, 2]
    assert rows_of("sampled", 3) == []
    assert rows_of("sampled", 4) == [0, 1, 2, 3]
    assert rows_of("sampled", 20) == [0, 3, 6, 9, 12, 15, 18]
    assert max(len(rows_of("sampled", n)) for n in range(1, 100)) == SAMPLED
