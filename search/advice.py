"""Advice if no plan is legal or none fits: a one-line reason and the closest way out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count, islice

import numpy as np

from autoplan.base.errors import InputError, NoPlanError
from autoplan.base.units import counted, format_bytes, format_percent
from autoplan.cost.estimate import estimate
from autoplan.search.cells import Cell
from autoplan.search.flags import plain_of
from autoplan.search.limits import Limits, default_limits
from autoplan.search.space import Space
from autoplan.spec.axes import AXIS, SEARCHED, shown
from autoplan.spec.axis import Kind
from autoplan.spec.enums import Offload, Recompute, Schedule, Sharding
from autoplan.spec.estimate import RISKY_Z
from autoplan.spec.problem import Problem
from autoplan.spec.search_result import SearchResult
from autoplan.topology.cluster import MAX_DEVICES

CHECKED_CELLS = 64  # cells checked for a reason, spread over the space
CHECKED_PLANS = 100_000  # of these cells; fewer cells are checked where they have more
BLOCK_PLANS = 4096  # priced at once when trying a cluster size
NEAREST_BATCHES = 4
SHOWN_WAYS = 3
MOST_HALVINGS = 4  # of a sequence, to make it fit


def check_result(problem: Problem, space: Space, result: SearchResult) -> None:
    """Raise NoPlanError with the reason and the way out if a result has no plan."""
    if result.ranked:
        return
    if result.closest is None:
        free = _free(problem, space.limits)
        wider = (says for says, limits in _wider(space.limits, free) if _is_lawful(replace(space, limits=limits)))
        ways = " or ".join(islice(wider, SHOWN_WAYS))
        raise NoPlanError(why_empty(space) + (f"; there is one {ways}" if ways else ""))
    closest = result.closest
    needed, capacity, is_host = closest.scarcest_memory(problem.capacity_bytes, problem.cluster.host.memory_bytes)
    where = " of a node's host memory" if is_host else ""
    raise NoPlanError(
        f"no plan fits: the closest ({closest.plan.describe()}) needs "
        f"{needed_text(needed, capacity, closest.oom_probability, where)}; {_remedy(problem, space)}"
    )


def needed_text(needed_bytes: float, capacity_bytes: float, oom_probability: float, where: str = "") -> str:
    """Describe the memory that a plan needs, and its OOM risk if only that is too high."""
    risk = f", with an OOM risk of {format_percent(oom_probability)}" if needed_bytes <= capacity_bytes else ""
    return f"{format_bytes(needed_bytes)} of {format_bytes(capacity_bytes)}{where}{risk}"


def why_empty(space: Space) -> str:
    """Explain why `space` contains no legal plan."""
    limits, workload = space.limits, space.workload
    cells = space.cells()
    anything = replace(space, limits=replace(limits, global_batches=(workload.num_devices,)))
    possible = anything.cells()
    if not possible:
        return _why_no_cell(space)
    degrees = _lawful_degrees(anything, possible) or {cell.dp for cell in possible}
    if not any(batch % dp == 0 for batch in limits.global_batches for dp in degrees):
        return _why_no_batch(limits, degrees)
    # No plan is priced: the rules say which of them rejects the candidates.
    checked = cells[:: -(-len(cells) // CHECKED_CELLS)]
    while len(checked) > 1 and space.size(checked) > CHECKED_PLANS and space.size(checked[::2]):
        checked = checked[::2]
    batch = space.candidates(checked)
    if not len(batch):
        batches = " or ".join(str(batch) for batch in limits.global_batches[:NEAREST_BATCHES])
        limited = "; ".join(limits.describe(workload.model))
        return f"no plan with global batch {batches} obeys {limited}: relax one of them"
    holds = np.array([rule.holds(workload, batch) for rule in space.rules])
    admitted = holds.sum(axis=1)
    nearest = int(holds.sum(axis=0).argmax())  # the plan that breaks the fewest rules
    faults = sorted(np.flatnonzero(~holds[:, nearest]).tolist(), key=lambda at: int(admitted[at]))
    says = "; ".join(space.rules[at].text(workload, batch.plan(nearest)) for at in faults)
    return f"no legal plan: {says}" + ("" if admitted[faults[0]] == 0 else " (other plans break other rules)")


def _lawful_degrees(space: Space, cells: Sequence[Cell]) -> set[int]:
    """Return the data-parallel degrees for which `space` contains a legal plan."""
    lean = replace(space, limits=_leanest(space.limits))
    degrees: set[int] = set()
    for block in lean.blocks(cells, BLOCK_PLANS):
        _, owner = lean.plans(block)
        degrees |= {block[at].dp for at in owner.tolist()}
    return degrees


def _is_lawful(space: Space) -> bool:
    """Return whether `space` contains a legal plan, checking only the plans with the least memory."""
    lean = replace(space, limits=_leanest(space.limits))
    return any(len(lean.plans(block)[0]) for block in lean.blocks(lean.cells(), BLOCK_PLANS))


def _why_no_cell(space: Space) -> str:
    limits, model, devices = space.limits, space.workload.model, space.workload.num_devices
    fixed = dict(limits.fixed)
    for axis in ("ep", "etp"):
        if fixed.get(axis, 1) > 1 and model.moe is None:
            return f"{axis} = {fixed[axis]} needs a model with experts, {model.name} has none: leave it out"
    if model.moe and model.moe.num_experts % fixed.get("ep", 1):
        return f"num_experts ({model.moe.num_experts}) must be divisible by ep ({fixed['ep']}): change ep"
    if fixed.get("pp", 1) > model.num_layers:
        return f"pp = {fixed['pp']} leaves stages without layers, {model.name} has {model.num_layers}: lower pp"
    degrees = [axis for axis in ("tp", "cp", "pp", "dp", "dp_replicate", "dp_shard") if axis in fixed]
    product = math.prod(fixed[axis] for axis in degrees)
    if devices % product:
        shown = " x ".join(f"{axis} {fixed[axis]}" for axis in degrees)
        return f"{shown} must divide the {devices} devices of the cluster: change one degree or the size"
    return (
        f"no way to distribute {model.name} over {devices} devices within the limits "
        f"({'; '.join(limits.describe(model))}): relax one of them"
    )


def _why_no_batch(limits: Limits, degrees: set[int]) -> str:
    batches = limits.global_batches
    low, high = batches[0], batches[-1]
    near = {low // dp * dp for dp in degrees} | {-(-high // dp) * dp for dp in degrees}
    usable = sorted(near - {0}, key=lambda batch: (min(abs(batch - low), abs(batch - high)), batch))
    shown = ", ".join(str(batch) for batch in sorted(usable[:NEAREST_BATCHES]))
    batches_shown = f"{low}" if low == high else f"{low}:{high}"
    return (
        f"global batch {batches_shown} is not divisible by any data-parallel degree that is possible here "
        f"(the smallest is {min(degrees)}): the nearest usable ones are {shown}"
    )


def _remedy(problem: Problem, space: Space) -> str:
    """Describe what makes the model fit: a larger cluster within the user's limits, other choices here, or both."""
    limits = space.limits
    free = _free(problem, limits)
    is_narrowed = limits != free
    ways = []
    if (least := smallest_nodes(problem, limits, space)) is not None:
        within = "within these limits " if is_narrowed else ""
        ways.append(f"{within}{_size(problem, least)}")
    helpful = (says for says, wider in _wider(limits, free) if fits_somewhere(problem, wider, space))
    if changes := list(islice(helpful, SHOWN_WAYS)):
        ways.append(f"it fits on this size {' or '.join(changes)}")
    elif is_narrowed and fits_somewhere(problem, free, space):
        ways.append("it fits on this size without some of --fix, --max and --forbid")
    elif length := _fitting_length(problem, space):
        ways.append(f"it fits on this size with --seq-len {length}")
    if ways:
        return "; ".join(ways)
    if is_narrowed and (least := smallest_nodes(problem, free, space)) is not None:
        return f"without --fix, --max and --forbid {_size(problem, least)}"
    return (
        f"no size of {problem.cluster.name} was found where it fits: use a larger device, a shorter sequence or "
        "another global batch"
    )


