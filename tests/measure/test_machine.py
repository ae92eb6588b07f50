"""What a timing was taken on:  pytest tests/measure/test_machine.py"""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest
import torch

from kvdrift.kernels import dispatch
from kvdrift.measure import energy, machine

CPU = torch.device("cpu")


def test_the_state_is_what_the_system_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_freq", lambda: SimpleNamespace(current=2596.12))
    monkeypatch.setattr(psutil, "getloadavg", lambda: (3.456, 0.0, 0.0))
    assert machine.state(CPU) == {"clock_mhz": 2596, "load": 3.46}


@pytest.mark.parametrize("told", [None, SimpleNamespace(current=0.0)], ids=["nothing", "zero"])
def test_a_clock_that_cannot_be_read_is_unavailable_and_never_zero(
    told: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "cpu_freq", lambda: told)
    assert machine.state(CPU)["clock_mhz"] == "unavailable"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without NVML")
def test_without_nvml_a_gpu_has_no_clock() -> None:
    assert energy.gpu_clock(0) is None


def test_the_settings_name_threads_kernels_and_versions() -> None:
    found = machine.settings(CPU)
    assert found["threads"] == torch.get_num_threads()
    assert found["kernel_build"] == dispatch.build_id(CPU)
    assert found["torch"] == torch.__version__
