"""Property tests are not timed: a busy machine must not fail them.  Files that take long come first.

GPUs are seen by tests marked so alone, in a run of these: `pytest -m gpu`.  The ranks of all others are the host's, of
which there are as many as a test asks for.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

settings.register_profile("untimed", deadline=None, max_examples=50)  # others are drawn in every run
settings.load_profile("untimed")

# Real ranks, other programs, pages in a browser.  What begins last would keep one worker busy when the others are done.
LONG = (
    *("test_ranks_of_four", "test_launch", "test_oracle", "test_ranks_of_two", "test_run", "test_trainer"),
    *("test_scheduler_jobs", "test_docs", "test_workers", "test_tune", "test_sweep", "test_worth", "test_profile"),
)


def pytest_configure(config: pytest.Config) -> None:
    """Let pytest-xdist keep the order, since its own begins with the files of most tests; hide what is not tested."""
    config.option.loadscopereorder = False
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest."""
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))
