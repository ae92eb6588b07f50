"""What a corpus holds: which cohorts, how many prompts of which length, and how they are batched.

Read from `conf/corpus/*.yaml` as plain dicts. This file knows names and limits; it builds nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvdrift.prompts.items import CRITICAL
from kvdrift.prompts.prompt import LENGTH_STEP, PromptError
from kvdrift.prompts.structured import STRUCTURED
from kvdrift.prompts.texts import CHATS, PLAIN

COHORTS = (*CRITICAL, *STRUCTURED, *PLAIN, *CHATS)
GRID = "needle_grid"
MAX = "max"


@dataclass(frozen=True)
class CohortSpec:
    """`prompts` maps a prefix length (tokens) to a number of prompts; `continuation` counts teacher-forced tokens.

    `max_new_tokens` 0 means that nothing is generated.
    """

    prompts: Mapping[int, int]
    continuation: int
    max_new_tokens: int = 0


@dataclass(frozen=True)
class GridSpec:
    """`depths` maps a prefix length (tokens, or "max") to needle depths, 0 to 1; `items` facts are planted at each."""

    depths: Mapping[int | str, tuple[float, ...]]
    continuation: int
    max_new_tokens: int
    items: int = 1


@dataclass(frozen=True)
class CorpusSpec:
    """A whole prompt set; "max" is the model's positions less `answer_room`, rounded down to a multiple of 16."""

    batch_size: int
    answer_room: int
    cohorts: Mapping[str, CohortSpec]
    needle_grid: GridSpec
    calibration: Mapping[str, CohortSpec]

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> CorpusSpec:
        """Build and validate; every error names the key, what it holds and what is allowed."""
        known = _known(cls, raw, "corpus")
        return cls(
            batch_size=_count(known["batch_size"], "batch_size", 1),
            answer_room=_count(known["answer_room"], "answer_room", 1),
            cohorts={name: _cohort(name, each, "cohorts") for name, each in known["cohorts"].items()},
            needle_grid=_grid(known["needle_grid"]),
            calibration={name: _cohort(name, each, "calibration") for name, each in known["calibration"].items()},
        )

    def prefix_lengths(self, max_positions: int) -> dict[str, list[int]]:
        """The prefix length of every prompt, by cohort; calibration prompts count under "calibration"."""
        found = {name: _lengths(each) for name, each in self.cohorts.items()}
        found[GRID] = [
            resolve(length, max_positions, self.answer_room)
            for length, depths in self.needle_grid.depths.items()
            for _ in range(len(depths) * self.needle_grid.items)
        ]
        found["calibration"] = [length for each in self.calibration.values() for length in _lengths(each)]
        return found

    def check(self, max_positions: int) -> None:
        """Refuse, before any work, a prompt that with its answer is longer than the model's positions."""
        for name, each in [*self.cohorts.items(), *self.calibration.items()]:
            for length in each.prompts:
                _fits(name, length, max(each.continuation, each.max_new_tokens), max_positions)
        grid = self.needle_grid
        for asked in grid.depths:
            length = resolve(asked, max_positions, self.answer_room)
            _fits(GRID, length, max(grid.continuation, grid.max_new_tokens), max_positions)


def resolve(length: int | str, max_positions: int, answer_room: int) -> int:
    """A prefix length in tokens, with "max" resolved for a model."""
    if length != MAX:
        return int(length)
    return (max_positions - answer_room) // LENGTH_STEP * LENGTH_STEP


def _lengths(cohort: CohortSpec) -> list[int]:
    return [length for length, count in cohort.prompts.items() for _ in range(count)]


def _fits(cohort: str, length: int, answer: int, max_positions: int) -> None:
    if length + answer > max_positions or length < LENGTH_STEP:
        raise PromptError(
            f"cohort {cohort} asks for a prefix of {length} tokens and {answer} more for its answer; the model has "
            f"{max_positions} positions. Shorten it in conf/corpus, or use {MAX!r} in the needle grid"
        )


def _known(cls: type, raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(raw, Mapping):
        raise PromptError(f"{where} is {raw!r}; it must be a mapping")
    names = {field.name: field for field in fields(cls)}
    for key in raw:
        if key not in names:
            raise PromptError(f"{where} has an unknown key {key!r}; allowed: {', '.join(names)}")
    for name, field in names.items():
        if name not in raw and not isinstance(field.default, int):
            raise PromptError(f"{where} lacks {name!r}; add it in conf/corpus")
    return dict(raw)


def _count(value: Any, what: str, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise PromptError(f"{what} is {value!r}; it must be an integer of at least {least}")
    return value


def _length(value: Any, where: str) -> int:
    number = int(value) if str(value).isdigit() else 0
    if number == 0 or number % LENGTH_STEP:
        raise PromptError(f"{where} has length {value!r}; allowed: positive multiples of {LENGTH_STEP}")
    return number


def _cohort(name: str, raw: Mapping[str, Any], group: str) -> CohortSpec:
    where = f"{group}.{name}"
    if name not in COHORTS:
        raise PromptError(f"{group} has an unknown cohort {name!r}; allowed: {', '.join(sorted(COHORTS))}")
    known = _known(CohortSpec, raw, where)
    return CohortSpec(
        prompts={_length(key, where): _count(n, f"{where}.prompts[{key}]", 1) for key, n in known["prompts"].items()},
        continuation=_count(known["continuation"], f"{where}.continuation", 2),
        max_new_tokens=_count(known.get("max_new_tokens", 0), f"{where}.max_new_tokens", 0),
    )


def _grid(raw: Mapping[str, Any]) -> GridSpec:
    known = _known(GridSpec, raw, GRID)
    depths: dict[int | str, tuple[float, ...]] = {}
    for key, values in known["depths"].items():
        for depth in values:
            if isinstance(depth, bool) or not isinstance(depth, (int, float)) or not 0 <= depth <= 1:
                raise PromptError(f"{GRID}.depths[{key}] holds {depth!r}; a depth is a number from 0 to 1")
        depths[MAX if key == MAX else _length(key, f"{GRID}.depths")] = tuple(map(float, values))
    return GridSpec(
        depths=depths,
        continuation=_count(known["continuation"], f"{GRID}.continuation", 2),
        max_new_tokens=_count(known["max_new_tokens"], f"{GRID}.max_new_tokens", 1),
        items=_count(known.get("items", 1), f"{GRID}.items", 1),
    )
