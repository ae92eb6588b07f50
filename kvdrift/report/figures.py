"""The figures: their tidy rows, which Vega templates under `.dvc/plots` draw, and the same drawn by seaborn as PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import seaborn
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

Rows = list[dict[str, Any]]

PANELS = ("key cosine error", "value cosine error", "KL (nats)")
FLOOR = 1e-7
"""What a logarithmic colour shows zero as; bfloat16 can't tell less."""
MARKS = {
    "chosen": ("*", "#1b7837"),
    "accept": ("o", "#1b7837"),
    "fallback": ("s", "#4d4d4d"),
    "reject": ("X", "#b2182b"),
}
REFERENCE = "reference"


def heatmap_rows(verdicts: Sequence[Mapping[str, Any]]) -> Rows:
    """A row a policy, layer, bucket and panel; `value` is never below FLOOR, so that its logarithm can be drawn."""
    rows = []
    for verdict in verdicts:
        for cell in verdict["cells"]:
            errors = [None if cell[name] is None else 1 - cell[name] for name in ("key_cosine", "value_cosine")]
            for panel, value in zip(PANELS, [*errors, cell["kl"]], strict=True):
                if value is not None:
                    row = {"policy": verdict["policy"], "layer": cell["layer"], "bucket": cell["bucket"]}
                    rows.append(row | {"panel": panel, "value": max(float(value), FLOOR)})
    return rows


def recall_rows(verdicts: Sequence[Mapping[str, Any]]) -> Rows:
    """A row a policy, length and depth: the share of needles recalled; the reference comes first, by its name."""
    grids = [(verdict["policy"], verdict["recall"], "candidate") for verdict in verdicts if not verdict["exact"]]
    measured: Rows = next((verdict["recall"] for verdict in verdicts if verdict["recall"]), [])
    rows = []
    for policy, grid, counted in [(REFERENCE, measured, "reference"), *grids]:
        for cell in grid:
            row = {"policy": policy, "length": cell["length"], "depth": cell["depth"]}
            rows.append(row | {"recall": cell[counted] / cell["items"], "items": cell["items"]})
    return rows


def latency_rows(latencies: Mapping[str, Mapping[str, Any] | None]) -> Rows:
    """A row a policy, context and path: the median decode step in ms at the target batch, and the break-even length.

    Only fresh caches count, and the first row of a length, which at the workload's own is the workload.
    """
    rows = []
    for policy, latency in latencies.items():
        if latency is None:
            continue
        batch = latency["workload"]["batch"]
        even = (latency.get("break_even") or {}).get(str(batch)) or {}
        verdict = even.get("verdict", "not measured")
        crossing = even.get("tokens") if verdict == "crosses" else None
        points: dict[int, Mapping[str, Any]] = {}
        for row in latency["rows"]:
            if row["phase"] == "decode" and row["batch"] == batch and row.get("reuse", "fresh") == "fresh":
                points.setdefault(row["context"], row)
        for context, row in points.items():
            shared = {"policy": policy, "batch": batch, "context": context, "verdict": verdict, "break_even": crossing}
            for path, key in ((REFERENCE, "reference_p50_ms"), ("candidate", "candidate_p50_ms")):
                rows.append(shared | {"path": path, "itl_ms": row[key]})
    return sorted(rows, key=lambda row: (list(latencies).index(row["policy"]), row["path"], row["context"]))


