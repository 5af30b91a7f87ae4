"""Measured runs as problems and plans, row by row from a table.

Only the columns that describe a configuration are read: an id is copied, and a source, a status or a measured value
is never looked at; of a note only the switches that it lists.  Blank columns take stated defaults, which every run
lists.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import get_args

from autoplan.base.errors import AutoplanError, UnpricedError
from autoplan.base.names import suggestion
from autoplan.base.units import GIB
from autoplan.frameworks.common import universal_rules as universal
from autoplan.frameworks.common.rules import broken
from autoplan.frameworks.megatron_lm.notation import GRAPH_SCOPES, graphs_of, layout_counts
from autoplan.frameworks.registry import book_of
from autoplan.readers.calibration import built_in_calibration
from autoplan.readers.cluster import load_cluster, preset_clusters
from autoplan.readers.finetuning import METHODS, load_finetuning, optimizer_named
from autoplan.readers.model import find_preset
from autoplan.runs.recipes import Recipe, nearest_recipe, recipe_called
from autoplan.runs.table import BLANKS, read_rows
from autoplan.spec.axes import DEFAULT_RECOMPUTE_MODULES, Value
from autoplan.spec.calibration import Calibration
from autoplan.spec.enums import (
    ContextParallelKind,
    CudaGraphs,
    Dispatcher,
    Fp8Scaling,
    Offload,
    Precision,
    Recompute,
    RecomputeModule,
    Sharding,
    enum_value,
)
from autoplan.spec.finetuning import FineTuning
from autoplan.spec.framework import Framework
from autoplan.spec.model import Experts, ModelSpec
from autoplan.spec.optimizers import OPTIMIZERS, OptimizerName
from autoplan.spec.plan import ParallelPlan, parse_recompute
from autoplan.spec.problem import Problem
from autoplan.spec.training import Attention, TrainingSpec
from autoplan.topology.cluster import ClusterSpec

GPT_VOCAB_SIZE = 50257  # of GPT-2's tokenizer, where a table leaves the vocabulary out
# Of a model whose positions are not learned, as those of GPT are.
NOT_IN_COLUMNS = (
    "squared_relu",
    "clamped_activation",
    "attention_sinks",
    "window",
    "full_attention_interval",
    "norm",
    "norm_bias",
    "qk_norm",
    "qkv_bias",
    "attention_output_bias",
    "mlp_bias",
    "position_embedding",
)
MOST_DEGREE = 10**6
SAME_MEMORY = 0.15  # tables round a device's memory: 192 GiB for 180 of a B200, 186 of a GB200; 94 is a rare H100's
SLOWEST_NIC_BYTES_PER_S = 10e9  # of those of nodes of GPUs: EDR and 100 Gb/s Ethernet have 12.5
# What recipes of mixtures of experts choose.  One that a row quotes, and that leaves dispatcher or overlap alone, has
# plain all-to-all and no overlap (Megatron-Bridge v0.2.0 to v0.5.0, scripts/performance/utils/utils.py,
# WorkloadBaseConfig); of a row that quotes none, the recipes of its framework tell.
CHOSEN_FOR_EXPERTS = {"cuda_graph", "dispatcher", "ep_overlap", "recompute_modules"}
# Of what the recipe of a row chose, what a problem and its plan hold.
READ_OPTIONS = {
    "cuda_graph",
    "dispatcher",
    "dropout",
    "ep_overlap",
    "finetune",
    "fp8_attention",
    "fp8_params",
    "grad_reduce_overlap",
    "offload",
    "optimizer",
    "param_gather_overlap",
    "pp_layout",
    "recompute_modules",
    "token_dropping",
    "tp_overlap",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Row of a table: what was run, or why it cannot be priced, and which blanks were filled."""

    id: str
    problem: Problem | None
    plan: ParallelPlan | None
    refusal: str
    is_invalid: bool  # the framework itself would refuse it
    filled: tuple[str, ...]
    doubted: Framework | None = None  # which the run may as well have had; None: no doubt

    def calibrated(self, calibration: Calibration) -> Run:
        """Return the run under another calibration."""
        return replace(self, problem=self.problem and replace(self.problem, calibration=calibration))


