"""The problem: model, training, cluster, framework, calibration and timings, checked together."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from autoplan.base.errors import InputError
from autoplan.base.units import format_bytes
from autoplan.spec.blocks import Block
from autoplan.spec.calibration import Calibration
from autoplan.spec.enums import AttentionKernel, Precision
from autoplan.spec.framework import Framework
from autoplan.spec.lengths import UNEVEN, Lengths
from autoplan.spec.model import Encoder, ModelSpec
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.timing import NO_TIMINGS, TimingTable
from autoplan.spec.training import TrainingSpec
from autoplan.spec.workload import Workload
from autoplan.topology.cluster import ClusterSpec, DeviceSpec
from autoplan.topology.levels import Topology, compile_topology

WIDEST_BLACKWELL_HEAD = 256  # of queries and keys, that a fused kernel takes there

MICROSCALING = ("blackwell", "cdna4")  # generations whose matrix units take a scale for every block of 32 elements

ENCODER_APART_RULES = ("megatron-lm",)  # of Megatron-Bridge too

PREFERENCE_RULES = ("accelerate", "deepspeed", "fsdp2")  # of frameworks whose programs train by preferences


def precisions_of(device: DeviceSpec) -> tuple[Precision, ...]:
    """The precisions in which `device` multiplies matrices: those with a rate, MXFP8 where fp8 has scales of blocks."""
    rates: set[str] = set(device.peak_flops_per_s)
    if "fp8" in rates and device.generation in MICROSCALING:
        rates.add("mxfp8")
    words: tuple[Precision, ...] = tuple(Precision)
    return tuple(precision for precision in words if precision in rates)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """The inputs of an estimate other than the plan."""

    model: ModelSpec
    training: TrainingSpec
    cluster: ClusterSpec
    framework: Framework
    calibration: Calibration = field(default_factory=Calibration)
    timings: TimingTable = NO_TIMINGS  # of the device and its links
    reserve_bytes: float = 0.0  # device memory that the user keeps free
    topology: Topology = field(init=False)
    device_share: float = field(init=False)  # of the device's rates, what the slowest one has
    device: DeviceSpec = field(init=False)  # the slowest one, which every step waits for

    def __post_init__(self) -> None:
        object.__setattr__(self, "topology", compile_topology(self.cluster))
        object.__setattr__(self, "device_share", self.cluster.slowest_share("device"))
        object.__setattr__(self, "device", self.cluster.device.slowed(self.device_share))
        model, seq_len = self.model, self.training.seq_len
        if model.position_embedding == "learned" and seq_len > model.max_positions:
            raise InputError(
                f"seq_len {seq_len} exceeds the {model.max_positions} learned positions of {model.name}: shorten it"
            )
        self._check_encoder()
        device, precision = self.cluster.device, self.training.precision
        is_fp32_priced = self.framework.is_trainer or self.framework.kernels.tf32_products
        usable = [name for name in precisions_of(device) if name != Precision.FP32 or is_fp32_priced]
        if precision == Precision.FP32 and not is_fp32_priced:
            raise InputError(
                f"fp32 is priced only for the built-in trainer, not for {self.framework.name}: "
                f"pass --precision {' or '.join(usable)}"
            )
        if precision not in usable:
            ways = " or ".join(usable)
            raise InputError(f"device {device.name} has no {precision} matrix units: pass --precision {ways}")
        if self.training.preference is not None and self.framework.rules not in PREFERENCE_RULES:
            raise InputError(
                f"preferences and rewards are priced only for Accelerate, DeepSpeed and FSDP, not for "
                f"{self.framework.name}: use --framework transformers or deepspeed-hf"
            )
        if not 0 <= self.reserve_bytes < device.visible_memory_bytes:
            raise InputError(
                f"reserved memory must be at least 0 and less than the {format_bytes(device.visible_memory_bytes)} of "
                f"{device.name}, got {format_bytes(self.reserve_bytes)}: reserve less"
            )

    def _check_encoder(self) -> None:
        encoder, training = self.model.any_encoder, self.training
        if encoder is None:
            return
        if self.model.encoder_apart is not None and self.framework.rules not in ENCODER_APART_RULES:
            raise InputError(
                f"an encoder on ranks of its own is priced only for Megatron-Core, not for {self.framework.name}: "
                "leave --encoder-ranks out"
            )
        images = encoder.images if training.images is None else training.images.most
        if training.lengths is not None:
            self._check_lengths(encoder)
        layers, positions = encoder.layers, int(encoder.positions(training.seq_len))
        if self.model.cross_attention and layers.position_embedding == "learned" and positions > layers.max_positions:
            raise InputError(
                f"the encoder of {self.model.name} has {layers.max_positions} learned positions, not {positions}: "
                "pass a shorter --encoder-len"
            )
        if (tokens := images * encoder.image_tokens) > training.seq_len:
            raise InputError(
                f"seq_len {training.seq_len} has no room for {images:g} x {encoder.image_tokens} = {round(tokens)} "
                f"tokens of images of {self.model.name}: raise it or lower --images"
            )

    def _check_lengths(self, encoder: Encoder) -> None:
        """Check that samples of unlike lengths go with an encoder: one to a sequence, all with as many positions."""
        training, name = self.training, self.model.name
        if training.images is not None:
            raise InputError("--lengths beside --images that differ are not priced: give one number of images")
        if training.batching in ("packed", "joined"):
            raise InputError(
                f"samples of {name}, which has an encoder, are priced one to a sequence, not {training.batching}: "
                "pass --batching padded, full or unpadded"
            )
        if not encoder.patches:
            raise InputError(f"--lengths are those of the decoder of {name}: pass --encoder-len for its encoder")

    @property
    def fuses_norms(self) -> bool:
        """Whether a norm is one kernel, as the training says or else the framework."""
        chosen = self.training.fused_norm
        return self.framework.kernels.fused_norm if chosen is None else chosen

    @property
    def machine_spread(self) -> float:
        """Standard deviation of log steps for unknown machines, until kernels or runs of this one were measured."""
        is_measured = bool(self.calibration.sources) or self.timings.has_kernels
        return math.hypot(self.timings.spread, 0.0 if is_measured else self.cluster.device.rate_spread)

    @property
    def link_spread(self) -> float:
        """Standard deviation of log link rates, until collectives or runs (`time_spread`) were measured here."""
        is_measured = self.calibration.time_spread is not None or self.timings.has_collectives
        return 0.0 if is_measured else max(level.rate_spread for level in self.cluster.levels)

    def batch(self, plans: Sequence[ParallelPlan]) -> PlanBatch:
        """The batch of `plans` for the model; unpriced values are refused."""
        return PlanBatch.of(plans, self.model.num_layers)

    def placed(self, placement: tuple[str, ...] | None) -> Problem:
        """The problem with ranks on the nodes in that order; None: as the cluster lists them."""
        return self if placement is None else self.on(compile_topology(self.cluster, placement))

    def on(self, topology: Topology) -> Problem:
        """The problem with other levels."""
        return self._with(topology=topology)

    def _with(self, **values: object) -> Problem:
        """The problem with other values of fields, which are not checked again."""
        changed = copy.copy(self)
        for name, value in values.items():
            object.__setattr__(changed, name, value)
        return changed

    @property
    def at_longest(self) -> Problem:
        """The problem with all sequences as long as the longest, as micro-batches are for which memory has to do.

        Where the numbers of images vary, all samples have the most.
        """
        if (images := self.training.images) is not None and self.model.any_encoder is not None:
            return self._with(model=self.model.with_images(images.most), training=replace(self.training, images=None))
        if (lengths := self.training.lengths) is None:
            return self
        seq_len = self.training.seq_len
        if self.training.batching in UNEVEN:
            seq_len = min(seq_len, lengths.longest)
        return self._with(training=replace(self.training, seq_len=seq_len, lengths=None))

    def of_samples(self, lengths: Lengths) -> Problem:
        """The problem of samples of these lengths alone, each a sequence of its own."""
        return self._with(training=replace(self.training, lengths=lengths, batching="unpadded"))

    @property
    def of_encoder(self) -> Problem | None:
        """The problem of the layers of the encoder alone, whose sequence is the patches of all images of a sample."""
        return self._of_layers(self.model.encoder)

    @property
    def of_encoder_apart(self) -> Problem | None:
        """The same of an encoder on ranks of its own."""
        return self._of_layers(self.model.encoder_apart.encoder if self.model.encoder_apart else None)

    def _of_layers(self, encoder: Encoder | None) -> Problem | None:
        if encoder is None:
            return None
        training = self.training
        alone = encoder.patches or training.document_len
        encoder_training = replace(
            training,
            seq_len=self.encoder_len,
            document_len=None if not alone else min(alone, self.encoder_len),
            lengths=None,
            images=None,
            finetuning=training.finetuning and training.finetuning.in_encoder(self.model),
            preference=None,
        )
        return self._with(model=encoder.layers, training=encoder_training)

    @property
    def trains_encoder(self) -> bool:
        """Return whether the encoder has a backward pass."""
        return self.training.finetuning is None or self.training.finetuning.reaches_encoder(self.model)

    def attending(self, block: Block) -> Problem:
        """The problem with the sizes of attention that the model has in a block."""
        model = self.model.attending(block)
        return self if model is self.model else self._with(model=model)

    @property
    def encoder_len(self) -> int:
        """Positions that the encoder makes of a sample of the batch."""
        encoder, training = self.model.any_encoder, self.training
        assert encoder is not None
        return max(round(encoder.images * training.sequences_per_sample * encoder.positions(training.seq_len)), 1)

    def stores_scores(self, kernel: AttentionKernel) -> bool:
        """Return whether attention stores its scores with this kernel, or where there is no other for its heads."""
        is_too_wide = self.device.generation == "blackwell" and self.model.qk_head_dim > WIDEST_BLACKWELL_HEAD
        return kernel.stores_scores or is_too_wide

    @property
    def num_devices(self) -> int:
        """Devices of the cluster, which are those of the text model, and of an encoder on ranks of its own."""
        apart = self.model.encoder_apart
        return self.cluster.num_devices + (apart.num_devices if apart else 0)

    @property
    def workload(self) -> Workload:
        """Input of the rules beside a plan, for plans on all devices of the cluster."""
        return Workload(model=self.model, training=self.training, num_devices=self.cluster.num_devices)

    @property
    def capacity_bytes(self) -> float:
        """Memory of a device that a plan may use."""
        return self.cluster.device.visible_memory_bytes - self.reserve_bytes
