"""Assembly of a step from pipelines with every stage laid out on its part of the cluster.

A plain cluster is one part.  On a mixed cluster pipelines are laid out once per part as if all of their stages were
there, and only the stages that are on the part are used from each layout.  Arrays of stages have the shape (pipelines,
stages).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from autoplan.base.arrays import Bools, Floats, Ints, add_up, distinct_rows
from autoplan.base.extremes import largest_of
from autoplan.cost.collectives.collective import LinkTimes
from autoplan.cost.collectives.end_of_step import FirstStage, end_of_step_s, optimizer_s, shown_gather_s, shown_reduce_s
from autoplan.cost.collectives.pipeline_messages import tied_table
from autoplan.cost.parameters import layer_parameters, updated_parameters
from autoplan.cost.passes import Pass, SplitPass
from autoplan.cost.pipeline.closed_forms import Makespan, gpipe_s, pipeline_s
from autoplan.cost.pipeline.order import PipelineShape, rank_of_chunks
from autoplan.cost.pipeline.recurrence import PipelineTimes, pipeline_times
from autoplan.cost.stages import Stages, chunk_times, work_terms
from autoplan.cost.uneven_images import Encoding, images_waiting_s
from autoplan.cost.uneven_lengths import Varying, met_in_turn, varying_s, waiting_s
from autoplan.spec.blocks import ATTENTION_BLOCKS, ENCODER_BLOCKS
from autoplan.spec.enums import Schedule
from autoplan.spec.plan import PlanBatch
from autoplan.spec.problem import Problem
from autoplan.spec.terms import STEP_TERMS

# Ranks wait for each other: a step takes as long as the slowest of N ranks, mean + spread x Phi^-1((N - .375) / (N +
# .25)) (`modelling` E6).  The relative spread of a rank's step is the median of 29 series of runs on 8 to 2,048 devices
# that differ only in the number of replicas; device rates were measured with all 8 devices of a node busy and already
# include their part.
STRAGGLER_SPREAD = 0.02
DEVICES_IN_RATES = 8


Numbers = TypeVar("Numbers", Floats, Ints)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartLayout:
    """Pipelines laid out as if entirely on one part, with one row per tensor-parallel degree they have there."""

    problem: Problem
    laid: Stages
    links: LinkTimes  # links of gradients and parameters at the end of a step
    pipeline: Ints  # index of every row's pipeline
    on_part: Bools | None = None  # stages on the part with the row's degree; None: all stages
    share_factor: Floats | float = 1.0  # sharded states of every row relative to an even share

    @property
    def overall(self) -> float:
        """The calibration's factor on all times."""
        return self.problem.calibration.overall

    def per_row(self, values: Numbers) -> Numbers:
        """Expand values per pipeline to values per row."""
        return values if self.on_part is None else values[self.pipeline]

    def only_on_part(self, values: Floats) -> Floats:
        """Return `values` of the stages on the part, and 0 for other stages."""
        return values if self.on_part is None else np.where(self.on_part, values, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaidOutPipelines:
    """Pipelines with one number of stages, laid out on every part that any of them uses."""

    layouts: tuple[PartLayout, ...]
    batch: PlanBatch  # as if all stages were like the first
    hop_s: Floats  # time of one message from every stage to the next
    tied_s: Floats  # time of the gradient reduction of an embedding tied between first and last stage
    forward_s: Floats
    backward_s: Floats
    before_head: Pass  # passes that may hide gradient and parameter traffic

    @classmethod
    def of(cls, layouts: Sequence[PartLayout], batch: PlanBatch, hop_s: Floats, tied_s: Floats) -> LaidOutPipelines:
        """Return the pipelines with each stage's times from the layout of its part."""
        passes, before_head = (
            Pass(
                *(
                    over_stages(layouts, [layout.overall * getattr(times, name) for layout, times in pairs], len(batch))
                    for name in ("forward_s", "backward_s")
                )
            )
            for pairs in (
                [(layout, layout.laid) for layout in layouts],
                [(layout, layout.laid.before_head) for layout in layouts],
            )
        )
        return cls(
            layouts=tuple(layouts),
            batch=batch,
            hop_s=hop_s,
            tied_s=tied_s,
            forward_s=passes.forward_s,
            backward_s=passes.backward_s,
            before_head=before_head,
        )

    @classmethod
    def plain(cls, problem: Problem, laid: Stages) -> LaidOutPipelines:
        """Return the pipelines of a plain cluster."""
        links, overall, stages = laid.costs.links, problem.calibration.overall, laid.blocks.num_stages
        hop_s = np.broadcast_to(overall * laid.costs.message_s[:, None], laid.forward_s.shape)
        tied_s = overall * tied_table(problem, laid.batch, stages).seconds(links)
        layout = PartLayout(problem=problem, laid=laid, links=links, pipeline=np.arange(len(laid.batch)))
        return cls.of([layout], laid.batch, hop_s, tied_s)

    def at(self, stage: Ints, values: Sequence[Mapping[str, Floats]]) -> dict[str, Floats]:
        """Return values per pipeline, each taken from the layout of the part that has the given stage."""
        if self.layouts[0].on_part is None:
            return dict(values[0])
        joined = {name: np.zeros(len(self.batch)) for name in values[0]}
        for layout, layout_values in zip(self.layouts, values, strict=True):
            assert layout.on_part is not None
            rows = np.flatnonzero(layout.on_part[np.arange(len(layout.on_part)), stage[layout.pipeline]])
            for name, value in layout_values.items():
                joined[name][layout.pipeline[rows]] = value[rows]
        return joined

    def largest(self, values: Sequence[Floats]) -> Floats:
        """Return the largest value of every pipeline over all layouts and rows."""
        if self.layouts[0].on_part is None:
            return values[0]
        largest = np.full(len(self.batch), -np.inf)
        for layout, value in zip(self.layouts, values, strict=True):
            np.maximum.at(largest, layout.pipeline, value)
        return largest


def over_stages(
    layouts: Sequence[PartLayout], values: Sequence[Floats], num_pipelines: int, stage_of: Ints | None = None
) -> Floats:
    """Return values per stage, or per chunk with `stage_of`, each taken from the layout of the stage's part."""
    if layouts[0].on_part is None:
        return values[0]
    joined = np.zeros((num_pipelines, values[0].shape[1]))
    for layout, value in zip(layouts, values, strict=True):
        assert layout.on_part is not None
        rows, columns = np.nonzero(layout.on_part if stage_of is None else layout.on_part[:, stage_of])
        joined[layout.pipeline[rows], columns] = value[rows, columns]
    return joined


# -- the passes -------------------------------------------------------------------------------------------------------


def makespan(pipelines: LaidOutPipelines) -> Makespan:
    """Return (work, messages, critical stage) of every pipeline by its schedule's closed form or order."""
    batch, m, hop_s = pipelines.batch, pipelines.batch.num_microbatches, pipelines.hop_s
    overlaps = pipelines.layouts[0].problem.framework.overlap.p2p_overlap
    beside_s = _beside_gradients_s(pipelines) if batch.ep_overlap.any() else np.inf
    result = pipeline_s(
        pipelines.forward_s,
        pipelines.backward_s,
        hop_s,
        m,
        batch.vp,
        overlaps=overlaps,
        beside_gradients_s=beside_s,
    )
    is_gpipe = batch.schedule == Schedule.GPIPE.code
    if is_gpipe.any():
        flow = gpipe_s(pipelines.forward_s, pipelines.backward_s, m, hop_s[:, :-1], overlaps=overlaps)
        result = Makespan(*(np.where(is_gpipe, *pair) for pair in zip(flow, result, strict=True)))
    for rows, times in _run_in_order(pipelines):
        for values, ordered in zip(result, (times.send_free_s, times.exposed_send_s, times.critical), strict=True):
            values[rows] = ordered
    return result


def _beside_gradients_s(pipelines: LaidOutPipelines) -> Floats:
    """Time of the work that may hide the message of a gradient, where two passes that overlap end together.

    A forward and a backward pass that hide each other's expert traffic run layer by layer.  When the gradient is sent,
    weight gradients of one attention are left to compute if they are delayed, and nothing otherwise (Megatron-LM
    d98e8a6, core/models/common/model_chunk_schedule_plan.py, TransformerModelChunkSchedulePlan.run).
    """
    shortest_s = np.full(len(pipelines.batch), np.inf)
    for layout in pipelines.layouts:
        batch, costs = layout.laid.batch, layout.laid.costs.blocks
        attention_s = [add_up(costs[block].weight_s.values()) for block in costs if block in ATTENTION_BLOCKS]
        delayed_s = layout.overall * batch.delay_wgrad * np.minimum.reduce(attention_s)
        np.minimum.at(shortest_s, layout.pipeline, np.where(batch.ep_overlap, delayed_s, np.inf))
    return shortest_s


def _run_in_order(pipelines: LaidOutPipelines) -> Iterator[tuple[Ints, PipelineTimes]]:
    """Yield (pipelines, times) for pipelines without a closed form, pass by pass; all messages count as the slowest."""
    batch, stages = pipelines.batch, pipelines.forward_s.shape[1]
    plans = np.flatnonzero(batch.splits_backward)
    shapes = np.stack([batch.schedule, batch.vp, batch.num_microbatches])[:, plans]
    first, shape_of = distinct_rows(*shapes)
    for at, (schedule, chunks, microbatches) in enumerate(shapes[:, first].T.tolist()):
        rows, shape = plans[shape_of == at], PipelineShape(tuple(Schedule)[schedule], stages, chunks, microbatches)
        passes = _chunk_passes(pipelines, rows, rank_of_chunks(*shape[:3]))
        yield rows, pipeline_times(shape, passes, pipelines.hop_s[rows].max(axis=1))


def _chunk_passes(pipelines: LaidOutPipelines, rows: Ints, stage_of: Ints) -> SplitPass:
    """Times of one micro-batch through every chunk of the pipelines at `rows`: shape (pipelines, chunks)."""
    layouts, passes = [], []
    for layout in pipelines.layouts:
        if not len(plan_rows := np.flatnonzero(np.isin(layout.pipeline, rows))):
            continue
        on_part = None if layout.on_part is None else layout.on_part[plan_rows]
        layouts.append(replace(layout, pipeline=np.searchsorted(rows, layout.pipeline[plan_rows]), on_part=on_part))
        passes.append(chunk_times(layout.problem, layout.laid, plan_rows).scaled(layout.overall))
    return SplitPass(*(over_stages(layouts, values, len(rows), stage_of) for values in zip(*passes, strict=True)))


# -- the end ----------------------------------------------------------------------------------------------------------


def collectives_s(pipelines: LaidOutPipelines) -> tuple[Floats, Floats]:
    """Gradient reduction and parameter gather of every stage, exposed or hidden."""
    layouts, seconds = pipelines.layouts, []
    for layout in layouts:
        laid = layout.laid
        end = end_of_step_s(layout.problem, laid.batch, laid.blocks, laid.parameters, layout.links)
        seconds.append((layout.overall * end.reduce_s, layout.overall * end.gather_s))
    reduce_s, gather_s = (over_stages(layouts, values, len(pipelines.batch)) for values in zip(*seconds, strict=True))
    return reduce_s, gather_s


def end_terms(pipelines: LaidOutPipelines) -> dict[str, Floats]:
    """Exposed gradient reduction, optimizer step and parameter gather (`modelling` C7, E5)."""
    reduce_s, gather_s = collectives_s(pipelines)
    first = np.zeros(len(pipelines.batch), dtype=np.int64)
    # The first stage ends last and hides the least.
    shown = pipelines.at(first, [_shown(pipelines, layout, reduce_s, gather_s) for layout in pipelines.layouts])
    return {
        "data_parallel_reduce": shown["data_parallel_reduce"] + pipelines.tied_s,
        "optimizer": pipelines.largest([layout.overall * _update_s(layout) for layout in pipelines.layouts]),
        "parameter_gather": shown["parameter_gather"],
    }


def _shown(pipelines: LaidOutPipelines, layout: PartLayout, reduce_s: Floats, gather_s: Floats) -> dict[str, Floats]:
    """Exposed traffic of a layout's rows, if their first stage is on its part."""
    problem, laid, passes = layout.problem, layout.laid, pipelines.before_head
    first = FirstStage.of(laid.blocks, laid.parameters)
    reduction = shown_reduce_s(problem, laid.batch, layout.per_row(passes.backward_s), first, layout.per_row(reduce_s))
    gather = shown_gather_s(problem, laid.batch, layout.per_row(passes.forward_s), first, layout.per_row(gather_s))
    if (shared := laid.costs.shared).is_measured.any():
        # Gathers in the first passes and reductions in the last ones, for layers and ends.
        layers = laid.parameters.dense.max(axis=1) / layer_parameters(problem, laid.batch)
        reduction = np.where(shared.is_measured, layout.overall * layers * shared.once_s, reduction)
        gather = np.where(shared.is_measured, 0.0, gather)
    return {"data_parallel_reduce": reduction, "parameter_gather": gather}


def _update_s(layout: PartLayout) -> Floats:
    """Optimizer time on the part for every row."""
    laid, trained = layout.laid, layout.laid.parameters.trained
    most_updated = layout.share_factor * layout.only_on_part(updated_parameters(laid.batch, laid.parameters)).max(
        axis=1
    )
    most_trained = layout.only_on_part(trained.dense + trained.expert).max(axis=1)
    return optimizer_s(layout.problem, laid.batch, most_updated, most_trained)


def straggler_share(num_devices: Ints) -> Floats:
    """Relative excess of the slowest of this many ranks over the mean, beyond the excess within one node."""
    beyond = largest_of(np.maximum(num_devices, DEVICES_IN_RATES)) - largest_of(np.array([DEVICES_IN_RATES]))
    return STRAGGLER_SPREAD * beyond


def _uneven_samples_s(pipelines: LaidOutPipelines) -> Floats:
    """Time waiting for longer samples, as the mean over stages, or for those with more images."""
    training = pipelines.layouts[0].problem.training
    if training.images is not None and pipelines.layouts[0].problem.model.encoder is not None:
        return images_waiting_s(training.images, _encoding(pipelines))
    if training.lengths is None:
        return np.zeros(len(pipelines.batch))
    tokens_s, squares_s = (np.zeros(len(pipelines.batch)) for _ in range(2))
    for layout in pipelines.layouts:
        blocks = layout.laid.blocks
        count, repeated = (
            {block: layout.only_on_part(of_block).sum(axis=1) for block, of_block in of_stages.items()}
            for of_stages in (blocks.count, blocks.repeated)
        )
        head_s = layout.only_on_part(blocks.at_last(layout.laid.head.total_s)).sum(axis=1)
        varying = varying_s(layout.problem, layout.laid.costs.blocks, count, repeated, head_s)
        for total, part in zip((tokens_s, squares_s), varying, strict=True):
            np.add.at(total, layout.pipeline, layout.overall * part)
    passes_s = (pipelines.forward_s + pipelines.backward_s).sum(axis=1)
    return waiting_s(pipelines.layouts[0].problem, pipelines.batch, Varying(tokens_s, squares_s), passes_s)


def _encoding(pipelines: LaidOutPipelines) -> Encoding:
    """Return the times of the encoder of images on the first stage, and of what works beside it."""
    batch, problem, passes_s = pipelines.batch, pipelines.layouts[0].problem, pipelines.forward_s + pipelines.backward_s
    encoder = []
    for layout in pipelines.layouts:
        blocks = [block for block in layout.laid.blocks.count if block in ENCODER_BLOCKS.values()]
        costs, count = layout.laid.costs.blocks, layout.laid.blocks.count
        passes = ((costs[of].total_forward_s + costs[of].total_backward_s) * count[of][:, 0] for of in blocks)
        encoder.append({"encoder": layout.overall * add_up(passes)})
    encoder_s = pipelines.at(np.zeros(len(batch), dtype=np.int64), encoder)["encoder"]
    in_turn = met_in_turn(problem, batch)
    return Encoding(
        encoder_s=encoder_s,
        beside_s=passes_s[:, 0] - encoder_s,
        others_s=passes_s[:, 1:].max(axis=1, initial=0.0),
        samples=problem.training.sequences_per_sample * batch.micro_batch,
        microbatches=batch.num_microbatches,
        stages=batch.pp,
        is_gpipe=batch.schedule == Schedule.GPIPE.code,
        in_turn=in_turn,
        at_end=batch.dp // in_turn,
    )


# -- all of it --------------------------------------------------------------------------------------------------------


def step_terms(pipelines: LaidOutPipelines) -> dict[str, Floats]:
    """Seconds of a step by term, without stragglers."""
    work_s, send_s, critical = makespan(pipelines)
    work = [
        {name: layout.overall * value for name, value in work_terms(layout.laid, layout.per_row(critical)).items()}
        for layout in pipelines.layouts
    ]
    terms = pipelines.at(critical, work)
    busy_s = add_up(value for name, value in terms.items() if name != "head") + terms["head"]
    terms["pipeline_bubble"] = np.maximum(work_s - busy_s, 0.0)  # rounding may leave -0
    terms["pipeline_send"] = send_s
    terms |= end_terms(pipelines)
    terms["uneven_lengths"] = _uneven_samples_s(pipelines)
    overheads = [
        np.full(len(layout.laid.batch), layout.overall * layout.problem.framework.host.step_overhead_s)
        for layout in pipelines.layouts
    ]
    terms["overhead"] = pipelines.largest(overheads)
    return terms


def with_stragglers(terms_s: Mapping[str, Floats], num_devices: Ints) -> dict[str, Floats]:
    """Add the wait for the slowest of this many devices to the terms of steps."""
    terms = {name: terms_s[name] for name in STEP_TERMS if name != "stragglers"}
    return {**terms, "stragglers": straggler_share(num_devices) * add_up(terms.values())}