class _Row:
    """Typed access to the cells of one row; remembers which defaults were taken."""

    def __init__(self, cells: dict[str, str]) -> None:
        self._cells = cells
        self.filled: list[str] = []

    def text(self, column: str, default: str | None = None) -> str:
        value = self._cells.get(column, "").strip()
        if value not in BLANKS:
            return value
        if default is None:
            raise UnpricedError(f"{column} is blank")
        self.filled.append(f"{column}={default}")
        return default

    def options(self) -> dict[str, str]:
        """Choices of the row's recipe, by name: "ep_overlap=1; dispatcher=deepep"."""
        pairs = (part.partition("=") for part in self._cells.get("options", "").split(";"))
        return {name.strip(): value.strip() for name, sign, value in pairs if sign}

    def option(self, name: str, default: bool) -> bool:
        value = self.options().get(name, str(int(default)))
        if value not in ("0", "1"):
            raise UnpricedError(f"option {name} is neither 0 nor 1: {value[:40]!r}")
        return value == "1"

    def has(self, column: str) -> bool:
        return self._cells.get(column, "").strip() not in BLANKS

    def integer(self, column: str, default: int | None = None, *, at_least: int = 0, at_most: int = 10**9) -> int:
        text = self.text(column, None if default is None else str(default))
        try:
            number = float(text)
        except ValueError:
            raise UnpricedError(f"{column} is not a number: {text[:40]!r}") from None
        if not math.isfinite(number) or number != int(number) or number < 0:
            raise UnpricedError(f"{column} is not a count: {text[:40]}")
        if not at_least <= number <= at_most:
            raise UnpricedError(f"{column} must be between {at_least} and {at_most}, got {text[:40]}")
        return int(number)

    def degree(self, column: str, default: int | None = None) -> int:
        return self.integer(column, default, at_least=1, at_most=MOST_DEGREE)

    def flag(self, column: str, default: bool) -> bool:
        return self.integer(column, int(default), at_most=1) == 1

    def number(self, column: str) -> float:
        try:
            value = float(self.text(column))
        except ValueError:
            raise UnpricedError(f"{column} is not a number: {self.text(column)[:40]!r}") from None
        if not (math.isfinite(value) and value > 0):
            raise UnpricedError(f"{column} is not a positive number: {self.text(column)[:40]}")
        return value

    def word(self, column: str, allowed: tuple[str, ...], default: str) -> str:
        text = self.text(column, default)
        if text not in allowed:
            raise UnpricedError(f"{column} {text[:40]!r} is not one of {', '.join(allowed)}")
        return text


def read_runs(path: Path) -> Iterator[Run]:
    """The runs of a CSV table in the columns of `measured_runs.csv`, in order; a bad row is a refusal, not an error."""
    return map(_run, read_rows(path, "runs", ("id", "framework", "gpu", "num_gpus", "model")))


def _run(cells: dict[str, str]) -> Run:
    row = _Row(cells)
    problem, plan, refusal, invalid, doubted = None, None, "", False, None
    try:
        recipe = _recipe(row)
        problem = _problem(row, recipe)
        plan = _plan(row, problem, recipe)
        if recipe.doubted and problem.cluster.num_nodes >= recipe.doubted_from_nodes:
            doubted = problem.framework.changed(**recipe.doubted)
        row.filled.extend(
            f"{name}={value} left out"
            for name, value in row.options().items()
            if name not in READ_OPTIONS | _read_under(row, recipe)
        )
        refusal = _refused_by_framework(problem, plan, recipe)
        invalid = bool(refusal)
    except AutoplanError as error:
        refusal = str(error)
    return Run(
        id=cells["id"],
        problem=problem,
        plan=plan if not refusal else None,
        refusal=refusal,
        is_invalid=invalid,
        filled=tuple(row.filled),
        doubted=doubted,
    )


