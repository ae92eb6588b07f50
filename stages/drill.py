"""Trip every serving rail with this policy on the real model, and prove that the fallback is the reference path."""

from dataclasses import asdict, dataclass
from pathlib import Path

from kvdrift.config import Profile, stage
from kvdrift.measure.sweep import Scheduler
from kvdrift.ranges import require


@dataclass(frozen=True)
class DrillConfig:
    profile: Profile
    scheduler: Scheduler
    plan: str
    new_tokens: int
    """Tokens that the fallback generates beside the stored generation."""
    manifest: Path
    prompts: Path
    reference: Path
    calibration: Path
    plans: Path
    out: Path

    def __post_init__(self) -> None:
        require(self, new_tokens=(1, 1024))


@stage("drill")
def main(config: DrillConfig) -> None:
    import json

    import polars as pl
    import torch

    from kvdrift import models
    from kvdrift.cache.packed import PackedCache
    from kvdrift.ledger import load_policy
    from kvdrift.measure import replay
    from kvdrift.measure.bench import read_prefix
    from kvdrift.measure.plans import read_plan
    from kvdrift.measure.reference import stored
    from kvdrift.prompts.prompt import from_frame
    from kvdrift.serving import drill
    from kvdrift.serving.canary import release
    from kvdrift.serving.subject import BLOCKS

    torch.set_num_threads(config.profile.threads)
    policy, exact = read_plan(config.plans, config.plan), load_policy("exact")
    ladder = (policy, *(load_policy(name) for name in policy.escalation))
    model, tokenizer = models.load(config.manifest, config.profile.torch_device, "kvdrift")
    manifest, _ = models.read_manifest(config.manifest)
    limits = json.loads((config.calibration / "calibration.json").read_text())["outlier_limits"]

    batches = sorted(stored(config.reference, from_frame(pl.read_parquet(config.prompts))), key=lambda b: b.length)
    enough = policy.exact_tokens + BLOCKS * policy.block
    prompt = next((batch for batch in batches if batch.length >= enough), batches[-1])
    prefix = read_prefix(prompt.path, prompt.prefix, model.device)
    running = release(manifest, policy, model.device)
    subject = drill.Subject(
        model=model,
        policy=policy,
        ladder=ladder,
        release=running,
        limits=limits,
        eviction=config.scheduler.eviction,
        tokens=prefix.tokens,
        keys=prefix.keys,
        values=prefix.values,
    )
    checks = drill.run(subject)

    batch = next(batch for batch in batches if batch.prompts[0].task and len(batch.prompts[0].continuation) > 1)
    made = pl.read_parquet(config.reference / "generations.parquet").filter(mode="greedy")
    tokens = dict(made.select("prompt", "tokens").iter_rows())
    cache = PackedCache(exact, model.config, dtype=model.dtype)
    batch.fill(cache, model.device)
    logits = replay.score(model, cache, batch.continuation.to(model.device)).cpu()
    cache.crop(batch.length - 1 - cache.get_seq_length())
    new = min(config.new_tokens, batch.prompts[0].max_new_tokens)
    stop = replay.stop_tokens(model, tokenizer)
    out = replay.generate(model, cache, batch.prefix.to(model.device), new, "greedy", config.profile.seed, stop)
    before = [tokens[p.id][:new] for p in batch.prompts]
    checks.append(drill.fallback((batch.read("logits")[0], before), (logits, out.tokens)))

    content = {
        "policy": policy.id,
        "checks": [asdict(check) for check in checks],
        "passed": all(check.passed for check in checks),
    }
    config.out.mkdir(parents=True, exist_ok=True)
    (config.out / f"{config.plan}.json").write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    failed = [check.name for check in checks if not check.passed]
    print(f"drill {config.plan}: {len(checks)} checks, " + (f"FAILED: {', '.join(failed)}" if failed else "all passed"))


if __name__ == "__main__":
    main()
