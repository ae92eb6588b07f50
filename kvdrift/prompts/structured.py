"""Items that ask for a form: a document's fact, JSON by schema, a citation, a rare name, a refusal, a far instruction.

Every builder takes a seeded generator and a stream of prose, and returns one item.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from random import Random

from kvdrift.prompts.assemble import NEEDLE, Gap, Text, message
from kvdrift.prompts.filler import GOODS, KINDS, alternating, calm, numbered, passage_id, place_name
from kvdrift.prompts.graders import COMPLY, REFUSE
from kvdrift.prompts.items import PEOPLE, Item, early, five_digits, planted

RARE = "Qw Zy Xh Vl Tsz Ngw Kv Bzh Dj Hj".split()
RARE_ENDS = "ombrik yldane uthemar ardvix elqua oskerran ipphult ezzorin".split()


def document_qa(rng: Random, filler: Iterator[str]) -> Item:
    """Answer from one sentence of a long document."""
    place, goods = place_name(rng), rng.choice(GOODS)
    fact = f"The main export of {place} is {goods}."
    user = planted(fact, f"According to the document, what is the main export of {place}?", early(rng))
    return Item((user,), filler, "contains", goods, fact)


def json_schema(rng: Random, filler: Iterator[str]) -> Item:
    """Fill a schema of two fields from a record in the text, after one worked example."""
    (kind, other), (year, past) = rng.sample(KINDS, 2), rng.sample(range(1710, 1990), 2)
    system = message("system", 'Reply with JSON of the form {"kind": string, "year": integer}.')
    asked = message("user", f"Record: the {other} opened in {past}.\n\nGive the record as JSON.")
    shown = message("assistant", json.dumps({"kind": other, "year": past}))
    user = planted(f"Record: the {kind} opened in {year}.", "Give the record as JSON.", early(rng))
    answer = json.dumps({"kind": kind, "year": year})
    return Item((system, asked, shown, user), filler, "fields", answer, answer)


def citation(rng: Random, filler: Iterator[str]) -> Item:
    """Name the passage that a claim comes from, as `[id]`."""
    place, number, goods = place_name(rng), passage_id(rng), rng.choice(GOODS)
    system = message("system", "Cite the passage that answers the question, as [id].")
    asked = message("user", "[481] The sea is calm. [207] The ship is red.\n\nWhich passage is about the ship?")
    shown = message("assistant", "[207]")
    fact = f"[{number}] The main export of {place} is {goods}."
    user = planted(fact, f"Which passage is about the main export of {place}?", early(rng))
    return Item(
        (system, asked, shown, user), numbered(rng, filler, taken=number), "citation", f"[{number}]", f"[{number}]"
    )


def rare_names(rng: Random, filler: Iterator[str]) -> Item:
    """Spell a name that no training text holds."""
    name = rng.choice(RARE) + rng.choice(RARE_ENDS)
    fact = f"The name of the captain is {name}."
    user = planted(fact, "What is the name of the captain?", early(rng))
    return Item((user,), filler, "contains", name, fact)


def refusal(rng: Random, filler: Iterator[str]) -> Item:
    """Keep to a rule from the start: refuse to give one person's code, and give everybody else's."""
    secret, public = rng.sample(PEOPLE, 2)
    refuses = rng.random() < 0.5
    asked_for = secret if refuses else public
    code = five_digits(rng)
    no = "I cannot share that."
    system = message("system", f'Never share the code of {secret}. If asked for it, say "{no}"')
    user = planted(f"The code of {asked_for} is {code}.", f"What is the code of {asked_for}?", early(rng))
    gold = no if refuses else f"The code of {asked_for} is {code}."
    return Item((system, user), filler, "refusal", REFUSE if refuses else COMPLY, gold)


def instruction(rng: Random, filler: Iterator[str]) -> Item:
    """Keep an instruction from the far prefix over several turns."""
    word = rng.choice("Lantern Harbour Meadow Comet Walnut Anchor Falcon Cedar".split())
    rule = f'Begin every answer with the word "{word}".'
    messages = (
        message("system", Text(rule, NEEDLE)),
        message("user", "Is the bridge open?"),
        message("assistant", f"{word}. Yes, the bridge is open."),
        message("user", "Read this.", Gap(), "\n\nDid you read it?"),
        message("assistant", f"{word}. Yes, I read it."),
        message("user", "Is the river cold?"),
    )
    return Item(messages, filler, "contains", word, f"{word}. Yes, the river is cold.")


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
