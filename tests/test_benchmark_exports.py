"""Are answers of searches for a target counted as exported, and is an answer that does not export told?"""

from __future__ import annotations

import numpy as np
import pytest
from exports import outcomes

from autoplan import PlanResult
from autoplan.base.errors import InputError


def test_an_answer_of_a_search_for_a_target_exports() -> None:
    counts = outcomes("accelerate", 1, np.random.default_rng(3))
    assert (counts["answered"], counts["exported"]) == (1, 1)


def test_an_answer_that_does_not_export_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuses(*_: object) -> None:
        raise InputError("cannot be written")

    monkeypatch.setattr(PlanResult, "export", refuses)
    counts = outcomes("accelerate", 1, np.random.default_rng(3))
    assert (counts["answered"], counts["exported"]) == (1, 0)
    assert "cannot be written" in capsys.readouterr().out
