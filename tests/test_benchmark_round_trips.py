"""Is what is exported read back, with every option of a plan switched, and would the benchmark notice a loss?"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import autoplan
from autoplan.frameworks.common.launch import Launch

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def trips() -> Iterator[Any]:
    sys.path.insert(0, str(BENCHMARKS))
    import round_trips

    yield round_trips
    sys.path.remove(str(BENCHMARKS))
    for name in ("round_trips", "certificate", "reports"):
        sys.modules.pop(name, None)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_legal_plan_of_any_framework_comes_back_or_is_refused(trips: Any, data: st.DataObject) -> None:
    rules = data.draw(st.sampled_from(sorted(trips.frameworks())))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    problem = trips.draw_problem(rng, rules)
    subject = trips.draw_file(rng, problem) if problem else None
    tally = trips.Tally()
    if subject:
        trips.check(tally, subject)
    assert tally.wrong == []


def test_a_dropped_option_is_told(trips: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"cluster": "h100-sxm:1x8", "global_batch": 64, "seq_len": 2048}
    result = autoplan.estimate("llama3-8b", **place, plan={"recompute": "full"})
    subject = trips.Exported(problem=result.problem, file=result.file)
    assert trips.trip(subject, "megatron-lm", "").outcome == "same"
    reader = trips.reader_of("megatron-lm")

    def forgetful(text: str, given_: Any) -> Launch:
        launch = reader.read(text, given_)
        return replace(launch, plan=replace(launch.plan, recompute="none"))

    monkeypatch.setattr(trips, "reader_of", lambda to: replace(reader, read=forgetful))
    lost = trips.trip(subject, "megatron-lm", "")
    assert (lost.outcome, lost.why) == ("wrong", "other recompute")
