"""The drill: every rail is tripped on the real model, and what it protects is looked at afterwards.

A check that can't be made because the policy packs nothing passes and says so. One that raises has failed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvdrift.cache.block import HEADER, BlockRejected, Identity
from kvdrift.cache.packed import PackedCache
from kvdrift.cache.pool import PoolExhausted
from kvdrift.ledger import account
from kvdrift.policy import CachePolicy
from kvdrift.serving import handover, killswitch
from kvdrift.serving.admission import Eviction, make_room
from kvdrift.serving.canary import Alarms, Canary, Release, exposed, tripped
from kvdrift.serving.mirror import Mirrored, Served, decode, mirror
from kvdrift.serving.router import Memory, Request, outlier_layers, route

TENANT, OTHER, SHARED = "tenant-a", "tenant-b", "shared:system-prompt"
BLOCKS = 3
"""Blocks that become due in the drill's prompt, the last of them within STEPS decode steps."""
STEPS = 4
NOTHING_PACKED = "the policy packs nothing"


class DrillFailed(AssertionError):
    """A rail did not hold; says what was seen instead."""


@dataclass(frozen=True)
class Check:
    name: str
    passed: bool
    detail: str


@dataclass(frozen=True)
class Subject:
    """The model and policy under drill, with one stored prompt: its tokens, and its exact keys and values by layer."""

    model: Any
    policy: CachePolicy
    ladder: tuple[CachePolicy, ...]
    """The policy, then its escalation."""
    release: Release
    limits: Sequence[Mapping[str, float]]
    """Calibrated magnitude limits of a request, by layer."""
    eviction: Eviction
    tokens: Int[Tensor, "1 T"]
    keys: Sequence[Float[Tensor, "1 kv_heads T d"]]
    values: Sequence[Float[Tensor, "1 kv_heads T d"]]

    @property
    def context(self) -> int:
        """Two tokens short of the last block that fits into the prompt, of BLOCKS at the most."""
        policy = self.policy
        blocks = min(BLOCKS, (self.tokens.shape[1] - policy.exact_tokens) // policy.block)
        return policy.exact_tokens + blocks * policy.block - 2

    def cache(self, scope: str = TENANT, max_tokens: int | None = None) -> PackedCache:
        """The prompt's first `context` tokens under the policy; with `max_tokens`, in pages reserved for so many."""
        cache = PackedCache(
            self.policy,
            self.model.config,
            batch=None if max_tokens is None else 1,
            max_tokens=max_tokens,
            dtype=self.model.dtype,
            identity=self.release.identity(scope),
        )
        return self.fill(cache)

    def fill(self, cache: Any) -> Any:
        for index, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            span = keys[:, :, : self.context], values[:, :, : self.context]
            (cache.load_layer(index, *span) if isinstance(cache, PackedCache) else cache.update(*span, index))
        return cache

    @property
    def token(self) -> Int[Tensor, "1 1"]:
        return self.tokens[:, self.context - 1 : self.context]

    def decode(self, cache: Any, steps: int = STEPS) -> Served:
        return decode(self.model, cache, self.token, steps)


def run(subject: Subject) -> list[Check]:
    """Every check of the rails, in the order of this file."""
    checks: tuple[Callable[[Subject], str], ...] = (
        header_fields, other_tenant, corruption, too_long, head_shape, outliers, memory_pressure, shortening,
        infinite_block, wide_span, kill_switch, exhaustion, eviction, rollback, mirroring, canary,
    )  # fmt: skip
    return [_checked(check, subject) for check in checks]


def _checked(check: Callable[[Subject], str], subject: Subject) -> Check:
    try:
        return Check(check.__name__, True, check(subject))
    except Exception as error:  # whatever goes wrong in a drill is a finding, not an end of the drill
        return Check(check.__name__, False, f"{type(error).__name__}: {error}")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise DrillFailed(otherwise)


def _rejection(block: handover.Block, identity: Identity, shareable: tuple[str, ...] = ()) -> str:
    """Why a block is rejected; empty if it is accepted."""
    try:
        handover.accept(block, identity, shareable)
    except BlockRejected as error:
        return str(error)
    return ""


def _altered(block: handover.Block, byte: int) -> handover.Block:
    page = block.page.clone()
    page[byte] ^= 1
    return replace(block, page=page)


# -- headers ------------------------------------------------------------------------------------------------------


def header_fields(subject: Subject) -> str:
    """A block is accepted as it is, and rejected by name when any one field of its header differs."""
    block = next(handover.blocks(subject.cache()), None)
    if block is None:
        return NOTHING_PACKED
    own = subject.release.identity(TENANT)
    _require(not _rejection(block, own), f"an intact block: {_rejection(block, own)}")
    names = list(HEADER.names or ())
    for name in names:
        rejection = _rejection(_altered(block, HEADER.fields[name][1]), own)  # type: ignore[index]
        _require(name in rejection, f"a changed {name} gave {rejection or 'no rejection'!r}")
    return f"rejected by name: {', '.join(names)}"


def other_tenant(subject: Subject) -> str:
    """Another tenant's block is rejected; one under a named shareable scope is accepted, and only when named."""
    block = next(handover.blocks(subject.cache()), None)
    if block is None:
        return NOTHING_PACKED
    other = subject.release.identity(OTHER)
    _require("scope" in _rejection(block, other), "another tenant's block was accepted")
    shared = next(handover.blocks(subject.cache(scope=SHARED)))
    _require("scope" in _rejection(shared, other), "a shared prefix was accepted without being named")
    _require(not _rejection(shared, other, (SHARED,)), "a shared prefix was rejected although it was named")
    return "scope is checked; a shareable prefix is accepted where it is named"


def corruption(subject: Subject) -> str:
    """One flipped bit in any section of the payload is found by the checksum."""
    found = 0
    own = subject.release.identity(TENANT)
    for block in list(handover.blocks(subject.cache()))[:: BLOCKS * 4]:
        for tensor in (block.layout.key, block.layout.value):
            for offset in {tensor.codes, tensor.scales, tensor.lows} - {tensor.end}:
                rejection = _rejection(_altered(block, offset), own)
                _require("checksum" in rejection, f"a flipped bit at byte {offset} of layer {block.layer} went unseen")
                found += 1
    return f"{found} of {found} flipped bits found" if found else NOTHING_PACKED


# -- router -------------------------------------------------------------------------------------------------------

PLENTY = Memory(1 << 62)


def too_long(subject: Subject) -> str:
    """A request beyond the evaluated length goes up the ladder."""
    longest = 1024
    ladder = (replace(subject.policy, max_length=longest), *subject.ladder[1:])
    shape = subject.cache().shape
    within = route(Request("within", longest - 16, 16), ladder, shape, PLENTY)
    beyond = route(Request("beyond", longest, 16), ladder, shape, PLENTY)
    _require(within.policy == ladder[0], f"{longest} tokens went to {within}")
    _require(beyond.policy in ladder[1:], f"{longest + 16} tokens went to {beyond}")
    return f"to {_name(beyond.policy)}: {'; '.join(beyond.reasons)}"


def head_shape(subject: Subject) -> str:
    """A model whose heads the policy can't pack is served by one that can."""
    shape = replace(subject.cache().shape, head_dim=65)
    decision = route(Request("odd", 512, 16), subject.ladder, shape, PLENTY)
    _require(decision.policy is not None, f"nothing serves head_dim 65: {decision.reasons}")
    assert decision.policy is not None
    decision.policy.bind(shape.layers, shape.head_dim)
    return f"to {decision.policy.name}" + (f": {'; '.join(decision.reasons)}" if decision.reasons else "")


def outliers(subject: Subject) -> str:
    """Keys far outside the calibrated range are found, and the request goes to 8 bits or exact."""
    keys = list(subject.keys)
    keys[0] = keys[0] * 1000
    layers = outlier_layers(keys, subject.values, subject.limits)
    _require(0 in layers, f"keys of layer 0 times 1,000 were not found; found {layers}")
    decision = route(Request("outlier", 512, 16, layers), subject.ladder, subject.cache().shape, PLENTY)
    served = decision.policy
    _require(served is not None, f"rejected: {decision.reasons}")
    assert served is not None
    bits = [q.bits for layer in served.layers for q in (layer.key, layer.value) if q is not None]
    _require(min(bits, default=16) >= 8, f"served at {min(bits, default=16)} bits")
    return f"to {served.name}"


def memory_pressure(subject: Subject) -> str:
    """Under pressure the packed policy serves any length; what fits nowhere is rejected, with the figures."""
    shape = subject.cache().shape
    patient = replace(subject.policy, min_length=4096)
    ladder, request = (patient, *subject.ladder[1:]), Request("pressed", 1008, 16)
    need = account(replace(patient, min_length=0), shape, 1024, 1).format_bytes
    pressed = route(request, ladder, shape, Memory(need, prefer_packed=True))
    _require(pressed.policy == replace(patient, min_length=0), f"went to {pressed}")
    rejected = route(request, ladder, shape, Memory(need // 64, prefer_packed=True))
    _require(rejected.policy is None and len(rejected.reasons) >= len(ladder), f"went to {rejected}")
    return f"packed at 1,024 tokens within {need:,} B; rejected within {need // 64:,} B"


def shortening(subject: Subject) -> str:
    """A prompt is shortened only where the caller asked for that, and the caller is told."""
    shape = subject.cache().shape
    free = Memory(account(subject.policy, shape, 512, 1).format_bytes)
    refused = route(Request("keep", 8000, 16), subject.ladder, shape, free)
    _require(refused.policy is None, f"a caller who didn't ask was given {refused}")
    short = route(Request("cut", 8000, 16, may_shorten=True), subject.ladder, shape, free)
    _require(0 < short.prompt_tokens < 8000 and "shortened" in short.reasons[-1], f"went to {short}")
    return short.reasons[-1]


def _name(policy: CachePolicy | None) -> str:
    return "nothing" if policy is None else policy.name


# -- cache --------------------------------------------------------------------------------------------------------


def infinite_block(subject: Subject) -> str:
    """A block that holds an Inf stays exact, bit for bit, and is counted."""
    cache, spoiled = _with_value(subject, float("inf"))
    if not cache.packed_layers:
        return NOTHING_PACKED
    _require(cache.escalated_blocks == 1, f"{cache.escalated_blocks} blocks counted instead of 1")
    layer = cache.packed_layers[0]
    assert layer.sequences is not None
    first, block = subject.policy.sink_tokens, subject.policy.block
    kept = layer.sequences.keys[0, :, first : first + block]
    _require(torch.equal(kept, spoiled[0, :, first : first + block]), "the block's exact tokens changed")
    return "1 block escalated, its tokens bit-exact"


def wide_span(subject: Subject) -> str:
    """Finite ±60,000 in one group (a span that float16 can't hold) decodes to finite values, or stays exact."""
    cache, _ = _with_value(subject, 60000.0)
    if not cache.packed_layers:
        return NOTHING_PACKED
    served = subject.decode(cache)
    _require(bool(served.logits.isfinite().all()), "logits are not finite")
    return f"finite; {cache.escalated_blocks} blocks stay exact"


def _with_value(subject: Subject, value: float) -> tuple[PackedCache, Tensor]:
    """A cache whose first block in its first packed layer holds ±value, and that layer's keys."""
    cache = subject.cache()
    if not cache.packed_layers:
        return cache, subject.keys[0]
    index = cache.packed_layers[0].index
    spoiled = subject.keys[index].clone()
    spoiled[:, 0, subject.policy.sink_tokens, :2] = torch.tensor([value, -value], dtype=spoiled.dtype)
    keys = [spoiled if i == index else k for i, k in enumerate(subject.keys)]
    return replace(subject, keys=keys).cache(), spoiled


def kill_switch(subject: Subject) -> str:
    """A policy change clears what the old policy packed, and its blocks are accepted no more."""
    old, new = replace(subject.release, version="another-version"), subject.release
    before = replace(subject, release=old)
    sessions = {
        "stale": killswitch.Session(TENANT, old, before.cache()),
        "current": killswitch.Session(TENANT, new, subject.cache()),
    }
    stale, kept = sessions["stale"].cache, sessions["current"].cache
    pages = list(handover.blocks(stale))
    rejected = [_rejection(block, new.identity(TENANT)) for block in pages]
    _require(all("version" in r for r in rejected), "a block of the old policy was accepted")
    dropped = killswitch.switch(sessions, new)
    _require(dropped == ["stale"] and list(sessions) == ["current"], f"dropped {dropped}")
    _require(stale.get_seq_length() == 0 and not list(handover.blocks(stale)), "stale packed state survived")
    _require(all(not _rejection(b, new.identity(TENANT)) for b in handover.blocks(kept)), "a current block was lost")
    same = torch.equal(subject.decode(subject.fill(stale)).logits, subject.decode(kept).logits)
    _require(same, "a session rebuilt after the switch answers otherwise")
    return f"{len(pages)} blocks of the old policy cleared, the current session kept"


def exhaustion(subject: Subject) -> str:
    """When pages run out the step is refused before anything changes, and the session goes on where it was."""
    room = subject.context + 1
    cache, twin = subject.cache(max_tokens=room), subject.cache()
    if not cache.packed_layers:
        return NOTHING_PACKED
    first, expected = subject.decode(cache, 1), subject.decode(twin, 1)
    before = (cache.get_seq_length(), [b.page.clone() for b in handover.blocks(cache)])
    try:
        decode(subject.model, cache, first.tokens, 1)
    except PoolExhausted as error:
        reason = str(error)
    else:
        raise DrillFailed("a step beyond the reserved pages was not refused")
    after = (cache.get_seq_length(), [b.page for b in handover.blocks(cache)])
    _require(before[0] == after[0], f"length changed from {before[0]} to {after[0]}")
    _require(all(map(torch.equal, before[1], after[1])), "pages changed")
    for held in (cache, twin):
        held.crop(-1)
    again, control = subject.decode(cache, 1), subject.decode(twin, 1)
    _require(torch.equal(again.logits, control.logits), "the session answers otherwise after the refusal")
    _require(torch.equal(first.logits, expected.logits), "reserved pages answer otherwise than growing ones")
    return f"refused: {reason}"


def eviction(subject: Subject) -> str:
    """A newcomer that doesn't fit is rejected, or takes the oldest session's place, as the scheduler says."""
    sessions = {name: killswitch.Session(TENANT, subject.release, subject.cache()) for name in ("oldest", "newest")}
    need = sessions["oldest"].cache.storage_bytes()
    before = subject.decode(sessions["oldest"].cache)
    try:
        evicted = make_room(sessions, need, 0, subject.eviction)
    except PoolExhausted as error:
        _require(subject.eviction == "none" and len(sessions) == 2, f"rejected: {error}")
        return f"rejected: {error}"
    _require(evicted == ["oldest"] and list(sessions) == ["newest"], f"evicted {evicted}")
    rebuilt = subject.decode(subject.cache())
    _require(torch.equal(before.logits, rebuilt.logits), "a rebuilt session answers otherwise")
    return f"the oldest session made room for {need:,} B; rebuilt, it answers bit-equal"


def rollback(subject: Subject) -> str:
    """Steps that sealed a block are taken back; the same steps then give the same logits and bytes."""
    cache = subject.cache()
    length, held = cache.get_seq_length(), cache.storage_bytes()
    before = subject.decode(cache)
    cache.crop(-STEPS)
    _require(cache.get_seq_length() == length, f"{cache.get_seq_length()} tokens instead of {length}")
    ours = cache.ledger().format_bytes
    _require(ours == cache.storage_bytes(), f"the ledger says {ours} B, the storages {cache.storage_bytes()} B")
    after = subject.decode(cache)
    _require(torch.equal(before.logits, after.logits), "the same steps answer otherwise after a rollback")
    return f"{STEPS} steps rolled back, logits bit-equal; {held:,} B before"


# -- rollout ------------------------------------------------------------------------------------------------------


def mirroring(subject: Subject) -> str:
    """A served request is decoded on the reference path too; an exact policy differs nowhere."""
    from transformers import DynamicCache

    served = subject.decode(subject.cache())
    reference = subject.fill(DynamicCache(config=subject.model.config))
    seen = mirror("drill", subject.model, reference, subject.token, served)
    _require(seen.steps == STEPS and seen.kl_mean < float("inf"), f"compared {seen}")
    if subject.policy.is_exact:
        _require(seen.kl_max == 0 and seen.first_divergence is None, f"an exact policy differs: {seen}")
    return f"{seen.steps} steps, KL {seen.kl_mean:.2e} nats, same top-1 {seen.same_top1:.2f}"


def canary(subject: Subject) -> str:
    """Only the bound release is exposed, and a drifting one sets off its alarms."""
    alarms = Alarms(kl_mean=0.05, same_top1=0.95, requests=2)
    bound = Canary(subject.release, 0.5, alarms)
    requests = [f"request-{i}" for i in range(1000)]
    share = sum(exposed(bound, subject.release, r) for r in requests) / len(requests)
    _require(abs(share - bound.share) < 0.1, f"{share:.0%} of the requests were exposed instead of {bound.share:.0%}")
    for field in ("model", "version", "kernels"):
        running = replace(subject.release, **{field: "another"})
        _require(not any(exposed(bound, running, r) for r in requests), f"another {field} was exposed")
    drifting = [Mirrored(r, 8, kl_mean=1.0, kl_max=2.0, same_top1=0.5, first_divergence=0) for r in requests[:2]]
    found = tripped(alarms, drifting)
    _require(len(found) == 2, f"alarms of a drifting release: {found}")
    return f"{share:.0%} exposed; alarms: {'; '.join(found)}"


def fallback(
    stored: tuple[Float[Tensor, "batch scored vocab"], Sequence[Sequence[int]]],
    found: tuple[Float[Tensor, "batch scored vocab"], Sequence[Sequence[int]]],
) -> Check:
    """The exact policy on the same runtime gives the stored reference's logits, bit for bit, and its tokens."""
    kl = _largest_kl(stored[0], found[0])
    tokens = sum(a != b for a, b in zip(stored[1], found[1], strict=True))
    passed = torch.equal(stored[0], found[0]) and not tokens
    detail = f"largest KL {kl:.3g} nats over {stored[0].shape[0] * stored[0].shape[1]} positions; "
    return Check("fallback", passed, detail + f"{tokens} of {len(found[1])} generations differ")


def _largest_kl(reference: Tensor, candidate: Tensor) -> float:
    log_p, log_q = (x.float().log_softmax(-1) for x in (reference, candidate))
    return max(0.0, float((log_p.exp() * (log_p - log_q)).sum(-1).max()))
