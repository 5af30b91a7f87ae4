"""Settings of all tests.  Property tests are not timed, since a busy machine must not fail them; slow files come first.

GPUs are seen by tests marked so alone, in a run of these: `pytest -m gpu`.  The ranks of all others are the host's, of
which there are as many as a test asks for.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# The same examples in every run, so that a change is judged by what it changes; `make hunt` draws others.
settings.register_profile("same", deadline=None, max_examples=25, derandomize=True)
settings.register_profile("hunt", deadline=None, max_examples=50)
settings.load_profile("same")

# Real ranks, other programs, pages in a browser.  What begins last would keep one worker busy when the others are done.
SLOW = (
    *("test_crew", "test_oracle", "test_parallel_four_ranks", "test_profile_job", "test_health", "test_docs"),
    *("test_mixed_search", "test_cli_profile", "test_workers", "test_cli_run", "test_sweep", "test_tune"),
    *("test_parallel_two_ranks", "test_trainer", "test_jobs_scheduler", "test_measurement_value", "test_journeys"),
)
# Many plans that are searched, priced, exported and read, which `make hunt` does with others: not marked as slow.
LONG = (
    *("test_benchmark_round_trips", "test_search_to", "test_store", "test_calibration", "test_cli", "test_cli_db"),
    *("test_torchtitan", "test_served", "test_state_types", "test_estimate", "test_front", "test_api", "test_study"),
    *("test_huggingface", "test_page", "test_mixed_equality", "test_sizes", "test_fsdp2", "test_benchmark_fuzz"),
)
FIRST = (*SLOW, *LONG)


def pytest_configure(config: pytest.Config) -> None:
    """Let pytest-xdist keep the order, since its own begins with the files of most tests; hide what is not tested.

    A shell starts background commands with SIGINT ignored, which the programs that tests interrupt would inherit.
    """
    config.option.loadscopereorder = False
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["HF_HUB_OFFLINE"] = "1"
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """Return one worker more than there are cores for `-n auto`: tests of ranks and jobs wait a third of their time."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    # In a container or an allocation, those that this process may use.
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return num_cores + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the files of slow tests, and begin with those that take longest."""
    for item in items:
        if item.path.stem in SLOW:
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: FIRST.index(item.path.stem) if item.path.stem in FIRST else len(FIRST))


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty database of either kind."""
    from stores import postgres_schema

    if request.param == "sqlite":
        yield str(tmp_path / "timings.db")
        return
    with postgres_schema() as place:
        yield place