def _read_under(row: _Row, recipe: Recipe) -> set[str]:
    """Return the options that mean something under this recipe alone, or by what they name."""
    by_name = {"fp8_recipe": row.options().get("fp8_recipe") in tuple(Fp8Scaling), "packed": recipe.packed_document_len}
    return {name for name, is_read in by_name.items() if is_read}


def _recipe(row: _Row) -> Recipe:
    """Return the recipe of the runs that go by the row's framework, or that of its nearest kin."""
    year = row.text("year", "?")
    sharding = row.text("sharding") if row.has("sharding") else ""
    recipe = recipe_called(row.text("framework", "?"), year, _sized_gpu(row)) or nearest_recipe(sharding, year)
    if recipe.in_pipelines and row.degree("pp", 1) > 1:
        return replace(recipe, framework=recipe.in_pipelines, is_kin=True)
    is_eager = recipe.uncompiled and row.options().get("cuda_graph") == "none"
    return replace(recipe, framework=recipe.uncompiled) if is_eager else recipe


def _problem(row: _Row, recipe: Recipe) -> Problem:
    framework = recipe.software()
    if recipe.is_kin:
        row.filled.append(f"framework treated as {recipe.framework}")
    attention = row.word("attention", get_args(Attention), recipe.attention)
    precision = row.word("precision", tuple(Precision), recipe.precision or "bf16")
    if recipe.precision and precision != recipe.precision:
        row.filled.append(f"precision={recipe.precision} as its scripts train")
        precision = recipe.precision
    training = TrainingSpec(
        seq_len=row.integer("seq_len"),
        precision=precision,  # type: ignore[arg-type]
        attention=attention,  # type: ignore[arg-type]
        fused_norm=row.flag("fused_norm", False) if row.has("fused_norm") else None,
        optimizer=_optimizer(row),
        finetuning=_finetuning(row),
        document_len=_document_len(row, recipe),
    )
    model = _model(row, recipe)
    if model.position_embedding == "learned":  # the table does not say how long the position table was
        model = replace(model, max_positions=max(model.max_positions, training.seq_len))
    cluster = _cluster(row)
    return Problem(
        model=model,
        training=training,
        cluster=cluster,
        framework=framework,
        calibration=built_in_calibration(framework, cluster.device, is_kin=recipe.is_kin),
    )


def _optimizer(row: _Row) -> OptimizerName:
    """Return the optimizer that the row names, or Adam."""
    name = optimizer_named(row.options().get("optimizer", "adam"))
    for known in OPTIMIZERS:
        if name == known:
            return known
    raise UnpricedError(f"option optimizer {name[:40]!r} is not one of {', '.join(OPTIMIZERS)}")


def _document_len(row: _Row, recipe: Recipe) -> int | None:
    """Return the mean length of the documents that are packed; None where sequences are attended to as a whole."""
    return recipe.packed_document_len if row.option("packed", default=False) else None


def _finetuning(row: _Row) -> FineTuning | None:
    """Return what the row trains, as `--finetune` takes it in words: "qlora:r=64,targets=q_proj+v_proj"."""
    text = row.options().get("finetune")
    if text is None:
        return None
    if text.partition(":")[0] not in METHODS:  # no file of the machine that reads the table
        raise UnpricedError(f"option finetune {text[:40]!r} is not one of {', '.join(METHODS)} with its settings")
    return load_finetuning(text)