def draw_heatmap(rows: Rows, path: Path) -> None:
    """Panels down, policies across, layers up the side, position buckets along; one colour scale a panel."""
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    if not policies:
        return _empty(path, "no policy packed anything")
    layers = 1 + max(row["layer"] for row in rows)
    buckets = sorted({row["bucket"] for row in rows})
    figure = Figure(figsize=(1.6 + 1.7 * len(policies), 1 + 3 * max(1.7, layers / 11)), layout="constrained")
    grid = figure.subplots(len(PANELS), len(policies), squeeze=False, sharex=True, sharey=True)
    for down, (panel, axes) in enumerate(zip(PANELS, grid, strict=True)):
        values = [row["value"] for row in rows if row["panel"] == panel]
        low, high = (min(values), max(values)) if values else (FLOOR, 1.0)
        norm = LogNorm(low, max(high, 10 * low))
        for policy, ax in zip(policies, axes, strict=True):
            shown = np.full((layers, len(buckets)), np.nan)
            for row in rows:
                if row["panel"] == panel and row["policy"] == policy:
                    shown[row["layer"], buckets.index(row["bucket"])] = row["value"]
            ax.set_facecolor("#e0e0e0")
            labels = [f"{bucket:,}" for bucket in buckets]
            every = max(1, layers // 10)
            seaborn.heatmap(shown, ax=ax, norm=norm, cmap="rocket_r", cbar=False, xticklabels=labels, yticklabels=every)
            if ax is axes[0]:
                ax.set_ylabel("layer")
            if down == 0:
                ax.set_title(policy)
            if down == len(PANELS) - 1:
                ax.set_xlabel("first position")
        figure.colorbar(axes[-1].collections[0], ax=list(axes), label=panel, pad=0.01)
    _save(figure, path)
    return None


def draw_recall(rows: Rows, path: Path) -> None:
    """One length × depth grid a policy, the reference first; a cell that has no needle is left grey."""
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    if not policies:
        return _empty(path, "no needle was generated for")
    lengths, depths = (sorted({row[name] for row in rows}) for name in ("length", "depth"))
    figure = Figure(figsize=(1.8 + 1.5 * len(policies), 2.6), layout="constrained")
    axes = figure.subplots(1, len(policies), squeeze=False, sharey=True)[0]
    for policy, ax in zip(policies, axes, strict=True):
        shown = np.full((len(depths), len(lengths)), np.nan)
        for row in rows:
            if row["policy"] == policy:
                shown[depths.index(row["depth"]), lengths.index(row["length"])] = row["recall"]
        ax.set_facecolor("#e0e0e0")
        names = {"xticklabels": [f"{n:,}" for n in lengths], "yticklabels": [f"{d:g}" for d in depths]}
        seaborn.heatmap(shown, ax=ax, vmin=0, vmax=1, cmap="RdYlGn", cbar=False, linewidths=1, **names)
        ax.set(title=policy, xlabel="tokens", ylabel="depth" if ax is axes[0] else "")
        ax.tick_params(axis="x", rotation=90)
    figure.colorbar(axes[-1].collections[0], ax=list(axes), label="recall", pad=0.01)
    _save(figure, path)
    return None


def draw_frontier(rows: Rows, path: Path) -> None:
    """Bytes against mean KL with its interval; the line joins what no other policy dominates."""
    if not rows:
        return _empty(path, "no policy has both its bytes and its KL measured")
    figure = Figure(figsize=(7.5, 5), layout="constrained")
    ax = figure.subplots()
    front = [row for row in rows if row["pareto"]]
    ax.plot(*_columns(front, "bytes_ratio", "kl"), color="#999999", linestyle="--", zorder=1, label="Pareto frontier")
    for row in rows:
        if row["kl_low"] is not None and row["kl_high"] is not None:
            ax.vlines(row["bytes_ratio"], row["kl_low"], row["kl_high"], color="#bbbbbb", zorder=1)
        ax.annotate(row["policy"], (row["bytes_ratio"], row["kl"]), xytext=(7, 5), textcoords="offset points")
    for mark, (shape, color) in MARKS.items():
        shown = [row for row in rows if row["mark"] == mark]
        if shown:
            size = 220 if mark == "chosen" else 70
            seaborn.scatterplot(
                x=_columns(shown, "bytes_ratio")[0], y=_columns(shown, "kl")[0], ax=ax, s=size, marker=shape,
                color=color, label=mark, zorder=2,
            )  # fmt: skip
    ax.set(xlabel="bytes of the exact cache, at the target workload", ylabel="mean KL (nats)")
    ax.set_yscale("symlog", linthresh=1e-4)
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.margins(x=0.12)
    ax.set_ylim(-2e-5, 2 * max(row["kl_high"] or row["kl"] for row in rows) + 1e-4)
    ax.legend(loc="upper right")
    _save(figure, path)
    return None


def draw_latency(rows: Rows, path: Path) -> None:
    """The median decode step over context, reference and candidate, one panel a policy; the crossing is marked."""
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    if not policies:
        return _empty(path, "no latency was measured")
    across = min(4, len(policies))
    down = -(-len(policies) // across)
    figure = Figure(figsize=(3.1 * across, 0.4 + 2.6 * down), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True).ravel()
    for policy, ax in zip(policies, axes, strict=False):
        for name, color in ((REFERENCE, "#4d4d4d"), ("candidate", "#2166ac")):
            shown = [row for row in rows if row["policy"] == policy and row["path"] == name]
            x, y = _columns(shown, "context", "itl_ms")
            seaborn.lineplot(x=x, y=y, ax=ax, color=color, marker="o", label=name, errorbar=None)
        first = next(row for row in rows if row["policy"] == policy)
        if first["break_even"] is not None:
            ax.axvline(first["break_even"], color="#b2182b", linestyle=":")
        even = f"{first['break_even']:,}" if first["break_even"] is not None else first["verdict"]
        ax.set(title=f"{policy}\nbreak-even: {even}", xlabel="context (tokens)", ylabel="decode step (ms)")
        ax.legend(fontsize="small")
    for ax in axes[len(policies) :]:
        ax.set_axis_off()
    _save(figure, path)
    return None


def _columns(rows: Rows, *names: str) -> list[np.ndarray]:
    return [np.array([row[name] for row in rows], dtype=float) for name in names]


def _empty(path: Path, why: str) -> None:
    figure = Figure(figsize=(5, 1.5))
    figure.text(0.5, 0.5, f"Nothing to draw: {why}.", ha="center", va="center")
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    """The same bytes for the same figure: no date, no software version."""
    figure.savefig(path, dpi=110, metadata={"Software": None})
