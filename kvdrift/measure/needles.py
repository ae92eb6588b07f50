"""The needle set of the sensitivity map: few short prompts, asked in every cell whether their answer is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvdrift.measure.reference import Stored
from kvdrift.policy import CachePolicy, packed_until
from kvdrift.prompts.prompt import Prompt


def needle_set(batches: Sequence[Stored], policy: CachePolicy) -> list[tuple[Stored, int]]:
    """Every prompt of the needle grid at the shortest length at which the policy packs a block: batch and row.

    The grid's are the prompts that have a depth. The shortest, because each of its cells holds more of the context than
    a longer one's, and costs less to measure. Empty if no length is long enough.
    """
    found = [(batch, row) for batch in batches for row, prompt in enumerate(batch.prompts) if prompt.depth is not None]
    found = [at for at in found if packed_until(policy, at[0].length) > policy.sink_tokens]
    shortest = min((batch.length for batch, _ in found), default=0)
    return [at for at in found if at[0].length == shortest]


def answer_steps(tokenizer: Any, prompt: Prompt) -> range:
    """The scored tokens that spell the answer, without the words around it: step i scores continuation token i + 1.

    Empty if they don't spell it.
    """
    told = prompt.continuation[: prompt.scored]
    stop = next((n for n in range(len(told) + 1) if prompt.answer in tokenizer.decode(told[:n])), 0)
    start = max((n for n in range(stop) if prompt.answer in tokenizer.decode(told[n:stop])), default=0)
    return range(max(start, 1) - 1, max(stop, 1) - 1)
