"""Generate every task's answer over its packed cache, greedy and sampled; grade it beside the reference's."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvdrift.config import Profile, stage


@dataclass(frozen=True)
class GenerateConfig:
    profile: Profile
    plan: str
    modes: list[Literal["greedy", "sampled"]]
    manifest: Path
    prompts: Path
    attack: Path
    reference: Path
    attack_reference: Path
    plans: Path
    out: Path

    def __post_init__(self) -> None:
        if "greedy" not in self.modes:
            raise ValueError(f"modes is {self.modes}; greedy is what drift is counted in, so add it")


@stage("generate")
def main(config: GenerateConfig) -> None:
    import polars as pl
    import torch
    from tqdm import tqdm

    from kvdrift import models
    from kvdrift.cache.packed import PackedCache
    from kvdrift.measure import replay, text
    from kvdrift.measure.compounding import step_kl
    from kvdrift.measure.plans import read_plan
    from kvdrift.measure.reference import stored
    from kvdrift.prompts.batches import modes_of
    from kvdrift.prompts.graders import grade
    from kvdrift.prompts.prompt import from_frame

    torch.set_num_threads(config.profile.threads)
    policy = read_plan(config.plans, config.plan)
    batches = stored(config.reference, from_frame(pl.read_parquet(config.prompts)))
    batches += stored(config.attack_reference, from_frame(pl.read_parquet(config.attack)))
    made = [pl.read_parquet(folder / "generations.parquet") for folder in (config.reference, config.attack_reference)]
    reference = {(row["prompt"], row["mode"]): row for row in pl.concat(made).iter_rows(named=True)}
    model, tokenizer = models.load(config.manifest, config.profile.torch_device, "kvdrift")
    stop = replay.stop_tokens(model, tokenizer)

    config.out.mkdir(parents=True, exist_ok=True)
    rows = []
    asked = [batch for batch in batches if batch.prompts[0].task]
    tasks = [
        (batch, mode)
        for batch in asked
        for mode in modes_of(batch.prompts[0].batch, len(batch.prompts))
        if mode in config.modes
    ]
    longest = max(batch.prompts[0].max_new_tokens for batch in asked)  # where errors have the most steps to add up
    for batch, mode in tqdm(tasks, desc=f"generate {config.plan}", unit="batch"):
        cache = PackedCache(policy, model.config, dtype=model.dtype)
        batch.fill(cache, model.device, tokens=batch.length - 1)
        new, prefix = batch.prompts[0].max_new_tokens, batch.prefix.to(model.device)
        out = replay.generate(model, cache, prefix, new, mode, config.profile.seed, stop)
        follow = mode == "greedy" and new == longest
        kls = step_kl(model, batch, policy, out.tokens) if follow else [None] * len(out.tokens)
        for prompt, tokens, kl in zip(batch.prompts, out.tokens, kls, strict=True):
            before = reference[prompt.id, mode]
            output = tokenizer.decode(tokens, skip_special_tokens=True)
            was, now = (grade(prompt.task, answer, prompt.answer) for answer in (before["text"], output))
            row = {"prompt": prompt.id, "cohort": prompt.cohort, "task": prompt.task, "mode": mode}
            row |= {"length": batch.length, "depth": prompt.depth, "answer": prompt.answer}
            row |= {"output_reference": before["text"], "output": output}
            row |= {"tokens_reference": before["tokens"], "tokens": tokens}
            row |= {"score_reference": was.score, "score": now.score}
            row |= {"correct_reference": was.correct, "correct": now.correct}
            row |= {"valid_format_reference": was.valid_format, "valid_format": now.valid_format}
            row |= {"refused_reference": was.refused, "refused": now.refused}
            row |= {"first_divergence": text.first_divergence(before["tokens"], tokens)}
            row |= {"step_kl": kl, "edit_distance": text.edit_distance(before["tokens"], tokens)}
            rows.append(row)
    nullable = {"first_divergence": pl.Int64(), "depth": pl.Float64(), "step_kl": pl.List(pl.Float64)}
    nullable |= dict.fromkeys(("tokens_reference", "tokens"), pl.List(pl.Int64))
    frame = pl.DataFrame(rows, schema_overrides=nullable, infer_schema_length=None)
    frame.write_parquet(config.out / f"{config.plan}.parquet", metadata={"policy": policy.id})


if __name__ == "__main__":
    main()
