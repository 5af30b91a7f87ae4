"""Devices that are shipped, and tables of a user's own that leave figures out."""

from __future__ import annotations

import math
import re
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoplan.base.errors import InputError
from autoplan.base.files import decode
from autoplan.base.units import GIB
from autoplan.readers.cluster import load_cluster
from autoplan.readers.device import UNMEASURED_SPREAD, completed, device_table, load_device, preset_devices
from autoplan.topology.cluster import DeviceSpec

CARD = {"name": "my card", "memory_gib": 24, "memory_bandwidth_gb_per_s": 1000, "peak_tflops": {"bf16": 160}}


def device_of(table: dict[str, Any]) -> DeviceSpec:
    return decode(DeviceSpec, completed(table, "card.toml"), "card.toml")


def test_a_datasheet_is_enough_and_the_most_similar_device_gives_the_rest() -> None:
    device, similar = device_of(CARD), load_device("rtx-4090")
    assert similar is not None
    assert (device.name, device.generation, device.gemm_efficiency) == ("my card", "ada", similar.gemm_efficiency)
    assert device.memory_bytes == 24 * GIB
    assert math.isclose(device.visible_memory_bytes, 23.64 * GIB, rel_tol=1e-9)
    # The other peaks stand to bf16 as on the similar card: 330.3 / 165.2 of fp8.
    assert math.isclose(device.peak_flops_per_s["fp8"], 160e12 * 330.3 / 165.2)
    assert device.peak_flops_per_s["bf16"] == 160e12
    assert device.rate_spread == UNMEASURED_SPREAD
    assert device.sources[-1].startswith("figures of rtx-4090 are used for attention, compute_units")


def test_a_file_may_name_the_device_it_is_based_on_and_keeps_what_it_says() -> None:
    device = device_of({**CARD, "based_on": "a100-pcie", "gemm_efficiency": 0.38, "rate_spread": 0.05, "tdp_w": 200})
    assert (device.generation, device.gemm_efficiency, device.tdp_w, device.rate_spread) == ("ampere", 0.38, 200, 0.05)
    # Half of the sustained share of an A100, so that attention and short products reach half of its shares.
    assert math.isclose(device.attention.efficiency, 0.67 / 2)
    assert math.isclose(device.gemm.burst_efficiency, 0.822 / 2)
    assert device.gemm.half_m == 91.5


def test_a_generation_narrows_which_devices_are_similar() -> None:
    assert device_of({**CARD, "generation": "ampere"}).sources[-1].startswith("figures of a30 ")
    with pytest.raises(InputError, match=r"is of vendor cpu.*: leave that out, or name one with based_on"):
        device_of({**CARD, "vendor": "cpu"})


def test_several_peaks_are_all_that_a_device_has() -> None:
    device = device_of({**CARD, "peak_tflops": {"bf16": 160, "fp32": 80}})
    assert device.peak_flops_per_s == {"bf16": 160e12, "fp32": 80e12}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"memory_gib": None, "peak_tflops": None}, "card.toml: missing memory_gib, peak_tflops"),
        ({"memory_gib": None, "speed": 1, "color": 2}, "unknown keys 'speed', 'color' and missing memory_gib; known: "),
        ({"memory_gib": None, "memory_gb": 24}, "unknown key 'memory_gb' (memory_gib?) and missing memory_gib"),
        ({"memory_gib": "24 GiBs"}, "memory_gib '24 GiBs': write a number with its unit, such as 80GB"),
        (
            {"memory_gib": -24, "memory_bandwidth_gb_per_s": 0, "peak_tflops": {"bf17": 1}},
            "memory_gib must be a positive number, got -24; "
            "memory_bandwidth_gb_per_s must be a positive number, got 0; "
            "peak_tflops must be of bf16, fp16, fp8, nvfp4, tf32, fp32, got bf17",
        ),
        ({"peak_tflops": {}}, "peak_tflops must be a table of positive numbers such as { bf16 = 312 }"),
        ({"peak_tflops": 160}, "peak_tflops must be a table of positive numbers"),
        ({"based_on": "a101"}, "based_on names no built-in device: did you mean a10"),
        ({"memory_efficiency": 2}, "memory_efficiency must be above 0 and at most 1"),
        ({"visible_memory_gib": -1}, "visible_memory_gib must be a positive finite number, got -1"),
    ],
)
def test_a_bad_table_is_refused_in_one_line_with_its_own_keys(change: dict[str, Any], says: str) -> None:
    table = {key: value for key, value in {**CARD, **change}.items() if value is not None}
    with pytest.raises(InputError) as caught:
        device_of(table)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@given(
    st.floats(1, 1000),
    st.floats(10, 20000),
    st.floats(1, 10000),
    st.sampled_from(["bf16", "fp16"]),
    st.sampled_from([None, "h100-sxm", "mi300x", "t4"]),
)
def test_every_datasheet_makes_a_device(
    memory_gib: float, gb_per_s: float, tflops: float, precision: str, base: str | None
) -> None:
    table = {"name": "x", "memory_gib": memory_gib, "memory_bandwidth_gb_per_s": gb_per_s} | {
        "peak_tflops": {precision: tflops}
    }
    device = device_of(table | ({"based_on": base} if base else {}))
    assert 0 < device.visible_memory_bytes <= device.memory_bytes
    assert math.isclose(device.peak_flops_per_s[precision], tflops * 1e12)  # type: ignore[index]
    assert device.rate_spread == UNMEASURED_SPREAD


