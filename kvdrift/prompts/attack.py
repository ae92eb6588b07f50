"""Prompts made to break a cache: their facts lie where the sensitivity map found the largest error, or among runs of
the tokens whose keys calibration found largest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random

from kvdrift.prompts.assemble import FILLER, Gap, Tokenizer, fixed_lengths, message
from kvdrift.prompts.build import from_item
from kvdrift.prompts.filler import calm
from kvdrift.prompts.items import PEOPLE, Item, five_digits, needle, planted, tool_arguments
from kvdrift.prompts.prompt import Prompt, PromptError

COHORT = "attack"
REPEATED = "repeated_outliers"
FACTS = (3, 2, 1)
"""How many codes an item plants side by side: as many as its cell has room for."""
OUTLIER = "outlier"
LONG = (65, 40)
"""Teacher-forced and generated tokens of an attack on cells: longer than any other cohort's, so errors can add up."""
SHORT = (17, 20)
RUN = (8, 24)
"""Least and most tokens of a run of one repeated token, and of the filler between two runs."""


def attack(
    tokenizer: Tokenizer,
    prompt_cells: Sequence[tuple[int, int]],
    length: int,
    items: int,
    seed: int,
    sizes: tuple[int, int] = LONG,
) -> list[Prompt]:
    """`items` prompts of `length` tokens that plant their facts wholly inside the token ranges [start, stop).

    The cells are attacked in turn, with recall of several codes and with tool arguments. Every answer must be read
    back from the cell, and with several codes it is long. A cell that can't hold a fact (the chat's own header fills
    it, or it lies beyond the prompt) is passed over; `PromptError` if none can.
    """
    prompts: list[Prompt] = []
    cells = [cell for cell in prompt_cells if _fitting(tokenizer, cell, length, seed, 0)]
    if not cells:
        raise PromptError(
            f"no fact fits into the cells {list(prompt_cells)} of a prompt of {length} tokens; "
            "choose cells behind the chat's header and before its question, or a longer prompt"
        )
    for index in range(items):
        cell = cells[index % len(cells)]
        # the other form of question each time all cells have had their turn
        forms = _fitting(tokenizer, cell, length, seed, index) or _fitting(tokenizer, cell, length, seed, 0)
        item = forms[index // len(cells) % len(forms)]
        prompts.append(
            from_item(
                tokenizer,
                item,
                length,
                sizes,
                id=f"{COHORT}-{length:05d}-p{cell[0]:05d}-{index:02d}",
                cohort=COHORT,
            )
        )
    return prompts


def repeated(
    tokenizer: Tokenizer, outliers: Sequence[int], length: int, items: int, seed: int, sizes: tuple[int, int] = SHORT
) -> list[Prompt]:
    """`items` prompts of `length` tokens that recall a number from filler broken up by runs of one `outliers` token.

    Each prompt repeats one of these token ids, in turn. The tokens stand in the prompt as they are, since text of
    them need not come back as the same tokens; their role is "outlier".
    """
    prompts = []
    for index in range(items):
        rng = Random(f"{seed}/{REPEATED}/{index}")
        id = f"{REPEATED}-{length:05d}-{index:02d}"
        plain = from_item(tokenizer, needle(rng, calm(rng)), length, sizes, id=id, cohort=REPEATED)
        prompts.append(_with_runs(plain, outliers[index % len(outliers)], rng))
    return prompts


def _with_runs(prompt: Prompt, token: int, rng: Random) -> Prompt:
    tokens, roles = list(prompt.tokens), list(prompt.roles)
    place = 0
    while place < len(tokens):
        for at in range(place, min(place + rng.randint(*RUN), len(tokens))):
            if roles[at] == FILLER:
                tokens[at], roles[at] = token, OUTLIER
            place = at + 1
        place += rng.randint(*RUN)
    return replace(prompt, tokens=tuple(tokens), roles=tuple(roles))


def _fitting(tokenizer: Tokenizer, cell: tuple[int, int], length: int, seed: int, index: int) -> list[Item]:
    """At most one item a form (codes, arguments) whose facts fit into the cell, planted at a seeded place in it."""
    found = []
    for form, sizes in (("codes", FACTS), ("arguments", (1,))):
        for facts in sizes:
            key = f"{seed}/{COHORT}/{form}/{index}"
            place = _place(tokenizer, _item(form, key, facts, 0), cell, length, Random(f"{key}/place"))
            if place is not None:
                found.append(_item(form, key, facts, place))
                break
    return found


def _item(form: str, key: str, facts: int, until: int) -> Item:
    rng = Random(key)
    gap = Gap(until=until)
    return codes(rng, calm(rng), gap, facts) if form == "codes" else tool_arguments(rng, calm(rng), gap)


def _place(tokenizer: Tokenizer, item: Item, cell: tuple[int, int], length: int, rng: Random) -> int | None:
    head, fact, tail = fixed_lengths(tokenizer, item.messages)
    first, last = max(cell[0], head), min(cell[1], length - tail) - fact
    return rng.randint(first, last) if first <= last else None


def codes(rng: Random, filler: Iterator[str], gap: Gap, facts: int) -> Item:
    """Recall one to three five-digit codes, in order."""
    people = rng.sample(PEOPLE, facts)
    numbers = [five_digits(rng) for _ in people]
    said = " ".join(f"The pass code of {who} is {number}." for who, number in zip(people, numbers, strict=True))
    asked = " and ".join(people)
    question = f"What is the pass code of {asked}?" if facts == 1 else f"What are the pass codes of {asked}?"
    system = message("system", "Recall.")
    return Item((system, planted(said, question, gap)), filler, "number", " ".join(numbers), said)