def _free(problem: Problem, limits: Limits) -> Limits:
    """Return the default limits, without anything fixed, bounded or forbidden by the user."""
    return default_limits(problem, limits.global_batches)


def _size(problem: Problem, nodes: int) -> str:
    cluster = problem.cluster
    size = f"{counted(nodes, 'node')} of {counted(cluster.devices_per_node, 'device')}"
    return f"it fits on {size}, {cluster.name} has {cluster.num_nodes}"


def _fitting_length(problem: Problem, space: Space) -> int | None:
    """Return the longest of the halves of the sequence length with which a plan fits; None if none of them does."""
    training = problem.training
    for halving in range(1, MOST_HALVINGS + 1):
        length = training.seq_len // 2**halving
        try:
            shorter = replace(problem, training=replace(training, seq_len=length))
        except InputError:  # of samples or images that are longer
            return None
        space = replace(space, workload=replace(space.workload, training=shorter.training))
        if fits_somewhere(shorter, space.limits, space):
            return length
    return None


def _wider(limits: Limits, free: Limits) -> Iterator[tuple[str, Limits]]:
    """Yield limits with one flag changed, and that flag."""
    shardings, schedules = limits.of("sharding"), limits.of("schedule")
    if limits.of("offload") == (Offload.NONE,) != free.of("offload"):
        yield "without --forbid offload", limits.where(offload=free.of("offload"))
    if len(shardings) > 1 and Sharding.ZERO3 in set(free.of("sharding")) - set(shardings):
        yield "without --forbid sharding=zero3", limits.where(sharding=free.of("sharding"))
    for axis, value in limits.fixed:
        bounds = tuple((name, bound) for name, bound in free.upper_bounds if name == axis)
        fixed = tuple(pair for pair in limits.fixed if pair != (axis, value))
        bounds = (*limits.upper_bounds, *bounds)
        yield f"without --fix {axis}={value}", replace(limits, fixed=fixed, upper_bounds=bounds)
    for axis, bound in limits.upper_bounds:
        if (axis, bound) not in free.upper_bounds:
            bounds = tuple(pair for pair in (*limits.upper_bounds, *free.upper_bounds) if pair != (axis, bound))
            # A bound of 1 comes from --max, or the axis was forbidden.
            says = f"without --max {axis}={bound}" if bound > 1 else f"with {axis} above 1"
            yield says, replace(limits, upper_bounds=tuple(dict.fromkeys(bounds)))
    for axis, value in limits.forbidden:
        forbidden = tuple(pair for pair in limits.forbidden if pair != (axis, value))
        yield f"without --forbid {axis}={value}", replace(limits, forbidden=forbidden)
    if limits.recomputes == (Recompute.NONE,):
        yield "with recomputation", replace(limits, recomputes=free.recomputes)
    elif len(limits.recomputes) == 1:
        yield f"without --fix recompute={limits.recomputes[0]}", replace(limits, recomputes=free.recomputes)
    for on in set(free.of("sp")) - set(limits.of("sp")):
        yield f"with sp {shown(on)}", limits.where(sp=(on,))
    if len(shardings) == 1:
        yield _with_others("sharding", limits, free), limits.where(sharding=free.of("sharding"))
    if schedules != free.of("schedule"):
        yield _with_others("schedule", limits, free), limits.where(schedule=free.of("schedule"))


