"""Put every gate beside what was measured about one policy; accept or reject it."""

from dataclasses import dataclass
from pathlib import Path

from kvdrift.config import stage
from kvdrift.report.limits import Limits
from kvdrift.report.reading import Sources, read_evidence


@dataclass(frozen=True)
class VerdictConfig(Sources):
    gates: Limits
    plan: str
    out: Path
    metrics: Path


@stage("verdict")
def main(config: VerdictConfig) -> None:
    import json

    from kvdrift.report.verdict import judge

    files = [folder / f"{config.plan}.json" for folder in (config.out, config.metrics)]
    for file in files:
        file.unlink(missing_ok=True)  # so that an error leaves no verdict on other evidence
    verdict = judge(read_evidence(config.plan, config), config.gates)
    for file, content in zip(files, (verdict, verdict["metrics"]), strict=True):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(content, indent=1, sort_keys=True, allow_nan=False) + "\n")
    print(f"{config.plan}: {verdict['decision']}")
    for gate in verdict["gates"]:
        if not gate["passed"]:
            found = "no figure" if gate["measured"] is None else f"{gate['measured']:.3g}"
            print(f"  {gate['status']}: {gate['name']}: {found}, {gate['sense']} {gate['limit']:g}; {gate['detail']}")


if __name__ == "__main__":
    main()
