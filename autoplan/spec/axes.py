"""Axes of a plan: the single table of their names, kinds, defaults and words, used by plans, searches and flags.

A new axis is a row here and a field of `ParallelPlan` and `PlanBatch`.  Its cost is in `autoplan.cost`, and the
frameworks that support it are in the rules and option tables of `autoplan.frameworks`.
"""

from __future__ import annotations

from functools import partial

from autoplan.spec.axis import MAX_DEGREE, Axis, Kind, Needs
from autoplan.spec.enums import (
    NARROW_PRECISIONS,
    AttentionKernel,
    ChunkedLoss,
    CodedEnum,
    ContextParallelKind,
    CrossEntropyFusion,
    CudaGraphs,
    Dispatcher,
    Fp8Scaling,
    GradType,
    MainWeights,
    MomentType,
    Offload,
    OffloadLayers,
    OffloadModules,
    Precision,
    RankOrder,
    Recompute,
    RecomputeModule,
    ReduceType,
    Schedule,
    Sharding,
)

DEFAULT_RECOMPUTE_MODULES: tuple[RecomputeModule, ...] = (RecomputeModule.CORE_ATTN,)
USUAL_SCHEDULES: tuple[Schedule, ...] = (Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED)
V_SHAPED: tuple[Schedule, ...] = (Schedule.ZB_V, Schedule.DUALPIPE_V)  # two chunks a rank, back and forth

_MEGATRON = ("megatron-lm", "primus")
_TORCHTITAN = ("torchtitan", "automodel")
_WITH_DEEPSPEED = (*_MEGATRON, "deepspeed")
_degree = partial(Axis, kind=Kind.COUNT, default=1, most=MAX_DEGREE, metavar="N")
_flag = partial(Axis, kind=Kind.FLAG, default=False)
_word = partial(Axis, kind=Kind.WORD)
_list = partial(Axis, kind=Kind.LIST)