def _graphs(row: _Row, model: ModelSpec, usual: CudaGraphs) -> CudaGraphs:
    """Return what is launched as CUDA graphs: scopes by Megatron-Core's names, joined by "+", or none."""
    if "cuda_graph" not in row.options():
        return usual
    scopes = {scope for scope in row.options().get("cuda_graph", "none").split("+") if scope != "none"}
    if scopes == {"layer"}:  # all of a layer that has static shapes
        return CudaGraphs.LAYER
    all_scopes = {scope for level in GRAPH_SCOPES.values() for scope in level} | {"full_iteration"}
    if unknown := scopes - all_scopes:
        raise UnpricedError(f"option cuda_graph {min(unknown)[:40]!r} is not one of {', '.join(sorted(all_scopes))}")
    return graphs_of(scopes, model)


def _drops_tokens(row: _Row, problem: Problem) -> bool:
    """Return whether experts take a fixed number of tokens, as an option says or words behind the name of a model."""
    name, is_usual = row.text("model"), bool(problem.framework.choice("token_dropping"))
    by_name = "(tokendrop)" in name or (is_usual and "(dropless)" not in name)
    return row.option("token_dropping", by_name) and problem.model.moe is not None


def _trains_mtp(model: str, recipe: Recipe) -> bool:
    """Return whether prediction layers are trained, which tables say behind the name of a model."""
    return "(w/ MTP)" in model or (recipe.trains_mtp and "(w/o MTP)" not in model)


def _model(row: _Row, recipe: Recipe) -> ModelSpec:
    needed = ("num_layers", "hidden_size", "num_heads", "ffn_size")
    if not all(row.has(column) for column in needed):
        preset = find_preset(row.text("model"))
        if preset is None:
            missing = ", ".join(column for column in needed if not row.has(column))
            raise UnpricedError(f"architecture of {row.text('model')!r} is not known ({missing} blank)")
        row.filled.append(f"architecture of preset {preset.name}")
        return preset if _trains_mtp(row.text("model"), recipe) else replace(preset, num_mtp_layers=0)
    gated = row.flag("gated_mlp", True)
    num_heads = row.integer("num_heads")
    # Published GPT runs have biases, LayerNorm and learned positions; gated models the Llama block.
    shape = {
        "name": row.text("model"),
        "num_layers": row.integer("num_layers"),
        "hidden_size": row.integer("hidden_size"),
        "num_heads": num_heads,
        "num_kv_heads": row.integer("num_kv_heads", num_heads),
        "ffn_size": row.integer("ffn_size"),
        "vocab_size": row.integer("vocab_size", GPT_VOCAB_SIZE),
        "gated_mlp": gated,
        "norm": "rmsnorm" if gated else "layernorm",
        "qkv_bias": not gated,
        "attention_output_bias": not gated,
        "mlp_bias": not gated,
        "position_embedding": "rope" if gated else "learned",
        "max_positions": 0 if gated else row.integer("seq_len"),
        "tied_embeddings": row.flag("tied_embeddings", not gated),
    }
    preset = find_preset(row.text("model"))
    if preset and gated == preset.gated_mlp and preset.position_embedding != "learned":
        shape |= {name: getattr(preset, name) for name in NOT_IN_COLUMNS}
        shape["tied_embeddings"] = row.flag("tied_embeddings", not gated and preset.tied_embeddings)
        shape["max_positions"] = 0
    is_latent = row.flag("mla", False)
    if is_latent:
        if preset is None or preset.mla is None:
            raise UnpricedError(f"the ranks of the latent attention of {row.text('model')!r} are not known")
        shape["mla"] = preset.mla
    elif preset and preset.head_dim and preset.hidden_size == shape["hidden_size"]:
        shape["head_dim"] = preset.head_dim
    if row.has("num_experts") and row.integer("num_experts") > 1:
        shape["moe"] = _experts(row, preset)
    if is_latent:
        shape["num_kv_heads"] = num_heads
    if preset and _trains_mtp(row.text("model"), recipe):
        shape |= {"num_mtp_layers": preset.num_mtp_layers, "shares_mtp_layer": preset.shares_mtp_layer}
    return ModelSpec(**shape)  # type: ignore[arg-type]


