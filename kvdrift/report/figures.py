"""The figures: their tidy rows, which Vega templates under `.dvc/plots` draw, and the same drawn by seaborn as PNG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import seaborn
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import NullFormatter, NullLocator

from kvdrift.report.frontier import NEVER, BreakEven, brief

Rows = list[dict[str, Any]]

PANELS = ("1 − cosine of keys", "1 − cosine of values", "KL (nats)")
APART = {
    "jensen_shannon": "keys: divergence of weights",
    "value_output": "values: error of output",
    "combined_error": "both: error of output",
}
FLOOR = 1e-7
"""What a logarithmic colour shows zero as; bfloat16 can't tell less."""
MARKS = {
    "chosen": ("*", "#1b7837"),
    "accept": ("o", "#1b7837"),
    "fallback": ("s", "#4d4d4d"),
    "reject": ("X", "#b2182b"),
}
ABSENT = "#e0e0e0"
"""What was not measured, or not asked for."""
REFERENCE = "reference"
EVENS = {"faster": ("#b2182b", ":"), "smaller": ("#1b7837", "--")}
"""Both break-evens: from where a policy is faster, and from where it is smaller."""


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


def attention_rows(verdicts: Sequence[Mapping[str, Any]]) -> Rows:
    """The same for what a cell alone does to attention: its keys, its values, and both."""
    return [
        {"policy": verdict["policy"], "layer": cell["layer"], "bucket": cell["bucket"], "panel": panel}
        | {"value": max(float(cell[name]), FLOOR)}
        for verdict in verdicts
        for cell in verdict["cells"]
        for name, panel in APART.items()
        if cell[name] is not None
    ]


def recall_rows(verdicts: Sequence[Mapping[str, Any]]) -> Rows:
    """A row a policy, length and depth: the share of needles recalled, and how many the reference recalls there; the
    reference comes first, by its name."""
    grids = [(verdict["policy"], verdict["recall"], "candidate") for verdict in verdicts if not verdict["exact"]]
    measured: Rows = next((verdict["recall"] for verdict in verdicts if verdict["recall"]), [])
    rows = []
    for policy, grid, counted in [(REFERENCE, measured, "reference"), *grids]:
        for cell in grid:
            row = {"policy": policy, "length": cell["length"], "depth": cell["depth"]}
            told = {"reference": cell["reference"]}
            rows.append(row | {"recall": cell[counted] / cell["items"], "items": cell["items"]} | told)
    return rows


def latency_rows(latencies: Mapping[str, Mapping[str, Any] | None], evens: Mapping[str, BreakEven]) -> Rows:
    """A row a policy, context and path: the median decode step in ms at the target batch, and both break-evens, null
    where a policy has none.

    Only fresh caches count, and the first row of a length, which at the workload's own is the workload.
    """
    rows = []
    for policy, latency in latencies.items():
        if latency is None:
            continue
        batch, even = latency["workload"]["batch"], evens[policy]
        points: dict[int, Mapping[str, Any]] = {}
        for row in latency["rows"]:
            if row["phase"] == "decode" and row["batch"] == batch and row.get("reuse", "fresh") == "fresh":
                points.setdefault(row["context"], row)
        words = f"faster {brief(even.faster)}, smaller {brief(even.smaller)}"
        told: dict[str, Any] = {"even": words if even != BreakEven(None, None) else "no break-even"}
        told |= {name: None if at == NEVER else at for name, at in asdict(even).items()}
        for context, row in points.items():
            shared = {"policy": policy, "batch": batch, "context": context, **told}
            for path, key in ((REFERENCE, "reference_p50_ms"), ("candidate", "candidate_p50_ms")):
                rows.append(shared | {"path": path, "itl_ms": row[key]})
    return sorted(rows, key=lambda row: (list(latencies).index(row["policy"]), row["path"], row["context"]))


