"""What a corpus holds: which cohorts, how many prompts of which length, and how they are batched.

Read from `conf/corpus/*.yaml` as plain dicts. This file knows names and limits; it builds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
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
        """Build and validate. Raises PromptError, an argument a fault: the key, what it holds and what is allowed."""
        known, wrong = _known(cls, raw, "corpus"), list[str]()

        def part(make: Callable[..., Any], *arguments: Any) -> Any:
            try:
                return make(*arguments)
            except PromptError as error:
                wrong.extend(error.args)

        def cohorts(group: str) -> dict[str, Any]:
            return {name: part(_cohort, name, each, group) for name, each in _mapping(known[group], group).items()}

        made = {
            "batch_size": part(_count, known["batch_size"], "batch_size", 2),
            "answer_room": part(_count, known["answer_room"], "answer_room", 1),
            "cohorts": part(cohorts, "cohorts"),
            "needle_grid": part(_grid, known["needle_grid"]),
            "calibration": part(cohorts, "calibration"),
        }
        if wrong:
            raise PromptError(*wrong)
        return cls(**made)

    def prefix_tokens(self, max_positions: int) -> int:
        """Tokens of all prefixes together, by multiplication: a typing error may ask for more than could be listed."""
        cohorts = [*self.cohorts.values(), *self.calibration.values()]
        total = sum(length * count for each in cohorts for length, count in each.prompts.items())
        for asked, depths in self.needle_grid.depths.items():
            total += resolve(asked, max_positions, self.answer_room) * len(depths) * self.needle_grid.items
        return total

    def scored(self) -> int:
        """How many next tokens are scored in all, by teacher forcing: a continuation's first has no logits."""
        cohorts = [*self.cohorts.values(), *self.calibration.values()]
        items = self.needle_grid.items * sum(map(len, self.needle_grid.depths.values()))
        found = [(each.continuation, sum(each.prompts.values())) for each in cohorts]
        return sum((tokens - 1) * count for tokens, count in [*found, (self.needle_grid.continuation, items)])

    def check(self, max_positions: int) -> None:
        """Refuse, before any work, a prompt that with its answer is longer than the model's positions.

        Raises PromptError, an argument each.
        """
        grid = self.needle_grid
        lengths = [resolve(length, max_positions, self.answer_room) for length in grid.depths]
        asked: list[tuple[str, list[int], CohortSpec | GridSpec]] = [(GRID, lengths, grid)]
        asked += [(name, [*each.prompts], each) for name, each in self.cohorts.items()]
        asked += [(f"calibration.{name}", [*each.prompts], each) for name, each in self.calibration.items()]
        beyond: dict[tuple[int, int], list[str]] = {}
        for name, prefixes, each in asked:
            answer = max(each.continuation, each.max_new_tokens)
            for length in prefixes:
                if length + answer > max_positions or length < LENGTH_STEP:
                    beyond.setdefault((length, answer), []).append(name)
        wrong = [
            f"a prefix of {length} tokens and {answer} more for its answer, as {', '.join(names)} ask for, is not "
            f"within the model's {max_positions} positions. Shorten it in conf/corpus; the needle grid takes {MAX!r}"
            for (length, answer), names in beyond.items()
        ]
        if len(set(lengths)) < len(lengths):
            wrong.append(f"{GRID}.depths are {lengths} tokens long on this model; name each length once")
        if wrong:
            raise PromptError(*wrong)


def resolve(length: int | str, max_positions: int, answer_room: int) -> int:
    """A prefix length in tokens, with "max" resolved for a model."""
    if length != MAX:
        return int(length)
    return (max_positions - answer_room) // LENGTH_STEP * LENGTH_STEP


def _known(cls: type, raw: Any, where: str) -> dict[str, Any]:
    names = {field.name: field for field in fields(cls)}
    if not isinstance(raw, Mapping):
        raise PromptError(f"{where} is {raw!r}; allowed: a mapping with the keys {', '.join(names)}")
    for key in raw:
        if key not in names:
            raise PromptError(f"{where} has an unknown key {key!r}; allowed: {', '.join(names)}")
    for name, field in names.items():
        if name not in raw and field.default is MISSING:
            raise PromptError(f"{where} lacks {name!r}; add it in conf/corpus")
    return dict(raw)


def _mapping(value: Any, what: str) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping) or not value:
        raise PromptError(f"{what} is {value!r}; allowed: a mapping with one entry or more")
    return value


def _count(value: Any, what: str, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise PromptError(f"{what} is {value!r}; it must be an integer of at least {least}")
    return value


def _continuation(value: Any, where: str) -> int:
    if _count(value, f"{where}.continuation", LENGTH_STEP + 1) % LENGTH_STEP != 1:
        raise PromptError(
            f"{where}.continuation is {value}; it must be 1 plus a multiple of {LENGTH_STEP}: 17, 33, 49 …"
        )
    return int(value)


def _length(value: Any, where: str) -> int:
    number = int(value) if str(value).isdigit() else 0
    if number == 0 or number % LENGTH_STEP:
        raise PromptError(f"{where} has length {value!r}; allowed: positive multiples of {LENGTH_STEP}")
    return number


def _cohort(name: str, raw: Any, group: str) -> CohortSpec:
    where = f"{group}.{name}"
    if name not in COHORTS:
        raise PromptError(f"{group} has an unknown cohort {name!r}; allowed: {', '.join(sorted(COHORTS))}")
    known = _known(CohortSpec, raw, where)
    counts = _mapping(known["prompts"], f"{where}.prompts")
    answered = name in CRITICAL or name in STRUCTURED
    return CohortSpec(
        prompts={_length(key, where): _count(n, f"{where}.prompts[{key}]", 1) for key, n in counts.items()},
        continuation=_continuation(known["continuation"], where),
        max_new_tokens=_count(known.get("max_new_tokens", 0), f"{where}.max_new_tokens", int(answered)),
    )


def _grid(raw: Any) -> GridSpec:
    known = _known(GridSpec, raw, GRID)
    depths = {
        MAX if key == MAX else _length(key, f"{GRID}.depths"): _depths(values, f"{GRID}.depths[{key}]")
        for key, values in _mapping(known["depths"], f"{GRID}.depths").items()
    }
    return GridSpec(
        depths=depths,
        continuation=_continuation(known["continuation"], GRID),
        max_new_tokens=_count(known["max_new_tokens"], f"{GRID}.max_new_tokens", 1),
        items=_count(known.get("items", 1), f"{GRID}.items", 1),
    )


def _depths(values: Any, where: str) -> tuple[float, ...]:
    if not isinstance(values, list | tuple) or not values:
        raise PromptError(f"{where} is {values!r}; allowed: a list of depths, such as [0.1, 0.5, 0.9]")
    for depth in values:
        if isinstance(depth, bool) or not isinstance(depth, (int, float)) or not 0 <= depth <= 1:
            raise PromptError(f"{where} holds {depth!r}; a depth is a number from 0 to 1")
    if len({round(100 * depth) for depth in values}) < len(values):
        raise PromptError(f"{where} is {values}; depths must differ by 0.01 or more")
    return tuple(map(float, values))
