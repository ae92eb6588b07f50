"""Choose the policy that ships; write its receipt, the changed examples and the figures."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvdrift.config import stage
from kvdrift.report.limits import Limits
from kvdrift.report.reading import Sources


@dataclass(frozen=True)
class FrontierConfig(Sources):
    profile: dict[str, Any]
    model: dict[str, Any]
    corpus: dict[str, Any]
    gates: Limits
    params: Path
    """Lists the policies; whatever else lies in the folders is not looked at."""
    preflight: Path
    calibration: Path
    reference: Path
    verdicts: Path
    sensitivity: Path
    hashed: dict[str, list[Path]]
    """What the receipt binds the evidence to: a name → files and folders."""
    out: Path
    changed: Path
    plots: Path

    def __post_init__(self) -> None:
        empty = [name for name, paths in self.hashed.items() if not paths]
        if empty or not self.hashed:
            raise ValueError(f"hashed is empty{f' for {empty[0]}' if empty else ''}; allowed: files for each name")


@stage("frontier")
def main(config: FrontierConfig) -> None:
    import json
    import shutil
    from dataclasses import asdict

    import yaml

    from kvdrift.report import changed, figures, frontier, shapes
    from kvdrift.report.artifacts import sound
    from kvdrift.report.floor import noise_floor
    from kvdrift.report.maps import TABLE, layer_table
    from kvdrift.report.origin import commit, config_hash, hashed, plain, weight_hashes
    from kvdrift.report.page import embedded, render
    from kvdrift.report.probes import probe_rows, read_cells
    from kvdrift.report.reading import read_evidence, read_manifest, read_object, read_table
    from kvdrift.report.receipt import Run, receipt
    from kvdrift.report.sections import sections, title
    from kvdrift.report.verdict import judge

    policies: list[str] = yaml.safe_load(config.params.read_text())["policies"]

    def write(path: Path, content: object) -> None:
        path.write_text(json.dumps(content, indent=1, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n")

    manifest = read_manifest(config.manifest)
    # What a verdict takes for not measured is not measured here either.
    found = {name: sound(read_evidence(name, config)) for name in policies}
    verdicts = [
        frontier.read_verdict(config.verdicts / f"{name}.json", judge(evidence, config.gates))
        for name, evidence in found.items()
    ]
    preflight, floors = config.preflight, [config.reference / f"noise_floor{x}.parquet" for x in ("", "_answers")]
    floor = noise_floor(
        read_table(floors[0], "reference", shapes.FLOOR, ("schedule", "prompt", "step")),
        read_table(floors[1], "reference", shapes.FLOOR_ANSWERS, ("schedule", "prompt")),
    )
    device = read_object(preflight / "device.json", "preflight", shapes.DEVICE)
    software = read_object(preflight / "software.json", "preflight", shapes.SOFTWARE)
    calibration = read_object(config.calibration / "calibration.json", "calibrate", shapes.CALIBRATION)

    choice = frontier.choose(verdicts)
    packings, latencies = ({name: getattr(x, kind) for name, x in found.items()} for kind in ("packing", "latency"))
    examples = []
    for name, evidence in found.items():
        examples += changed.changed_examples(name, evidence.generations)
    longest = {name: frontier.longest(packing) for name, packing in packings.items()}
    evens = {
        name: frontier.break_even(evidence.policy, evidence.shape, verdict["metrics"]["even"], longest[name])
        for (name, evidence), verdict in zip(found.items(), verdicts, strict=True)
    }
    for folder in (config.out, config.plots, config.changed.parent):
        folder.mkdir(parents=True, exist_ok=True)
    limits = config.gates
    cell = (1 - limits.cell.cos, 1 - limits.cell.cos, limits.cell.kl)
    rows = {
        "heatmap": figures.heatmap_rows(verdicts),
        "attention": figures.attention_rows(verdicts),
        "recall": figures.recall_rows(verdicts),
        "frontier": frontier.frontier_rows(verdicts, choice),
        "latency": figures.latency_rows(latencies, evens),
    }
    drawn = {name: config.plots / f"{name}.png" for name in rows}
    figures.draw_heatmap(rows["heatmap"], drawn["heatmap"], dict(zip(figures.PANELS, cell, strict=True)), choice.policy)
    apart = "What each cell does to attention"
    figures.draw_heatmap(rows["attention"], drawn["attention"], {}, choice.policy, apart)
    figures.draw_recall(rows["recall"], drawn["recall"])
    figures.draw_frontier(rows["frontier"], drawn["frontier"], limits.max_bytes_ratio, limits.max_kl)
    figures.draw_latency(rows["latency"], drawn["latency"])
    for name, drawn_rows in rows.items():
        write(config.plots / f"{name}.json", drawn_rows)

    policy = found[choice.policy].policy if choice.policy in found else frontier.EXACT
    even = evens.get(choice.policy, frontier.BreakEven(None, None))
    released = frontier.bound(policy, even, longest.get(choice.policy, 0))
    selected = {"profile": config.profile, "model": config.model, "corpus": config.corpus, "gates": asdict(limits)}
    selected = plain(selected)
    for path in drawn.values():
        shutil.copyfile(path, config.out / path.name)
    write(config.out / "policy.json", released.to_dict())
    layer_table(verdicts).write_csv(config.out / TABLE)
    hashes = weight_hashes(manifest, config.manifest.parent)
    hashes += [hashed(name, paths) for name, paths in config.hashed.items()]
    hashes += [config_hash(selected, config.out / "receipt.json"), hashed("policy", [config.out / "policy.json"])]
    run = Run(
        verdicts=verdicts,
        evens=evens,
        packings=packings,
        latencies=latencies,
        drills={name: evidence.drill for name, evidence in found.items()},
        manifest=manifest,
        device=device,
        software=software,
        calibration=calibration,
        changes=changed.change_counts(examples, limits.critical),
        floor=floor,
        probes=probe_rows(read_cells(config.sensitivity, manifest["shape"]["layers"])),
        config=selected,
        commit=commit(Path()),
        hashes=hashes,
        figures=[path.name for path in drawn.values()],
    )
    content = receipt(run, choice, released)
    paths = {"receipt": str(config.out / "receipt.md"), "changed": str(config.out / "changed_examples.html")}
    paths |= {"layers": str(config.out / TABLE)}
    paths |= {name: str(path) for name, path in drawn.items()}
    write(config.out / "receipt.json", content)
    write(
        config.out / "decisions.json",
        {"decision": content["decision"], "policies": content["candidates"], "paths": paths},
    )
    pictures = {path.name: embedded(path) for path in drawn.values()}
    for kind in ("md", "html"):
        page = render(f"receipt.{kind}.jinja", title=title(content), sections=sections(content), pictures=pictures)
        (config.out / f"receipt.{kind}").write_text(page)
    (config.out / "changed_examples.html").write_text(render("changed.html.jinja", rows=examples))
    lines = [json.dumps(row, sort_keys=True, ensure_ascii=False) + "\n" for row in examples]
    config.changed.write_text("".join(lines))
    print(f"{choice.policy}: {choice.reason}")


if __name__ == "__main__":
    main()
