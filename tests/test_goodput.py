from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.base.errors import InputError
from autoplan.cost.goodput import (
    DEVICE_MTBF_S,
    Reliability,
    daly_interval_s,
    expected_wall_s,
    usable_share,
    young_interval_s,
)

LLAMA = {"mtbf_s": 11160.0, "checkpoint_s": 60.0}


def simulated_wall_s(work_s: float, interval_s: float, mtbf_s: float, checkpoint_s: float, restart_s: float) -> float:
    """A run with failures drawn one by one: what was done since the last checkpoint is lost."""
    random = np.random.default_rng(5)
    now = done = 0.0
    while done < work_s:
        part = min(interval_s, work_s - done) + checkpoint_s
        while (lives := random.exponential(mtbf_s)) < part:
            now += lives
            while (lives := random.exponential(mtbf_s)) < restart_s:  # it may fail again before its first step
                now += lives
            now += restart_s
        now += part
        done += interval_s
    return now


def test_intervals_of_a_job_that_fails_every_three_hours() -> None:
    """16,384 H100 of Llama 3 405B: the worked numbers of `modelling` F."""
    assert young_interval_s(**LLAMA) == pytest.approx(1157.2, abs=0.05)
    young, daly = young_interval_s(**LLAMA), daly_interval_s(**LLAMA)
    assert daly == pytest.approx(1117.6, abs=0.05)
    assert 1 / expected_wall_s(1.0, young, restart_s=600.0, **LLAMA) == pytest.approx(0.852704, abs=5e-7)
    assert 0.8527 < 1 / expected_wall_s(1.0, daly, restart_s=600.0, **LLAMA) < 0.8528
    assert 1 - 60 / young - (young / 2 + 600) / 11160 == pytest.approx(0.8425, abs=5e-5)  # first order


def test_wall_time_is_that_of_a_simulation() -> None:
    daly = daly_interval_s(**LLAMA)
    simulated = simulated_wall_s(2000 * daly, daly, restart_s=600.0, **LLAMA)
    assert expected_wall_s(2000 * daly, daly, restart_s=600.0, **LLAMA) == pytest.approx(simulated, rel=0.01)


def test_failures_of_llama_3() -> None:
    """419 interruptions in 54 days on 16,384 devices: one in 3.09 hours."""
    assert Reliability().mtbf_s(16384) / 3600 == pytest.approx(3.09, abs=0.005)
    assert pytest.approx(5.07e4, rel=1e-3) == DEVICE_MTBF_S / 3600
    assert 0.8 < Reliability().goodput(16384) < 0.9
    # A checkpoint that stalls the run for 3 s and hot spares bring it above the 90 % that Meta reports.
    assert Reliability(checkpoint_s=3, restart_s=300).goodput(16384) > 0.9


@settings(max_examples=50, deadline=None)
@given(st.floats(600, 1e7), st.floats(0.5, 600), st.floats(1, 1800))
def test_no_interval_is_much_better_than_dalys(mtbf_s: float, checkpoint_s: float, restart_s: float) -> None:
    rest = {"mtbf_s": mtbf_s, "checkpoint_s": checkpoint_s, "restart_s": restart_s}
    own = expected_wall_s(1.0, daly_interval_s(mtbf_s, checkpoint_s), **rest)
    tried = np.geomspace(checkpoint_s / 10, 10 * mtbf_s, 400)
    assert own <= min(expected_wall_s(1.0, float(interval), **rest) for interval in tried) * 1.01


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 200_000), st.integers(2, 10), st.floats(1, 300), st.floats(10, 3600))
def test_goodput_falls_with_devices_checkpoints_and_restarts(
    devices: int, times: int, checkpoint_s: float, restart_s: float
) -> None:
    policy = Reliability(checkpoint_s=checkpoint_s, restart_s=restart_s)
    assert 0 < policy.goodput(devices * times) < policy.goodput(devices) < 1
    assert policy.goodput(devices) > Reliability(checkpoint_s=checkpoint_s, restart_s=2 * restart_s).goodput(devices)
    assert policy.goodput(devices) > Reliability(checkpoint_s=2 * checkpoint_s, restart_s=restart_s).goodput(devices)


@pytest.mark.parametrize(("tensor", "share"), [(8, 99.2), (16, 98.4), (32, 96.8), (64, 93.6)])
def test_lost_devices_stop_their_tensor_groups_or_their_replicas(tensor: int, share: float) -> None:
    """S37: 33 of 32,768 devices lost, each in another group; every replica of 1,024 devices loses one."""
    assert 100 * usable_share(32768, 33, tensor) == pytest.approx(share, abs=0.05)
    assert usable_share(32768, 33, 1024) == 0.0


def test_a_run_without_progress_is_refused() -> None:
    with pytest.raises(InputError, match="no progress"):
        Reliability(device_mtbf_s=3600.0).goodput(10_000)
    assert math.isinf(expected_wall_s(1.0, 60.0, 1.0, 60.0, 600.0))
    with pytest.raises(InputError, match="restart_s"):
        Reliability(restart_s=0.0)
