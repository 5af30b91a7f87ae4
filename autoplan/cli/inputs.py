"""What do the flags that several commands share mean?  Model, cluster and training flags to a problem and a space."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, get_args

import typer

from autoplan.base.errors import InputError, UnpricedError
from autoplan.spec.enums import Precision

if TYPE_CHECKING:  # heavy modules load when a command runs, not when its help is shown
    from autoplan.profiler.store import Store
    from autoplan.search.space import Space
    from autoplan.spec.framework import Framework
    from autoplan.spec.mixed_problem import MixedProblem
    from autoplan.spec.model import ModelSpec
    from autoplan.spec.problem import Problem
    from autoplan.spec.timing import Calibration, Measurement, Operation
    from autoplan.spec.training import TrainingSpec
    from autoplan.topology.cluster import ClusterSpec
    from autoplan.topology.mixed_cluster import MixedCluster


_SIZE = re.compile(r"(?P<number>[0-9]{1,18}(?:\.[0-9]{1,18})?)\s*(?P<unit>[kmgt]i?b|b)?", re.IGNORECASE)
_SIZE_UNITS = {"b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12}
_SIZE_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def whole_url(context: typer.Context, url: str | None) -> str | None:
    """The database URL as it was typed: `main` lets every argument be parsed without the password in it."""
    whole: dict[str, str] = context.obj or {}
    return whole.get(url, url) if url else None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFlags:
    """The flags of a search that say where its answer goes, as typed."""

    out: Path
    page: Path | None
    force: bool
    json: bool
    quiet: bool

    def check(self) -> None:
        """Refuse, before any work, files that exist or cannot be written."""
        for path in (self.out, self.page):
            if path is not None:
                check_output(path, force=self.force)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFlags:
    """The flags that describe a problem, as typed, or as a launch file has it what was not typed."""

    model: str | ModelSpec
    cluster: str
    seq_len: int
    precision: str
    attention: str
    framework: str
    reserve_memory: str
    calibration: Path | None = None
    timings: str | None = None
    db: str | None = None
    training: TrainingSpec | None = None  # of a launch file, for what no flag says
    quiet: bool = False


def is_typed(context: typer.Context, name: str) -> bool:
    """Whether a parameter stands on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def check_untyped(context: typer.Context, said: Collection[str], says: str) -> None:
    """Refuse parameters on the command line that a file beside them says: they would be ignored."""
    typed = [one for one in context.command.params if one.name and one.name in said and is_typed(context, one.name)]
    if typed:
        flags = ", ".join(one.opts[0] if one.param_type_name == "option" else one.human_readable_name for one in typed)
        raise InputError(f"{says}, without {flags}: leave them out, or give a model in place of the file")


def parse_size(text: str) -> float:
    """Bytes of a size such as '4GiB', '500MB' or '0'."""
    match = _SIZE.fullmatch(text.strip())
    if not match or (match["unit"] is None and float(match["number"]) != 0):
        raise InputError(f"memory size {text!r}: write a number with a unit, such as 4GiB")
    return float(match["number"]) * _SIZE_UNITS[(match["unit"] or "b").lower()]


def parse_duration(text: str) -> float:
    """Seconds of a time such as '90s', '10m', '1.5h' or '30d'."""
    match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,6})?)(s|m|h|d)", text.strip())
    if not match or float(match[1]) <= 0:
        raise InputError(f"time {text!r}: write a number above 0 with a unit, such as 90s, 10m, 1h or 30d")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def parse_numbers(text: str, flag: str) -> tuple[int, ...]:
    """The numbers of '1,2,4', each once."""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[1-9][0-9]{0,8}", part) for part in parts):
        raise InputError(f"{flag} {text!r}: write whole numbers from 1, such as 1,2,4")
    return tuple(dict.fromkeys(int(part) for part in parts))


def parse_words(text: str, flag: str, known: Iterable[str]) -> tuple[str, ...]:
    """The words of 'a,b', each once, each of them known."""
    words = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    if unknown := [word for word in words if word not in known]:
        raise InputError(f"{flag} {unknown[0]!r} is unknown: known are {', '.join(known)}")
    return words


def parse_batches(text: str) -> tuple[int, int]:
    """(least, most) global batch of 'NUMBER' or 'LOW:HIGH'."""
    low, sign, high = text.partition(":")
    numbers = []
    for part in (low, high) if sign else (low,):
        if not re.fullmatch(r"[0-9]{1,9}", part.strip()) or int(part) < 1:
            raise InputError(
                f"global batch {text!r}: write a whole number of sequences from 1 to 999999999, or LOW:HIGH"
            )
        numbers.append(int(part))
    if numbers[0] > numbers[-1]:
        raise InputError(f"global batch {text!r}: LOW must not exceed HIGH")
    return numbers[0], numbers[-1]