def draw_heatmap(
    rows: Rows, path: Path, limits: Mapping[str, float], chosen: str = "", title: str = "Where the error lands"
) -> None:
    """Panels down, policies across, layers down the side, position buckets along; one colour scale a panel. What was
    not measured is grey, which the title explains where it occurs.

    `limits` are the gates' by panel: a line on the scale, and an outline around each cell beyond it.
    """
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    if not policies:
        return _empty(path, "no policy packed anything")
    layers = 1 + max(row["layer"] for row in rows)
    buckets = sorted({row["bucket"] for row in rows})
    labels = [f"{a:,}–{b - 1:,}" for a, b in pairwise(buckets)] + [f"from {buckets[-1]:,}"]
    figure = Figure(figsize=(1.8 + 1.7 * len(policies), 1.6 + 3 * max(1.7, layers / 11)), layout="constrained")
    panels = list(dict.fromkeys(row["panel"] for row in rows))
    whole = len(panels) * len(policies) * layers * len(buckets) == len(rows)
    figure.suptitle(title if whole else f"{title}\ngrey: not measured or not packed")
    grid = figure.subplots(len(panels), len(policies), squeeze=False, sharex=True, sharey=True)
    for panel, axes in zip(panels, grid, strict=True):
        values = [row["value"] for row in rows if row["panel"] == panel]
        low, high = (min(values), max(values)) if values else (FLOOR, 1.0)
        top, limit = max(high, 10 * low), limits.get(panel, math.inf)
        norm = LogNorm(low, top)
        for policy, ax in zip(policies, axes, strict=True):
            found = np.full((layers, len(buckets)), np.nan)
            for row in rows:
                if row["panel"] == panel and row["policy"] == policy:
                    found[row["layer"], buckets.index(row["bucket"])] = row["value"]
            ax.set_facecolor(ABSENT)
            every = max(1, layers // 10)
            seaborn.heatmap(found, ax=ax, norm=norm, cmap="rocket_r", cbar=False, xticklabels=labels, yticklabels=every)
            for layer, bucket in np.argwhere(found > limit):
                ax.add_patch(Rectangle((bucket, layer), 1, 1, fill=False, edgecolor="#35b0ff", linewidth=1.2))
            ax.tick_params(axis="y", rotation=0)
            if ax is axes[0]:
                ax.set_ylabel("layer")
            if panel == panels[0]:
                name, weight = (f"{policy} (chosen)", "bold") if policy == chosen else (policy, "normal")
                ax.set_title(name, fontweight=weight)
            if panel == panels[-1]:
                ax.set_xlabel("token positions")
        bar = figure.colorbar(axes[-1].collections[0], ax=list(axes), pad=0.01)
        bar.set_label(panel, fontsize="small")  # beside a model of few layers there is little room
        if low < limit < top:
            bar.ax.axhline(limit, color="#35b0ff", linewidth=2)
            bar.ax.set_title(f"limit {limit:g}", fontsize="small", color="#1170aa")
    _save(figure, path)
    return None


def draw_recall(rows: Rows, path: Path) -> None:
    """One length × depth grid a policy, the reference first, recalled of asked in each cell; grey has no needle, and
    hatched one that the reference does not recall either, which judges no candidate."""
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    if not policies:
        return _empty(path, "no needle was generated for")
    lengths, depths = (sorted({row[name] for row in rows}) for name in ("length", "depth"))
    figure = Figure(figsize=(1.8 + 1.6 * len(policies), 3.1), layout="constrained")
    figure.suptitle("Needles recalled of needles planted\ngrey: none planted; hatched: the reference recalls none")
    axes = figure.subplots(1, len(policies), squeeze=False, sharey=True)[0]
    for policy, ax in zip(policies, axes, strict=True):
        shares = np.full((len(depths), len(lengths)), np.nan)
        counts, blind = np.full(shares.shape, "", dtype=object), np.zeros(shares.shape, dtype=bool)
        for row in rows:
            if row["policy"] == policy:
                at = depths.index(row["depth"]), lengths.index(row["length"])
                shares[at], blind[at] = row["recall"], not row["reference"]
                counts[at] = f"{row['recall'] * row['items']:.0f}/{row['items']}"
        ax.set_facecolor(ABSENT)
        names = {"xticklabels": [f"{n:,}" for n in lengths], "yticklabels": [f"{d:g}" for d in depths]}
        scale = {"vmin": 0, "vmax": 1, "cmap": "RdYlGn", "cbar": False, "linewidths": 1}
        seaborn.heatmap(shares, ax=ax, annot=counts, fmt="", annot_kws={"fontsize": "small"}, **scale, **names)
        for text in ax.texts:
            x, y = (int(middle) for middle in text.get_position())
            if blind[y, x]:
                ax.add_patch(Rectangle((x, y), 1, 1, facecolor="#d8d8d8", edgecolor="#b0b0b0", hatch="////"))
                text.set_color("black")
        ax.set(title=policy, xlabel="prompt tokens", ylabel="depth in the prompt" if ax is axes[0] else "")
        ax.tick_params(axis="x", rotation=90)
        ax.tick_params(axis="y", rotation=0)
    figure.colorbar(axes[-1].collections[0], ax=list(axes), label="share recalled", pad=0.01)
    _save(figure, path)
    return None


def draw_frontier(rows: Rows, path: Path, most_bytes: float = math.inf, most_kl: float = math.inf) -> None:
    """Bytes against mean KL with its interval, and the gates' limits; the line joins what no other policy dominates."""
    if not rows:
        return _empty(path, "no policy has both its bytes and its KL measured")
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    middle = (min(row["bytes_ratio"] for row in rows) + max(row["bytes_ratio"] for row in rows)) / 2
    ax = figure.subplots()
    front = [row for row in rows if row["pareto"]]
    ax.plot(*_columns(front, "bytes_ratio", "kl"), color="#999999", linestyle="--", zorder=1, label="Pareto frontier")
    for row in rows:
        if row["kl_low"] is not None and row["kl_high"] is not None:
            ax.vlines(row["bytes_ratio"], row["kl_low"], row["kl_high"], color="#777777", linewidth=2, zorder=1)
        weight = "bold" if row["chosen"] else "normal"
        at = row["bytes_ratio"], row["kl"]
        # above what lies on the right, so that no name leaves the picture
        aside, to = ((9, 6), "left") if row["bytes_ratio"] <= middle else ((12, 11), "right")
        behind = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5}
        words = ax.annotate(
            row["policy"], at, xytext=aside, textcoords="offset points", ha=to, fontweight=weight, bbox=behind
        )
        words.set_zorder(1.5)  # over lines, under points
    for mark, (shape, color) in MARKS.items():
        shown = [row for row in rows if row["mark"] == mark]
        if shown:
            size = 220 if mark == "chosen" else 70
            seaborn.scatterplot(
                x=_columns(shown, "bytes_ratio")[0], y=_columns(shown, "kl")[0], ax=ax, s=size, marker=shape,
                color=color, label=mark, zorder=2,
            )  # fmt: skip
    if most_bytes < math.inf:
        ax.axvline(most_bytes, color="#35b0ff", linestyle=":", zorder=0, label="limits of bytes and mean KL")
    if most_kl < math.inf:
        ax.axhline(most_kl, color="#35b0ff", linestyle=":", zorder=0)
    ax.set(
        xlabel="bytes of the whole cache over the exact cache's, at the target workload",
        ylabel="mean KL (nats), bars are its 95 % interval",
        title="Bytes against drift of the next token: down and left is better",
    )
    ax.set_yscale("symlog", linthresh=1e-4)
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.margins(x=0.14)
    ax.set_ylim(-2e-5, 2 * max(row["kl_high"] or row["kl"] for row in rows) + 1e-4)
    lines, names = ax.get_legend_handles_labels()
    if legend := ax.get_legend():
        legend.remove()
    figure.legend(lines, names, loc="outside lower center", ncols=3)
    _save(figure, path)
    return None


