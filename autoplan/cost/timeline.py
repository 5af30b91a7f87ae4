"""Timeline behind the estimate of one plan: the activity of every rank throughout a step.

It consists of the same parts as the estimate: pass times, the order of the schedule, and the end-of-step terms.  All
ranks of one pipeline stage do the same, so one of them represents all.

If the recurrence prices a plan, the timeline is its simulation.  If a closed form does, the makespan of the order
simulated pass by pass may differ: not at all for equal stages, otherwise by some percent (`pipeline.closed_forms`).
The estimate takes precedence: every wait of a rank is scaled by a common factor, so that work, order and step length
are the estimate's, and only messages may appear too late or too early by that amount (`Timeline.order_error`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autoplan.base.arrays import Floats, Ints, add_up
from autoplan.base.errors import InputError
from autoplan.cost.estimate import estimate
from autoplan.cost.kernels.measured_units import FORWARD_SHARE
from autoplan.cost.memory.activations import chunk_activation_bytes
from autoplan.cost.memory.stage_memory import ALLOCATED_TERMS, StageMemory
from autoplan.cost.passes import SplitPass
from autoplan.cost.pipeline.layout import chunk_blocks
from autoplan.cost.pipeline.order import Operation, PipelineShape, chunks_of_ranks, rank_of_chunks, rank_orders
from autoplan.cost.pipeline.recurrence import RankSteps, is_recurrent, rank_steps
from autoplan.cost.pipeline.waits import ROWS
from autoplan.cost.stages import Stages, lay_out
from autoplan.cost.step import LaidOutPipelines, collectives_s, step_terms
from autoplan.spec.axes import V_SHAPED
from autoplan.spec.enums import Schedule
from autoplan.spec.estimate import StagePlace
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.problem import Problem
from autoplan.spec.ranks import coordinates
from autoplan.spec.terms import BLOCK_TERMS, END_TERMS, PIPELINE_TERMS, STREAM_OF, STREAMS, WORK_TERMS
from autoplan.spec.timeline import Event, RankTimeline, Timeline

PASSES = {"F": "forward", "B": "backward", "I": "input_gradient", "W": "weight_gradient"}
HIDING = ("data_parallel_reduce", "parameter_gather")  # end-of-step terms that may overlap with passes
MIN_S = 1e-12  # a shorter wait is rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Inputs of a replica's timeline.  Arrays have one element per stage, or per chunk where stated."""

    schedule: Schedule
    vp: int
    places: tuple[StagePlace, ...]
    ranks: Sequence[tuple[int, ...]]  # global ranks of every stage
    pass_terms_s: Mapping[tuple[str, int], Mapping[str, float]]  # of one pass, by (kind, chunk) and term
    hop_s: Floats  # one message over each hop between chunks
    blocking: bool  # messages block both of their ranks
    pipeline_s: float  # estimated time until the end of the last backward pass
    send_s: float  # part added by messages
    alive_bytes: Floats  # activations of one micro-batch, by chunk
    levels: Mapping[str, Floats]  # memory besides activations (`_memory_levels`)
    end_s: Mapping[str, Floats]  # total gradient reduction and parameter gather, exposed or hidden

    @property
    def shape(self) -> PipelineShape:
        """Schedule, ranks, chunks per rank and micro-batches."""
        return PipelineShape(self.schedule, len(self.places), self.vp, self.places[0].num_microbatches)


def _sender(schedule: Schedule, stage_of: Ints) -> Ints:
    """Return the stage whose hop lies behind each chunk but the last: a V goes back over the hops that it came."""
    here, following = stage_of[:-1], stage_of[1:]
    return np.minimum(here, following) if schedule in V_SHAPED else here


def timeline(problem: Problem, plan: ParallelPlan) -> Timeline:
    """Timeline that ends at the `step_s` of `estimate`; InputError beyond `spec.plan.MAX_OPERATIONS` passes."""
    problem = problem.placed(plan.placement)
    check_length(PipelineShape(plan.schedule, plan.pp, plan.vp, plan.num_microbatches))
    batch = problem.batch([plan])
    terms = {name: float(value[0]) for name, value in estimate(problem, batch).terms_s.items()}
    stage_of = coordinates(plan)["pp"]
    places = tuple(
        StagePlace(stage=stage, num_microbatches=plan.num_microbatches, capacity_bytes=problem.capacity_bytes)
        for stage in range(plan.pp)
    )
    ranks = [tuple(np.flatnonzero(stage_of == stage).tolist()) for stage in range(plan.pp)]
    laid_out = LaidOutPipelines.plain(problem, lay_out(problem, batch, plan.pp))
    return step_timeline([pipeline_of(laid_out, places, ranks, plan.num_devices)], terms)


