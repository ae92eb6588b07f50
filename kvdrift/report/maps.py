"""Layer maps and probes laid out for reading: what each layer of a policy costs and does, and what single cells do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from kvdrift.report.page import NOT_MEASURED, Block, Folded, Section, Table, blank, shown

WORST = 3
TABLE = "layers.csv"
"""Every policy's map as one table, beside the receipt."""
HEARD = {"jensen_shannon": "weights", "top_overlap": "top positions kept"}
HEARD |= {"value_output": "output, values alone", "combined_error": "output, both"}
"""What attention makes of an error, by the same names wherever it stands."""
LAYERS = {
    "layer": "layer",
    "key_bits": "key bits",
    "value_bits": "value bits",
    "saved_bytes": "saved bytes",
    "key_cosine": "key cosine",
    "value_cosine": "value cosine",
    "key_error": "key error",
    "value_error": "value error",
    "kl": "KL, nats",
    **HEARD,
    "latency_share": "share of attention time",
}
LAYER_MAP = (
    "Cosine, error (relative L2) and KL are those of the layer's worst position bucket; saved bytes are at the target "
    "workload. What attention makes of it, named as in Slices: Jensen–Shannon divergence of its weights in nats, share "
    "of its top positions kept, relative L2 error of its output with values alone and with both quantized."
)
PROBES = (
    "What the search and the attack go by. A probe quantizer is put into one layer, or one layer's blocks of one "
    "position bucket, all else exact: its keys alone, its values alone, both. It has the sinks, residual window and "
    "block of the searched policy, so its cells differ from those of the policy of that name. KL of layers alone is "
    "summed over layers, mean over the probe prompts. Needles are short prompts that were asked for their answer in "
    "every cell that they have, keys and values together; in layers where that loses something, keys and values also "
    "alone. Kept is the share of the answer's tokens that the exact cache says and the cell still says, mean over "
    "needles; every other figure is of the probe prompts, without the needles."
)


def layer_table(verdicts: Sequence[Mapping[str, Any]]) -> pl.DataFrame:
    """The layer maps of all policies: `policy`, then the columns LAYERS; what was not measured is null."""
    whole = ("layer", "key_bits", "value_bits", "saved_bytes")
    schema: dict[str, Any] = {"policy": pl.String}
    schema |= {name: pl.Int64 if name in whole else pl.Float64 for name in LAYERS}
    rows = [{"policy": verdict["policy"]} | layer for verdict in verdicts for layer in verdict["layers"]]
    return pl.DataFrame(rows, schema=schema)


def maps(receipt: Mapping[str, Any]) -> list[Section]:
    """The layer map of every policy, the chosen one's first and whole; then the probes."""
    chosen = receipt["decision"]["policy"]
    layers = receipt["layer_maps"]
    blocks: list[Block] = [LAYER_MAP]
    if chosen in layers:
        blocks += [f"`{chosen}`, chosen: {worst_layers(layers[chosen])}.", _layers(layers[chosen])]
    others = {policy: rows for policy, rows in layers.items() if policy != chosen}
    blocks += [Folded(f"`{policy}`: {worst_layers(rows)}", _layers(rows)) for policy, rows in others.items()]
    blocks.append(f"All of them whole, a row a layer: `{TABLE}`.")
    return [Section("Layer map", blocks), Section("Probes", _probes(receipt["probes"]))]


def worst_layers(rows: Sequence[Mapping[str, Any]]) -> str:
    """A layer map on one line: its bits, and where it is worst."""
    bits = f"{_span(row['key_bits'] for row in rows)}-bit keys, {_span(row['value_bits'] for row in rows)}-bit values"
    known = sorted((row for row in rows if row["kl"] is not None), key=lambda row: (-row["kl"], row["layer"]))
    kls = ", ".join(f"{row['layer']} ({shown(row['kl'])})" for row in known[:WORST])
    found = [f"{bits}, {len(rows)} layers", f"most KL alone in layers {kls}" if kls else "no cell packed or measured"]
    for tensor in ("key", "value"):
        wrong = [(row[f"{tensor}_error"], row["layer"]) for row in rows if row[f"{tensor}_error"] is not None]
        if wrong:
            error, layer = max(wrong, key=lambda pair: (pair[0], -pair[1]))
            found.append(f"largest {tensor} error in layer {layer} ({shown(error)})")
    return "; ".join(found)


def _span(values: Any) -> str:
    low, *_, high = sorted(set(values)) * 2
    return f"{low}" if low == high else f"{low}- to {high}"


def _layers(rows: Sequence[Mapping[str, Any]]) -> Table:
    return Table(tuple(LAYERS.values()), [tuple(blank(row.get(name)) for name in LAYERS) for row in rows])


def _probes(rows: Sequence[Mapping[str, Any]]) -> list[Block]:
    """A row a (probe, tensor), then its worst cells."""
    if not rows:
        return [f"{NOT_MEASURED}."]
    head = ["probe", "tensor", "cells", "KL of layers alone, nats", "needles", "cells asked", "kept", "least kept"]
    names = ("policy", "tensor", "cells", "alone", "needles", "asked", "kept")
    cells = [
        (
            row["policy"],
            row["tensor"],
            shown(cell["layer"]),
            f"{cell['start']:,}–{cell['stop']:,}",
            *(shown(cell[name]) for name in ("kl", "cosine", "error", "same_top1", "rank_correlation")),
            "–" if cell["kept"] is None else f"{shown(cell['kept'])} of {shown(cell['needles'])}",
            cell["prompt"],
        )
        for row in rows
        for cell in row["worst"]
    ]
    named = ["probe", "tensor", "layer", "tokens", "KL alone, nats", "cosine", "error", "same top-1"]
    named += ["rank correlation", "answers kept, of needles", "shown by prompt"]
    explained = (
        "The worst cells of each, by KL on the probe prompt that shows them worst, then the cell that keeps least if "
        "any loses a part of the answer; tokens are the first and the one after the last. For both, cosine and error "
        "(relative L2) are the worse of keys and values. A dash is a cell in which no needle was asked."
    )
    summary = Table(head, [(*(blank(row[name]) for name in names), _least(row["least"])) for row in rows])
    return [PROBES, summary, explained, Table(named, cells)]


def _least(cell: Mapping[str, Any] | None) -> str:
    """The cell that keeps least of the answer, and where it is, if it loses any."""
    if cell is None or cell["kept"] == 1:
        return "–" if cell is None else "1"
    return f"{shown(cell['kept'])} in layer {cell['layer']} at {cell['start']:,}–{cell['stop']:,}"
