"""Put every gate beside what was measured about one policy; accept or reject it."""

from dataclasses import dataclass
from pathlib import Path

from kvdrift.config import stage
from kvdrift.report.limits import Limits


@dataclass(frozen=True)
class VerdictConfig:
    gates: Limits
    plan: str
    manifest: Path
    plans: Path
    quantize: Path
    logits: Path
    generate: Path
    latency: Path
    drill: Path
    out: Path
    metrics: Path


@stage("verdict")
def main(config: VerdictConfig) -> None:
    import json

    from kvdrift.report.evidence import Sources, read_evidence
    from kvdrift.report.verdict import judge

    sources = Sources(
        config.manifest,
        config.plans,
        config.quantize,
        config.logits,
        config.generate,
        config.latency,
        config.drill,
    )
    verdict = judge(read_evidence(config.plan, sources), config.gates)
    for folder, content in ((config.out, verdict), (config.metrics, verdict["metrics"])):
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(content, indent=1, sort_keys=True, allow_nan=False)
        (folder / f"{config.plan}.json").write_text(text + "\n")
    print(f"{config.plan}: {verdict['decision']}")
    for gate in verdict["gates"]:
        if not gate["passed"]:
            found = "no figure" if gate["measured"] is None else f"{gate['measured']:.3g}"
            print(f"  {gate['status']}: {gate['name']}: {found}, {gate['sense']} {gate['limit']:g}; {gate['detail']}")


if __name__ == "__main__":
    main()
