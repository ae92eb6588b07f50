"""The tensor policy: which quantizer holds each layer's keys and values, and which tokens stay exact.

This file knows names, limits and identity. It knows no tensor, no model and no byte.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

FORMATS = {"uniform": (2, 4, 8), "fp8_e4m3": (8,)}
AXES = ("channel", "token")
SCALE_BYTES = {"float16": 2, "float32": 4}
PREFILLS = ("exact", "packed")
WHOLE_HEAD = 0
"""`group` of a per-token quantizer whose one group is the whole head, whatever its size."""


class PolicyError(ValueError):
    """A policy that can't be built, or that doesn't fit the model it is bound to: an argument a mistake."""

    def __str__(self) -> str:
        return "\n".join(map(str, self.args))


def _refuse(*faults: str | None) -> None:
    """Raises PolicyError with all that is wrong, each once."""
    if found := dict.fromkeys(fault for fault in faults if fault):
        raise PolicyError(*found)


def _one_of(what: str, value: object, allowed: Sequence[object]) -> str | None:
    return None if value in allowed else f"{what} is {value!r}; allowed: {', '.join(map(str, allowed))}"


def _checked(cls: type, raw: object, where: str) -> dict[str, Any]:
    """Plain data as the fields of `cls`, of the types that they say."""
    types = {field.name: str(field.type) for field in fields(cls)}
    if not isinstance(raw, Mapping):
        raise PolicyError(f"{where} is {raw!r}; pass a mapping with keys from {', '.join(sorted(types))}")
    faults = []
    for key, value in raw.items():
        if key not in types:
            faults.append(f"{where} has an unknown key {key!r}; allowed: {', '.join(sorted(types))}")
        elif "int" in types[key] and not (type(value) is int or (value is None and "None" in types[key])):
            faults.append(f"{where}: {key} is {value!r}; pass a whole number")
        elif types[key] == "str" and not isinstance(value, str):
            faults.append(f"{where}: {key} is {value!r}; pass a name")
    _refuse(*faults)
    return dict(raw)


def _not_negative(what: str, value: int) -> str | None:
    return f"{what} is {value}; it must be 0 or more" if value < 0 else None


@dataclass(frozen=True)
class Quantizer:
    """How one tensor becomes codes.

    `axis="channel"` groups `group` consecutive tokens of one channel (as KIVI does for keys);
    `axis="token"` groups `group` consecutive channels of one token, or the whole head when `group` is 0.
    """

    format: str = "uniform"
    bits: int = 8
    axis: str = "token"
    group: int = WHOLE_HEAD
    scale_dtype: str = "float16"

    def __post_init__(self) -> None:
        faults = [
            _one_of("format", self.format, tuple(FORMATS)),
            _one_of(f"bits of {self.format}", self.bits, FORMATS.get(self.format, (self.bits,))),
            _one_of("axis", self.axis, AXES),
            _one_of("scale_dtype", self.scale_dtype, tuple(SCALE_BYTES)),
            _not_negative("group", self.group),
        ]
        if self.axis == "channel" and self.group == WHOLE_HEAD:
            faults.append(f"group is {self.group}; a per-channel quantizer needs the number of tokens it groups")
        if self.axis == "channel" and self.format == "fp8_e4m3":
            faults.append("fp8_e4m3 has a scale per token and head; set axis: token")
        _refuse(*faults)

    @property
    def has_low(self) -> bool:
        """Asymmetric formats store a floating low beside the scale."""
        return self.format == "uniform"


@dataclass(frozen=True)
class LayerPolicy:
    """The quantizers of one layer; None keeps that tensor exact, in the model's dtype."""

    key: Quantizer | None = None
    value: Quantizer | None = None

    def __post_init__(self) -> None:
        if self.value is not None and self.value.axis != "token":
            raise PolicyError("value.axis is 'channel'; values are read token by token, so only 'token' is allowed")

    @property
    def is_exact(self) -> bool:
        return self.key is None and self.value is None


