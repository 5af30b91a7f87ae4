"""Traits of a training framework as data: what it stores, computes, sends, overlaps and spends on the host."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, Literal

from autoplan.base.errors import InputError
from autoplan.base.units import check_count, check_not_negative, check_positive, listed
from autoplan.spec.axes import AXIS, offered, shown
from autoplan.spec.axis import Value
from autoplan.spec.enums import AttentionKernel, RankOrder
from autoplan.spec.operations import FUSED, JOINED_KERNELS, SHAPES, TRAINER_UNITS, Operation
from autoplan.spec.plan import ParallelPlan


def _check(traits: object, *, positive: tuple[str, ...] = (), **ranges: tuple[float, float]) -> None:
    """Refuse numbers outside their range; without one, negative numbers, or numbers in `positive` that are not."""
    for trait in fields(traits):  # type: ignore[arg-type]
        value = getattr(traits, trait.name)
        if trait.name in ranges:
            at_least, at_most = ranges[trait.name]
            if not at_least <= value <= at_most:
                raise InputError(f"{trait.name} must be in [{at_least}, {at_most}], got {value:g}")
        elif trait.type == "float":
            (check_positive if trait.name in positive else check_not_negative)(trait.name, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes per element that a rank keeps and its allocator adds, unless named otherwise; the peak that logs show."""

    bytes_per_weight: float = 2.0  # the copy of the weights that the matrix products read
    bytes_per_grad: float = 4.0  # persistent gradient buffer
    # A second, fp32 buffer beside 16-bit gradients, in bf16 runs whose `grad_dtype` is fp32.
    bytes_per_bf16_grad_accumulator: float = 0.0
    frees_accumulated_grads: bool = False  # or instead of it: 16-bit ones are given back as they are added to it
    # fp32 copies of gradients that fp16 runs make to unscale them, sharded with the optimizer; freed before the next
    # forward pass they are there during the optimizer's step alone.
    fp16_unscaled_grads: Literal["none", "kept", "freed"] = "none"
    bytes_per_optimizer_state: float = 12.0  # fp32 master weights and two Adam moments
    # Of the optimizer's state, what stays on the device where the optimizer is on the host.
    bytes_per_state_kept_on_device: float = 0.0
    offloads_grads: bool = False  # under zero3, an optimizer on the host takes the gradients along
    drops_grads: bool = False  # after the optimizer's step, where others set them to zero
    # FSDP2 holds the states, under every sharding but none in shards: fp32 weights that the passes read in 16-bit
    # copies, and gradients that live from their backward pass to the optimizer's step: a step has several peaks.
    fsdp2_states: bool = False
    # Programs of JAX: dense layers keep their inputs and the outputs of products, and repeat all between them
    # (jax.checkpoint by name); embedding and head are gathered where they are used, not for the whole of both passes.
    is_jax: bool = False
    keeps_narrow_copies: bool = True  # 8- and 4-bit GEMMs keep their quantised inputs, and of the weights such copies
    # Frozen weights stored in 8 bits alone keep transposed copies for the data gradients; else every pass makes them.
    keeps_frozen_transposes: bool = True
    dummy_wgrad_buffers: bool = False  # one persistent bf16 buffer per distinct weight shape (Transformer Engine)
    # The optimizer's step, when no activations live:
    bytes_per_update_copy: float = 0.0  # fp32 gradients and Adam's temporaries, per parameter that the rank updates
    bytes_per_bf16_gathered_weight: float = 0.0  # a bf16 zero1 step gathers all weights of the rank into one more copy
    bucket_bytes: float = 0.0  # through which gradients are reduced, and under zero1 weights gathered, in pieces
    whole_gather_copies: int = 0  # of a rank's weights, alive while zero1 gathers the shards at the end of a step
    bytes_per_logit: float = 8.0  # at the peak of head and loss: bf16 logits, fp32 copy, bf16 gradient (`modelling` B3)
    bytes_per_parallel_logit: float = 0.0  # more where tp > 1: gathered pieces, or the steps of a parallel loss
    keeps_logits: bool = False  # logits stay through the backward pass of the layers, not only of the head
    shards_logits: bool = True  # vocabulary-parallel cross entropy
    pads_vocab_to: int = 128  # multiple of this times tp
    # What an eager RMSNorm keeps beyond its input and output: an fp32 copy instead of the input, and the normalised
    # input in 16 bits.  6 where that is in fp32, too (`modelling` B2).
    bytes_per_eager_norm: float = 4.0
    regathers_norm_output: bool = True  # under sequence parallelism, for the backward pass; else it is kept gathered
    in_place_activation: bool = False  # a fused SwiGLU writes its inputs' gradients over the inputs
    glu_offset: bool = False  # a gated activation that is not fused keeps the upper half once more, an offset added
    bytes_per_fused_score: float = 2.0  # kept of an attention score by a kernel that fuses the softmax: its output
    # Kept of it by eager code: the softmax output, the scores and a masked copy.
    bytes_kept_per_unfused_score: float = 6.0
    keeps_packed_qkv: bool = False  # without shared kv heads, the qkv output stays beside a copy of its k and v
    # Inputs and outputs that a stage keeps, per live micro-batch, token slice and hidden element.
    bytes_per_boundary_hidden: float = 0.0
    # Persistent buffers that tensor-parallel ranks gather hidden states into, per token of the whole width.
    bytes_per_gathered_hidden: float = 0.0
    keeps_hidden_gradients: bool = False  # under zero3 beside frozen weights: of every layer to the end of the pass
    # Of routed tokens, hidden states kept beside the inputs of experts: what scores weight, what they have weighted.
    weighted_copies: float = 0.0
    # What the gradients of a layer's tensors take at least in its backward pass, of what the layer keeps.
    transient_layers: float = 0.0
    fixed_bytes: float = 2.0 * 2**30  # CUDA context, kernels, cuBLAS workspaces
    communicator_bytes: float = 0.3 * 2**30  # NCCL buffers of one active group
    reserved_factor: float = 1.05  # what the allocator reserves over what it hands out
    broken_pass_share: float = 0.0  # more of what the passes take: blocks with gaps that their tensors do not fit into
    # Every tensor has its place when the program is compiled: the gradients of a step's only micro-batch take what the
    # passes have given back.
    is_planned_ahead: bool = False
    # Whether the peak counts blocks that the allocator keeps beyond its tensors and gives back when memory runs short.
    counts_cached_blocks: bool = False
    # Of them, outputs of whole width wait for a collective in as many layers as the host launches ahead of the device.
    host_lead_layers: float = 0.0
    host_lead_tokens_per_layer: float = 1.0  # of a step; it is ahead by one layer more for this many tokens
    pipeline_lead_tokens_per_layer: float = 1.0  # the same in a pipeline, of tokens divided by tp
    # Which peak its log, or people who use it, report: handed out by the allocator, held by it, or taken on the device.
    logs_memory: Literal["allocated", "reserved", "device"] = "allocated"
    logs_first_rank: bool = False  # of rank 0 alone, not of the worst rank

    @property
    def keeps_main_weights(self) -> bool:
        """Return whether the optimizer updates the stored weights, which passes cast, and not an fp32 copy."""
        return self.bytes_per_weight >= 4.0

    def __post_init__(self) -> None:
        check_count("whole_gather_copies", self.whole_gather_copies, at_least=0, at_most=10)
        check_count("pads_vocab_to", self.pads_vocab_to, at_most=2**20)
        _check(
            self,
            positive=(
                "bytes_per_weight",
                "bytes_per_grad",
                "bytes_per_optimizer_state",
                "bytes_per_logit",
                "host_lead_tokens_per_layer",
                "pipeline_lead_tokens_per_layer",
            ),
            bytes_per_fused_score=(2, 16),
            reserved_factor=(1, 10),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Kernels of the passes: what they compute, repeat and move through the memory of the device."""

    fused_norm: bool = True  # an eager norm keeps and moves fp32 copies
    fused_activation: bool = True  # an eager SwiGLU keeps one more tensor of the MLP width
    fused_squared_relu: bool = True  # else a ReLU and a power with kernels of their own
    fuses_softmax: bool = False  # what a plan calls unfused attention has a kernel that scales, masks and normalises
    # Its fp32 plans multiply on TF32 units, else only those of the built-in trainer are priced.  No option of a plan:
    # NVIDIA's containers turn it on for all that runs in them (TORCH_ALLOW_TF32_CUBLAS_OVERRIDE), and no launch file
    # says it.
    tf32_products: bool = False
    # What it runs where a plan says flash; flash stands for the best that the device has, sdpa for torch's own.
    flash_kernel: Literal["flash", "flash1", "flash2", "triton", "cudnn", "sdpa", "flex"] = "flash"
    # Queries, keys, values, gate and up are products of their own, whose gradients of the same input are added up.
    separate_inputs: bool = False
    torch_grouped_products: bool = False  # experts' products are torch's grouped ones, not of cuBLAS for each expert
    # Keys and values are repeated to the number of heads before attention, also on their way around a context group,
    # whose ranks gather all of them at once, beside attention to their own.
    expands_kv: bool = False
    # Time of attention to the keys of other ranks of a ring, piece by piece, over that of the same work in one piece.
    ring_attention_factor: float = 1.0
    # What `recompute = "selective"` repeats: the attention core alone, or this share of all that a layer does (SAC).
    selective_recompute_share: float = 0.0
    # Of the products alone that share is repeated, attention and what reduces its output and the MLP's are not, and all
    # else is.
    selective_saves_attention: bool = False
    # Parts of a mixture's layers are compiled on their own, so that what chooses the outputs to keep sees no products.
    compiles_mixtures_in_parts: bool = False
    # What is chosen to be kept includes every product with a bias, and what experts' ranks have exchanged.
    keeps_biased_and_exchanged: bool = False
    # Recomputing a whole layer ends before its last matrix, whose output no gradient needs; tokens that a dispatcher
    # weights before it sums them stay with experts.
    recompute_stops_early: bool = False
    kernel_bytes_factor: float = 1.0  # traffic of the memory-bound operations over that of fused kernels
    permute_bytes_factor: float = 1.0  # more of it for sorting tokens by expert and back: times the above
    # What ranks receive in order of ranks is sorted by expert once more, and back, by indexing.
    sorts_received: bool = False
    # Outputs of experts, and gradients of their inputs, are added up element by element with atomic operations.
    atomic_expert_sums: bool = False
    bytes_moved_per_logit: float = 0.0  # by the cross entropy, in each pass; 0: 1.25 times `bytes_per_logit`
    bytes_per_unfused_score: float = 22.0  # moved per attention score, both passes, where no kernel fuses the softmax
    # Moved through memory per parameter and micro-batch where adding up gradients is not fused into the products.
    bytes_moved_per_accumulated_grad: float = 0.0
    casts_for_adapters: bool = False  # adapters in fp32 meet 16-bit inputs, which are cast; else as they are sharded
    fuses_unpacking: bool = False  # 4-bit integers become weights in one kernel, not in one of torch for each operation
    bytes_moved_per_update: float = 30.0  # read and written per local parameter in a step (`modelling` C7)
    # Read and written in host memory per parameter that an optimizer on the host updates: by torch's AdamW, a loop
    # over a tensor for each of its eight operations.
    bytes_moved_per_host_update: float = 80.0

    def __post_init__(self) -> None:
        _check(
            self,
            positive=("ring_attention_factor", "kernel_bytes_factor", "permute_bytes_factor"),
            selective_recompute_share=(0, 1),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Mixtures of experts: their traffic, their waits for the host and their kernels."""

    bytes_per_dispatched: float = 2.0  # per element of a token on its way to the experts; on its way back 2
    # Every pass through a MoE block waits for the host: it reads how many tokens each expert got before it can launch
    # the experts, by when the device has caught up with it.
    moe_sync_s: float = 0.0
    # Each rank of an expert-tensor-parallel group routes and sends all tokens of the group; else its own, and the group
    # gathers them behind the exchange.
    routes_group_tokens: bool = False
    # A kernel for all local experts casts, multiplies or adds biases; else each expert has its own.
    are_grouped: bool = False
    # More in every such pass of 8 bits or fewer, as casts are kernels of each expert: once, and for each.
    narrow_sync_s: float = 0.0
    s_per_local_expert: float = 0.0
    # Unless something else is said, nothing but routers chooses experts; benchmarks under others force a balance.
    routes_freely: bool = False

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Traffic between ranks: what is sent, how often, and what that costs beyond the time on the wire."""

    sequence_parallel: bool = True  # whether tp > 1 normally runs with sequence parallelism
    # Which 8-bit plans gather what enters the matrices as quantised, gradients too: those where a matrix has one scale;
    # or MXFP8 and NVFP4 plans too, blocks of rows for the products that gradients flow through, blocks of columns for
    # the gradients of weights.
    narrow_tp_gathers: Literal["none", "tensors", "blocks"] = "none"
    # Pipelines are those of torch.distributed.pipelining: without sequence parallelism every rank of a tensor group
    # sends all of a hidden state, not 1/tp, and schedules that take the backward pass apart leave the first chunk's
    # whole, whose input has no gradient.
    torch_pipelines: bool = False
    bytes_per_reduced_grad: float = 4.0  # per gradient element on the wire
    reduces_accumulators: bool = False  # as they are, in fp32; else in the type of the gradients
    # Unsharded gradients are reduced in the type in which they are stored, whatever the type of sharded reductions.
    copies_reduce_as_stored: bool = False
    # Of 16-bit gradients, that an unsharded all-reduce takes at a time, out of buckets beside the gradients (DDP); 0:
    # all of them at once, in place.
    reduce_bucket_bytes: float = 0.0
    zero1_grad_all_reduce: bool = False  # DeepSpeed-like: the whole gradient is all-reduced, then the shard updated
    zero2_reduces_every_microbatch: bool = False  # else once a step, like zero1
    # Under zero3 gathers, and reductions, of a block: more than one where every tensor goes by itself.
    messages_per_block: float = 1.0
    # zero3 gathers the layers' dense weights as 8-bit products read them, where their scales follow from past steps.
    gathers_quantised: bool = False
    # What zero3 copies on the device behind a gather and before a reduction: units, out of the gathered buffer and into
    # the one to reduce, or units and the slices of all ranks, each by a kernel.
    sharded_copies: Literal["none", "units", "pieces"] = "none"
    zero3_regathers_in_pipeline: bool = False  # else stages of a pipeline gather and reduce once a step
    # What reducing and gathering sharded states costs over the wire's time alone (flattening, padding, small buckets).
    sharded_wire_factor: float = 1.0
    # Added to a tensor-parallel collective that leaves the scale-up domain, for every further member of the group.
    cross_node_s_per_member: float = 0.0
    # Added on the host to every tensor-parallel collective, per member of its group, in pipelines across nodes; once
    # more per member beyond the scale-up domain, whose host is further away; to one of a data-parallel group likewise.
    cross_node_pipeline_s_per_tp: float = 0.0
    cross_node_pipeline_s_per_far_tp: float = 0.0
    cross_node_pipeline_s_per_dp: float = 0.0
    # Added to a message between stages, both of whose ends sleep between looks at whether it came.
    message_poll_s: float = 0.0

    def __post_init__(self) -> None:
        _check(self, positive=("messages_per_block",))


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Communication that runs beside computation, and how much of it hides there."""

    # Tensor-parallel ranks reduce the gradient of a matrix's inputs while they compute that of its weights.
    tp_reduce_overlap: bool = True
    tp_overlap_share: float = 0.0  # of the tensor-parallel collectives that hides under GEMMs
    # Overlapped products run in so many pieces, each beside the traffic of another one; 0: they stay as they are.
    tp_overlap_pieces: int = 0
    # Of the last micro-batch's backward pass, on the first stage, that can hide an unsharded all-reduce; 0: not at all.
    all_reduce_overlap_share: float = 1.0
    sharded_reduce_overlap: bool = True  # the reduce-scatter of sharded gradients, under all of that pass
    param_gather_overlap: bool = True  # under the next step's first forward pass
    fsdp_unhidden_share: float = 0.15  # of the shorter of computing and gathering that does not hide behind the longer
    p2p_overlap: bool = True  # interleaved schedules and GPipe send while they compute

    def __post_init__(self) -> None:
        check_count("tp_overlap_pieces", self.tp_overlap_pieces, at_least=0, at_most=1000)
        _check(self, tp_overlap_share=(0, 1), all_reduce_overlap_share=(0, 1), fsdp_unhidden_share=(0, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Time that the host spends on launching kernels, on collectives, on its allocator and once per step."""

    host_s_per_block_forward: float = 150e-6  # CPU time to launch one attention or MLP block
    host_s_per_block_backward: float = 250e-6
    # Added to each pass of a block under zero3, where hooks around every module fetch its weights and release them.
    host_s_per_hooked_block: float = 0.0
    # Of each kernel that a block of experts, or of latent attention, launches beyond a dense block
    # (`cost/kernels/launches.py`): an eager operation (`modelling` C6), or what a framework's layers put around it.
    host_s_per_launch: float = 10e-6
    # Added for each operation on DTensors, torch's sharded tensors, that a block dispatches in Python, in tensor groups
    # where norms and activation are not compiled (`cost/kernels/sharded_operations.py`).
    host_s_per_dtensor_operation: float = 0.0
    host_s_per_collective: float = 20e-6  # added where ranks must meet before a collective starts
    # Where zero1 gathers every rank's slice of every tensor of weights on its own: slicing, flattening, copying back.
    host_s_per_gathered_piece: float = 0.0
    step_overhead_s: float = 0.01  # data, logging, the norm's barrier

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """Traits of one framework (and era) that decide what the same plan costs in it.

    The defaults are those of Megatron-Core as its sources and `modelling` B, C6, D and E5 give them; communicator,
    fragmentation, host and overlap figures are judged there, and a preset that was fitted to runs says so.
    """

    name: str
    memory: Memory = field(default_factory=Memory)
    kernels: Kernels = field(default_factory=Kernels)
    experts: Experts = field(default_factory=Experts)
    network: Network = field(default_factory=Network)
    overlap: Overlap = field(default_factory=Overlap)
    host: Host = field(default_factory=Host)
    # Options of its plans (AXIS=VALUE), where nothing else is said, that are not the usual ones of `spec/axes.py`.
    usual: tuple[str, ...] = ()
    # Options (AXIS), or words of them (AXIS=WORD), that others under the same rules offer and this version does not.
    lacks: tuple[str, ...] = ()
    # Of the options that few frameworks have, those that this version has, where not all that its rules allow.
    offers: tuple[str, ...] | None = None
    # Its layers are Megatron-LM's, or a fork's; those of other code are predicted less well (`cost/spreads.py`).
    megatron_layers: bool = True
    interleaves_mamba: bool = True  # whether a pipeline of a model with Mamba layers may have several chunks a rank
    rules: str = "megatron-lm"  # the folder whose rules decide which plans it admits, by its name in the registry
    rank_orders: tuple[RankOrder, ...] = (RankOrder.DP_BEFORE_PP,)  # that it can number its ranks in, its default first
    calibrated_as: str = ""  # the framework whose calibration holds for it too: another version of the same
    sources: tuple[str, ...] = ()
    fitted: tuple[str, ...] = ()  # traits whose values were fitted to measured runs; all others have a source

    @property
    def is_trainer(self) -> bool:
        """Return whether its layers and other units are the built-in trainer's, which a profile measures."""
        return self.rules == "trainer"

    @property
    def layer_kernels(self) -> str:
        """Beginning of the kernel names of its own whole layers, which a profile measures and prices use."""
        if self.is_trainer:
            return "trainer"
        return f"{'megatron-core' if self.megatron_layers else self.rules}: "

    @property
    def timed_operations(self) -> list[Operation]:
        """Operations whose measured times are those of its kernels: not what it fuses and torch runs one by one."""
        return [name for name in SHAPES if self.is_trainer or name not in FUSED]

    @property
    def profiled_operations(self) -> list[Operation]:
        """Operations of these that a profile measures without being told whose kernels to run."""
        named_only = {*JOINED_KERNELS, *(() if self.is_trainer else TRAINER_UNITS)}
        return [name for name in self.timed_operations if name not in named_only]

    @property
    def calibration_name(self) -> str:
        """Name of the framework whose calibrations apply to this one."""
        return self.calibrated_as or self.name

    def __post_init__(self) -> None:
        if not self.rank_orders:
            raise InputError("rank_orders must name at least one")
        if unknown := set(self.fitted) - GROUP_OF.keys():
            raise InputError(f"fitted names no trait of a framework: {listed(sorted(unknown))}")
        usual_axes = {text.partition("=")[0] for text in self.usual}
        if unknown := usual_axes - {name for name, axis in AXIS.items() if axis.offered_by or name == "attention"}:
            raise InputError(f"usual names no option of few frameworks: {listed(sorted(unknown))}")
        if unknown := {text.partition("=")[0] for text in self.lacks} - AXIS.keys():
            raise InputError(f"lacks names no option: {listed(sorted(unknown))}")
        if unknown := set(self.offers or ()) - set(offered(self.rules)):
            raise InputError(f"offers names what {self.rules} does not: {listed(sorted(unknown))}")
        for key, texts in (("usual", self.usual), ("lacks", tuple(text for text in self.lacks if "=" in text))):
            for text in texts:
                name, _, value = text.partition("=")
                AXIS[name].parse(value, key)

    def choice(self, axis: str) -> Value:
        """Return the value of an option in plans that leave it out."""
        default = self.network.sequence_parallel if axis == "sp" else AXIS[axis].default
        value: Value = _parsed(self.usual).get(axis, default)
        return value

    @property
    def choices(self) -> dict[str, Any]:
        """Options whose values in plans that leave them out differ from the defaults of `spec/axes.py`."""
        return dict(_parsed(self.usual))

    @property
    def attention(self) -> AttentionKernel:
        """Kernel of attention in plans that leave it out."""
        return AttentionKernel(str(self.choice("attention")))

    def choosing(self, plan: ParallelPlan) -> Framework:
        """Return the framework whose plans have the options of `plan` that decide the numerics of training."""
        numerics = {name: getattr(plan, name) for name, axis in AXIS.items() if axis.exact is not None}
        chosen = {name: value for name, value in (self.choices | numerics).items() if value != AXIS[name].default}
        return replace(self, usual=tuple(f"{name}={shown(value)}" for name, value in chosen.items()))

    def preferring(self, choice: str) -> Framework:
        """Return the framework whose plans have an option (AXIS=VALUE) where nothing else is said."""
        return replace(self, usual=(*self.usual, choice))

    def trait(self, name: str) -> Any:
        """Return the trait called `name`, whichever group holds it."""
        return getattr(getattr(self, GROUP_OF[name]), name)

    def changed(self, **traits: Any) -> Framework:
        """Return the framework with other values of traits, whichever groups hold them."""
        groups: dict[str, dict[str, Any]] = {}
        for name, value in traits.items():
            groups.setdefault(GROUP_OF[name], {})[name] = value
        return replace(self, **{group: replace(getattr(self, group), **values) for group, values in groups.items()})


@cache
def _parsed(usual: tuple[str, ...]) -> dict[str, Any]:
    """Values of options by their names, from texts such as dropout=on."""
    pairs = (text.partition("=") for text in usual)
    return {name: AXIS[name].parse(value, "usual") for name, _, value in pairs}


GROUPS: dict[str, type] = {
    "memory": Memory,
    "kernels": Kernels,
    "experts": Experts,
    "network": Network,
    "overlap": Overlap,
    "host": Host,
}
GROUP_OF = {trait.name: group for group, kind in GROUPS.items() for trait in fields(kind)}
