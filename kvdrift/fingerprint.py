"""On what machine, with what versions: what makes a measurement another measurement. Told without loading torch."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from kvdrift.config import ConfigError, Profile

BACKENDS = ("definition", "native", "cuda")


def check_device(device: str, gpu: str | None, torch_version: str | None) -> str:
    """`auto` resolved to cpu or cuda. Raises ConfigError for `cuda` without a GPU, or a torch that can't use it."""
    usable = gpu is not None and not (torch_version or "").endswith("+cpu")
    if device == "cuda" and not usable:
        reason = "nvidia-smi shows no GPU" if gpu is None else f"torch {torch_version} has no CUDA in it"
        raise ConfigError(f"device is 'cuda', but {reason}; allowed here: cpu, auto. Set it in conf/profile/.")
    return ("cuda" if usable else "cpu") if device == "auto" else device


def device_fingerprint(profile: Profile, chunk_tokens: int) -> dict[str, Any]:
    """What makes a measurement on another machine, or set up otherwise, another measurement. Raises ConfigError.

    `KVDRIFT_FAKE_DRIVER` stands in for the driver's version.
    """
    gpu, driver = _gpu()
    device = check_device(profile.device, gpu, _version("torch"))
    cpu, flags = _cpu()
    compiler = (_output("c++", "--version") or "").partition("\n")[0] or None
    if compiler is None:
        print("warning: no C++ compiler `c++` on PATH; the CPU runs the slow torch definition", file=sys.stderr)
    return {
        "device": device,
        "gpu": gpu,
        "driver": os.environ.get("KVDRIFT_FAKE_DRIVER") or driver,
        "cuda_runtime": _version("nvidia-cuda-runtime") if device == "cuda" else None,
        "cpu": cpu,
        "cpu_flags": flags,
        "compiler": compiler,
        "backend": resolve_backend(device, compiler),
        "threads": profile.threads,
        "scheduler": {"batching": "static", "chunk_tokens": chunk_tokens},
    }


def resolve_backend(device: str, compiler: str | None) -> str:
    """The kernels that `kvdrift.kernels.dispatch` will choose, told without torch. Raises ConfigError."""
    chosen = os.environ.get("KVDRIFT_BACKEND") or {"cpu": "native", "cuda": "cuda"}[device]
    if chosen not in BACKENDS:
        raise ConfigError(f"KVDRIFT_BACKEND is {chosen!r}; allowed: {', '.join(BACKENDS)}. Unset it to go by device.")
    runs = {"definition": True, "native": device == "cpu" and compiler is not None, "cuda": device == "cuda"}
    return chosen if runs[chosen] else "definition"


def software_fingerprint() -> dict[str, str | None]:
    """The versions that a result depends on."""
    names = {"torch": "torch", "transformers": "transformers", "cupy": "cupy-cuda13x", "kvdrift": "kvdrift"}
    return {name: _version(package) for name, package in names.items()}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _gpu() -> tuple[str | None, str | None]:
    """Name and driver of the first GPU."""
    found = _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    name, _, driver = (found or "").partition("\n")[0].partition(", ")
    return name or None, driver or None


def _cpu() -> tuple[str, str]:
    """Model name, and a hash over its instruction set flags."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else (_output("sysctl", "-a") or "")
    name = re.search(r"^(?:model name|machdep.cpu.brand_string)\s*:\s*(.*)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features|machdep.cpu.features)\s*:\s*(.*)$", text, re.MULTILINE)
    listed = " ".join(sorted(flags[1].split())) if flags else ""
    return name[1] if name else "unknown", hashlib.sha256(listed.encode()).hexdigest()[:12]