def draw_latency(rows: Rows, path: Path) -> None:
    """The median decode step over context, reference and candidate, a panel a policy; both break-evens are marked."""
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    if not policies:
        return _empty(path, "no latency was measured")
    across = min(4, len(policies))
    down = -(-len(policies) // across)
    figure = Figure(figsize=(3.2 * across, 1.2 + 2.7 * down), layout="constrained")
    figure.suptitle(f"Decode step over context, batch {rows[0]['batch']}: medians of both paths in one run")
    axes = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True).ravel()
    lines: dict[str, Any] = {}
    for policy, ax in zip(policies, axes, strict=False):
        for name, color in ((REFERENCE, "#4d4d4d"), ("candidate", "#2166ac")):
            shown = [row for row in rows if row["policy"] == policy and row["path"] == name]
            (lines[name],) = ax.plot(*_columns(shown, "context", "itl_ms"), color=color, marker="o", markersize=4)
        first = next(row for row in rows if row["policy"] == policy)
        for name, (color, style) in EVENS.items():
            if first[name] is not None:
                lines[f"{name} from here on"] = ax.axvline(max(first[name], 1), color=color, linestyle=style)
        ax.set(title=f"{policy}\n{first['even']}", xlabel="context (tokens)", ylabel="decode step (ms)", xscale="log")
    axes[0].set_ylim(0, 1.05 * max(row["itl_ms"] for row in rows))
    contexts = sorted({row["context"] for row in rows})
    axes[0].set_xticks(contexts, [f"{context:,}" for context in contexts])
    axes[0].xaxis.set_minor_locator(NullLocator())
    for ax in axes:
        ax.tick_params(axis="x", rotation=45)
    for ax in axes[len(policies) :]:
        ax.set_axis_off()
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=2 if across < 3 else 4)
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