def pipeline_of(
    pipelines: LaidOutPipelines, places: tuple[StagePlace, ...], ranks: Sequence[tuple[int, ...]], num_devices: int
) -> Pipeline:
    """Return the timeline inputs of a single laid-out pipeline, in a step on this many devices."""
    plan, terms = pipelines.batch.plan(0), step_terms(pipelines)
    overlaps = pipelines.layouts[0].problem.framework.overlap.p2p_overlap
    has_room = plan.vp == 1 or (not overlaps and plan.num_microbatches >= plan.pp)
    stage_of = np.array(rank_of_chunks(plan.schedule, plan.pp, plan.vp))
    passes: dict[tuple[str, int], dict[str, float]] = {}
    levels: dict[str, Floats] = defaultdict(lambda: np.zeros(plan.pp))
    alive = np.zeros(len(stage_of))
    for layout in pipelines.layouts:
        for row, is_on_part in enumerate(
            np.ones((1, plan.pp), dtype=np.bool_) if layout.on_part is None else layout.on_part
        ):
            chunks = is_on_part[stage_of]
            of_chunks = pass_terms(layout.problem, layout.laid, row)
            passes |= {(kind, chunk): value for (kind, chunk), value in of_chunks.items() if chunks[chunk]}
            alive[chunks] = chunk_activation_bytes(layout.problem, layout.laid.batch)[row, chunks]
            for name, value in _memory_levels(layout.problem, layout.laid.memory, row).items():
                levels[name][is_on_part] = value[is_on_part]
    end_s = zip(HIDING, collectives_s(pipelines), strict=True)
    return Pipeline(
        schedule=plan.schedule,
        vp=plan.vp,
        places=places,
        ranks=ranks,
        pass_terms_s=passes,
        hop_s=pipelines.hop_s[0][_sender(plan.schedule, stage_of)],
        blocking=plan.pp > 1 and plan.schedule in ("1f1b", "interleaved") and has_room,
        pipeline_s=float(add_up(terms[name] for name in PIPELINE_TERMS)[0]),
        send_s=float(terms["pipeline_send"][0]),
        alive_bytes=alive,
        levels=levels,
        end_s={name: (num_devices > 1) * seconds[0] for name, seconds in end_s},
    )


def check_length(shape: PipelineShape) -> None:
    """Raise InputError for a step with more passes than the recurrence supports."""
    if not is_recurrent(shape):
        raise InputError(
            f"a step of {shape.num_microbatches:,} micro-batches through {shape.stages * shape.chunks} chunks is too "
            "long for a timeline: give a smaller --global-batch, which repeats the same steady state"
        )


def step_timeline(pipelines: Sequence[Pipeline], terms: Mapping[str, float]) -> Timeline:
    """Timeline of replicas, one pipeline per kind, which wait for the slowest; `terms` give the end of the step."""
    last_s = max(event.pipeline_s for event in pipelines)
    drawn = [_draw(event, terms, last_s) for event in pipelines]
    return Timeline(
        step_s=float(add_up(np.array(seconds) for seconds in terms.values())),
        pipeline_s=last_s,
        order_error=max((error for _, error in drawn), key=abs),
        ranks=tuple(rank for ranks, _ in drawn for rank in ranks),
    )