def test_a_box_of_cards_is_a_file_of_three_lines(tmp_path: Path) -> None:
    path = tmp_path / "box.toml"
    path.write_text('name = "box"\ndevice = "rtx-5090"\ndevices_per_node = 4\n')
    box, shipped = load_cluster(str(path)), load_cluster("rtx-5090:1x4")
    assert (box.levels, box.network, box.host) == (shipped.levels, shipped.network, shipped.host)
    # Through host memory, which is shared by four instead of eight: 2 x 16.5 GB/s each.
    assert [(level.num_devices, level.kind) for level in box.levels] == [(4, "shared_memory")]
    assert math.isclose(box.levels[0].efficiency * box.levels[0].rate_bytes_per_s, 33e9, rel_tol=0.01)
    assert box.sources[-1] == "levels, network, host of rtx-5090"


def test_a_cluster_may_name_the_cluster_whose_links_it_has(tmp_path: Path) -> None:
    path = tmp_path / "box.toml"
    path.write_text('name = "box"\nbased_on = "h100-sxm"\ndevice = "h20"\ndevices_per_node = 8\n')
    assert load_cluster(str(path)).levels == load_cluster("h100-sxm").levels
    path.write_text('name = "box"\nbased_on = "h1000"\ndevice = "h20"\ndevices_per_node = 8\n')
    with pytest.raises(InputError, match="based_on names no built-in cluster: did you mean h100-"):
        load_cluster(str(path))


def test_an_unknown_device_of_a_cluster_is_one_line() -> None:
    with pytest.raises(InputError, match=re.escape("x.toml: unknown device 'h1000': did you mean h100-")):
        device_table("h1000", "x.toml")


def datasheet(device: DeviceSpec) -> tuple[float, ...]:
    peaks = [device.peak_flops_per_s.get(precision, 0.0) for precision in ("bf16", "fp16", "fp8")]  # type: ignore[call-overload]
    return (device.memory_bandwidth_bytes_per_s, device.tdp_w, device.compute_units, *peaks)


def sustained_flops_per_s(device: DeviceSpec) -> dict[str, float]:
    wide, narrow = device.gemm_efficiency, device.narrow_gemm_efficiency or device.gemm_efficiency
    shares = {"bf16": wide, "fp16": wide, "fp8": narrow}
    return {name: share * device.peak_flops_per_s.get(name, 0.0) for name, share in shares.items()}  # type: ignore[call-overload]


def test_a_device_with_the_better_datasheet_sustains_no_less() -> None:
    """Rates were measured on different machines, which explains 7 %."""
    devices = [device for name in preset_devices() if (device := load_device(name))]
    for better, lesser in permutations(devices, 2):
        if (better.vendor, better.generation) != (lesser.vendor, lesser.generation):
            continue
        if all(figure >= other for figure, other in zip(datasheet(better), datasheet(lesser), strict=True)):
            rates = sustained_flops_per_s(better)
            for precision, rate in sustained_flops_per_s(lesser).items():
                assert rates[precision] >= 0.93 * rate, (better.name, lesser.name, precision)


@pytest.mark.parametrize(("name", "relative"), [("rubin", "gb300"), ("mi455x", "mi355x")])
def test_announced_devices_say_so_and_are_as_uncertain_as_devices_of_a_minimal_file(name: str, relative: str) -> None:
    device = load_device(name)
    assert device is not None
    assert device.is_announced
    assert device.rate_spread > UNMEASURED_SPREAD
    assert any(source.startswith(f"figures of {relative} are used for ") for source in device.sources)
    assert not any(
        other.is_announced for other in map(load_device, preset_devices()) if other and other.name == relative
    )


def test_announced_devices_are_the_relatives_of_none() -> None:
    sheet = {"name": "next", "memory_gib": 288, "memory_bandwidth_gb_per_s": 22000, "peak_tflops": {"bf16": 4000}}
    sources = completed(sheet, "next.toml")["sources"]
    assert not any("rubin" in source or "mi455x" in source for source in sources)