# The order is that in which limits of a search are told.
# fmt: off
AXES: tuple[Axis, ...] = (
    _degree(name="tp", help="Tensor-parallel degree.", of_kernels=True),
    _degree(name="cp", help="Context-parallel degree.", of_kernels=True),
    _degree(name="pp", help="Pipeline stages."),
    _degree(name="vp", help="Model chunks per stage.", change="schedule", of_memory=False),
    _degree(name="ep", help="Expert-parallel degree.", needs=Needs.EXPERTS, of_kernels=True),
    _degree(name="etp", help="Tensor-parallel degree of experts; default: tp.", needs=Needs.SPLIT_EXPERTS,
            flag_default=None, of_kernels=True),
    _degree(name="dp", help="Data-parallel degree, from the devices that the other degrees leave.", change="", flag=""),
    _degree(name="dp_replicate", help="Replicas of the sharding group.", change="sharding"),
    _degree(name="dp_shard", help="Ranks in a sharding group.", change="sharding", flag=""),
    Axis(name="micro_batch", kind=Kind.COUNT, help="Sequences per micro-batch.", default=1, label="micro-batch",
         metavar="N", of_kernels=True),
    Axis(name="global_batch", kind=Kind.COUNT, help="Sequences per step.", label="global batch",
         elsewhere="use --global-batch", flag=""),
    _word(name="sharding", help="none, zero1, zero2 or zero3.", default=Sharding.ZERO1, needs=Needs.COPIES,
          searched=tuple(Sharding)),
    _word(name="recompute",
          help="none, selective, full, full:N (the first N layers of every chunk), or parts such as moe_act+layernorm.",
          default=Recompute.NONE, metavar="WHAT"),
    _list(name="recompute_modules", help="Parts of a layer that selective recomputation repeats.",
          default=DEFAULT_RECOMPUTE_MODULES, change="recompute", elsewhere="use recompute", flag=""),
    _list(name="recompute_num_layers", help="Layers of every chunk that full recomputation repeats; default: all.",
          change="recompute", elsewhere="use recompute", flag=""),
    _flag(name="sp", help="Sequence parallelism, if tp > 1.", needs=Needs.TENSOR_RANKS, label="sequence parallelism",
          searched=(True, False), flag="--sp/--no-sp", flag_default=True, of_kernels=True),
    _flag(name="tp_overlap", help="Overlap tensor-parallel communication.", needs=Needs.TENSOR_RANKS,
          label="overlap of tensor-parallel traffic", phrases={True: "TP overlap"}, searched=(False, True),
          of_memory=False),
    _flag(name="ep_overlap", help="Overlap expert communication with another micro-batch.", needs=Needs.SPREAD_EXPERTS,
          label="overlap of expert traffic", phrases={True: "EP overlap"}, offered_by=_MEGATRON, searched=(False, True),
          of_kernels=True, of_memory=False),
    _flag(name="shared_expert_overlap", help="Compute shared experts beside the traffic of the routed ones.",
          needs=Needs.SPREAD_EXPERTS, label="overlap of shared experts", phrases={True: "shared experts overlapped"},
          offered_by=_MEGATRON, searched=(False, True), is_monotone=True, flag_default=None, of_kernels=True,
          of_memory=False),
    _word(name="dispatcher", help="alltoall, deepep, hybridep or allgather.", default=Dispatcher.ALL_TO_ALL,
          needs=Needs.SPREAD_EXPERTS, label="dispatcher of tokens", offered_by=(*_MEGATRON, "automodel"),
          searched=tuple(Dispatcher), of_kernels=True, of_memory=False),
    _flag(name="grad_reduce_overlap", help="Reduce gradients during the last backward pass.", default=True,
          needs=Needs.COPIES, label="overlap of the gradient reduction",
          elsewhere="searches turn it off where that is faster", flag="", of_memory=False),
    _flag(name="param_gather_overlap", help="Gather parameters during the first forward pass.", default=True,
          needs=Needs.COPIES, label="overlap of the parameter gather", elsewhere="searches leave it on", flag="",
          of_memory=False),
    _word(name="schedule", help="1f1b, interleaved, gpipe, zb-h1, zb-v or dualpipe-v.", default=Schedule.ONE_F_ONE_B,
          needs=Needs.STAGES, searched=tuple(Schedule), flag_default=None, of_memory=False),
    _list(name="layers_per_chunk", help="Layers of every chunk in model order; default: evenly spread.",
          needs=Needs.STAGES, label="layers of the chunks", change="layers",
          elsewhere="searches spread the layers, --forbid uneven_stages narrows how", flag="--layers",
          metavar="N,N,..."),
    _word(name="cp_kind", help="ring, all_to_all, or a2a+p2p:N (all-to-all among N ranks, a ring over groups of N).",
          default=ContextParallelKind.RING, needs=Needs.CONTEXT_RANKS, label="kind of context parallelism",
          searched=tuple(ContextParallelKind), of_kernels=True, of_memory=False),
    _flag(name="dynamic_cp", help="Split every sample over as few of the cp ranks as its tokens need, if lengths vary.",
          needs=Needs.CONTEXT_RANKS, label="dynamic context parallelism", phrases={True: "dynamic CP"},
          offered_by=("megatron-lm",), searched=(False, True), of_memory=False),
    _word(name="offload", help="none, optimizer, or parameters (with gradients and optimizer).",
          default=Offload.NONE, searched=tuple(Offload)),
    Axis(name="offload_percent", kind=Kind.COUNT, default=100, most=100,
         help="Percentage of the optimizer's states that --offload optimizer keeps on the host.",
         label="share of the optimizer on the host", offered_by=_WITH_DEEPSPEED,
         elsewhere="searches try all, a half and quarters: use --forbid partial_offload, or autoplan estimate",
         metavar="PERCENT"),
    # Links to the host carry traffic of the network, too, which no runs price yet: searches leave these two alone.
    _word(name="offload_modules",
          help="Inputs of parts of a layer in host memory: core_attn, core_attn+attn_proj, expert_fc1, moe_act ...",
          default=OffloadModules.NONE, label="parts of layers on the host", offered_by=_MEGATRON,
          elsewhere="searches keep activations on the device: use autoplan estimate", metavar="WHAT",
          phrases={word: f"inputs of {word} on the CPU" for word in OffloadModules if word.code}),
    _word(name="offload_layers", help="Share of the layers whose activations are all in host memory: 1/4, 1/2 or 3/4.",
          default=OffloadLayers.NONE, label="layers on the host", offered_by=_MEGATRON,
          elsewhere="searches keep activations on the device: use autoplan estimate", metavar="SHARE",
          phrases={word: f"activations of {word} of the layers on the CPU" for word in OffloadLayers if word.code}),
    _word(name="cuda_graphs",
          help="none, router, attn, layer (every part of a layer with static shapes) or full_iteration.",
          default=CudaGraphs.NONE, label="CUDA graphs", offered_by=_MEGATRON,
          searched=(CudaGraphs.NONE, CudaGraphs.ATTENTION, CudaGraphs.LAYER, CudaGraphs.FULL_ITERATION),
          of_kernels=True, of_memory=False,
          phrases={CudaGraphs.ROUTER: "CUDA graphs of routers", CudaGraphs.ATTENTION: "CUDA graphs of attention",
                   CudaGraphs.LAYER: "CUDA graphs of layers", CudaGraphs.FULL_ITERATION: "one CUDA graph"}),
    _word(name="grad_dtype",
          help="Accumulate and reduce gradients in fp32 or bf16; bf16_main: without an fp32 copy for the update.",
          default=GradType.FP32, label="data type of the gradients", offered_by=_WITH_DEEPSPEED,
          searched=tuple(GradType),
          exact=(), flag_default=None, of_kernels=True,
          phrases={GradType.BF16: "16-bit gradients", GradType.BF16_MAIN: "16-bit main gradients"}),
    _word(name="reduce_dtype",
          help="Communicate gradients in the framework's usual type, in fp32, or in 16 bits (half).",
          default=ReduceType.USUAL, needs=Needs.COPIES, label="data type of the reduction",
          offered_by=(*_TORCHTITAN, "deepspeed", "fsdp2"), searched=tuple(ReduceType), exact=(), flag_default=None,
          phrases={ReduceType.FP32: "gradients reduced in fp32", ReduceType.HALF: "gradients reduced in 16 bits"}),
    _word(name="fp8_scaling",
          help="Scales of 8-bit GEMMs: tensorwise, rowwise, blockwise (of 128), or delayed (from past steps).",
          default=Fp8Scaling.TENSORWISE, precisions=(Precision.FP8,), label="scales of 8-bit products",
          offered_by=(*_TORCHTITAN, "fsdp2", "maxtext", *_MEGATRON), searched=tuple(Fp8Scaling), exact=(),
          flag_default=None, of_kernels=True, of_memory=False,
          phrases={Fp8Scaling.ROWWISE: "scales of rows", Fp8Scaling.DELAYED: "scales of past steps",
                   Fp8Scaling.BLOCKWISE: "scales of blocks"}),
    _flag(name="narrow_params",
          help="Store and gather the weights of low-precision GEMMs in 8 or 4 bits.",
          precisions=NARROW_PRECISIONS, label="narrow weights", phrases={True: "narrow weights"}, offered_by=_MEGATRON,
          searched=(False, True), exact=(), is_monotone=True, flag_default=None),
    _word(name="attention", default=AttentionKernel.FLASH, label="attention kernel",
          help=f"Attention kernel: {', '.join(AttentionKernel)}; flash is the fused one that the framework takes.",
          elsewhere="use --attention", of_kernels=True,
          phrases={word: f"{word} attention" for word in AttentionKernel if word.code}),
    _flag(name="fp8_attention", help="Compute core attention in 8 bits, in addition to the GEMMs.",
          precisions=NARROW_PRECISIONS, label="attention in 8 bits", phrases={True: "8-bit attention"},
          offered_by=_MEGATRON, searched=(False, True), exact=(), flag_default=None, of_kernels=True, of_memory=False),
    _flag(name="fp8_activation_input", help="Store the input of SwiGLU in 8 bits for the backward pass.",
          label="input of SwiGLU in 8 bits", phrases={True: "SwiGLU inputs stored in 8 bits"}, offered_by=_MEGATRON,
          searched=(False, True), exact=(), flag_default=None, of_kernels=True),
    _flag(name="token_dropping",
          help="Give every expert a fixed number of tokens and drop the rest (capacity factor 1).",
          needs=Needs.EXPERTS, label="dropping of tokens", phrases={True: "dropped tokens"}, offered_by=_MEGATRON,
          searched=(False, True), exact=(), flag_default=None, of_kernels=True),
    _flag(name="dropout", help="Apply dropout to hidden states and attention scores.", phrases={True: "dropout"},
          offered_by=_WITH_DEEPSPEED, searched=(False, True), exact=(), flag_default=None, of_kernels=True),
    _flag(name="router_fusion", help="Use fused kernels for the router.", needs=Needs.EXPERTS,
          label="fused router", phrases={True: "fused router"}, offered_by=_MEGATRON, searched=(False, True),
          is_monotone=True, flag_default=None, of_memory=False),
    _flag(name="rope_fusion", help="Use a fused RoPE kernel for latent attention.",
          needs=Needs.LATENTS, label="fused RoPE", phrases={True: "fused RoPE"}, offered_by=_MEGATRON,
          searched=(False, True), is_monotone=True, flag_default=None, of_memory=False),
    _flag(name="gradient_accumulation_fusion",
          help="Add up gradients of micro-batches in the GEMMs that compute them, where the framework can.",
          default=True, label="fused accumulation", offered_by=_MEGATRON, searched=(False, True), is_monotone=True,
          flag="--gradient-accumulation-fusion/--no-gradient-accumulation-fusion", flag_default=None, of_kernels=True,
          of_memory=False,
          phrases={False: "unfused accumulation"}),
    _flag(name="delay_wgrad",
          help="With ep_overlap, compute weight gradients of attention beside the messages of a pipeline.",
          needs=Needs.SPREAD_EXPERTS, label="delay of weight gradients", phrases={True: "delayed weight gradients"},
          offered_by=("megatron-lm",), searched=(False, True), is_monotone=True, flag_default=None, of_memory=False),
    _word(name="cross_entropy_fusion",
          help="Kernels of the cross entropy: unfused, native (compiled), or te (Transformer Engine's, in place).",
          default=CrossEntropyFusion.UNFUSED, label="fusion of the cross entropy", offered_by=_MEGATRON,
          searched=tuple(CrossEntropyFusion), flag_default=None, of_kernels=True,
          phrases={word: f"{word} cross entropy" for word in CrossEntropyFusion if word.code}),
    _word(name="chunked_loss",
          help="Compute head and loss in pieces: none, chunks (8), liger or cut (fused linear cross entropy).",
          default=ChunkedLoss.NONE, label="loss in pieces", offered_by=("torchtitan", "accelerate"),
          searched=tuple(ChunkedLoss), exact=(ChunkedLoss.NONE, ChunkedLoss.CHUNKS),  # others are packages
          flag_default=None, of_kernels=True,
          phrases={ChunkedLoss.CHUNKS: "loss in pieces", ChunkedLoss.LIGER: "Liger's loss",
                   ChunkedLoss.CUT: "cut cross entropy"}),
    _word(name="main_weights",
          help="Main weights of the optimizer: fp32, remainders (fp32 minus the bf16 weights), fp16 or bf16.",
          default=MainWeights.FP32, label="main weights",
          offered_by=(*_WITH_DEEPSPEED, *_TORCHTITAN, "fsdp2", "accelerate"), searched=tuple(MainWeights),
          exact=(MainWeights.FP32, MainWeights.REMAINDERS), is_monotone=True, flag_default=None, of_kernels=True,
          phrases={MainWeights.REMAINDERS: "main weights as remainders", MainWeights.FP16: "fp16 main weights",
                   MainWeights.BF16: "bf16 main weights"}),
    _word(name="moment_dtype", help="Adam's moments: fp32, bf16 or fp8.", default=MomentType.FP32,
          label="data type of the moments", offered_by=_WITH_DEEPSPEED, searched=tuple(MomentType), exact=(),
          is_monotone=True, flag_default=None,
          phrases={MomentType.BF16: "bf16 moments", MomentType.FP8: "fp8 moments"}),
    _flag(name="quantized_gathers", help="Gather weights of zero3 in 8 bits (ZeRO++ qwZ).", needs=Needs.COPIES,
          label="gathers in 8 bits", phrases={True: "8-bit gathers"}, offered_by=("deepspeed",), searched=(False, True),
          exact=(), flag_default=None),
    _flag(name="quantized_reductions", help="Reduce gradients of zero3 in 4 bits (ZeRO++ qgZ).", needs=Needs.COPIES,
          label="reductions in 4 bits", phrases={True: "4-bit reductions"}, offered_by=("deepspeed",),
          searched=(False, True), exact=(), flag_default=None),
    Axis(name="secondary_shard", kind=Kind.COUNT, default=1, most=MAX_DEGREE,
         help="Ranks that share a second copy of zero3's weights, for gathers inside nodes (ZeRO++ hpZ).",
         label="ranks of a second copy", offered_by=("deepspeed",),
         elsewhere="searches keep one copy of the weights: use autoplan estimate", metavar="N"),
    _flag(name="wide_adapters",
          help="Compute fp32 adapters in fp32, without torch.autocast, instead of casting them for the GEMMs.",
          label="products of adapters in fp32", phrases={True: "adapters multiplied in fp32"},
          offered_by=("accelerate",), searched=(False, True), exact=(), flag_default=None, of_kernels=True),
    _word(name="rank_order", help="tp-cp-ep-dp-pp or tp-cp-ep-pp-dp, innermost first.",
          default=RankOrder.DP_BEFORE_PP, needs=Needs.STAGES_AND_REPLICAS, label="order of the ranks",
          searched=tuple(RankOrder), metavar="ORDER", of_memory=False),
    _word(name="precision", help="Data type of the GEMMs.", default=Precision.BF16, change="",
          elsewhere="use --precision", flag="", of_kernels=True),
    _list(name="placement", help="Nodes in the order of the ranks; default: as in the cluster.",
          label="order of the nodes", change="nodes", elsewhere="searches order the nodes", metavar="NODE,NODE,..."),
)
# fmt: on

