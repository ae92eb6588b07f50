"""The policies of `conf/policy/` that a run uses: each well formed, fit for the model, and free to escalate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvdrift.config import Composition, ConfigError, check, read_yaml
from kvdrift.layout import HEADER_BYTES, block_layout
from kvdrift.ledger import CacheShape
from kvdrift.policy import CachePolicy, PolicyError, from_dict
from kvdrift.ranges import require


@dataclass(frozen=True)
class SearchSpace:
    """`search` of a policy whose bits are searched for: the budget, and the quantizers to choose from."""

    bits_per_element: float
    choices: dict[int | str, dict[str, Any]]

    def __post_init__(self) -> None:
        require(self, filled=("choices",), bits_per_element=(0, 16))


def escalated(root: Path, named: Sequence[str]) -> list[str]:
    """What these policies escalate to, whether there are such or not; `exact` in any case."""
    found = {"exact": None}
    for name in named:
        try:
            steps = read_yaml(root / "conf" / "policy" / f"{name}.yaml").get("escalation")
            found |= dict.fromkeys(step for step in steps or () if isinstance(step, str))
        except (ConfigError, AttributeError, TypeError):
            continue  # told by whoever checks that policy
    return list(found)


def check_policy(root: Path, name: str, searched: str, shape: CacheShape | None) -> CachePolicy | None:
    """The policy, whose file is well formed and fits the model; None of the one that is `searched`, whose choices are.

    Raises ConfigError with a line for each mistake in the file.
    """
    file = f"conf/policy/{name}.yaml"
    raw = read_yaml(root / file)
    if not isinstance(raw, dict):
        what = "write key, value and what else docs/quantizers.md lists"
        raise ConfigError(f"{file}: the file holds {raw!r}; {what}. Edit it and run again.")
    wrong: list[Any] = []
    made = None
    if raw.get("name", name) != name:
        wrong.append(f"name is {raw['name']!r}; a policy is called as its file, so remove it")
    if isinstance(raw.get("escalation"), list) and searched in raw["escalation"]:
        wrong.append(f"escalation names {searched!r}, whose bits are searched for; allowed: any other policy")
    try:
        if name == searched:
            _check_searched(raw, name, file, shape)
        elif "search" in raw:
            wrong.append(f"search is set; allowed: only in {searched}.yaml, which conf/search.yaml selects. Remove it")
        else:
            made = _bound(raw, name, shape)
    except PolicyError as error:
        wrong += error.args
    if wrong:
        raise ConfigError(*(f"{file}: {line}. Edit it and run again." for line in wrong))
    return made


def _check_searched(raw: dict[str, Any], name: str, file: str, shape: CacheShape | None) -> None:
    frame = {key: value for key, value in raw.items() if key != "search"}
    if "search" not in raw:
        raise PolicyError(
            "search is missing; conf/search.yaml selects this policy. Give it bits_per_element and choices"
        )
    if extra := sorted({"key", "value", "layers"} & frame.keys()):
        raise PolicyError(f"{extra[0]} is set beside search; the search chooses it, so remove it")
    space = check(Composition(file, {"search": raw["search"]}, {}), _Searched).search
    bits, wrong = [], dict[str, None]()  # what is wrong with the frame is so with each choice
    for choice, tensors in space.choices.items():
        if set(tensors) != {"key", "value"} or None in tensors.values():
            wrong[f"search.choices.{choice} is {tensors!r}; allowed: a quantizer for key and one for value"] = None
            continue
        try:
            policy = _bound({**frame, **tensors}, name, shape)
        except PolicyError as error:
            wrong |= dict.fromkeys(error.args)
            continue
        if shape is not None:
            bits.append(_bits(policy, shape))
    if wrong:
        raise PolicyError(*wrong)
    if bits and space.bits_per_element < min(bits):
        least = math.ceil(100 * min(bits)) / 100
        raise PolicyError(
            f"search.bits_per_element is {space.bits_per_element}; allowed: {least} to 16, the fewest bits "
            "that any choice takes on this model"
        )


@dataclass(frozen=True)
class _Searched:
    search: SearchSpace


def _bound(raw: dict[str, Any], name: str, shape: CacheShape | None) -> CachePolicy:
    made = from_dict(raw, name)
    if shape is None:
        return made
    least = made.exact_tokens + made.block
    if not made.is_exact and shape.positions is not None and max(least, made.min_length) > shape.positions:
        raise PolicyError(
            f"sink_tokens + residual_window is {made.exact_tokens}, min_length {made.min_length}; a first block is "
            f"packed at {max(least, made.min_length)} tokens, and the model has {shape.positions} positions"
        )
    return made.bind(shape.layers, shape.head_dim)


def _bits(policy: CachePolicy, shape: CacheShape) -> float:
    """What the search counts of a packed element: codes, scales, lows and header, without the page's padding."""
    page = block_layout(policy.layers[0], policy.block, shape.kv_heads, shape.head_dim, shape.dtype_bytes)
    size = sum(tensor.codes_bytes + tensor.scales_bytes + tensor.lows_bytes for tensor in (page.key, page.value))
    return 8 * (size + HEADER_BYTES) / (2 * shape.kv_heads * shape.head_dim * policy.block)
