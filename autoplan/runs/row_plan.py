"""Plan of a row in a table of runs: its degrees and options, with defaults for blank cells."""

from __future__ import annotations

import math

from autoplan.base.errors import UnpricedError
from autoplan.frameworks.megatron_lm.notation import GRAPH_SCOPES, graphs_of, layout_counts
from autoplan.frameworks.registry import book_of
from autoplan.runs.recipes import Recipe
from autoplan.runs.row import MAX_DEGREE, Row
from autoplan.spec.axes import AXES, AXIS, DEFAULT_RECOMPUTE_MODULES
from autoplan.spec.axis import Kind, Value
from autoplan.spec.enums import (
    AttentionKernel,
    ChunkedLoss,
    ContextParallelKind,
    CudaGraphs,
    Dispatcher,
    Fp8Scaling,
    Offload,
    OffloadLayers,
    Recompute,
    RecomputeModule,
    Sharding,
    enum_value,
)
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan, parse_recompute
from autoplan.spec.problem import Problem

# Choices of MoE recipes.  A recipe quoted in a row without dispatcher or overlap has plain all-to-all and no overlap
# (Megatron-Bridge v0.2.0 to v0.5.0, scripts/performance/utils/utils.py, WorkloadBaseConfig); for a row without a quoted
# recipe, the recipes of its framework apply.
CHOSEN_FOR_EXPERTS = {"cuda_graph", "dispatcher", "ep_overlap", "recompute_modules"}


# Options of plans that a row may state by their names; others are read with what they depend on.
STATED = frozenset(axis.name for axis in AXES if axis.offered_by and axis.kind in (Kind.FLAG, Kind.WORD)) - {
    *("dispatcher", "ep_overlap", "cuda_graphs", "token_dropping", "offload_layers", "fp8_attention"),
}


def _graphs(row: Row, model: ModelSpec, usual: CudaGraphs) -> CudaGraphs:
    """Return the CUDA graphs: scopes by Megatron-Core's names, joined by "+", or none."""
    if "cuda_graph" not in row.options():
        return usual
    scopes = {scope for scope in row.options().get("cuda_graph", "none").split("+") if scope != "none"}
    if scopes == {"layer"}:  # all parts of a layer with static shapes
        return CudaGraphs.LAYER
    all_scopes = {scope for level in GRAPH_SCOPES.values() for scope in level} | {"full_iteration"}
    if unknown := scopes - all_scopes:
        raise UnpricedError(f"option cuda_graph {min(unknown)[:40]!r} is not one of {', '.join(sorted(all_scopes))}")
    return graphs_of(scopes, model)


def _drops_tokens(row: Row, problem: Problem) -> bool:
    """Return whether experts drop tokens, by an option or by words after the name of a model."""
    name, is_usual = row.text("model"), bool(problem.framework.choice("token_dropping"))
    by_name = "(tokendrop)" in name or (is_usual and "(dropless)" not in name)
    return row.option("token_dropping", by_name) and problem.model.moe is not None


