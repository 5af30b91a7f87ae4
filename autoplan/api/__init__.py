"""The functions behind the public names of `autoplan`, and behind every command: one module for each task.

They take keyword arguments with plain values or loaded objects, and return objects; none of them prints.  Errors that a
user can fix are `AutoplanError`s, other things a user should know are `AutoplanWarning`s.  Long-running functions take
a `progress` callback.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING

from autoplan.base.lazy import module_loader

if TYPE_CHECKING:
    from autoplan.api import calibrations as calibrations
    from autoplan.api import compare as compare
    from autoplan.api import database as database
    from autoplan.api import discovery as discovery
    from autoplan.api import doctor as doctor
    from autoplan.api import estimate as estimate
    from autoplan.api import explain as explain
    from autoplan.api import export as export
    from autoplan.api import health as health
    from autoplan.api import launch_files as launch_files
    from autoplan.api import listing as listing
    from autoplan.api import measured_runs as measured_runs
    from autoplan.api import mixed as mixed
    from autoplan.api import open_ranking as open_ranking
    from autoplan.api import outputs as outputs
    from autoplan.api import page as page
    from autoplan.api import plan_files as plan_files
    from autoplan.api import plan_result as plan_result
    from autoplan.api import plan_run as plan_run
    from autoplan.api import problem as problem
    from autoplan.api import profile_job as profile_job
    from autoplan.api import profiling as profiling
    from autoplan.api import record_facts as record_facts
    from autoplan.api import replan as replan
    from autoplan.api import results as results
    from autoplan.api import schemas as schemas
    from autoplan.api import search as search
    from autoplan.api import serving as serving
    from autoplan.api import team as team
    from autoplan.api import timings as timings
    from autoplan.api import topology as topology
    from autoplan.api import traces as traces
    from autoplan.api import tracking as tracking
    from autoplan.api import training_run as training_run
    from autoplan.api import tuning as tuning
    from autoplan.api import what_if as what_if

__getattr__: Callable[[str], ModuleType] = module_loader(__name__)