def _draw(pipeline: Pipeline, terms: Mapping[str, float], last_s: float) -> tuple[list[RankTimeline], float]:
    """Return (timelines of a pipeline's ranks, its `order_error`); the slowest pipeline takes `last_s`."""
    steps = _run(pipeline)
    exact_s = max(float(event.end_s[-1]) for event in steps)
    chunks_of = chunks_of_ranks(pipeline.schedule, len(pipeline.places), pipeline.vp)
    orders = rank_orders(pipeline.shape)
    ranks = []
    for stage, order in enumerate(orders):
        pass_terms_s = {key: value for key, value in pipeline.pass_terms_s.items() if key[1] in chunks_of[stage]}
        passes, calls = _placed(pipeline, order, steps[stage], pass_terms_s, exact_s)
        beside_passes = [
            *(calls or _messages(pipeline, order, passes)),
            *_waits(passes, pipeline),
            *_end(terms, pipeline.pipeline_s, last_s),
            *_beside(terms, last_s, {name: float(seconds[stage]) for name, seconds in pipeline.end_s.items()}),
        ]
        levels = {name: float(value[stage]) for name, value in pipeline.levels.items()}
        memory = _memory(passes, beside_passes, pipeline.alive_bytes, levels)
        ranks.append(
            RankTimeline(
                place=pipeline.places[stage],
                ranks=pipeline.ranks[stage],
                passes=tuple(passes),
                pass_terms_s=pass_terms_s,
                other_events=tuple(beside_passes),
                memory_time_s=memory[0],
                memory_bytes=memory[1],
            )
        )
    return ranks, pipeline.pipeline_s / exact_s - 1.0


# -- passes -----------------------------------------------------------------------------------------------------------


def pass_terms(problem: Problem, laid: Stages, at: int) -> dict[tuple[str, int], dict[str, float]]:
    """Seconds of a micro-batch by (pass, chunk) and non-zero term, for plan `at` of a layout."""
    batch, plan, overall = laid.batch, laid.batch.plan(at), problem.calibration.overall
    layout = np.array([batch.layouts[batch.layout[at]]])
    chunks = layout.shape[1]
    of_ranks = chunks_of_ranks(plan.schedule, plan.pp, plan.vp)
    splits = np.zeros(chunks)
    splits[of_ranks[laid.split_backward[at]].ravel()] = 1.0
    forward, backward, weight, split = ({name: np.zeros(chunks) for name in WORK_TERMS} for _ in range(4))
    for block, (count, again) in chunk_blocks(problem.model, layout, batch.recompute_num_layers[[at]]).items():
        cost = laid.costs.blocks[block]
        for name in BLOCK_TERMS:
            forward[name] += count[0] * cost.forward_s[name][at]
            backward[name] += count[0] * cost.backward_s[name][at] + again[0] * cost.repeat_s[name][at]
        for name, value in cost.weight_s.items():
            weight[name] += count[0] * value[at]
            split[name] += splits * (count[0] * cost.split_s[name][at] + again[0] * cost.split_repeat_s[name][at])
    # As in the estimate, the cost of the ends except their traffic belongs to the head.
    shares = {"forward_s": FORWARD_SHARE, "backward_s": 1 - FORWARD_SHARE}
    for (name, share), terms in zip(shares.items(), (forward, backward), strict=True):
        terms["head"][0] += share * laid.costs.embedding_s[at]
        terms["head"][-1] += getattr(laid.head, name)[at]
        for term, ends in (("fsdp_communication", laid.sharded_ends), ("tp_communication", laid.costs.ends_tp)):
            terms[term][0] += getattr(ends.embedding, name)[at]
            terms[term][-1] += getattr(ends.head, name)[at]
        if launches := float(terms["launch"].sum()):
            terms["launch"] *= max(1.0 - float(getattr(laid.hidden_launches, name)[at]) / launches, 0.0)
        terms["launch"] += laid.costs.action_s[at]
    weight["head"][-1] += laid.costs.head.weight_s[at]
    for stage, rank_chunks in enumerate(of_ranks):
        retries = laid.retries_s[at, stage] / plan.vp
        forward["allocator_retries"][rank_chunks] += retries / 3
        backward["allocator_retries"][rank_chunks] += retries * 2 / 3
    backward = {name: backward[name] + split[name] for name in WORK_TERMS}
    inputs = {name: backward[name] - weight[name] for name in WORK_TERMS}
    tables = {"forward": forward, "backward": backward, "input_gradient": inputs, "weight_gradient": weight}
    order = sorted(WORK_TERMS, key=lambda name: STREAMS.index(STREAM_OF[name]))
    return {
        (kind, chunk): {name: overall * float(terms[name][chunk]) for name in order if terms[name][chunk]}
        for kind, terms in tables.items()
        for chunk in range(chunks)
    }


