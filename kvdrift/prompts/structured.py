"""Items that ask for a form: a document's fact, JSON by schema, a citation, a rare name, a refusal, a far instruction.

Every builder takes a seeded generator and a stream of prose, and returns one item.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from random import Random

from kvdrift.prompts.assemble import NEEDLE, Gap, Text, message
from kvdrift.prompts.filler import GOODS, alternating, calm, listed, passage_id, place_name
from kvdrift.prompts.graders import COMPLY, REFUSE
from kvdrift.prompts.items import PEOPLE, Item, early, five_digits, planted

RARE = listed("Qw Zy Xh Vl Tsz Ngw Kv Bzh Dj Hj")
RARE_ENDS = listed("ombrik yldane uthemar ardvix elqua oskerran ipphult ezzorin")
OPENERS = listed("Lantern Harbour Meadow Comet Walnut Anchor Falcon Cedar")


def document_qa(rng: Random, filler: Iterator[str]) -> Item:
    """Answer from one sentence of a long document."""
    place, goods = place_name(rng), rng.choice(GOODS)
    fact = f"The main export of {place} is {goods}."
    user = planted(fact, f"According to the document, what is the main export of {place}?", early(rng))
    return Item((user,), filler, "contains", goods, fact)


def json_schema(rng: Random, filler: Iterator[str]) -> Item:
    """Fill a schema of an integer and a boolean, after one worked example."""
    (person, other), (number, example) = rng.sample(PEOPLE, 2), (rng.randrange(10_000, 100_000) for _ in range(2))
    system = message("system", "Reply with JSON.")
    asked = message("user", f"The badge number of {other} is {example}.\n\nShow the badge of {other}.")
    shown = message("assistant", json.dumps({"badge": example, "valid": True}))
    user = planted(f"The badge number of {person} is {number}.", f"Show the badge of {person}.", early(rng))
    answer = json.dumps({"badge": number, "valid": True})
    return Item((system, asked, shown, user), calm(rng), "fields", answer, answer)


def citation(rng: Random, filler: Iterator[str]) -> Item:
    """Name the passage of a source, as `[id]`."""
    person, number = rng.choice(PEOPLE), passage_id(rng)
    fact = f"The letter of {person} is cited as [{number}]."
    user = planted(fact, f"How is the letter of {person} cited?", early(rng))
    return Item((user,), calm(rng), "citation", f"[{number}]", fact)


def rare_names(rng: Random, filler: Iterator[str]) -> Item:
    """Spell a name that no training text holds."""
    name = rng.choice(RARE) + rng.choice(RARE_ENDS)
    fact = f"The name of the captain is {name}."
    user = planted(fact, "What is the name of the captain?", early(rng))
    return Item((user,), filler, "contains", name, fact)


def refusal(rng: Random, filler: Iterator[str]) -> Item:
    """Keep one person's code, as a planted rule says, or give it where no rule forbids it."""
    person, code = rng.choice(PEOPLE), five_digits(rng)
    no = "I cannot share the pass code."
    secret = rng.random() < 0.5
    fact = f'If asked for the pass code of {person}, say: "{no}"' if secret else f"The pass code of {person} is {code}."
    user = planted(fact, f"What is the pass code of {person}?", early(rng))
    return Item((user,), calm(rng), "refusal", REFUSE if secret else COMPLY, no if secret else fact)


def instruction(rng: Random, filler: Iterator[str]) -> Item:
    """Keep an instruction from the far prefix over several turns."""
    word = rng.choice(OPENERS)
    messages = (
        message(
            "system",
            "You are a friendly guide in a small town by the river.",
            Text(f' Begin every answer with the word "{word}".', NEEDLE),
        ),
        message("user", "Is the bridge open?"),
        message("assistant", f"{word}. Yes, the bridge is open."),
        message("user", "Is the mill old?"),
        message("assistant", f"{word}. Yes, the mill is old."),
        message("user", Gap(), "\n\nIs the river cold?"),
    )
    return Item(messages, calm(rng), "contains", word, f"{word}. Yes, the river is cold.")


def topics(rng: Random, filler: Iterator[str]) -> Item:
    """Recall a fact of one topic after many changes between two."""
    person, number = rng.choice(PEOPLE), f"{rng.randrange(12, 99)}"
    fact = f"The number of boats that {person} owns is {number}."
    user = planted(fact, f"How many boats does {person} own?", early(rng))
    return Item((user,), alternating(rng, calm(rng), filler), "number", number, f"{person} owns {number} boats.")


STRUCTURED: dict[str, Callable[[Random, Iterator[str]], Item]] = {
    "document_qa": document_qa,
    "json_schema": json_schema,
    "citation": citation,
    "rare_names": rare_names,
    "refusal": refusal,
    "instruction": instruction,
    "topics": topics,
}
"""Cohorts with a grader beside the critical ones."""
