"""Steps that wait for samples: the rate of storage, tokenisation and loader as a cap on that of the devices.

Loaders work ahead, so a step takes as long as its devices or as its samples, whichever is longer.  The cap is the same
for all plans on the same nodes, so it changes no ranking; `search` therefore ranks device times and answers are capped.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from autoplan.cost.kernels.sequences import useful
from autoplan.spec.input_rate import InputRate
from autoplan.spec.mixed_result import MixedCost
from autoplan.spec.problem import Problem
from autoplan.spec.search_result import RankedPlan
from autoplan.spec.training import TrainingSpec

Cost = TypeVar("Cost", RankedPlan, MixedCost)


def slowest_input(training: TrainingSpec, num_nodes: int) -> tuple[float, InputRate | None]:
    """Return the seconds in which a sequence of the batch is delivered, and the rate that decides; 0 without rates."""
    learnt = useful(training)
    per_sequence = {"samples": learnt.samples, "tokens": learnt.tokens}
    seconds = [
        (per_sequence[rate.unit] / rate.amount_per_s / (num_nodes if rate.per_node else 1), rate)
        for rate in training.input_rates
    ]
    return max(seconds, key=lambda pair: pair[0], default=(0.0, None))


def with_input(problem: Problem, plan: RankedPlan) -> RankedPlan:
    """Return the plan with the time for which its steps wait for samples; a second time changes nothing."""
    waiting = with_samples(problem.training, problem.cluster.num_nodes, plan)
    share = plan.step_s / waiting.step_s
    return replace(waiting, tokens_per_s_per_device=share * plan.tokens_per_s_per_device, mfu=share * plan.mfu)


def with_samples(training: TrainingSpec, num_nodes: int, cost: Cost) -> Cost:
    """Return the times of a plan on this many nodes with its wait for samples."""
    least_s = cost.plan.global_batch * slowest_input(training, num_nodes)[0]
    step_s = max(cost.step_s, least_s)
    return replace(
        cost,
        step_s=step_s,
        low_s=max(cost.low_s, least_s),
        high_s=max(cost.high_s, least_s),
        terms_s=cost.terms_s | {"input": cost.terms_s["input"] + step_s - cost.step_s},
    )
