"""Display of results: terminal tables, drawings, the HTML page."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING

from autoplan.base.lazy import module_loader

if TYPE_CHECKING:
    from autoplan.report import answer as answer
    from autoplan.report import cluster as cluster
    from autoplan.report import cluster_drawing as cluster_drawing
    from autoplan.report import compare as compare
    from autoplan.report import estimate as estimate
    from autoplan.report import explain as explain
    from autoplan.report import launch_file as launch_file
    from autoplan.report import markdown as markdown
    from autoplan.report import mixed_search as mixed_search
    from autoplan.report import replan as replan
    from autoplan.report import run_report as run_report
    from autoplan.report import run_trace as run_trace
    from autoplan.report import score as score
    from autoplan.report import terminal as terminal
    from autoplan.report import timing_sources as timing_sources
    from autoplan.report import trace as trace
    from autoplan.report import traffic as traffic
    from autoplan.report import tune as tune
    from autoplan.report import verified as verified

__getattr__: Callable[[str], ModuleType] = module_loader(__name__)
