"""The verdict and frontier stages on a made-up run, and what they write."""

import inspect
import json
from contextlib import chdir, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from made_up import Run

from kvdrift.composed import load_stage
from kvdrift.config import check, compose

ROOT = Path(__file__).parent.parent.parent


def stage(run: Run, name: str, *overrides: str) -> str:
    """What a stage prints when its own configuration is composed in the run's folder, as dvc would start it there."""
    main = load_stage(ROOT / "stages" / f"{name}.py")
    with chdir(run.root), redirect_stdout(StringIO()) as out:
        inspect.unwrap(main)(check(compose(name, overrides, ROOT / "conf"), main.schema))
    return out.getvalue()


def finish(run: Run, policies: list[str] | None = None) -> str:
    """Every verdict, then the frontier."""
    for name in run.policies:
        stage(run, "verdict", f"plan={name}", "gates=laptop")
    for folder in ("kvdrift/quantizers", "kvdrift/kernels", "kvdrift/cache", "stages"):
        (run.root / folder).mkdir(parents=True, exist_ok=True)
        (run.root / folder / "code.py").write_text("pass\n")
    (run.root / "params.yaml").write_text(f"policies: [{', '.join(policies or run.policies)}]\n")
    return stage(run, "frontier")


def read(run: Run, path: str) -> Any:
    return json.loads((run.root / path).read_text())


def written(run: Run) -> dict[str, bytes]:
    folders = [run.root / name for name in ("data/release", "data/verdict", "metrics", "plots")]
    files = [path for folder in folders for path in folder.iterdir()] + [run.root / "data/changed_examples.jsonl"]
    return {path.relative_to(run.root).as_posix(): path.read_bytes() for path in files}