def _experts(row: _Row, preset: ModelSpec | None) -> Experts:
    """The MoE table of a row; what the columns do not say comes from the preset of that name."""
    preset_moe = preset.moe if preset else None
    width = row.integer("expert_ffn_size")
    num_layers = row.integer("num_layers")
    dense = preset_moe.num_dense_layers if preset_moe else 0
    if preset and preset_moe and num_layers < preset.num_layers:
        dense = min(dense, 1)  # published cut-down models keep one dense layer
        row.filled.append(f"{dense} dense layers")
    return Experts(
        num_experts=row.integer("num_experts"),
        experts_per_token=row.integer("experts_per_token"),
        expert_ffn_size=width,
        shared_expert_ffn_size=row.integer("num_shared_experts", 0) * width or _always_on(preset_moe, width),
        num_dense_layers=dense,
        interval=preset_moe.interval if preset_moe else 1,
    )


def _always_on(preset_moe: Experts | None, width: int) -> int:
    """Width of the shared expert where no column counts one, as configs of Llama 4 do not."""
    return preset_moe.shared_expert_ffn_size if preset_moe and preset_moe.expert_ffn_size == width else 0


@lru_cache(maxsize=1)
def _clusters_of_device() -> dict[str, list[str]]:
    """Return the shipped clusters of every device: the one of the same name first, then those of slower networks.

    Tables that do not tell the network of a machine are mostly of rented ones.
    """
    clusters: dict[str, list[ClusterSpec]] = {}
    for cluster in map(load_cluster, preset_clusters()):
        clusters.setdefault(cluster.device.name, []).append(cluster)

    def rank(cluster: ClusterSpec) -> tuple[bool, float]:
        network = cluster.network
        return cluster.name != cluster.device.name, network.nic_bytes_per_s * network.nics_per_device

    return {device: [cluster.name for cluster in sorted(nodes, key=rank)] for device, nodes in clusters.items()}


def _sized_gpu(row: _Row) -> str:
    """The device as it is called with its memory: "a100-sxm-40"."""
    gpu = row.text("gpu")
    return f"{gpu}-{row.number('gpu_memory_gib'):g}" if row.has("gpu_memory_gib") else gpu


def _cluster(row: _Row) -> ClusterSpec:
    gpu = row.text("gpu")
    memory_gib = row.number("gpu_memory_gib") if row.has("gpu_memory_gib") else None
    clusters = _clusters_of_device().get(_sized_gpu(row)) or _clusters_of_device().get(gpu)
    if clusters is None:
        raise UnpricedError(f"gpu {gpu[:40]!r} is not a known device: {suggestion(gpu, tuple(_clusters_of_device()))}")
    name = clusters[0]
    preset_gib = load_cluster(name).device.memory_bytes / GIB
    share = 1.0 if memory_gib is None else memory_gib / preset_gib
    if memory_gib is not None and abs(memory_gib - preset_gib) > 0.5 and abs(share - 1.0) < SAME_MEMORY:
        row.filled.append(f"gpu_memory_gib={preset_gib:g} as shipped")
        share = 1.0
    num_gpus = row.degree("num_gpus")
    per_node = row.degree("gpus_per_node", load_cluster(name).devices_per_node)
    name = next((listed for listed in clusters if load_cluster(listed).devices_per_node == per_node), name)
    per_node = min(per_node, num_gpus)
    cluster = _with_links(row, _sized_cluster(name, math.ceil(num_gpus / per_node), per_node), load_cluster(name))
    return cluster if share == 1.0 else _with_memory(cluster, share)


def _with_memory(cluster: ClusterSpec, share: float) -> ClusterSpec:
    """The cluster of a variant of its device that has `share` times the memory."""
    device = cluster.device
    memory, visible = share * device.memory_bytes, share * device.visible_memory_bytes
    return replace(cluster, device=replace(device, memory_bytes=memory, visible_memory_bytes=visible))