@dataclass(frozen=True)
class CachePolicy:
    """A tensor policy for a whole model.

    `layers` holds one entry a layer, or a single one that every layer shares. `min_length` (from where packing pays)
    and `max_length` (the longest length that was evaluated) say where the policy may run, not what it is, so they are
    outside its id. Where packing never pays, `min_length` is beyond `max_length`.
    """

    name: str
    layers: tuple[LayerPolicy, ...]
    sink_tokens: int = 0
    residual_window: int = 0
    block: int = 64
    rollback: int = 16
    prefill: str = "exact"
    escalation: tuple[str, ...] = ("exact",)
    min_length: int = 0
    max_length: int | None = None

    def __post_init__(self) -> None:
        faults = [_one_of("prefill", self.prefill, PREFILLS), _one_of("block", self.block, (32, 64, 128))]
        if not self.layers:
            faults.append(f"policy {self.name!r} has no layers")
        faults += [
            _not_negative(name, getattr(self, name) or 0)
            for name in ("sink_tokens", "residual_window", "rollback", "min_length", "max_length")
        ]
        if not self.escalation:
            faults.append("escalation is []; name where a request goes that this policy may not serve: [exact]")
        if len(set(self.escalation)) < len(self.escalation):
            faults.append(f"escalation is {list(self.escalation)}; name each policy once")
        if self.name in self.escalation and not self.is_exact:
            faults.append(f"escalation is {list(self.escalation)}; {self.name!r} can't escalate to itself: remove it")
        if self.rollback > self.block:
            faults.append(f"rollback is {self.rollback}; one block ({self.block} tokens) is the most that is kept")
        if self.exact_tokens % 16:
            faults.append(
                f"sink_tokens + residual_window is {self.exact_tokens}; it must be a multiple of 16, so that 16-token "
                "chunks see what token-by-token decoding sees"
            )
        for layer in self.layers:
            key = layer.key
            if key is not None and key.axis == "channel" and key.group not in _groups(self.block):
                faults.append(
                    f"key.group is {key.group}; it must divide the block of {self.block} tokens: {_groups(self.block)}"
                )
        _refuse(*faults)

    @property
    def is_exact(self) -> bool:
        return all(layer.is_exact for layer in self.layers)

    @property
    def exact_tokens(self) -> int:
        """Tokens that always stay exact: sinks and residual window."""
        return self.sink_tokens + self.residual_window

    @property
    def id(self) -> str:
        """12 hex digits over everything that decides a byte of the cache; the same before and after `bind`."""
        content = asdict(self)
        if all(layer == self.layers[0] for layer in self.layers):
            content["layers"] = content["layers"][:1]
        for outside in ("name", "min_length", "max_length", "escalation"):
            del content[outside]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]

    def layer(self, index: int) -> LayerPolicy:
        return self.layers[0] if len(self.layers) == 1 else self.layers[index]

    def bind(self, layers: int, head_dim: int) -> CachePolicy:
        """This policy with one entry a layer, checked against a model.

        Raises PolicyError naming head_dim, group and the allowed groups when they don't fit.
        """
        if len(self.layers) not in (1, layers):
            raise PolicyError(f"policy {self.name!r} names {len(self.layers)} layers; the model has {layers}")
        pairs = [pair for layer in self.layers for pair in (("key", layer.key), ("value", layer.value))]
        _refuse(*(_row_fault(self.name, tensor, quantizer, head_dim) for tensor, quantizer in pairs if quantizer))
        return replace(self, layers=tuple(self.layer(index) for index in range(layers)))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def packed_until(policy: CachePolicy, length: int) -> int:
    """Tokens [sink_tokens, this) are packed once a sequence holds `length` real tokens (DESIGN: P of the last one)."""
    return policy.sink_tokens + packed_blocks(policy, length) * policy.block


def packed_blocks(policy: CachePolicy, length: int) -> int:
    """Blocks sealed in each packed layer of a sequence of `length` real tokens."""
    if policy.is_exact or length < policy.min_length:
        return 0
    return max(0, length - policy.exact_tokens) // policy.block


def _groups(row: int) -> list[int]:
    """Group sizes for a row of so many tokens or channels: the powers of two from 8 on that divide it."""
    return [group for group in (8, 16, 32, 64, 128, 256) if row % group == 0]


