"""Drill of what happens to a cache: escalation, kill switch, exhaustion, eviction, rollback; then mirror and canary."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvdrift.cache.packed import PackedCache
from kvdrift.cache.pool import PoolExhausted
from kvdrift.serving import handover, killswitch
from kvdrift.serving.admission import make_room
from kvdrift.serving.canary import Alarms, Canary, exposed, tripped
from kvdrift.serving.mirror import Mirrored, decode, mirror
from kvdrift.serving.subject import NOTHING_PACKED, STEPS, TENANT, DrillFailed, Subject, rejection_of, require


def infinite_block(subject: Subject) -> str:
    """A block that holds an Inf stays exact, bit for bit, and is counted."""
    cache, spoiled = _with_value(subject, float("inf"))
    if not cache.packed_layers:
        return NOTHING_PACKED
    require(cache.escalated_blocks == 1, f"{cache.escalated_blocks} blocks counted instead of 1")
    layer = cache.packed_layers[0]
    assert layer.sequences is not None
    first, block = subject.policy.sink_tokens, subject.policy.block
    kept = layer.sequences.exact.keys[0, :, first : first + block]
    require(torch.equal(kept, spoiled[0, :, first : first + block]), "the block's exact tokens changed")
    return "a block that holds an Inf stays exact, bit for bit, and is counted"


def wide_span(subject: Subject) -> str:
    """Finite ±60,000 in one group (a span that float16 can't hold) decodes to finite values, or stays exact."""
    cache, _ = _with_value(subject, 60000.0)
    if not cache.packed_layers:
        return NOTHING_PACKED
    served = subject.decode(cache)
    require(bool(served.logits.isfinite().all()), "logits are not finite")
    return f"±60,000 in one group: logits are finite, {cache.escalated_blocks} blocks stay exact"


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
    rejected = [rejection_of(block, new.identity(TENANT)) for block in pages]
    require(all("version" in r for r in rejected), "a block of the old policy was accepted")
    dropped = killswitch.switch(sessions, new)
    require(dropped == ["stale"] and list(sessions) == ["current"], f"dropped {dropped}")
    require(stale.get_seq_length() == 0 and not list(handover.blocks(stale)), "stale packed state survived")
    require(all(not rejection_of(b, new.identity(TENANT)) for b in handover.blocks(kept)), "a current block was lost")
    same = torch.equal(subject.decode(subject.fill(stale)).logits, subject.decode(kept).logits)
    require(same, "a session rebuilt after the switch answers otherwise")
    return f"{len(pages)} blocks of the old version are rejected and cleared; the current session is kept"


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
    require(before[0] == after[0], f"length changed from {before[0]} to {after[0]}")
    require(all(map(torch.equal, before[1], after[1])), "pages changed")
    for held in (cache, twin):
        held.crop(-1)
    again, control = subject.decode(cache, 1), subject.decode(twin, 1)
    require(torch.equal(again.logits, control.logits), "the session answers otherwise after the refusal")
    require(torch.equal(first.logits, expected.logits), "reserved pages answer otherwise than growing ones")
    return f"a step beyond the reserved pages is refused ({reason}), and the session goes on bit-equal"


def eviction(subject: Subject) -> str:
    """A newcomer that doesn't fit is rejected, or takes the oldest session's place, as the scheduler says."""
    sessions = {name: killswitch.Session(TENANT, subject.release, subject.cache()) for name in ("oldest", "newest")}
    need = sessions["oldest"].cache.storage_bytes()
    before = subject.decode(sessions["oldest"].cache)
    try:
        evicted = make_room(sessions, need, 0, subject.eviction)
    except PoolExhausted as error:
        require(subject.eviction == "none" and len(sessions) == 2, f"rejected: {error}")
        return f"a newcomer is rejected and both sessions are kept ({error})"
    require(evicted == ["oldest"] and list(sessions) == ["newest"], f"evicted {evicted}")
    rebuilt = subject.decode(subject.cache())
    require(torch.equal(before.logits, rebuilt.logits), "a rebuilt session answers otherwise")
    return f"the oldest session made room for {need:,} B; rebuilt, it answers bit-equal"


def rollback(subject: Subject) -> str:
    """Steps that sealed a block are taken back; the same steps then give the same logits and bytes."""
    cache = subject.cache()
    length = cache.get_seq_length()
    before = subject.decode(cache)
    cache.crop(-STEPS)
    require(cache.get_seq_length() == length, f"{cache.get_seq_length()} tokens instead of {length}")
    ours = cache.ledger().format_bytes
    require(ours == cache.storage_bytes(), f"the ledger says {ours} B, the storages {cache.storage_bytes()} B")
    after = subject.decode(cache)
    require(torch.equal(before.logits, after.logits), "the same steps answer otherwise after a rollback")
    return f"{STEPS} steps are rolled back; repeated, their logits are bit-equal; ledger and storages agree"


def mirroring(subject: Subject) -> str:
    """A served request is decoded on the reference path too; an exact policy differs nowhere."""
    from transformers import DynamicCache

    served = subject.decode(subject.cache())
    reference = subject.fill(DynamicCache(config=subject.model.config))
    seen = mirror("drill", subject.model, reference, subject.token, served)
    require(seen.steps == STEPS and seen.kl_mean < float("inf"), f"compared {seen}")
    if subject.policy.is_exact:
        require(seen.kl_max == 0 and seen.first_divergence is None, f"an exact policy differs: {seen}")
    return f"{seen.steps} steps beside the reference path: KL {seen.kl_mean:.2e} nats, same top-1 {seen.same_top1:.2f}"


def canary(subject: Subject) -> str:
    """Only the bound release is exposed, and a drifting one sets off its alarms."""
    alarms = Alarms(kl_mean=0.05, same_top1=0.95, requests=2)
    bound = Canary(subject.release, 0.5, alarms)
    requests = [f"request-{i}" for i in range(1000)]
    share = sum(exposed(bound, subject.release, r) for r in requests) / len(requests)
    require(abs(share - bound.share) < 0.1, f"{share:.0%} of the requests were exposed instead of {bound.share:.0%}")
    for field in ("model", "version", "kernels"):
        running = replace(subject.release, **{field: "another"})
        require(not any(exposed(bound, running, r) for r in requests), f"another {field} was exposed")
    drifting = [Mirrored(r, 8, kl_mean=1.0, kl_max=2.0, same_top1=0.5, first_divergence=0) for r in requests[:2]]
    found = tripped(alarms, drifting)
    require(len(found) == 2, f"alarms of a drifting release: {found}")
    exposure = f"{share:.0%} of the requests are exposed where {bound.share:.0%} are to be"
    return f"{exposure}; a made-up drift sets off: {'; '.join(found)}"
