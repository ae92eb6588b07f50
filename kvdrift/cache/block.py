"""The header of a page: whose block it is and under what it was made. A worker takes a block only if all of it matches.

64 bytes: magic, layer, sealed tokens, first position, key and value groups, then 8-byte digests of the scope, model,
adapter, quantizer version and kernel build, and the payload checksum.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from kvdrift.layout import HEADER_BYTES, BlockLayout

MAGIC = b"KVD1"
HEADER = np.dtype(
    [
        ("magic", "S4"),
        ("layer", "<u2"),
        ("tokens", "<u2"),
        ("start", "<u4"),
        ("key_group", "<u2"),
        ("value_group", "<u2"),
        *((name, "<u8") for name in ("scope", "model", "adapter", "version", "kernels", "checksum")),
    ]
)
assert HEADER.itemsize == HEADER_BYTES


@dataclass(frozen=True)
class Identity:
    """What a block is bound to, besides its place."""

    scope: str = "local"
    """The tenant, or the name of an explicitly shareable prefix scope."""
    model: str = ""
    adapter: str = ""
    version: str = ""
    """Quantizer version: policy id and the hash of the quantizers', kernels' and cache's sources."""
    kernels: str = ""

    def digests(self) -> dict[str, int]:
        return {
            field.name: int.from_bytes(hashlib.sha256(getattr(self, field.name).encode()).digest()[:8], "little")
            for field in fields(self)
        }


class BlockRejected(ValueError):
    """A block whose header or payload isn't what the worker expects."""


def header(identity: Identity, layer: int, layout: BlockLayout) -> np.ndarray:
    """What the headers of all blocks of one layer have in common: one record, without first position and checksum."""
    record = np.zeros(1, dtype=HEADER)
    record["magic"], record["layer"], record["tokens"] = MAGIC, layer, layout.block
    record["key_group"], record["value_group"] = _group(layout.key), _group(layout.value)
    for name, digest in identity.digests().items():
        record[name] = digest
    return record


def headers(common: np.ndarray, starts: Sequence[int]) -> UInt8[Tensor, "blocks 64"]:
    """Headers of blocks that begin at these positions, complete but for their checksums."""
    records = common.repeat(len(starts))
    records["start"] = starts
    return torch.from_numpy(records.view(np.uint8).reshape(-1, HEADER_BYTES))


def check(
    page: UInt8[Tensor, "page_bytes"],
    checksum: int,
    identity: Identity,
    layer: int,
    layout: BlockLayout,
    start: int | None = None,
) -> None:
    """Raise BlockRejected naming every field in which the page's header differs from what is expected."""
    record = page[:HEADER_BYTES].cpu().numpy().view(HEADER)[0]
    expected: dict[str, object] = {
        "magic": MAGIC,
        "layer": layer,
        "tokens": layout.block,
        "key_group": _group(layout.key),
        "value_group": _group(layout.value),
        "checksum": checksum % 2**64,
        **identity.digests(),
    }
    if start is not None:
        expected["start"] = start
    wrong = [name for name, value in expected.items() if record[name] != value]
    if wrong:
        raise BlockRejected(
            f"block rejected: {', '.join(wrong)} differ from this worker's; recompute it from the prompt"
        )


def _group(tensor: object) -> int:
    quantizer = getattr(tensor, "quantizer", None)
    return 0 if quantizer is None else quantizer.group