def _row_fault(name: str, tensor: str, quantizer: Quantizer, head_dim: int) -> str | None:
    """What keeps the rows of a per-token quantizer from fitting a head."""
    per_byte, allowed = 8 // quantizer.bits, [WHOLE_HEAD, *_groups(head_dim)]
    if quantizer.axis != "token":
        return None
    if quantizer.group not in allowed:
        return (
            f"policy {name!r}: {tensor}.group {quantizer.group} does not divide head_dim {head_dim}; "
            f"allowed groups: {allowed} (0 is the whole head)"
        )
    if head_dim % per_byte:
        return (
            f"policy {name!r}: head_dim {head_dim} at {quantizer.bits} bits is no whole number of bytes; "
            f"it must be a multiple of {per_byte}"
        )
    return None


@contextmanager
def _gathered(faults: list[str], where: str = "") -> Iterator[None]:
    """What is found wrong inside is added to `faults`, and what follows goes on."""
    try:
        yield
    except PolicyError as error:
        faults += [f"{where}{fault}" for fault in error.args]


def _layer(raw: object, where: str) -> LayerPolicy:
    raw, made, faults = _checked(LayerPolicy, raw, where), LayerPolicy(), list[str]()
    for tensor, content in raw.items():
        if content is not None:
            with _gathered(faults):
                content = _checked(Quantizer, content, f"{where}.{tensor}")
                with _gathered(faults, f"{where}.{tensor}: "):
                    made = replace(made, **{tensor: Quantizer(**content)})
    _refuse(*faults)
    return made


def from_dict(raw: object, name: str | None = None) -> CachePolicy:
    """A policy from plain data: either `layers: [{key, value}, …]`, or `key` and `value` for all layers alike.

    A file's own `name` counts only where no `name` is passed. Raises PolicyError on an unknown key or a value that
    isn't allowed.
    """
    if not isinstance(raw, Mapping):
        raise PolicyError(f"policy {name!r} is {raw!r}; pass a mapping with `layers`, or with `key` and `value`")
    content = dict(raw)
    name = name or content.pop("name", None) or "unnamed"
    content.pop("name", None)
    where = f"policy {name!r}"
    if not {"layers", "key", "value"} & content.keys():
        raise PolicyError(f"{where} names neither key, value nor layers; for the exact cache write key: null")
    if "layers" in content and {"key", "value"} & content.keys():
        raise PolicyError(f"{where} has layers beside key or value; the layers name both already, so remove the others")
    faults: list[str] = []
    layers: tuple[LayerPolicy, ...] = (LayerPolicy(),)  # stands in for what can't be made
    with _gathered(faults):
        layers = _layers(content, where)
    steps = content.pop("escalation", ["exact"])
    if not (isinstance(steps, list | tuple) and all(isinstance(step, str) for step in steps)):
        faults.append(f"{where}: escalation is {steps!r}; pass a list of policy names, such as [int8, exact]")
        steps = ["exact"]
    with _gathered(faults):
        made = CachePolicy(name, layers, escalation=tuple(steps), **_checked(CachePolicy, content, where))
        if made.max_length is not None and made.max_length < max(made.min_length, 1):
            least = f"min_length ({made.min_length}) or more, or null for no limit"
            faults.append(f"max_length is {made.max_length}; it must be {least}")
    _refuse(*faults)
    return made


def _layers(content: dict[str, Any], where: str) -> tuple[LayerPolicy, ...]:
    """What `content` says of the layers, taken out of it."""
    if "layers" not in content:
        return (_layer({k: content.pop(k) for k in ("key", "value") if k in content}, where),)
    listed = content.pop("layers")
    if not isinstance(listed, list | tuple):
        raise PolicyError(f"{where}: layers is {listed!r}; pass a list of {{key, value}}")
    faults, layers = list[str](), []
    for index, layer in enumerate(listed):
        with _gathered(faults):
            layers.append(_layer(layer, f"{where} layer {index}"))
    _refuse(*faults)
    return tuple(layers)
