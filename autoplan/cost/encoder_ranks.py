"""Ranks of their own that encode images: a stage in front of every pipeline of the text model.

The encoder is priced as any model that is one pipeline stage, with its own tensor-parallel degree and replicas.  Each
of its replicas encodes the images of all micro-batches that its share of the text model's replicas works on at once.
Source: Megatron-Core core/models/mimo, core/pipeline_parallel/multimodule_communicator.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from autoplan.base.arrays import Floats, add_up
from autoplan.cost.network.algorithms import ProcessGroup
from autoplan.cost.network.links import Links
from autoplan.cost.passes import Pass
from autoplan.cost.pipeline.closed_forms import pipeline_s
from autoplan.cost.stages import lay_out
from autoplan.cost.step import LaidOutPipelines, end_terms, makespan
from autoplan.cost.uneven_images import Encoding, images_waiting_s
from autoplan.spec.enums import Schedule
from autoplan.spec.plan import ALL_LAYERS, PlanBatch
from autoplan.spec.problem import Problem

# Memory of ranks whose weights are frozen: neither gradients nor states, and nothing kept for a backward pass.
OF_TRAINED = ("gradients", "optimizer", "activations", "wgrad_buffers", "update")


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderRanks:
    """Cost of the encoder's ranks: an element per plan of the text model."""

    problem: Problem
    batch: PlanBatch  # of the encoder
    passes: Pass  # of the micro-batches of its share of the replicas
    hop_s: Floats  # time of one message of what it has encoded
    end_s: Floats  # from its last backward pass to the next step
    memory_terms: Mapping[str, Floats]

    @property
    def reserved_bytes(self) -> Floats:
        """Memory that one of its ranks needs."""
        return add_up(self.memory_terms.values())

    def waits_s(self, text: LaidOutPipelines, terms_s: Mapping[str, Floats]) -> dict[str, Floats]:
        """Return what the encoder's ranks add to a step of the text model, whose `terms_s` are known."""
        forward_s = np.hstack([self.passes.forward_s[:, None], text.forward_s])
        backward_s = np.hstack([self.passes.backward_s[:, None], text.backward_s])
        hop_s = np.hstack([self.hop_s[:, None], text.hop_s])
        microbatches, ones = text.batch.num_microbatches, np.ones_like(text.batch.vp)
        overlaps = self.problem.framework.overlap.p2p_overlap
        behind = pipeline_s(forward_s, backward_s, hop_s, microbatches, ones, overlaps=overlaps)
        alone = makespan(text)
        longer_s = behind.work_s + behind.send_s - alone.work_s - alone.send_s
        text_end_s = add_up(terms_s[name] for name in ("data_parallel_reduce", "optimizer", "parameter_gather"))
        waits = {"encoder_ranks": np.maximum(longer_s, 0.0) + np.maximum(self.end_s - text_end_s, 0.0)}
        if (counts := self.problem.training.images) is not None:
            waits["uneven_lengths"] = images_waiting_s(counts, self._encoding(text))
        return waits

    def _encoding(self, text: LaidOutPipelines) -> Encoding:
        none = np.zeros(len(self.batch))
        return Encoding(
            encoder_s=self.passes.forward_s + self.passes.backward_s,
            beside_s=none,
            others_s=(text.forward_s + text.backward_s).max(axis=1),
            samples=self.batch.micro_batch,
            microbatches=self.batch.num_microbatches,
            stages=text.batch.pp + 1,
            is_gpipe=none > 0.0,
            in_turn=np.ones_like(self.batch.dp),
            at_end=self.batch.dp,
        )


def encoder_ranks(problem: Problem, batch: PlanBatch) -> EncoderRanks | None:
    """Return the cost of the encoder's ranks for every plan of the text model, or None without such ranks."""
    apart, own = problem.model.encoder_apart, problem.of_encoder_apart
    if apart is None or own is None:
        return None
    plans = _plans_of_encoder(problem, batch)
    laid = lay_out(own, plans, 1)
    pipelines, is_trained = LaidOutPipelines.plain(own, laid), float(problem.trains_encoder)
    in_flight = np.minimum(plans.num_microbatches, batch.pp + 1)
    longest = problem.at_longest.of_encoder_apart
    assert longest is not None
    largest = laid if problem.training.images is None else lay_out(longest, plans, 1)
    memory = {name: value[:, 0] for name, value in largest.memory.terms.items()}
    memory["activations"] = memory["activations"] * in_flight
    memory |= {name: is_trained * memory[name] for name in OF_TRAINED}
    tokens = (
        batch.micro_batch * problem.training.sequences_per_sample * apart.encoder.images * apart.encoder.image_tokens
    )
    sent = problem.training.element_bytes * tokens * problem.model.hidden_size / batch.tp
    # Ranks of both are neighbours at best, as those of stages are.
    pair = ProcessGroup(batch.tp * batch.cp * batch.dp, np.full(len(batch), 2, dtype=np.int64))
    return EncoderRanks(
        problem=problem,
        batch=plans,
        passes=Pass(pipelines.forward_s[:, 0], is_trained * pipelines.backward_s[:, 0]),
        hop_s=problem.calibration.overall * Links.of(problem).seconds("send_recv", pair, sent),
        end_s=is_trained * add_up(end_terms(pipelines).values()),
        memory_terms=memory,
    )


def _plans_of_encoder(problem: Problem, batch: PlanBatch) -> PlanBatch:
    """Return the plans by which the encoder's ranks work, for those of the text model."""
    apart = problem.model.encoder_apart
    assert apart is not None
    ones = np.ones_like(batch.tp)
    return replace(
        batch,
        tp=apart.tp * ones,
        cp=ones,
        pp=ones,
        vp=ones,
        ep=ones,
        etp=ones,
        dp_replicate=ones,
        sp=batch.sp & (apart.tp > 1),
        dp_shard=apart.dp * ones,
        micro_batch=batch.micro_batch * batch.dp // apart.dp,
        schedule=Schedule.ONE_F_ONE_B.code * ones,
        recompute_num_layers=np.where(batch.recompute_num_layers == ALL_LAYERS, ALL_LAYERS, 0),
        layout=0 * ones,
        layouts=((apart.encoder.layers.num_layers,),),
        placement=None,
    )
