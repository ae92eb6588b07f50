"""Teacher-forced cohorts: written or generated text whose own next tokens are the continuation.

Written text lies in the corpus folder; its last quarter is kept for calibration. Generated text comes from seeded
templates. Both go on for ever (written text starts over), so that a prompt may have any length.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, cycle, islice
from pathlib import Path
from random import Random

from kvdrift.prompts.assemble import Gap, Message, Stretch, Tokenizer, encode, flatten, message, opening
from kvdrift.prompts.filler import GOODS, KINDS, PARTS, WEATHER, mixed, numbered, place_name
from kvdrift.prompts.items import PEOPLE
from kvdrift.prompts.prompt import CALIBRATION, PromptError

TEXT = "text"
BLANK_LINE = "\n\n"


@dataclass(frozen=True)
class Library:
    """The corpus folder, seen by one split."""

    folder: Path
    split: str

    def units(self, name: str, end: str = "\n") -> list[str]:
        """The lines (or, by `end`, the blocks) of one file that belong to this split, each with its `end`."""
        path = self.folder / f"{name}.txt"
        if not path.is_file():
            raise PromptError(f"{path} is missing; the corpus folder holds the source texts, see data/corpus")
        units = [unit + end for unit in path.read_text(encoding="utf-8").split(end) if unit.strip()]
        kept = len(units) - len(units) // 4
        return units[kept:] if self.split == CALIBRATION else units[:kept]

    def prose(self, rng: Random) -> Iterator[str]:
        """The essay's paragraphs and invented sentences, for ever."""
        return mixed(rng, [unit.strip() for unit in self.units("essay")])


def _from(units: list[str], start: float) -> Iterator[str]:
    return islice(cycle(units), int(start * len(units)), None)


def code(rng: Random, library: Library, start: float) -> Iterator[str]:
    """A Python module and a C source."""
    return _from(library.units("python", BLANK_LINE) + library.units("c", BLANK_LINE), start)


def multilingual(rng: Random, library: Library, start: float) -> Iterator[str]:
    """Paragraphs in a dozen languages and six scripts."""
    return _from(library.units("multilingual"), start)


def tables(rng: Random, library: Library, start: float) -> Iterator[str]:
    """Small tables, in Markdown and comma-separated in turn, for ever."""
    while True:
        columns = rng.sample(GOODS, 3)
        yield f"| place | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}\n"
        for _ in range(rng.randrange(6, 12)):
            yield f"| {place_name(rng)} | {' | '.join(str(rng.randrange(1, 2000)) for _ in columns)} |\n"
        yield "\nid,site,kind,height,share\n"
        for row in range(rng.randrange(6, 12)):
            share = f"{rng.uniform(0, 1):.3f}"
            yield f"{row},{place_name(rng)},{rng.choice(KINDS)},{rng.randrange(2, 90)},{share}\n"
        yield "\n"


def repetitive(rng: Random, library: Library, start: float) -> Iterator[str]:
    """A log whose lines differ in a few characters."""
    host, job = place_name(rng).lower(), rng.randrange(100, 999)
    for tick in count():
        state = "late" if rng.random() < 0.05 else "ok"
        yield f"12:{tick // 60 % 60:02d}:{tick % 60:02d} {host} worker[{job}]: heartbeat {state}, queue empty\n"


def long_numbers(rng: Random, library: Library, start: float) -> Iterator[str]:
    """Identifiers, decimals and sums of many digits."""
    while True:
        a, b = rng.randrange(10**11, 10**12), rng.randrange(10**11, 10**12)
        yield f"{a} + {b} = {a + b}\n"
        yield f"account {rng.randrange(10**15, 10**16)} holds {rng.randrange(10**8)}.{rng.randrange(100):02d}\n"
        yield f"ratio {rng.random():.15f}, id {rng.getrandbits(64):016x}\n"


def retrieved(rng: Random, library: Library, start: float) -> Iterator[str]:
    """Passages with ids, as a retriever returns them."""
    for passage in numbered(rng, library.prose(rng), taken=""):
        yield f"{passage}\n"


