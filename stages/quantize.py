"""Pack the reference's keys and values under one policy; write tensor and attention errors, and the ledger."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvdrift.config import Profile, stage


@dataclass(frozen=True)
class QuantizeConfig:
    profile: Profile
    plan: str
    manifest: Path
    prompts: Path
    reference: Path
    calibration: Path
    plans: Path
    out: Path


@stage("quantize")
def main(config: QuantizeConfig) -> None:
    import json

    import polars as pl
    import torch
    from safetensors.torch import load_file
    from tqdm import tqdm

    from kvdrift import ledger, models
    from kvdrift.layout import layer_layouts
    from kvdrift.measure.held import reconcile
    from kvdrift.measure.plans import read_plan
    from kvdrift.measure.quantized import ATTENTION, ERRORS, prompt_rows
    from kvdrift.measure.reference import stored
    from kvdrift.prompts.prompt import from_frame

    torch.set_num_threads(config.profile.threads)
    _, shape = models.read_manifest(config.manifest)
    policy = read_plan(config.plans, config.plan).bind(shape.layers, shape.head_dim)
    layouts = layer_layouts(policy, shape.kv_heads, shape.head_dim, shape.dtype_bytes)
    ranges = load_file(config.calibration / "ranges.safetensors")
    batches = stored(config.reference, from_frame(pl.read_parquet(config.prompts)))

    found, reconciled = [], list[dict[str, Any]]()
    seen: set[tuple[str, int]] = set()  # one prompt of each cohort and length shows what packing does to its tensors
    for batch in tqdm(batches, desc=f"quantize {config.plan}", unit="batch"):
        first = {
            prompt.cohort: row
            for row, prompt in reversed(list(enumerate(batch.prompts)))
            if (prompt.cohort, batch.length) not in seen
        }
        seen |= {(cohort, batch.length) for cohort in first}
        found += [prompt_rows(batch, row, layouts, policy, ranges) for row in sorted(first.values())]
        if batch.length not in {row["tokens"] for row in reconciled}:
            reconciled.append(reconcile(batch, policy, shape))
    config.out.mkdir(parents=True, exist_ok=True)
    errors, attention = ([row for rows in found for row in getattr(rows, name)] for name in ("errors", "attention"))
    for rows, schema, suffix in ((errors, ERRORS, ""), (attention, ATTENTION, "_attention")):
        frame = pl.DataFrame(rows, schema=schema)
        frame.write_parquet(config.out / f"{config.plan}{suffix}.parquet", metadata={"policy": policy.id})
    content = {
        "policy": policy.id,
        "bits_per_element": ledger.bits_per_element(policy, shape),
        "escalated_blocks": sum(rows.escalated for rows in found),
        "memory": reconciled,
        "reconciled": all(row["reconciled"] for row in reconciled),
    }
    (config.out / f"{config.plan}.json").write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