def _run(pipeline: Pipeline) -> tuple[RankSteps, ...]:
    """Simulate the pipeline's order, pass by pass, with blocking messages if the closed form assumes them."""
    passes = (
        np.array([sum(pipeline.pass_terms_s[kind, chunk].values()) for chunk in range(len(pipeline.alive_bytes))])
        for kind in ("forward", "input_gradient", "weight_gradient")
    )
    return rank_steps(pipeline.shape, SplitPass(*passes), pipeline.hop_s, blocking=pipeline.blocking)


def _placed(
    pipeline: Pipeline,
    order: Sequence[Operation],
    steps: RankSteps,
    own_terms_s: Mapping[tuple[str, int], Mapping[str, float]],
    exact_s: float,
) -> tuple[list[Event], list[Event]]:
    """Return (passes, blocking calls) of a rank fitted to the estimate: work unchanged, waits scaled."""
    seconds = {key: sum(terms.values()) for key, terms in own_terms_s.items()}
    is_call = steps.rows >= len(ROWS) * len(pipeline.places) * pipeline.vp
    idle_s = exact_s - float(steps.duration_s[~is_call].sum())
    scale = (pipeline.pipeline_s - exact_s) / idle_s + 1.0 if idle_s > MIN_S * exact_s else 0.0
    passes: list[Event] = []
    calls: list[Event] = []
    done = now = 0.0  # work so far, and its end time
    run = iter(order)
    for call, took, end in zip(is_call.tolist(), steps.duration_s.tolist(), steps.end_s.tolist(), strict=True):
        if call:
            over = done + scale * (end - done)
            start = max(over - took, now)
            calls.append(_message("exchange with neighbours", start, max(over - start, 0.0)))
            continue
        event = next(run)
        now = max(done + scale * (end - took - done), now)
        for kind, chunk, microbatch, _ in (event, next(run)) if event.joined else (event,):
            name = PASSES[kind]
            length = seconds[name, chunk]
            words = f"{name} {microbatch}".replace("_", " ")
            passes.append(Event("compute", name, words, now, length, microbatch, chunk))
            now += length
            done += length
    return passes, calls


def _message(name: str, start_s: float, duration_s: float, microbatch: int | None = None) -> Event:
    return Event("pipeline", "message", name, start_s, duration_s, microbatch, is_hidden=True)


def _messages(pipeline: Pipeline, order: Sequence[Operation], passes: Sequence[Event]) -> list[Event]:
    """Messages that a rank sends at the end of a pass, or of both passes if joined, while it continues."""
    rank_of = rank_of_chunks(pipeline.schedule, len(pipeline.places), pipeline.vp)
    messages = []
    for at, (kind, chunk, microbatch, joined) in enumerate(order):
        to = chunk + {"F": 1, "B": -1, "I": -1, "W": 0}[kind]
        if 0 <= to < len(rank_of) and rank_of[to] != rank_of[chunk]:
            last = passes[at + joined]
            name = f"{passes[at].name} to stage {pipeline.places[rank_of[to]].name}"
            send_s = float(pipeline.hop_s[min(to, chunk)])
            messages.append(_message(name, last.start_s + last.duration_s, send_s, microbatch))
    return messages


# -- what else takes time ----------------------------------------------------------------------------------------------


def _waits(passes: Sequence[Event], pipeline: Pipeline) -> Iterator[Event]:
    """Divide gaps between passes into bubble and message waits by their totals, with equal message time per rank."""
    pipeline_s = pipeline.pipeline_s
    idle = pipeline_s - sum(event.duration_s for event in passes)
    share = min(pipeline.send_s / idle, 1.0) if idle > MIN_S * pipeline_s else 0.0
    ends = [0.0, *(event.start_s + event.duration_s for event in passes)]
    starts = [*(event.start_s for event in passes), pipeline_s]
    for end, start in zip(ends, starts, strict=True):
        if (gap := start - end) > MIN_S * pipeline_s:
            bubble = (1.0 - share) * gap
            if bubble > 0:
                yield _of_term("pipeline_bubble", end, bubble)
            if share > 0:
                yield _of_term("pipeline_send", end + bubble, gap - bubble)


def _of_term(name: str, start_s: float, duration_s: float) -> Event:
    return Event(STREAM_OF[name], name, name.replace("_", " "), start_s, duration_s)