def outlier(rng: Random, library: Library, start: float) -> Iterator[str]:
    """Runs of one repeated delimiter or rare token between short remarks: what stretches a quantizer's range."""
    while True:
        run = rng.choice(["\n", " 0", "!", " the", "=", "\t", "\u00a4", " ####", ".", " \u2591"])
        yield f"{rng.choice(PARTS)} {rng.choice(WEATHER)}{run * rng.randrange(8, 40)}\n"


def dialogue(rng: Random, library: Library, start: float) -> Iterator[Message]:
    """A written conversation over many turns; it begins with the user."""
    turns = [unit.rstrip("\n").partition(": ")[::2] for unit in library.units("dialogue")]
    first = int(start * len(turns))
    first += turns[first][0] != "user"
    for role, text in islice(cycle(turns), first, None):
        yield message(role, text)


def system_tool(rng: Random, library: Library, start: float) -> Iterator[Message]:
    """A system prompt that lists tools, then calls and results without end."""
    tools = [
        {"name": "find_site", "parameters": {"place": "string"}},
        {"name": "read_gauge", "parameters": {"site": "integer", "hours": "integer"}},
        {"name": "order", "parameters": {"goods": "string", "crates": "integer"}},
    ]
    yield message("system", f"You plan deliveries. Call a tool with JSON. Tools: {json.dumps(tools)}")
    while True:
        person, place, goods = rng.choice(PEOPLE), place_name(rng), rng.choice(GOODS)
        site, crates = rng.randrange(100, 999), rng.randrange(2, 60)
        yield message("user", f"{person} needs {crates} crates of {goods} in {place}. Please arrange it.")
        yield message("assistant", json.dumps({"name": "find_site", "arguments": {"place": place}}))
        yield message("tool", json.dumps({"site": site, "open": rng.random() < 0.8, "stock": rng.randrange(90)}))
        yield message("assistant", json.dumps({"name": "order", "arguments": {"goods": goods, "crates": crates}}))
        yield message("tool", json.dumps({"order": rng.randrange(10**6), "site": site, "days": rng.randrange(1, 9)}))
        yield message("assistant", f"Done: {crates} crates of {goods} go to {place}, site {site}.")


PLAIN: dict[str, Callable[[Random, Library, float], Iterator[str]]] = {
    "code": code,
    "long_code": code,
    "multilingual": multilingual,
    "tables": tables,
    "repetitive": repetitive,
    "long_numbers": long_numbers,
    "retrieved": retrieved,
    "outlier": outlier,
}
CHATS: dict[str, Callable[[Random, Library, float], Iterator[Message]]] = {
    "dialogue": dialogue,
    "system_tool": system_tool,
}


def excerpt(tokenizer: Tokenizer, cohort: str, library: Library, rng: Random, start: float, length: int) -> Stretch:
    """The first `length` tokens of a cohort's text; written text begins at the share `start` of its file."""
    if cohort in CHATS:
        return _chat_excerpt(tokenizer, CHATS[cohort](rng, library, start), length)
    head, text, tokens = opening(tokenizer), "", list[int]()
    source = PLAIN[cohort](rng, library, start)
    while len(tokens) < length:
        text += "".join(islice(source, 64))
        tokens = head + encode(tokenizer, text)
    return Stretch(tuple(tokens[:length]), (TEXT,) * length)


def _chat_excerpt(tokenizer: Tokenizer, source: Iterator[Message], length: int) -> Stretch:
    messages: list[Message] = []
    tokens: list[int] = []
    roles: list[str] = []
    while len(tokens) < length:
        messages += islice(source, 16)
        tokens, roles = [], []
        for piece in flatten(tokenizer, messages, answering=False):
            if isinstance(piece, Gap):
                continue
            own = encode(tokenizer, piece.text)
            tokens += own
            roles += [piece.role] * len(own)
    return Stretch(tuple(tokens[:length]), tuple(roles[:length]))
