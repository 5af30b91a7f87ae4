"""Are quantities checked, converted and written as their names say?"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoplan.base.errors import InputError
from autoplan.base.units import (
    FILE_UNITS,
    GIB,
    MIB,
    check_count,
    check_fraction,
    check_name,
    check_not_negative,
    check_positive,
    file_keys,
    format_bytes,
    format_flops,
    format_percent,
    format_rate,
    format_seconds,
)


@pytest.mark.parametrize(
    ("field", "key"),
    [
        ("memory_bytes", "memory_gib"),
        ("nic_bytes_per_s", "nic_gb_per_s"),
        ("peak_flops_per_s", "peak_tflops"),
        ("latency_s", "latency_us"),
        ("tdp_w", "tdp_w"),
        ("num_devices", "num_devices"),
        ("price_per_device_hour", "price_per_device_hour"),
    ],
)
def test_a_field_is_written_under_its_human_unit(field: str, key: str) -> None:
    assert file_keys(field)[0] == key
    assert file_keys(field)[-1] == field


def test_binary_sizes_are_powers_of_two_and_rates_are_decimal() -> None:
    assert (MIB, GIB) == (1024**2, 1024**3)
    factors = {human: factor for human, _, factor in FILE_UNITS}
    assert factors["_gib"] == 2**30
    assert factors["_mib"] == 2**20
    assert factors["_gb_per_s"] == 1e9
    assert factors["_tflops"] == 1e12


def test_every_file_unit_is_offered_for_its_field() -> None:
    for human, inside, _ in FILE_UNITS:
        assert "size" + human in file_keys("size" + inside)


@pytest.mark.parametrize("value", [0, -1, 10**9 + 1])
def test_a_count_outside_its_range_is_refused_with_the_range_and_the_value(value: int) -> None:
    with pytest.raises(InputError, match=rf"num_nodes must be between 1 and 1000000000, got {value}"):
        check_count("num_nodes", value)


def test_a_count_at_its_bounds_is_accepted() -> None:
    check_count("layers", 0, at_least=0)
    check_count("layers", 7, at_least=7, at_most=7)
    check_count("layers", 10**9)


@pytest.mark.parametrize("value", [0.0, -0.0, -1.0, math.nan, math.inf, -math.inf])
def test_a_quantity_that_is_not_positive_and_finite_is_refused(value: float) -> None:
    with pytest.raises(InputError, match="bandwidth must be a positive finite number"):
        check_positive("bandwidth", value)


@pytest.mark.parametrize("check", [check_positive, check_fraction, check_not_negative])
def test_a_quantity_whose_products_would_overflow_is_refused(check: Callable[[str, float], None]) -> None:
    value = 1.1e30 if check is check_not_negative else 0.9e-30
    with pytest.raises(InputError, match=r"latency must (be in \[1e-30, 1e\+30\]|be at most 1e\+30), got"):
        check("latency", value)


@given(st.floats(min_value=1e-30, max_value=1e30))
def test_every_positive_finite_quantity_is_accepted(value: float) -> None:
    check_positive("bandwidth", value)


@pytest.mark.parametrize("value", [0.0, -0.1, 1.0000001, math.nan, math.inf])
def test_a_share_outside_zero_and_one_is_refused(value: float) -> None:
    with pytest.raises(InputError, match="efficiency must be above 0 and at most 1"):
        check_fraction("efficiency", value)


@given(st.floats(min_value=1e-30, max_value=1))
def test_every_share_is_accepted(value: float) -> None:
    check_fraction("efficiency", value)


@pytest.mark.parametrize("value", [-1e-9, math.nan, math.inf, -math.inf])
def test_an_amount_that_is_negative_or_not_finite_is_refused(value: float) -> None:
    check_not_negative("forward_s", 0.0)
    with pytest.raises(InputError, match="forward_s must be finite and not negative, got"):
        check_not_negative("forward_s", value)


@pytest.mark.parametrize("name", ["", "  ", "a\nb", "a\tb", "\x1b[31mred", "\u202eleft"])
def test_a_name_that_does_not_show_on_one_line_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="name must be printable text and not empty"):
        check_name("name", name)


def test_any_printable_name_is_accepted() -> None:
    check_name("name", "Käse 3 (lab)")


def test_bytes_are_shown_in_gib() -> None:
    assert format_bytes(71.34 * GIB) == "71.3 GiB"
    assert format_bytes(0) == "0.0 GiB"
    assert format_bytes(2048 * GIB) == "2,048.0 GiB"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1234.56, "1,234.6 s"), (7.314, "7.31 s"), (0.4123, "412.3 ms"), (5.5e-5, "55.0 us"), (0.0, "0.0 us")],
)
def test_seconds_are_shown_in_the_unit_that_reads_best(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf])
def test_a_time_that_is_not_finite_is_shown_as_a_dash(seconds: float) -> None:
    assert format_seconds(seconds) == "-"


@given(st.floats(min_value=1e-6, max_value=1e5))
def test_a_shown_time_keeps_three_figures_from_a_microsecond_up(seconds: float) -> None:
    number, unit = format_seconds(seconds).split(" ")
    shown = float(number.replace(",", "")) * {"s": 1.0, "ms": 1e-3, "us": 1e-6}[unit]
    assert math.isclose(shown, seconds, rel_tol=0.051)


def test_a_fraction_is_shown_in_percent() -> None:
    assert format_percent(0.4567) == "45.7 %"


@pytest.mark.parametrize(
    ("value", "text"),
    [(989.5e12, "990 TFLOP/s"), (2.5e15, "2,500 TFLOP/s"), (1e12, "1.00 TFLOP/s"), (0.16e12, "160 GFLOP/s")],
)
def test_a_peak_has_three_figures_or_more(value: float, text: str) -> None:
    assert format_flops(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(47e9, "47.0 GB/s"), (1.44e9, "1.44 GB/s"), (450e9, "450 GB/s"), (99.96e9, "100 GB/s"), (3.008e12, "3.01 TB/s")],
)
def test_a_rate_has_three_figures(value: float, text: str) -> None:
    assert format_rate(value) == text