def _end(terms: Mapping[str, float], own_s: float, last_s: float) -> Iterator[Event]:
    """Yield the events after the last backward pass on a rank, which waits for the slowest pipeline."""
    if last_s - own_s > MIN_S * last_s:
        yield _of_term("stragglers", own_s, last_s - own_s)
    now = last_s
    for name in END_TERMS:
        if terms[name] > 0:
            yield _of_term(name, now, terms[name])
            now += terms[name]


def _beside(terms: Mapping[str, float], last_s: float, end_s: Mapping[str, float]) -> Iterator[Event]:
    """Yield the parts of gradient reduction and parameter gather hidden by passes; `end_s` are the totals."""
    for name, seconds in end_s.items():
        hidden = min(seconds - terms[name], last_s)
        if hidden > MIN_S * last_s:
            start = last_s - hidden if name == "data_parallel_reduce" else 0.0
            words = f"{name} beside passes".replace("_", " ")
            yield Event(STREAM_OF[name], name, words, start, hidden, is_hidden=True)


# -- memory -----------------------------------------------------------------------------------------------------------


def _memory_levels(problem: Problem, memory: StageMemory, at: int) -> dict[str, Floats]:
    """Bytes of every stage besides activations during "forward", "backward" and "update", and peak "activations".

    Between passes the level is that of a forward pass.  The maximum is the estimate's need of the device.  `at` is the
    index of the plan in the batch.
    """
    terms = {name: value[at] for name, value in memory.terms.items()}
    activations = terms["activations"]
    states = add_up(terms[name] for name in ("weights", "optimizer", "wgrad_buffers"))
    if memory.snapshots:
        peak_bytes = {
            phase: np.max([add_up(value[at] for value in snapshot.values()) for snapshot in snapshots], axis=0)
            for phase, snapshots in memory.snapshots.items()
        }
        activations = np.max([snapshot["activations"][at] for snapshot in memory.snapshots["forward"]], axis=0)
        forward, backward = (states + peak_bytes[phase] - activations for phase in ("forward", "backward"))
        update = states + peak_bytes["update"]
    else:
        states = states + terms["gradients"]
        forward = states + terms["gathered"]
        backward = forward + terms["logits"] + terms["transients"]
        update = states - terms["wgrad_buffers"] + memory.update_bytes[at]  # needed only in passes
    allocated = add_up(terms[name] for name in ALLOCATED_TERMS)
    update = np.where(terms["update"] > 0, allocated, update)
    factor = problem.framework.memory.reserved_factor
    gaps = terms["fragmentation"] - (factor - 1.0) * allocated  # in blocks of the passes, whatever they hold
    outside = gaps + add_up(terms[name] for name in ("cached", "communicators", "context"))
    levels = {"forward": forward, "backward": backward, "update": update}
    return {name: factor * level + outside for name, level in levels.items()} | {"activations": factor * activations}


def _memory(
    passes: Sequence[Event], beside_passes: Sequence[Event], per_chunk: Floats, levels: Mapping[str, float]
) -> tuple[Floats, Floats]:
    """Return (times, reserved bytes from each time on) of a rank: live activations up to the estimate's peak."""
    points: list[tuple[float, str, float]] = []  # time, level, activations alive
    alive_bytes, sizes = 0.0, per_chunk.tolist()
    for event in passes:
        is_forward = event.kind == "forward"
        size = sizes[event.chunk or 0]
        alive_bytes += size if is_forward else 0.0
        points.append((event.start_s, "forward" if is_forward else "backward", alive_bytes))
        alive_bytes -= size if event.kind in ("backward", "weight_gradient") else 0.0
        points.append((event.start_s + event.duration_s, "forward", alive_bytes))
    for event in beside_passes:
        if event.kind == "optimizer":
            points += [(event.start_s, "update", 0.0), (event.start_s + event.duration_s, "forward", 0.0)]
    max_alive_bytes = max(alive for _, _, alive in points)
    share = levels["activations"] / max_alive_bytes if max_alive_bytes > 0 else 0.0
    times = np.array([0.0, *(time for time, _, _ in points)])
    reserved = np.array([levels["forward"], *(levels[level] + share * max(alive, 0.0) for _, level, alive in points)])
    is_last = np.append(np.diff(times) > 0, True)
    times, reserved = times[is_last], reserved[is_last]
    changes = np.append(True, np.diff(reserved) != 0)
    return times[changes], reserved[changes]