AXIS: dict[str, Axis] = {axis.name: axis for axis in AXES}
# Axes that determine the shapes of a plan's kernels; many plans agree in all of them.
KERNEL_AXES: tuple[str, ...] = tuple(axis.name for axis in AXES if axis.of_kernels)
COLUMNS: tuple[Axis, ...] = tuple(axis for axis in AXES if axis.is_column)
SEARCHED: tuple[Axis, ...] = tuple(axis for axis in AXES if axis.searched)
# Options that mean something with some precisions, or in some models, alone.
PARTLY_MEANT: tuple[Axis, ...] = tuple(
    axis
    for axis in SEARCHED
    if len(axis.precisions) < len(Precision)
    or (axis.kind is Kind.FLAG and axis.needs in (Needs.EXPERTS, Needs.LATENTS))
)
# By the name of a change of a plan, how it is called on screen.
LABELS: dict[str, str] = {axis.changed_as: axis.label for axis in AXES if axis.label}


def shown(value: object) -> str:
    """Return a readable form of a word, a number or a flag."""
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def offered(rules: str) -> tuple[str, ...]:
    """Return the axes that few frameworks have and one offers, by the name of its rules."""
    return tuple(axis.name for axis in AXES if rules in axis.offered_by)


def words_of(axis: str) -> tuple[CodedEnum, ...]:
    """Return all values of a word axis."""
    return tuple(AXIS[axis].enum or ())
