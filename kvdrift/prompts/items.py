"""The critical items: short questions whose answer is planted in filler, early or at a given place.

An item is everything about a prompt but its length: `assemble` makes it exact. The wording was tuned until
SmolLM2-135M-Instruct answers nearly all of them, because drift is counted over items that the reference gets right.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from kvdrift.prompts.assemble import NEEDLE, Gap, Message, Text, message
from kvdrift.prompts.filler import listed, place_name

EARLY = (0.02, 0.12)
"""Where items plant their text, as a share of the filler: old enough to be packed under every policy."""

PEOPLE = listed("Anna Boris Clara David Elena Felix Greta Henry Irene Jonas Laura Martin Nina Oscar Paula Simon")
WORDS = listed(
    "copper lantern violet marble cedar falcon ribbon harbor pepper silver walnut comet velvet anchor basket candle "
    "meadow thunder",
)


@dataclass(frozen=True)
class Item:
    """One question: its chat, the filler for its gaps, and the gold `answer` with the grader (`task`) that judges it.

    `gold` is what a good assistant would say in full, for teacher forcing.
    """

    messages: tuple[Message, ...]
    filler: Iterator[str]
    task: str
    answer: str
    gold: str


def early(rng: Random) -> Gap:
    """A gap that ends at a seeded place within `EARLY`."""
    return Gap(share=rng.uniform(*EARLY))


def planted(fact: str, question: str, gap: Gap) -> Message:
    """A user message that holds `fact` after `gap`, more filler, and then `question`."""
    return message("user", gap, Text(f" {fact}", NEEDLE), Gap(), f"\n\n{question}")


def needle(rng: Random, filler: Iterator[str], gap: Gap | None = None) -> Item:
    """Recall a five-digit number."""
    place, number = place_name(rng), five_digits(rng)
    fact = f"The pass code of {place} is {number}."
    user = planted(fact, f"What is the pass code of {place}?", gap or early(rng))
    return Item((user,), filler, "number", number, fact)


def copy(rng: Random, filler: Iterator[str], gap: Gap | None = None) -> Item:
    """Repeat a made-up phrase exactly."""
    phrase = " ".join([*rng.sample(WORDS, 4), f"{rng.randrange(100, 1000)}"])
    fact = f'The secret phrase is "{phrase}".'
    system = message("system", "You answer briefly and exactly.")
    user = planted(fact, "What is the secret phrase?", gap or early(rng))
    return Item((system, user), filler, "exact", phrase, fact)


def tool_arguments(rng: Random, filler: Iterator[str], gap: Gap | None = None) -> Item:
    """Give a tool call its arguments, with a value from the context, after one worked example."""
    person, other = rng.sample(PEOPLE, 2)
    code, example = five_digits(rng), five_digits(rng)
    system = message("system", "Reply with JSON arguments.")
    asked = message("user", f"The pass code of {other} is {example}.\n\nUnlock the door of {other}.")
    called = message("assistant", json.dumps({"code": example}))
    user = planted(f"The pass code of {person} is {code}.", f"Unlock the door of {person}.", gap or early(rng))
    answer = json.dumps({"code": code})
    return Item((system, asked, called, user), filler, "arguments", answer, answer)


def five_digits(rng: Random) -> str:
    """A number of five digits."""
    return f"{rng.randrange(10_000, 100_000)}"


CRITICAL: dict[str, Callable[[Random, Iterator[str]], Item]] = {
    "needle": needle,
    "copy": copy,
    "tool_arguments": tool_arguments,
}
"""The cohorts whose drift decides a release."""
