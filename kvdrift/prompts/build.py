"""Build the prompt set that a corpus specification asks for, deterministically."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

from kvdrift.prompts.assemble import Gap, Stretch, Tokenizer, assemble, encode
from kvdrift.prompts.batches import batched
from kvdrift.prompts.filler import calm
from kvdrift.prompts.items import CRITICAL, Item, needle
from kvdrift.prompts.prompt import CALIBRATION, EVALUATION, Prompt, PromptError
from kvdrift.prompts.spec import GRID, CohortSpec, CorpusSpec, resolve
from kvdrift.prompts.structured import STRUCTURED
from kvdrift.prompts.texts import Library, excerpt


def build(tokenizer: Tokenizer, spec: CorpusSpec, corpus: Path, max_positions: int, seed: int) -> list[Prompt]:
    """All prompts of `spec`: evaluation cohorts, then the needle grid, then the calibration split.

    `corpus` is the folder of source texts. Equal arguments give equal prompts; another seed gives other facts and
    other filler. Raises `PromptError` before any work if a prompt does not fit into `max_positions` tokens.
    """
    spec.check(max_positions)
    prompts: list[Prompt] = []
    for name, cohort in spec.cohorts.items():
        prompts += _cohort(tokenizer, name, cohort, Library(corpus, EVALUATION), seed)
    prompts += _grid(tokenizer, spec, max_positions, seed)
    for name, cohort in spec.calibration.items():
        prompts += _cohort(tokenizer, name, cohort, Library(corpus, CALIBRATION), seed)
    return batched(prompts, spec.batch_size)


def _cohort(tokenizer: Tokenizer, name: str, cohort: CohortSpec, library: Library, seed: int) -> Iterator[Prompt]:
    total, built = sum(cohort.prompts.values()), 0
    label = name if library.split == EVALUATION else f"{CALIBRATION}-{name}"
    for length, count in cohort.prompts.items():
        for index in range(count):
            rng = Random(f"{seed}/{label}/{length}/{index}")
            id = f"{label}-{length:05d}-{index:02d}"
            sizes = (cohort.continuation, cohort.max_new_tokens)
            if name in CRITICAL or name in STRUCTURED:
                item = CRITICAL[name](rng, calm(rng)) if name in CRITICAL else STRUCTURED[name](rng, library.prose(rng))
                yield from_item(tokenizer, item, length, sizes, id=id, cohort=name, split=library.split)
            else:
                text = excerpt(tokenizer, name, library, rng, built / total, length + cohort.continuation)
                yield from_text(text, length, sizes, id=id, cohort=name, split=library.split)
            built += 1


def _grid(tokenizer: Tokenizer, spec: CorpusSpec, max_positions: int, seed: int) -> Iterator[Prompt]:
    """The same facts in the same filler at every length and depth, so that only the position differs."""
    grid = spec.needle_grid
    for asked, depths in grid.depths.items():
        length = resolve(asked, max_positions, spec.answer_room)
        cells = [(depth, index) for depth in depths for index in range(grid.items)]
        for depth, index in cells:
            rng = Random(f"{seed}/{GRID}/{index}")
            yield from_item(
                tokenizer,
                needle(rng, calm(rng), Gap(share=depth)),
                length,
                (grid.continuation, grid.max_new_tokens),
                id=f"{GRID}-{length:05d}-d{round(100 * depth):03d}-{index:02d}",
                cohort=GRID,
                depth=depth,
            )


def from_item(
    tokenizer: Tokenizer,
    item: Item,
    length: int,
    sizes: tuple[int, int],
    *,
    id: str,
    cohort: str,
    split: str = EVALUATION,
    depth: float | None = None,
) -> Prompt:
    """An item at an exact length; `sizes` are its continuation length and `max_new_tokens`.

    The continuation is the gold text and the end of turn, cut or padded to its length.
    """
    stretch = assemble(tokenizer, item.messages, length, item.filler, id)
    continuation, max_new_tokens = sizes
    eos = tokenizer.eos_token_id
    if eos is None:
        raise PromptError("the tokenizer has no eos token, which ends every answer; set tokenizer.eos_token")
    gold = [*encode(tokenizer, item.gold), eos][:continuation]
    return Prompt(
        id=id,
        cohort=cohort,
        task=item.task,
        split=split,
        tokens=stretch.tokens,
        roles=stretch.roles,
        continuation=tuple(gold + [eos] * (continuation - len(gold))),
        scored=len(gold),
        answer=item.answer,
        max_new_tokens=max_new_tokens,
        depth=depth,
        batch="",
    )


def from_text(text: Stretch, length: int, sizes: tuple[int, int], *, id: str, cohort: str, split: str) -> Prompt:
    """A prefix of `length` tokens and, as its continuation, the tokens that really follow."""
    continuation, max_new_tokens = sizes
    return Prompt(
        id=id,
        cohort=cohort,
        task="",
        split=split,
        tokens=text.tokens[:length],
        roles=text.roles[:length],
        continuation=text.tokens[length : length + continuation],
        scored=continuation,
        answer="",
        max_new_tokens=max_new_tokens,
        depth=None,
        batch="",
    )


def prefix_tokens(prompts: Sequence[Prompt]) -> int:
    """How many tokens the reference must prefill."""
    return sum(len(prompt.tokens) for prompt in prompts)