def plan_of(row: Row, problem: Problem, recipe: Recipe) -> ParallelPlan:
    """Return the plan of a row; UnpricedError if a cell cannot be read or contradicts others."""
    tp, cp, pp = row.degree("tp", 1), row.degree("cp", 1), row.degree("pp", 1)
    num_gpus = row.degree("num_gpus")
    dp = row.degree("dp", max(num_gpus // (tp * cp * pp), 1))
    if tp * cp * pp * dp != num_gpus:
        raise UnpricedError(f"tp {tp} x cp {cp} x pp {pp} x dp {dp} is not num_gpus {num_gpus}")
    ep = row.degree("ep", _usual_ep(problem, num_gpus, pp))
    etp = row.integer("etp", 1, at_most=MAX_DEGREE) or 1  # 0: not used
    sp = row.flag("sp", tp > 1 and problem.framework.network.sequence_parallel)
    sharding, shard, offload = _sharding(row, recipe, dp)
    micro_batch = row.integer("micro_batch", _usual_micro_batch(row, recipe, pp, dp), at_least=1)
    global_batch = row.integer("global_batch", micro_batch * dp)
    vp = row.integer("vp", _usual_vp(problem, recipe, pp, global_batch // (micro_batch * dp)), at_most=MAX_DEGREE) or 1
    if vp > 1 and pp == 1:
        row.filled.append("vp=1 without a pipeline")
    recompute, num_repeated = _recompute(row, problem, recipe)
    modules = _recompute_modules(row, problem, recipe) if recompute == "selective" else DEFAULT_RECOMPUTE_MODULES
    if not modules:
        recompute = Recompute.NONE
    chunks = vp if pp > 1 else 1
    drops = _drops_tokens(row, problem)
    overlaps = ep > 1 and row.option("ep_overlap", _overlaps_experts(row, problem, recipe, pp, vp, ep, drops=drops))
    is_graphed = overlaps and problem.training.precision in recipe.overlaps_experts
    return ParallelPlan.derived(
        has_experts=problem.model.moe is not None,
        has_latents=problem.model.mla is not None,
        global_batch=global_batch,
        micro_batch=micro_batch,
        tp=tp,
        sp=sp,
        cp=cp,
        cp_kind=_context_kind(row, problem),
        pp=pp,
        vp=chunks,
        layers_per_chunk=_layout(row) or _layers_per_chunk(problem, recipe, pp, chunks),
        ep=ep,
        etp=etp,
        dp_replicate=dp // shard,
        dp_shard=shard,
        sharding=sharding,
        recompute=recompute,
        recompute_num_layers=num_repeated,
        recompute_modules=modules or DEFAULT_RECOMPUTE_MODULES,
        precision=problem.training.precision,
        offload=_offload(row, offload),
        offload_layers=_offload_layers(row, problem.model),
        tp_overlap=row.option("tp_overlap", problem.framework.overlap.tp_overlap_share > 0),
        dispatcher=_dispatcher(row, problem, recipe, ep, drops=drops),
        ep_overlap=overlaps,
        **problem.framework.choices
        | _chosen(row, problem, recipe, sharding, overlaps=overlaps)
        | {"token_dropping": drops},
        cuda_graphs=_graphs(row, problem.model, recipe.overlap_graphs if is_graphed else CudaGraphs.NONE),
        grad_reduce_overlap=row.option("grad_reduce_overlap", default=True),
        param_gather_overlap=row.option("param_gather_overlap", default=True),
    )


def _sharding(row: Row, recipe: Recipe, dp: int) -> tuple[str, int, Offload]:
    """Return (sharding, ranks in a shard group, offload by the sharding's suffix "+offload")."""
    text = row.text("sharding", recipe.sharding)
    sharding = text.removesuffix("+offload")
    if sharding not in tuple(Sharding):
        raise UnpricedError(f"sharding {sharding[:40]!r} is not one of {', '.join(tuple(Sharding))}")
    shard = 1 if sharding == "none" else row.integer("shard_group", dp, at_most=MAX_DEGREE) or dp
    if dp % shard:
        raise UnpricedError(f"shard_group {shard} does not divide dp {dp}")
    return sharding, shard, Offload.NONE if sharding == text else Offload.OPTIMIZER


def _offload(row: Row, by_sharding: Offload) -> Offload:
    """Return which states are offloaded to the host: those named by an option, or those of "+offload"."""
    return enum_value("offload", Offload, row.options().get("offload", by_sharding))


def _offload_layers(row: Row, model: ModelSpec) -> OffloadLayers:
    """Return the share of the layers whose activations are in host memory; only quarters are priced."""
    text = row.options().get("activation_offload_layers", "0")
    share = (int(text) if text.isdigit() else 0) / model.num_layers
    nearest = OffloadLayers.nearest(share)
    if nearest.share != share or not text.isdigit():
        row.filled.append(f"activation_offload_layers={text} as {nearest} of the layers")
    return nearest


def _chosen(row: Row, problem: Problem, recipe: Recipe, sharding: str, *, overlaps: bool) -> dict[str, int | Value]:
    """Return the row's choices, with the framework's defaults for the others."""
    narrows = problem.model.moe is not None and problem.training.precision in recipe.narrows_attention
    narrow_params = problem.framework.choice("narrow_params") and problem.training.precision not in recipe.wide_params
    keeps_dropout = recipe.keeps_gpt_dropout and problem.model.position_embedding == "learned"
    chosen: dict[str, int | Value] = {
        "dropout": bool(problem.framework.choice("dropout")) or keeps_dropout,
        "narrow_params": row.option("fp8_params", bool(narrow_params)),
        "attention": (attention := _attention(row, problem, recipe)),
        "fp8_attention": attention == AttentionKernel.FLASH and row.option("fp8_attention", narrows),
    }
    # Recipes that overlap experts do both (Megatron-Bridge 067f987, scripts/performance/utils/overrides.py).
    if overlaps and problem.framework.rules == "megatron-lm":
        chosen["delay_wgrad"] = True
    if recipe.accumulates_in_pipelines and row.degree("pp", 1) == 1:
        chosen["gradient_accumulation_fusion"] = False
    # Megatron-FSDP of recipes (Megatron-Bridge 067f987, perf_recipes/llama/gb200/llama3.py).
    if problem.framework.rules == "megatron-lm" and sharding in (Sharding.ZERO2, Sharding.ZERO3):
        chosen["gradient_accumulation_fusion"] = False
    if (named := row.options().get("fp8_recipe", "")) in tuple(Fp8Scaling):
        chosen["fp8_scaling"] = Fp8Scaling(named)
    if recipe.routes_unfused_alltoall and _named_dispatcher(row, recipe) == Dispatcher.ALL_TO_ALL:
        chosen |= {"router_fusion": False, "rope_fusion": False}
    return chosen | _stated(row)


def _stated(row: Row) -> dict[str, int | Value]:
    """Return the options that a row states by the names that plans have for them; 0 and 1 are off and on.

    A loss in pieces of which nothing more is said is Liger's.
    """
    texts = {name: {"0": "off", "1": "on"}.get(text, text) for name, text in row.options().items() if name in STATED}
    if (name := "chunked_loss") in texts:
        texts[name] = {"off": ChunkedLoss.NONE, "on": ChunkedLoss.LIGER}.get(texts[name], texts[name])
    return {name: AXIS[name].parse(text, "option") for name, text in texts.items()}


def _context_kind(row: Row, problem: Problem) -> ContextParallelKind:
    """Return the kind of context parallelism that a row states, or the plainest one of its framework for the model.

    A ring takes neither windows nor attention sinks (Transformer Engine, attn_forward_func_with_cp).
    """
    supported = (words.words for words in book_of(problem.framework).supported if words.axis == "cp_kind")
    kinds = next(supported, tuple(ContextParallelKind))
    is_local = problem.model.window is not None or problem.model.attention_sinks
    usual = ContextParallelKind.ALL_TO_ALL if is_local and ContextParallelKind.ALL_TO_ALL in kinds else kinds[0]
    return enum_value("cp_kind", ContextParallelKind, row.options().get("cp_kind", usual))


def _layers_per_chunk(problem: Problem, recipe: Recipe, pp: int, vp: int) -> tuple[int, ...] | None:
    """Return layers per chunk if they are not as even as possible.

    Megatron-LM accepts indivisible layers if embedding and loss count as one layer each, which is even, or with a
    layout.  NVIDIA's recipes fill every chunk except the last, which has the loss; with too few layers for that, the
    last chunk has only the loss and the first chunk has fewer layers, too (Megatron-LM
    core/transformer/transformer_config.py, account_for_loss_in_pipeline_split; Megatron-Bridge 067f987,
    recipes/deepseek/h100/deepseek_v3.py, perf_recipes/deepseek/h100/deepseek_v3.py and recipes/kimi/h100/kimi_k2.py).
    """
    if split := book_of(problem.framework).split:
        return split(problem.model, pp)
    if recipe.counts_ends_as_layers and vp == 1:
        return _with_ends(problem.model.num_layers, pp)
    if recipe.relieves_last_stage and vp == 1:
        return _with_light_end(problem.model.num_layers, pp)
    chunks, num_layers = pp * vp, problem.model.num_layers
    max_layers = math.ceil(num_layers / chunks)
    last = num_layers - max_layers * (chunks - 1)
    is_even = problem.framework.rules != "megatron-lm" or (num_layers + 2) % chunks == 0
    if is_even or last in (0, max_layers) or last <= -max_layers:
        return None
    return (min(max_layers, max_layers + last), *[max_layers] * (chunks - 2), max(last, 0))


def _with_ends(num_layers: int, pp: int) -> tuple[int, ...] | None:
    """Return layers per stage with embedding and head counted as one each; the first stages take the remainder."""
    base, remainder = divmod(num_layers + 2, pp)
    if pp == 1 or base < 2:
        return None
    first, *middle, last = (base + (stage < remainder) for stage in range(pp))
    return (first - 1, *middle, last - 1)


def _with_light_end(num_layers: int, pp: int) -> tuple[int, ...] | None:
    """Return layers per stage of LiBai's pipelines, whose last stages are planned for more layers than exist.

    Divisible layers are laid out as if there were up to pp - 1 more; the remainder of an even share goes to the last
    stages, and stages are filled starting from the first.
    """
    share, remainder = divmod(num_layers, pp)
    more = min(pp - 1, share) if pp >= 4 and num_layers >= 8 and not remainder else 0
    share, longer = divmod(num_layers + more, pp)
    planned = [share + (stage >= pp - longer) for stage in range(pp)]
    layers = tuple(max(min(size, num_layers - sum(planned[:stage])), 0) for stage, size in enumerate(planned))
    return layers if len(set(layers)) > 1 else None


def _usual_ep(problem: Problem, num_gpus: int, pp: int) -> int:
    """Default `ep`: 1, or if the experts of a stage would not fit on a device, all ranks that may share them."""
    moe = problem.model.moe
    if moe is None:
        return 1
    state_bytes = problem.framework.memory.bytes_per_weight + problem.framework.memory.bytes_per_grad
    experts = 3 * problem.model.hidden_size * moe.expert_ffn_size * moe.num_experts * problem.model.num_layers
    fits = state_bytes * experts / moe.interval / pp < problem.capacity_bytes
    return 1 if fits else math.gcd(moe.num_experts, num_gpus // pp)


def _usual_vp(problem: Problem, recipe: Recipe, pp: int, num_microbatches: int) -> int:
    """Default `vp`: 1, or as many chunks as a stage has layers."""
    model = problem.model
    can = pp > 1 and model.moe is None and model.num_layers % pp == 0 and num_microbatches % pp == 0
    return model.num_layers // pp if can and recipe.interleaves_layers else 1


def _attention(row: Row, problem: Problem, recipe: Recipe) -> AttentionKernel:
    kernel = AttentionKernel(row.word("attention", tuple(AttentionKernel), recipe.attention))
    return recipe.latent_attention if kernel is AttentionKernel.FLASH and problem.model.mla else kernel


def _usual_recompute(problem: Problem, recipe: Recipe) -> Recompute:
    """Default recomputation: none, or the core of an attention that stores its scores for want of a kernel."""
    is_forced = problem.model.mla is not None and recipe.latent_attention.stores_scores
    return Recompute.SELECTIVE if is_forced else Recompute.NONE


def _recompute(row: Row, problem: Problem, recipe: Recipe) -> tuple[str, int | None]:
    """Return the row's recomputation with its number of layers per chunk: "full", "full:21"."""
    text = row.text("recompute") if row.has("recompute") else ""
    if text.startswith(f"{Recompute.FULL}:"):
        return Recompute.FULL, int(str(parse_recompute(text)["recompute_num_layers"]))
    return row.word("recompute", tuple(Recompute), _usual_recompute(problem, recipe)), None


def _recompute_modules(row: Row, problem: Problem, recipe: Recipe) -> tuple[RecomputeModule, ...]:
    """Parts under selective recomputation, by default the attention core, or the parts named by recipes for MLA."""
    modules = row.options().get("recompute_modules")
    if modules is not None:
        names = [name for name in modules.split("+") if name != "none"]
        return tuple(enum_value("recompute_modules", RecomputeModule, name) for name in names)
    is_latent = problem.model.mla is not None and not problem.stores_scores(_attention(row, problem, recipe))
    return (is_latent and recipe.latent_recompute) or DEFAULT_RECOMPUTE_MODULES


def _layout(row: Row) -> tuple[int, ...] | None:
    """Return layers per chunk if the row states them in Megatron's notation."""
    layout = row.options().get("pp_layout")
    return tuple(layout_counts(layout)) if layout else None


def _usual_micro_batch(row: Row, recipe: Recipe, pp: int, dp: int) -> int:
    """Default micro-batch: one sequence, or the size with as many micro-batches as pipeline ranks."""
    if recipe.microbatch_per_rank and pp > 1 and row.has("global_batch"):
        return max(row.integer("global_batch") // (dp * pp), 1)
    return 1


def _dispatcher(row: Row, problem: Problem, recipe: Recipe, ep: int, *, drops: bool) -> Dispatcher:
    """Return the token dispatcher, which is always all-to-all if tokens are dropped."""
    if problem.model.moe is None or ep == 1 or drops:
        return Dispatcher.ALL_TO_ALL
    return _named_dispatcher(row, recipe)


def _named_dispatcher(row: Row, recipe: Recipe) -> Dispatcher:
    usual = Dispatcher.ALL_TO_ALL if _quotes_recipe(row) else recipe.dispatcher
    return enum_value("dispatcher", Dispatcher, row.options().get("dispatcher", usual))


def _quotes_recipe(row: Row) -> bool:
    """Return whether the row states its recipe's choices for experts, so that omitted ones were not made."""
    return not CHOSEN_FOR_EXPERTS.isdisjoint(row.options())


def _overlaps_experts(row: Row, problem: Problem, recipe: Recipe, pp: int, vp: int, ep: int, *, drops: bool) -> bool:
    """Return whether expert traffic overlaps with another micro-batch, which the framework's recipes do if possible.

    Megatron-Core supports it only for models with attention layers and, in a pipeline, with interleaving
    (core/transformer/transformer_config.py, overlap_moe_expert_parallel_comm).
    """
    if _quotes_recipe(row):
        return False
    framework = problem.framework
    can = framework.rules != "megatron-lm" or (problem.model.mamba is None and (pp == 1 or vp > 1))
    is_far = ep > problem.cluster.levels[-1].num_devices and pp > 1
    by_choice = is_far and recipe.overlaps_far_experts and not drops
    return can and (by_choice or problem.training.precision in recipe.overlaps_experts)