def named_cluster(text: str, *, quiet: bool) -> ClusterSpec | MixedCluster:
    """The cluster that a flag names: a shipped one, several joined by +, a file, or `local`, this machine."""
    from autoplan.read.mixed_cluster import load_parts

    if text == "local":
        from autoplan.cli.discover import local_cluster

        return local_cluster(quiet=quiet)
    return load_parts(text)


def uniform_cluster(text: str, *, quiet: bool) -> ClusterSpec:
    """The same, of equal nodes."""
    from autoplan.topology.mixed_cluster import MixedCluster

    cluster = named_cluster(text, quiet=quiet)
    if isinstance(cluster, MixedCluster):
        raise InputError(f"{text} has unlike parts, for which there is autoplan search only")
    return cluster


def make_problem(flags: TrainingFlags) -> Problem:
    """The problem that the flags describe."""
    from autoplan.spec.problem import Problem

    cluster = uniform_cluster(flags.cluster, quiet=flags.quiet)
    common = _read_common(flags)
    problem = Problem(
        model=common.model,
        training=common.training,
        cluster=cluster,
        framework=common.framework,
        calibration=_calibration(flags, common.framework, cluster),
        reserve_bytes=common.reserve_bytes,
    )
    return problem if flags.timings is None else with_timings(problem, flags.timings, flags.db)


def make_mixed_problem(flags: TrainingFlags, cluster: MixedCluster) -> MixedProblem:
    """The problem that the flags describe on a mixed cluster."""
    from autoplan.spec.mixed_problem import MixedProblem

    if flags.timings is not None:
        raise InputError("--timings is not priced on mixed clusters yet: leave it out")
    common = _read_common(flags)
    return MixedProblem(
        model=common.model,
        training=common.training,
        cluster=cluster,
        framework=common.framework,
        calibrations=tuple(_calibration(flags, common.framework, part) for part in cluster.parts),
        reserve_bytes=common.reserve_bytes,
    )


class _Common(NamedTuple):
    """What flags say beside the cluster."""

    model: ModelSpec
    training: TrainingSpec
    framework: Framework
    reserve_bytes: float


def _calibration(flags: TrainingFlags, framework: Framework, cluster: ClusterSpec) -> Calibration:
    from autoplan.read.calibration import built_in_calibration, load_calibration

    if flags.calibration == Path("db"):
        from autoplan.cli.runs import calibration_of

        return calibration_of(cluster, framework, flags.db).calibration
    if flags.calibration:
        return load_calibration(flags.calibration)
    return built_in_calibration(framework, cluster.device.generation)


def _read_common(flags: TrainingFlags) -> _Common:
    from autoplan.base.files import decode
    from autoplan.frameworks.presets import load_framework
    from autoplan.read.model import load_model
    from autoplan.spec.training import Attention, TrainingSpec

    for option, value, known in (
        ("--precision", flags.precision, tuple(Precision)),
        ("--attention", flags.attention, get_args(Attention)),
    ):
        if value not in known:
            raise InputError(f"{option} {value!r}: must be one of {', '.join(known)}")
    reserve_bytes = parse_size(flags.reserve_memory)
    table = {"seq_len": flags.seq_len, "precision": flags.precision, "attention": flags.attention}
    table = {**(asdict(flags.training) if flags.training else {}), **table}
    return _Common(
        model=load_model(flags.model) if isinstance(flags.model, str) else flags.model,
        training=decode(TrainingSpec, table, "training"),
        framework=load_framework(flags.framework),
        reserve_bytes=reserve_bytes,
    )


TIMINGS = ("aiconfigurator", "db")

# A profile runs them one by one, as torch does: frameworks fuse them, each in its way, unless they are eager as well.
_FUSED = ("rope", "swiglu", "swiglu_backward", "cross_entropy")


def with_timings(problem: Problem, source: str, url: str | None = None) -> Problem:
    """The problem with the times that `source` holds of its device: one of `TIMINGS`, `url` says which database."""
    if source not in TIMINGS:
        raise InputError(f"no timings are known as {source!r}: use {' or '.join(TIMINGS)}")
    measurements = _published(problem) if source == "aiconfigurator" else usable_timings(problem, url)
    if not measurements:
        raise InputError(f"{source} has no timings of {problem.cluster.device.name}: leave --timings out")
    return with_measurements(problem, measurements, is_own=source == "db" and problem.framework.kernels.eager_layers)


def with_measurements(problem: Problem, measurements: list[Measurement], *, is_own: bool | None = None) -> Problem:
    """The problem with measured times: own ones are of the very kernels and layers that the framework runs."""
    from autoplan.spec.timing import TimingTable, burst_factors

    own = problem.framework.kernels.eager_layers if is_own is None else is_own
    factors = burst_factors(problem.cluster.device, problem.calibration)
    return replace(problem, timings=TimingTable.of(measurements, slower=factors, is_own=own))


