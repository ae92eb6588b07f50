"""Drill of what stands at the door: block headers, tenants, checksums and the router."""

from __future__ import annotations

from dataclasses import replace

from kvdrift.cache.block import HEADER
from kvdrift.ledger import account, byte_break_even
from kvdrift.policy import CachePolicy
from kvdrift.serving import handover
from kvdrift.serving.router import Memory, Request, outlier_layers, route
from kvdrift.serving.subject import BLOCKS, NOTHING_PACKED, OTHER, SHARED, TENANT, Subject, rejection_of, require

PLENTY = Memory(1 << 62)
LONG = 1 << 14
"""Tokens up to which the drill looks for a length at which packing saves bytes."""


def header_fields(subject: Subject) -> str:
    """A block is accepted as it is, and rejected by name when any one field of its header differs."""
    block = next(handover.blocks(subject.cache()), None)
    if block is None:
        return NOTHING_PACKED
    own = subject.release.identity(TENANT)
    require(not rejection_of(block, own), f"an intact block: {rejection_of(block, own)}")
    names = list(HEADER.names or ())
    for name in names:
        rejection = rejection_of(_altered(block, HEADER.fields[name][1]), own)  # type: ignore[index]
        require(name in rejection, f"a changed {name} gave {rejection or 'no rejection'!r}")
    return f"each of {len(names)} header fields, changed alone, is rejected by name: {', '.join(names)}"


def other_tenant(subject: Subject) -> str:
    """Another tenant's block is rejected; one under a named shareable scope is accepted, and only when named."""
    block = next(handover.blocks(subject.cache()), None)
    if block is None:
        return NOTHING_PACKED
    other = subject.release.identity(OTHER)
    require("scope" in rejection_of(block, other), "another tenant's block was accepted")
    shared = next(handover.blocks(subject.cache(scope=SHARED)))
    require("scope" in rejection_of(shared, other), "a shared prefix was accepted without being named")
    require(not rejection_of(shared, other, (SHARED,)), "a shared prefix was rejected although it was named")
    return "another tenant's block is rejected; a shared prefix is accepted only where it is named"


def corruption(subject: Subject) -> str:
    """One flipped bit in any section of the payload is found by the checksum."""
    found = 0
    own = subject.release.identity(TENANT)
    for block in list(handover.blocks(subject.cache()))[:: BLOCKS * 4]:
        for tensor in (block.layout.key, block.layout.value):
            for offset in {tensor.codes, tensor.scales, tensor.lows} - {tensor.end}:
                rejection = rejection_of(_altered(block, offset), own)
                require("checksum" in rejection, f"a flipped bit at byte {offset} of layer {block.layer} went unseen")
                found += 1
    return f"{found} of {found} flipped bits are found by the checksum" if found else NOTHING_PACKED


def _altered(block: handover.Block, byte: int) -> handover.Block:
    page = block.page.clone()
    page[byte] ^= 1
    return replace(block, page=page)


def too_long(subject: Subject) -> str:
    """A request beyond a policy's max_length goes up the ladder; the limit here is the drill's, not the certified."""
    longest = 1024
    ladder = (replace(subject.policy, max_length=longest), *subject.ladder[1:])
    shape = subject.cache().shape
    within = route(Request("within", longest - 16, 16), ladder, shape, PLENTY)
    beyond = route(Request("beyond", longest, 16), ladder, shape, PLENTY)
    require(within.policy == ladder[0], f"{longest} tokens went to {within}")
    require(beyond.policy in ladder[1:], f"{longest + 16} tokens went to {beyond}")
    return (
        f"with max_length set to {longest:,} for this drill, {longest:,} tokens are served by {subject.policy.name} "
        f"and {longest + 16:,} by {_name(beyond.policy)}"
    )


def head_shape(subject: Subject) -> str:
    """A model whose heads the policy can't pack is served by one that can."""
    shape = replace(subject.cache().shape, head_dim=65)
    decision = route(Request("odd", 512, 16), subject.ladder, shape, PLENTY)
    require(decision.policy is not None, f"nothing serves head_dim 65: {decision.reasons}")
    assert decision.policy is not None
    decision.policy.bind(shape.layers, shape.head_dim)
    why = f", because {'; '.join(decision.reasons)}" if decision.reasons else ", which it fits"
    return f"a model of head_dim 65 is served by {decision.policy.name}{why}"


def outliers(subject: Subject) -> str:
    """Keys far outside the calibrated range are found, and the request goes to 8 bits or exact."""
    keys = list(subject.keys)
    keys[0] = keys[0] * 1000
    layers = outlier_layers(keys, subject.values, subject.limits)
    require(0 in layers, f"keys of layer 0 times 1,000 were not found; found {layers}")
    decision = route(Request("outlier", 512, 16, layers), subject.ladder, subject.cache().shape, PLENTY)
    served = decision.policy
    require(served is not None, f"rejected: {decision.reasons}")
    assert served is not None
    bits = [q.bits for layer in served.layers for q in (layer.key, layer.value) if q is not None]
    require(min(bits, default=16) >= 8, f"served at {min(bits, default=16)} bits")
    return f"keys of layer 0 times 1,000 are found, and the request is served by {served.name}"


def memory_pressure(subject: Subject) -> str:
    """Under pressure the policy packs from its byte break-even on; what fits nowhere is rejected, with the figures."""
    shape = subject.cache().shape
    patient = replace(subject.policy, min_length=LONG, max_length=LONG)
    ladder = (patient, *subject.ladder[1:])
    little = account(subject.policy, shape, 1024, 1).format_bytes // 64
    rejected = route(Request("rejected", 1008, 16), ladder, shape, Memory(little, prefer_packed=True))
    require(rejected.policy is None and len(rejected.reasons) >= len(ladder), f"went to {rejected}")
    refused = f"1,024 tokens are rejected where {little:,} B are free"
    smaller = byte_break_even(patient, shape, LONG)
    if smaller is None:
        return f"packing saves bytes at no length up to {LONG:,} tokens; {refused}"
    packed = replace(patient, min_length=smaller)
    first = smaller + patient.rollback  # until then it would hold its blocks exact as well
    need = account(packed, shape, first, 1).format_bytes
    found = route(Request("pressed", first, 0), ladder, shape, Memory(need, prefer_packed=True))
    require(found.policy == packed, f"{first} tokens within {need} B went to {found}")
    exact = (smaller - 1) * shape.token_bytes * shape.layers
    found = route(Request("short", smaller - 1, 0), ladder, shape, Memory(exact, prefer_packed=True))
    require(
        found.policy is not None and account(found.policy, shape, smaller - 1, 1).format_bytes == exact,
        f"{smaller - 1} tokens within {exact} B went to {found}",
    )
    return f"a prompt is packed from {first:,} tokens on, where that holds fewer bytes than exact ones do; {refused}"


def shortening(subject: Subject) -> str:
    """A prompt is shortened only where the caller asked for that, and the caller is told."""
    shape = subject.cache().shape
    free = Memory(account(subject.policy, shape, 512, 1).format_bytes)
    refused = route(Request("keep", 8000, 16), subject.ladder, shape, free)
    require(refused.policy is None, f"a caller who didn't ask was given {refused}")
    short = route(Request("cut", 8000, 16, may_shorten=True), subject.ladder, shape, free)
    require(0 < short.prompt_tokens < 8000 and "shortened" in short.reasons[-1], f"went to {short}")
    return f"rejected where the caller did not ask; where it did, {short.reasons[-1]}"


def _name(policy: CachePolicy | None) -> str:
    return "nothing" if policy is None else policy.name
