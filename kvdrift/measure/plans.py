"""Read a resolved plan: the policy of `data/plans/<policy>.json`."""

from __future__ import annotations

import json
from pathlib import Path

from kvdrift.policy import CachePolicy, from_dict


def read_plan(folder: Path, policy: str) -> CachePolicy:
    return from_dict(json.loads((folder / f"{policy}.json").read_text()), name=policy)