@lru_cache(maxsize=512)
def _sized_cluster(name: str, nodes: int, devices: int) -> ClusterSpec:
    return load_cluster(f"{name}:{nodes}x{devices}")


def _with_links(row: _Row, cluster: ClusterSpec, full_size: ClusterSpec) -> ClusterSpec:
    """The cluster with the link rates that the row states, per device and direction, of nodes of `full_size`."""
    if row.has("intra_node_gbytes_per_s"):
        share = cluster.levels[-1].bandwidth_bytes_per_s / full_size.levels[-1].bandwidth_bytes_per_s
        rate = share * row.number("intra_node_gbytes_per_s") * 1e9
        outer = replace(cluster.levels[-1], bandwidth_bytes_per_s=rate)
        cluster = replace(cluster, levels=(*cluster.levels[:-1], outer))
    if row.has("inter_node_gbytes_per_s"):
        rate = row.number("inter_node_gbytes_per_s") * 1e9
        # No adapter of these machines is slower: what is less is a part of one, of a node's only one at least.
        nics = min(max(rate / SLOWEST_NIC_BYTES_PER_S, 1.0 / full_size.devices_per_node), 1.0)
        network = replace(cluster.network, nic_bytes_per_s=rate / nics, nics_per_device=nics)
        cluster = replace(cluster, network=network)
    return cluster


