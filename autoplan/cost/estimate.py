"""Estimate of a step: a pure function of a problem and a batch of plans."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise

import numpy as np

from autoplan.base.arrays import Bools, Floats, Ints, add_up
from autoplan.cost.encoder_ranks import encoder_ranks
from autoplan.cost.memory.stage_memory import MEMORY_TERMS, host_bytes, stage_memory
from autoplan.cost.parameters import stage_parameters
from autoplan.cost.pipeline.layout import stage_blocks
from autoplan.cost.pipeline.order import chunks_of_ranks
from autoplan.cost.spreads import NORMAL_90, Familiarity
from autoplan.cost.stages import MicroBatchCosts, Stages, lay_out, microbatch_terms
from autoplan.cost.step import LaidOutPipelines, step_terms, with_stragglers
from autoplan.spec.estimate import CostEstimate, StageCost, oom_probability
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.problem import Problem
from autoplan.spec.terms import KERNEL_TERMS, STEP_TERMS, TRAFFIC_TERMS
from autoplan.spec.timing import NO_TIMINGS

# Number of plans x stages priced at once, so that their arrays stay in the cache.
BLOCK_VALUES = 2**16


def estimate(problem: Problem, batch: PlanBatch) -> CostEstimate:
    """Return the step time and memory of every plan of `batch`.

    Plans must obey the rules of their framework, which are not checked here.  A plan that does not fit into memory is
    priced like any other.
    """
    problem = problem.placed(batch.placement)
    terms = {name: np.zeros(len(batch)) for name in STEP_TERMS}
    memory = {name: np.zeros(len(batch)) for name in MEMORY_TERMS}
    worst = np.zeros(len(batch), dtype=np.int64)
    logged, host = np.zeros(len(batch)), np.zeros(len(batch))
    for where, laid in _laid_out(problem, batch):
        pipelines = LaidOutPipelines.plain(problem, laid)
        of_step = step_terms(pipelines)
        if (encoder := encoder_ranks(problem, laid.batch)) is not None:
            of_step |= encoder.waits_s(pipelines, of_step)
        for name, value in of_step.items():
            terms[name][where] = value
        logged[where] = laid.memory.logged_bytes(problem)
        host[where] = host_bytes(problem, laid.batch, laid.parameters, laid.memory.offloaded_bytes)
        worst[where] = worst_stage = np.argmax(laid.memory.reserved_bytes, axis=1)
        for name, value in laid.memory.terms.items():
            memory[name][where] = value[np.arange(len(worst_stage)), worst_stage]
        if encoder is not None:
            is_fuller = encoder.reserved_bytes > laid.memory.reserved_bytes.max(axis=1)
            for name, value in encoder.memory_terms.items():
                memory[name][where] = np.where(is_fuller, value, memory[name][where])
    apart = problem.num_devices - problem.cluster.num_devices
    terms = with_stragglers(terms, batch.num_devices + apart)
    step_s, reserved = add_up(terms.values()), add_up(memory.values())
    low_s, high_s = interval(terms, step_s, _familiarity(problem, batch, terms))
    return CostEstimate(
        batch=batch,
        step_s=step_s,
        low_s=low_s,
        high_s=high_s,
        terms_s=terms,
        memory_bytes=reserved,
        logged_memory_bytes=logged,
        memory_terms_bytes=memory,
        worst_stage=worst,
        capacity_bytes=problem.capacity_bytes,
        host_memory_bytes=host,
        oom_z=oom_z(problem, reserved, host),
    )


def _familiarity(problem: Problem, batch: PlanBatch, terms_s: Mapping[str, Floats]) -> Familiarity:
    """Return the familiarity of plans: what was measured of a machine counts for plans that mostly rest on it."""
    known, untimed = Familiarity.of(problem, batch), replace(problem, timings=NO_TIMINGS)
    unknown = Familiarity.of(untimed, batch)
    if not unknown.is_less_than(known):
        return known
    references_s = estimate(untimed, batch).terms_s

    def is_unserved(names: Iterable[str]) -> Bools:
        served_s = add_up(np.where(terms_s[name] == references_s[name], 0.0, terms_s[name]) for name in names)
        return np.asarray(2 * served_s < add_up(terms_s[name] for name in names))

    return known.without_measurements(unknown, is_unserved(KERNEL_TERMS), is_unserved(TRAFFIC_TERMS))


def interval(terms_s: Mapping[str, Floats], step_s: Floats, familiarity: Familiarity) -> tuple[Floats, Floats]:
    """Return the bounds of the 90 % interval of the step time."""
    spread = familiarity.sides(terms_s, step_s)
    return step_s * np.exp(-NORMAL_90 * spread.below), step_s * np.exp(NORMAL_90 * spread.above)


def oom_z(problem: Problem, reserved_bytes: Floats, host_bytes: Floats) -> Floats:
    """Margin to the capacity of device or host, whichever is smaller, in standard deviations of log memory."""
    fill = np.maximum(reserved_bytes / problem.capacity_bytes, host_bytes / problem.cluster.host.memory_bytes)
    return np.log(fill) / problem.calibration.memory_spread


def memory_oom_z(problem: Problem, batch: PlanBatch) -> Floats:
    """Return `oom_z` of `batch` without pricing its pipelines."""
    problem = problem.placed(batch.placement)
    of_plans = np.zeros(len(batch))
    for stages in np.unique(batch.pp).tolist():
        where = np.flatnonzero(batch.pp == stages)
        plans = batch.take(where)
        blocks = stage_blocks(problem.model, plans, stages)
        parameters = stage_parameters(problem, plans, blocks)
        memory = stage_memory(problem, plans, blocks, parameters)
        on_host = host_bytes(problem, plans, parameters, memory.offloaded_bytes)
        reserved = memory.reserved_bytes.max(axis=1)
        if (encoder := encoder_ranks(problem, plans)) is not None:
            reserved = np.maximum(reserved, encoder.reserved_bytes)
        of_plans[where] = oom_z(problem, reserved, on_host)
    return of_plans


def _laid_out(problem: Problem, batch: PlanBatch) -> Iterator[tuple[Ints, Stages]]:
    """Yield (plans, their stages) by number of stages, in blocks of about `BLOCK_VALUES`."""
    order = np.argsort(batch.pp, kind="stable")
    upto = np.cumsum(batch.pp[order]) // BLOCK_VALUES
    for block in np.split(order, np.flatnonzero(np.diff(upto)) + 1) if len(batch) else ():
        plans = batch.take(block)
        costs = MicroBatchCosts.of(problem, plans)
        starts = np.flatnonzero(np.diff(plans.pp, prepend=0)).tolist()
        for start, stop in pairwise((*starts, len(block))):
            rows = slice(start, stop)
            yield block[rows], lay_out(problem, plans.take(rows), int(plans.pp[start]), costs.take(rows))


def stage_costs(problem: Problem, plan: ParallelPlan) -> tuple[StageCost, ...]:
    """Time per micro-batch and memory of every pipeline rank of one plan."""
    problem = problem.placed(plan.placement)
    laid = lay_out(problem, problem.batch([plan]), plan.pp)
    return tuple(stage_cost(problem, laid, 0, stage) for stage in range(plan.pp))


def stage_cost(problem: Problem, laid: Stages, at: int, stage: int) -> StageCost:
    """Cost of one pipeline rank of the plan at position `at` of the batch."""
    plan, reserved = laid.batch.plan(at), laid.memory.reserved_bytes[at, stage]
    layers = np.array(laid.batch.layouts[laid.batch.layout[at]])[chunks_of_ranks(plan.schedule, plan.pp, plan.vp)]
    overall = problem.calibration.overall
    terms = microbatch_terms(laid, np.full(len(laid.batch), stage))
    return StageCost(
        stage=stage,
        layers=int(layers[stage].sum()),
        forward_s=overall * float(laid.forward_s[at, stage]),
        backward_s=overall * float(laid.backward_s[at, stage]),
        terms_s={name: overall * float(value[at]) for name, value in terms.items()},
        memory_bytes=float(reserved),
        memory_terms_bytes={name: float(value[at, stage]) for name, value in laid.memory.terms.items()},
        oom_probability=oom_probability(
            float(np.log(reserved / problem.capacity_bytes)) / problem.calibration.memory_spread
        ),
    )
