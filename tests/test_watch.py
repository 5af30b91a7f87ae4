"""Does a watch over a run look at the devices of the run, and say what disturbed it?"""

from __future__ import annotations

import pytest

from autoplan.profiler.machine import hardware
from autoplan.profiler.machine.watch import DeviceSample, conditions


class Nvml:
    """NVML of three GPUs, as it answers in Python."""

    NVMLError = RuntimeError

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802 - as the library calls it
        return 3

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetPciInfo(self, handle: int) -> None:  # noqa: N802
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:  # noqa: N802
        if uuid != "GPU-c":
            raise self.NVMLError("not found")
        return 2


@pytest.mark.parametrize(
    ("variable", "handles"),
    [(None, [0, 1, 2]), ("1", [1]), ("2,0", [2, 0]), ("GPU-c", [2]), ("MIG-a", [0, 1, 2]), ("", []), ("-1", [])],
)
def test_the_gpus_of_a_run_are_those_that_it_sees(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, handles: list[int]
) -> None:
    monkeypatch.setattr(hardware, "nvml", Nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert hardware.visible_nvidia_handles() == handles


def test_a_watch_over_a_run_says_what_disturbed_it() -> None:
    calm = DeviceSample(slowdown="", clock_mhz=1755, power_w=650, foreign=0.0)
    hot = DeviceSample(slowdown="hardware thermal", clock_mhz=1200, power_w=500, foreign=0.0)
    assert conditions([calm] * 20, None) == ({"clock_mhz": "1755", "power_w": "650", "other_load": "0.0 %"}, "")
    found, disturbance = conditions([calm] * 8 + [hot] * 2, None)
    assert found["slowdown"] == "hardware thermal at 20 % of 10 looks"
    assert disturbance == "devices slowed down: hardware thermal at 20 % of 10 looks"
    ran_on_cores = {"other_load": "31.0 %"}, "other load took 31 % of the machine"
    assert conditions([], 0.31) == conditions([calm] * 20, 0.31) == ran_on_cores
    assert conditions([], 0.03)[1] == conditions([], None)[1] == ""