def _plan(row: _Row, problem: Problem, recipe: Recipe) -> ParallelPlan:
    tp, cp, pp = row.degree("tp", 1), row.degree("cp", 1), row.degree("pp", 1)
    num_gpus = row.degree("num_gpus")
    dp = row.degree("dp", max(num_gpus // (tp * cp * pp), 1))
    if tp * cp * pp * dp != num_gpus:
        raise UnpricedError(f"tp {tp} x cp {cp} x pp {pp} x dp {dp} is not num_gpus {num_gpus}")
    ep = row.degree("ep", _usual_ep(problem, num_gpus, pp))
    etp = row.integer("etp", 1, at_most=MOST_DEGREE) or 1  # 0: not used
    sp = row.flag("sp", tp > 1 and problem.framework.network.sequence_parallel)
    sharding = row.text("sharding", recipe.sharding)
    offload = sharding.endswith("+offload")
    sharding = sharding.removesuffix("+offload")
    if sharding not in tuple(Sharding):
        raise UnpricedError(f"sharding {sharding[:40]!r} is not one of {', '.join(tuple(Sharding))}")
    shard = 1 if sharding == "none" else row.integer("shard_group", dp, at_most=MOST_DEGREE) or dp
    if dp % shard:
        raise UnpricedError(f"shard_group {shard} does not divide dp {dp}")
    micro_batch = row.integer("micro_batch", _usual_micro_batch(row, recipe, pp, dp))
    global_batch = row.integer("global_batch", micro_batch * dp)
    vp = row.integer("vp", _usual_vp(problem, recipe, pp, global_batch // (micro_batch * dp)), at_most=MOST_DEGREE) or 1
    if vp > 1 and pp == 1:
        row.filled.append("vp=1 without a pipeline")
    recompute, num_repeated = _recompute(row, problem)
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
        cp_kind=_context_kind(problem.framework),
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
        offload=_offload(row, Offload.OPTIMIZER if offload else Offload.NONE),
        tp_overlap=row.option("tp_overlap", problem.framework.overlap.tp_overlap_share > 0),
        dispatcher=_dispatcher(row, problem, recipe, ep, drops=drops),
        ep_overlap=overlaps,
        **problem.framework.choices | _chosen(row, problem, recipe) | {"token_dropping": drops},
        cuda_graphs=_graphs(row, problem.model, recipe.overlap_graphs if is_graphed else CudaGraphs.NONE),
        grad_reduce_overlap=row.option("grad_reduce_overlap", default=True),
        param_gather_overlap=row.option("param_gather_overlap", default=True),
    )


def _offload(row: _Row, by_sharding: Offload) -> Offload:
    """Return which states wait in the host's memory: those that an option names, or those of "+offload"."""
    return enum_value("offload", Offload, row.options().get("offload", by_sharding))


def _chosen(row: _Row, problem: Problem, recipe: Recipe) -> dict[str, Value]:
    """Return the row's choice of the options that the framework's plans have unless they say otherwise."""
    narrows = problem.model.moe is not None and problem.training.precision in recipe.narrows_attention
    keeps_dropout = recipe.keeps_gpt_dropout and problem.model.position_embedding == "learned"
    chosen: dict[str, Value] = {
        "dropout": row.option("dropout", bool(problem.framework.choice("dropout")) or keeps_dropout),
        "narrow_params": row.option("fp8_params", bool(problem.framework.choice("narrow_params"))),
        "fp8_attention": problem.training.attention == "flash" and row.option("fp8_attention", narrows),
    }
    if (named := row.options().get("fp8_recipe", "")) in tuple(Fp8Scaling):
        chosen["fp8_scaling"] = Fp8Scaling(named)
    if recipe.routes_unfused_alltoall and _named_dispatcher(row, recipe) == Dispatcher.ALL_TO_ALL:
        chosen |= {"router_fusion": False, "rope_fusion": False}
    return chosen


def _context_kind(framework: Framework) -> ContextParallelKind:
    """Return the way in which the ranks of a sequence attend: no column tells, so the plainest of the framework."""
    kinds = (words.words for words in book_of(framework).supported if words.axis == "cp_kind")
    return ContextParallelKind(next(kinds, (ContextParallelKind.RING,))[0])


def _layers_per_chunk(problem: Problem, recipe: Recipe, pp: int, vp: int) -> tuple[int, ...] | None:
    """Layers of every chunk, where they are not as even as they can be.

    Megatron-LM takes layers that do not divide where embedding and loss count as one layer each, which is even, or with
    a layout; those of NVIDIA's recipes fill every chunk but the last, which has the loss, and where they are too few
    for that, the loss is alone in it and the first chunk has fewer as well (Megatron-LM
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
    """Layers of every stage where embedding and head count as one each; the first stages get what does not divide."""
    base, remainder = divmod(num_layers + 2, pp)
    if pp == 1 or base < 2:
        return None
    first, *middle, last = (base + (stage < remainder) for stage in range(pp))
    return (first - 1, *middle, last - 1)


def _with_light_end(num_layers: int, pp: int) -> tuple[int, ...] | None:
    """Layers of every stage of LiBai's pipelines, whose last stages are planned for layers that there are not.

    Where layers divide they are laid out as if there were up to pp - 1 more; what is left of an even share goes to the
    last stages, and stages are filled from the first on.
    """
    share, remainder = divmod(num_layers, pp)
    more = min(pp - 1, share) if pp >= 4 and num_layers >= 8 and not remainder else 0
    share, longer = divmod(num_layers + more, pp)
    planned = [share + (stage >= pp - longer) for stage in range(pp)]
    layers = tuple(max(min(size, num_layers - sum(planned[:stage])), 0) for stage, size in enumerate(planned))
    return layers if len(set(layers)) > 1 else None


def _usual_ep(problem: Problem, num_gpus: int, pp: int) -> int:
    """Default `ep`: 1, or if the experts of a stage do not fit on a device so, all ranks that may share them."""
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


def _usual_recompute(problem: Problem) -> Recompute:
    """Default recomputation: nothing, or the core of an attention that would keep its scores."""
    return Recompute.NONE if problem.training.attention != "flash" or problem.fuses_attention else Recompute.SELECTIVE


def _recompute(row: _Row, problem: Problem) -> tuple[str, int | None]:
    """Return the word of the row's recomputation, and the layers of a chunk that it repeats: "full", "full:21"."""
    text = row.text("recompute") if row.has("recompute") else ""
    if text.startswith(f"{Recompute.FULL}:"):
        return Recompute.FULL, int(str(parse_recompute(text)["recompute_num_layers"]))
    return row.word("recompute", tuple(Recompute), _usual_recompute(problem)), None


def _recompute_modules(row: _Row, problem: Problem, recipe: Recipe) -> tuple[RecomputeModule, ...]:
    """Parts that selective recomputation repeats, by default the core of attention, or what recipes name of MLA."""
    modules = row.options().get("recompute_modules")
    if modules is not None:
        names = [name for name in modules.split("+") if name != "none"]
        return tuple(enum_value("recompute_modules", RecomputeModule, name) for name in names)
    is_latent = problem.model.mla is not None and problem.fuses_attention
    return (is_latent and recipe.latent_recompute) or DEFAULT_RECOMPUTE_MODULES


def _layout(row: _Row) -> tuple[int, ...] | None:
    """Layers of every chunk, where the row has Megatron's notation of them."""
    layout = row.options().get("pp_layout")
    return tuple(layout_counts(layout)) if layout else None


def _usual_micro_batch(row: _Row, recipe: Recipe, pp: int, dp: int) -> int:
    """Default micro-batch: a sequence, or what makes as many micro-batches as the pipeline has ranks."""
    if recipe.microbatch_per_rank and pp > 1 and row.has("global_batch"):
        return max(row.integer("global_batch") // (dp * pp), 1)
    return 1


def _dispatcher(row: _Row, problem: Problem, recipe: Recipe, ep: int, *, drops: bool) -> Dispatcher:
    """Return the way in which tokens reach their experts: by all-to-all alone where some are dropped."""
    if problem.model.moe is None or ep == 1 or drops:
        return Dispatcher.ALL_TO_ALL
    return _named_dispatcher(row, recipe)


def _named_dispatcher(row: _Row, recipe: Recipe) -> Dispatcher:
    usual = Dispatcher.ALL_TO_ALL if _quotes_recipe(row) else recipe.dispatcher
    return enum_value("dispatcher", Dispatcher, row.options().get("dispatcher", usual))


def _quotes_recipe(row: _Row) -> bool:
    """Tell whether the row names its recipe's choices for experts: those that it leaves out were not made."""
    return not CHOSEN_FOR_EXPERTS.isdisjoint(row.options())


def _overlaps_experts(row: _Row, problem: Problem, recipe: Recipe, pp: int, vp: int, ep: int, *, drops: bool) -> bool:
    """Return whether expert traffic runs beside another micro-batch, as the recipes of the framework do where it can.

    Megatron-Core can only for models of attention layers and, in a pipeline, with interleaving
    (core/transformer/transformer_config.py, overlap_moe_expert_parallel_comm).
    """
    if _quotes_recipe(row):
        return False
    framework = problem.framework
    can = framework.rules != "megatron-lm" or (problem.model.mamba is None and (pp == 1 or vp > 1))
    is_far = ep > problem.cluster.levels[-1].num_devices and pp > 1
    by_choice = is_far and recipe.overlaps_far_experts and not drops
    return can and (by_choice or problem.training.precision in recipe.overlaps_experts)


def _refused_by_framework(problem: Problem, plan: ParallelPlan, recipe: Recipe) -> str:
    """The first rule that the plan breaks, or nothing.

    The rules of Megatron-LM are those of today, and most of its runs in tables are older: they answer to none.  Nor do
    runs of kin, which has other rules, or without mixed precision, which no plan is made for.
    """
    framework = problem.framework
    answers_to_none = recipe.is_kin or framework.rules == "megatron-lm" or problem.training.precision == "fp32"
    rules = universal.RULES if answers_to_none else book_of(framework).rules
    return next(iter(broken(rules, problem.workload, plan)), "")