def _with_others(axis: str, limits: Limits, free: Limits) -> str:
    """Describe how to allow other values of an axis."""
    values = limits.of(axis)
    if len(values) == 1 and values[0] != plain_of(AXIS[axis], free.of(axis)):
        return f"without --fix {axis}={values[0]}"
    return f"with another {axis} than {' or '.join(map(shown, values))}"


def _leanest(limits: Limits) -> Limits:
    """Narrow `limits` to the choices with the least memory.

    All ways of sharding stay: without replicas a space takes the first of them, on which further choices depend.
    """
    plain = ("micro_batch", "vp") if Schedule.ONE_F_ONE_B in limits.of("schedule") else ("micro_batch",)
    least = tuple(
        (axis, next(value for value in count(1) if (axis, value) not in limits.forbidden))
        for axis in plain
        if not limits.fixes(axis)
    )
    off = {axis.name: limits.of(axis.name)[:1] for axis in SEARCHED if axis.kind is Kind.FLAG}
    return replace(
        limits,
        recomputes=("full",) if "full" in limits.recomputes else limits.recomputes,
        upper_bounds=(*limits.upper_bounds, *least),
        global_batches=limits.global_batches[:1],
    ).where(offload=limits.of("offload")[-1:], **off)


def fits_somewhere(problem: Problem, limits: Limits, space: Space) -> bool:
    """Return whether a plan within `limits` fits on the problem's cluster, checking only the leanest plans."""
    workload = replace(space.workload, num_devices=problem.cluster.num_devices)
    lean = replace(space, workload=workload, limits=_leanest(limits))
    for block in lean.blocks(lean.cells(), BLOCK_PLANS):
        batch, _ = lean.plans(block)
        if len(batch) and bool((estimate(problem, batch).oom_z <= RISKY_Z).any()):
            return True
    return False


def smallest_nodes(problem: Problem, limits: Limits, space: Space) -> int | None:
    """Return the fewest nodes of the cluster on which a plan within `limits` fits, by doubling and then bisection.

    Because of divisibility this is not monotone, so a smaller size may exist; on the returned one a plan does fit.
    """

    def fits(nodes: int) -> bool:
        try:
            larger = replace(problem, cluster=replace(problem.cluster, num_nodes=nodes, nodes=()))
        except InputError:
            return False
        return fits_somewhere(larger, limits, space)

    too_few = problem.cluster.num_nodes
    max_nodes = min(MAX_DEVICES, problem.cluster.num_devices * 2**12) // problem.cluster.devices_per_node
    enough = too_few
    while True:
        enough *= 2
        if enough > max_nodes:
            return None
        if fits(enough):
            break
        too_few = enough
    while enough - too_few > 1:
        middle = (enough + too_few) // 2
        if fits(middle):
            enough = middle
        else:
            too_few = middle
    return enough