def _published(problem: Problem) -> list[Measurement]:
    from autoplan.profiler.imports.aiconfigurator import read_measurements
    from autoplan.profiler.selection import for_training
    from autoplan.spec.timing import SHAPES

    device = problem.cluster.device
    operations = [operation for operation in SHAPES if operation != "experts" or problem.model.moe]
    # Its 8-bit products are those of serving: with them steps of 8-bit runs on H100 come out 6 to 15 % longer.
    wide = read_measurements(devices=[device.name], operations=operations, dtypes=["bf16", "fp16"])
    return for_training(wide, device)


def usable_operations(framework: Framework) -> list[Operation]:
    """The operations whose times in the database are those of the kernels that the framework runs."""
    from autoplan.spec.timing import SHAPES

    return [one for one in SHAPES if framework.kernels.eager_layers or one not in _FUSED]


def usable_timings(problem: Problem, url: str | None) -> list[Measurement]:
    """What the database holds of them."""
    return stored_timings(problem.cluster, url, usable_operations(problem.framework))


def stored_timings(cluster: ClusterSpec, url: str | None, operations: Collection[Operation]) -> list[Measurement]:
    """Of the machine that the cluster file names, else of the one with its device that was measured last."""
    from autoplan.profiler.record import Fingerprint

    device, machine = cluster.device.name, cluster.machine
    with opened_store(url, writable=False) as store:
        if machine is not None:
            wanted = Fingerprint(device=device, **asdict(machine))
        else:
            wanted = store.latest(device) or Fingerprint(device=device)
        return store.timings(wanted, operations=operations)


@contextmanager
def opened_store(url: str | None, *, writable: bool, creates: bool = True) -> Iterator[Store]:
    """The timing database; in the end one line tells how much of it was passed over."""
    from autoplan.profiler.store import open_store

    with open_store(url, writable=writable, creates=creates) as store:
        yield store
        if store.num_unread:
            print(
                f"autoplan: warning: rows of {store.name} that this version does not understand, and passes over: "
                f"{store.num_unread:,}; `autoplan db check` lists them",
                file=sys.stderr,
            )


def check_framework(framework: Framework) -> None:
    """Refuse a framework whose rules are not written down yet."""
    if framework.rules == "unknown":
        raise UnpricedError(
            f"which plans {framework.name} admits is not known yet: "
            "use megatron-core, nemo, torchtitan, nanotron, deepspeed-zero or pytorch-fsdp, or a TOML file of your own"
        )


def check_tp_overlap(framework: Framework) -> None:
    """Refuse tp_overlap where the framework hides none of the traffic: it would be accepted and change nothing."""
    if framework.overlap.tp_overlap_share == 0:
        raise InputError(
            f"{framework.name} does not overlap tensor-parallel traffic (tp_overlap_share is 0): leave tp_overlap out, "
            "or use --framework nemo or a framework TOML of your own"
        )


def check_rank_order(framework: Framework, rank_order: str) -> None:
    """Refuse an order of the ranks that the framework cannot be told."""
    if rank_order not in framework.rank_orders:
        raise InputError(f"{framework.name} has no rank_order {rank_order!r}: use {' or '.join(framework.rank_orders)}")


def make_space(
    problem: Problem, global_batch: str, *, fix: Iterable[str], at_most: Iterable[str], allow: Iterable[str]
) -> Space:
    """The plans that the framework admits for `problem`, within the user's limits."""
    from autoplan.frameworks.rulebooks import book_of
    from autoplan.search.limits import batch_grid, check_words, default_limits, with_wishes
    from autoplan.search.placement import is_fragmented
    from autoplan.search.space import Space
    from autoplan.topology.placement import by_switch

    check_framework(problem.framework)
    low, high = parse_batches(global_batch)
    batches = (low,) if low == high else batch_grid(low, high, problem.cluster.num_devices)
    limits = with_wishes(default_limits(problem, batches), fix=fix, at_most=at_most, allow=allow)
    book = book_of(problem.framework)
    check_words(problem.framework.name, book, limits)
    if any(limits.tp_overlaps):
        check_tp_overlap(problem.framework)
    for rank_order in limits.rank_orders:
        check_rank_order(problem.framework, rank_order)
    placement = by_switch(problem.cluster) if is_fragmented(problem) else None
    return Space(workload=problem.workload, limits=limits, rules=book.rules, placement=placement)


def check_output(path: Path, *, force: bool) -> None:
    """Refuse, before any work, an output that exists or a folder that cannot be written."""
    import tempfile

    from autoplan.base.files import check_target

    check_target(path, force=force)
    try:
        with tempfile.TemporaryFile(dir=path.resolve().parent):
            pass
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from None
