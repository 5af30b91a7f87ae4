"""Is what libraries of devices tell of their state understood?"""

from __future__ import annotations

import time

import pytest

from autoplan.profiler.machine import hardware, readings, watch


class OneAmd:
    """AMD SMI of a device, as it answers in Python."""

    AmdSmiException = RuntimeError

    def __init__(self, violations: dict[str, object] | None, throttle_status: object = "N/A") -> None:
        self.violations, self.throttle_status = violations, throttle_status

    def amdsmi_get_violation_status(self, handle: int) -> dict[str, object]:
        if self.violations is None:
            raise self.AmdSmiException("not supported")
        return self.violations

    class AmdSmiClkType:
        GFX = "gfx"

    def amdsmi_get_processor_handles(self) -> list[int]:
        return [7]

    def amdsmi_get_clock_info(self, handle: int, kind: str) -> dict[str, object]:
        assert kind == "gfx"
        return {"clk": 2100, "max_clk": 2100}

    def amdsmi_get_power_info(self, handle: int) -> dict[str, object]:
        return {"current_socket_power": "N/A", "average_socket_power": 560}

    def amdsmi_get_gpu_metrics_info(self, handle: int) -> dict[str, object]:
        return {"indep_throttle_status": self.throttle_status}


@pytest.mark.parametrize(
    ("library", "slowdown"),
    [
        (OneAmd({"active_socket_thrm": True, "active_hbm_thrm": True}), "socket thermal, memory thermal"),
        (OneAmd({"active_ppt_pwr": True, "active_socket_thrm": False}), ""),  # at its power cap, as in training
        (OneAmd({"active_socket_thrm": "N/A"}, 1 << 36), "thermal"),  # MI200: TEMP_HOTSPOT
        (OneAmd(None, 1 << 36), "thermal"),
        (OneAmd(None, 0x3), ""),  # PPT0 and PPT1
        (OneAmd(None, 2**64 - 1), ""),  # not supported
        (OneAmd(None), ""),
    ],
)
def test_what_slows_an_amd_device_down_is_told(monkeypatch: pytest.MonkeyPatch, library: OneAmd, slowdown: str) -> None:
    monkeypatch.setattr(readings, "amdsmi", lambda: library)
    assert readings.amd_slowdown(0) == slowdown


def test_a_run_on_amd_devices_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    library = OneAmd({"active_hbm_thrm": True})
    for module in (readings, hardware):
        monkeypatch.setattr(module, "amdsmi", lambda: library)
    monkeypatch.setattr(watch, "SAMPLE_S", 0.01)
    with watch.Watch() as seen:
        time.sleep(0.2)
    samples = seen.samples
    assert set(samples) == {watch.DeviceSample("memory thermal", 2100, 560, None)}
    values, disturbance = watch.conditions(samples, None)
    assert values["clock_mhz"] == "2100"
    assert values["power_w"] == "560"
    assert "other_load" not in values  # its library does not tell
    assert disturbance.startswith("devices slowed down: memory thermal at 100 %")
