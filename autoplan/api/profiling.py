"""Profiles: timings of a model's operations on this machine or allocation, stored in the timing database."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from autoplan.api.outputs import PlannedMeasurement, PlannedMeasurements, Profiled
from autoplan.api.plan_run import EMULATION
from autoplan.api.problem import load_cluster, load_framework, load_model
from autoplan.api.timings import machine_of, opened_store
from autoplan.base.errors import InputError, NoStoreError
from autoplan.base.units import check_count
from autoplan.base.user import user_name
from autoplan.base.values import parse_duration, parse_numbers, parse_words
from autoplan.profiler.crew import Crew, place_with
from autoplan.profiler.expected import expected_hello
from autoplan.profiler.machine.hardware import emulates_bf16
from autoplan.profiler.protocol import Hello, Job
from autoplan.profiler.record import Mode
from autoplan.profiler.shipped_kernels import COMPILED, SHIPPED
from autoplan.profiler.store import Store, open_store
from autoplan.profiler.sweep import Progress, extrapolations, outliers
from autoplan.profiler.sweep import run as sweep
from autoplan.profiler.tasks import MeasurementScope, RankedTask, TaskKey, ranked_tasks, unmeasurable_parts
from autoplan.spec.framework import Framework
from autoplan.spec.model import ModelSpec
from autoplan.spec.operations import GIVEN_KERNELS, LAYERS, MOE_LAYERS, NARROW_MODULES, SHAPES, Operation
from autoplan.spec.search_result import RankedPlan
from autoplan.topology.cluster import ClusterSpec

if TYPE_CHECKING:  # Optuna, which a profile of a model does not need
    from autoplan.api.open_ranking import OpenRanking
    from autoplan.search.measurement_value import MeasurementAdvice


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """Options of a profile; lists and times are texts: "1,2", "10m"."""

    db: str | None = None  # path or URL of the timing database; None: AUTOPLAN_DB, else the user's own
    budget: str = "10m"
    seq_len: int = 4096
    tp: str | None = None  # tensor-parallel degrees; None: powers of two in a node
    micro_batches: str = "1,2"
    ep: str = "8"
    dtypes: str | None = None  # None: what the device trains in
    mode: str = "sustained"
    only: str | None = None  # operations; None: all
    cluster: str | None = None  # that the job will run on: says what is extrapolated
    framework: str | Path | Framework = "megatron-core"
    ranks: int = 0  # to start here; 0: one for each device
    allowance: str = "3s"  # for one measurement to settle
    visits: int = 1
    limit: str = "2m"  # after which a rank counts as hung
    kernels: tuple[str, ...] = ()  # OPERATION=MODULE:NAME, timed in place of torch's


@dataclass(slots=True, kw_only=True)
class PlannedProfile:
    """Measurements that are planned for ranks that have met, or that would meet on a cluster."""

    tasks: list[RankedTask]
    num_known: int  # measurements that the database has
    budget_s: float
    num_visits: int
    advice: MeasurementAdvice | None  # how sure the order of the plans is, where these say what is measured
    remarks: list[str]  # what a user should know of this machine before
    hello: Hello

    @property
    def expected_s(self) -> float:
        """Seconds that all visits take on a quiet machine."""
        return self.num_visits * sum(ranked.expected_s for ranked in self.tasks)

    def output(self) -> PlannedMeasurements:
        """Return what --dry-run prints as JSON."""
        advice = self.advice
        return PlannedMeasurements(
            device=self.hello.fingerprint.device,
            ranks=len(self.hello.hosts),
            nodes=self.hello.num_nodes,
            expected_s=self.expected_s,
            budget_s=self.budget_s,
            known=self.num_known,
            sure=None if advice is None else advice.probability,
            sure_after=None if advice is None else advice.expected_probability,
            measurements=tuple(
                PlannedMeasurement(
                    operation=ranked.task.operation,
                    shape=ranked.task.shape,
                    dtype=ranked.task.dtype,
                    kernel=ranked.task.kernel,
                    mode=ranked.task.mode,
                    expected_s=self.num_visits * ranked.expected_s,
                )
                for ranked in self.tasks
            ),
        )


@dataclass(slots=True, kw_only=True)
class Profile(PlannedProfile):
    """Measurements that are planned on ranks that have met, and their progress."""

    progress: Progress
    _crew: Crew
    _store: Store
    _open_ranking: OpenRanking | None = field(default=None)

    def measure(self, advance: Callable[[Progress], None] = lambda progress: None) -> Progress:
        """Measure within the budget; every measurement is stored as soon as it is there."""
        sweep(
            self._crew,
            self.hello,
            self._store,
            self.tasks,
            budget_s=self.budget_s,
            progress=self.progress,
            advance=advance,
            measured_by=user_name(),
            num_visits=self.num_visits,
        )
        return self.progress

    def settled(self) -> tuple[MeasurementAdvice, list[RankedPlan]] | None:
        """Return how sure the order of the plans is now, and that order; None where no plans say what is measured."""
        if self._open_ranking is None:
            return None
        self._open_ranking.reload()
        after, _ = self._open_ranking.planned(self.hello, self._store.measured_keys(self.hello.fingerprint))
        return after, self._open_ranking.ranking()


def profile(
    model: str | Path | ModelSpec | None = None,
    *,
    plan_file: str | Path | None = None,
    options: ProfileOptions | None = None,
    advance: Callable[[Progress], None] = lambda progress: None,
) -> Progress | None:
    """Measure the kernels and collectives that plans for `model` consist of, and store them.

    With `plan_file`, the plan file of a search, only what could make another plan win is measured.  Runs on one node,
    or under torchrun, srun or mpirun with one rank per device; ranks other than the first return None.  What the
    database already has is not measured again.  `advance` is called after every measurement.

    Raises InputError for arguments that cannot be used, and CrewError if ranks are lost.
    """
    with started_profile(model, plan_file=plan_file, options=options or ProfileOptions()) as started:
        return started.measure(advance) if started else None


def progress_output(progress: Progress) -> Profiled:
    """Return what `autoplan profile` prints as JSON."""
    outcomes = {str(operation): dict(counts) for operation, counts in progress.counts().items()}
    return Profiled(planned=progress.total, outcomes=outcomes, elapsed_s=progress.elapsed_s, left=progress.num_left)


def planned_profile(
    model: str | Path | ModelSpec | None = None,
    *,
    plan_file: str | Path | None = None,
    options: ProfileOptions | None = None,
    num_nodes: int = 0,
) -> PlannedProfile:
    """Return what `profile` would measure on this many nodes of a cluster, 0: on all, without any of its devices.

    The cluster is that of the plan file, or of `options`.  With a plan file it tells as well how sure the order of its
    plans is and what the measurements are expected to settle.

    Raises InputError where something that was given cannot be used.
    """
    options = options or ProfileOptions()
    purpose = _purpose(model, plan_file, options)
    cluster = purpose.cluster
    if cluster is None:
        raise InputError("give the plan file of a search, or --cluster: it says which devices there would be")
    check_count("--nodes", num_nodes, at_least=0)
    if num_nodes > cluster.num_nodes:
        raise InputError(f"--nodes {num_nodes}: the cluster has {cluster.num_nodes}")
    machine, measured_keys = None, set[TaskKey]()
    with suppress(NoStoreError), opened_store(options.db, writable=False) as store:
        machine = machine_of(cluster, store)
        measured_keys = store.measured_keys(machine, options.visits) if machine else measured_keys
    hello = expected_hello(
        cluster,
        machine,
        measured_keys,
        dtypes=purpose.dtypes,
        num_nodes=num_nodes,
        layer_kernels=purpose.framework.layer_kernels,
    )
    return _planned(purpose, hello, measured_keys, options)


def _planned(purpose: _Purpose, hello: Hello, measured: Collection[TaskKey], options: ProfileOptions) -> PlannedProfile:
    advice = None
    if purpose.open_ranking is not None:
        advice, tasks = purpose.open_ranking.planned(hello, measured)
        scope = purpose.open_ranking.scope
    else:
        assert purpose.scope is not None
        scope = purpose.scope
        if not scope.tps:
            max_degree = purpose.cluster.devices_per_node if purpose.cluster else len(hello.hosts)
            scope = replace(scope, tps=tuple(degree for degree in scope.degrees() if degree <= max_degree))
        tasks = ranked_tasks(scope, hello, measured)
    return PlannedProfile(
        tasks=tasks,
        num_known=len(measured),
        budget_s=parse_duration(options.budget),
        num_visits=options.visits,
        advice=advice,
        remarks=_remarks(hello, scope, purpose.cluster),
        hello=hello,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Purpose:
    """Purpose of a profile: a model, or the plans of a file that may be the fastest."""

    cluster: ClusterSpec | None
    dtypes: tuple[str, ...]
    scope: MeasurementScope | None
    open_ranking: OpenRanking | None

    @property
    def framework(self) -> Framework:
        """Framework of the plans."""
        if self.open_ranking is not None:
            return self.open_ranking.file.framework
        assert self.scope is not None
        return self.scope.framework


def _purpose(model: str | Path | ModelSpec | None, plan_file: str | Path | None, options: ProfileOptions) -> _Purpose:
    """Read what was given."""
    check_count("--visits", options.visits)
    for text in (options.budget, options.allowance, options.limit):  # before a rank or a job starts
        parse_duration(text)
    cluster = load_cluster(options.cluster) if options.cluster else None
    modes: tuple[Mode, ...] = parse_words(options.mode, "--mode", ("sustained", "burst"))  # type: ignore[assignment]
    scope: MeasurementScope | None = None
    open_ranking: OpenRanking | None = None
    if plan_file is not None:
        from autoplan.api.open_ranking import OpenRanking  # brings Optuna

        open_ranking = OpenRanking(Path(plan_file), options.db, modes)
        cluster, dtypes = open_ranking.file.cluster, open_ranking.dtypes
    elif model is None:
        raise InputError("give a model, or the plan file of a search")
    else:
        scope = _scope(model, options, modes)
        # As plans are made for the built-in trainer unless told otherwise, on every device.
        dtypes = ("bf16",) if scope.framework.is_trainer else ()
    if options.dtypes:
        dtypes = parse_words(options.dtypes, "--dtypes", ("bf16", "fp16", "fp32", *NARROW_MODULES))
    return _Purpose(cluster=cluster, dtypes=dtypes, scope=scope, open_ranking=open_ranking)


@contextmanager
def started_profile(
    model: str | Path | ModelSpec | None, *, plan_file: str | Path | None, options: ProfileOptions
) -> Iterator[Profile | None]:
    """Start ranks, yield what they will measure, None on others than the first, and end them whatever happens."""
    place, num_ranks = place_with(options.ranks)
    purpose = _purpose(model, plan_file, options)
    job = Job(
        dtypes=purpose.dtypes,
        allowance_s=parse_duration(options.allowance),
        limit_s=parse_duration(options.limit),
        devices_per_domain=purpose.cluster.levels[-1].num_devices if purpose.cluster else 0,
        kernels=_named_kernels(options.kernels, purpose.framework),
        layer_kernels=purpose.framework.layer_kernels,
    )
    with Crew(job, place, num_ranks) as crew:
        if not crew.leads:
            crew.start()
            crew.follow()
            yield None
            return
        # The database first: what is wrong with it shall be known before any rank starts.
        with open_store(options.db) as store:
            hello = crew.start()
            assert hello is not None
            planned = _planned(purpose, hello, store.measured_keys(hello.fingerprint, options.visits), options)
            yield Profile(
                **{field.name: getattr(planned, field.name) for field in fields(PlannedProfile)},
                progress=Progress(total=len(planned.tasks)),
                _crew=crew,
                _store=store,
                _open_ranking=purpose.open_ranking,
            )


def _named_kernels(texts: Sequence[str], framework: Framework) -> dict[Operation, str]:
    """Return the kernels that were named, by operation; paths are whole, as ranks may start elsewhere.

    Layers of a library only if it is the framework of the plans: no other plans run them.
    """
    named: dict[Operation, str] = {}
    layers = (LAYERS[0], MOE_LAYERS[0])
    for text in texts:
        operation, equals, name = text.partition("=") if "=" in text else ("", "", text)
        plain = name.removesuffix(COMPILED)
        suffix, shipped = name.removeprefix(plain), SHIPPED.get(plain, {})
        runs_layers = framework.layer_kernels.startswith(plain)
        if operation in layers and operation in shipped and not runs_layers:
            raise InputError(f"--kernel {text}: no plan for {framework.name} runs it: name its own with --framework")
        if served := [
            known for known in shipped if (known == operation if equals else runs_layers or known not in layers)
        ]:
            named |= {known: f"{shipped[known]}{suffix}" for known in served}
            continue
        place, _, attribute = plain.rpartition(":")
        if operation not in GIVEN_KERNELS or not place or not attribute.isidentifier():
            raise InputError(
                f"--kernel {text!r}: write OPERATION=MODULE:NAME or OPERATION=FILE.py:NAME, with one of "
                f"{', '.join(GIVEN_KERNELS)}, or a library: {', '.join(SHIPPED)}"
            )
        named[operation] = f"{Path(place).resolve()}:{attribute}{suffix}" if place.endswith(".py") else name
    return named


def _scope(model: str | Path | ModelSpec, options: ProfileOptions, modes: Sequence[Mode]) -> MeasurementScope:
    return MeasurementScope(
        model=load_model(model),
        framework=load_framework(options.framework),
        seq_len=options.seq_len,
        tps=parse_numbers(options.tp, "--tp") if options.tp else (),
        micro_batches=parse_numbers(options.micro_batches, "--micro-batches"),
        eps=parse_numbers(options.ep, "--ep"),
        modes=tuple(modes),
        only=parse_words(options.only, "--only", SHAPES) if options.only else (),  # type: ignore[arg-type]
    )


def _remarks(hello: Hello, scope: MeasurementScope, cluster: ClusterSpec | None) -> list[str]:
    """Say what stands in the way or is left out."""
    remarks = [*outliers(hello), *(extrapolations(hello, cluster) if cluster else [])]
    if hello.device_type == "cpu" and "bf16" in hello.dtypes and emulates_bf16():
        remarks.append(f"{EMULATION}: measure with --dtypes fp32, and plan with --precision fp32")
    return [*remarks, *(f"not measured: {part}" for part in unmeasurable_parts(scope))]
