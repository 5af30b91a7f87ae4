"""Problem of a row in a table of runs: model, training, cluster and software."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from autoplan.base.errors import UnpricedError
from autoplan.base.names import suggestion
from autoplan.base.units import GIB, listed
from autoplan.readers.calibration import built_in_calibration
from autoplan.readers.cluster import cluster_called, load_cluster, preset_clusters
from autoplan.readers.finetuning import METHODS, load_finetuning, optimizer_named
from autoplan.readers.model import find_preset
from autoplan.runs.recipes import Recipe, nearest_recipe, recipe_called
from autoplan.runs.row import Row
from autoplan.spec.blocks import Experts
from autoplan.spec.enums import Precision
from autoplan.spec.finetuning import FineTuning
from autoplan.spec.framework import Framework
from autoplan.spec.model import ModelSpec
from autoplan.spec.optimizers import OPTIMIZERS, OptimizerName
from autoplan.spec.problem import Problem
from autoplan.spec.training import OWN_ROUTING_LOSS, TrainingSpec, usual_balancing_loss
from autoplan.topology.cluster import ClusterSpec

GPT_VOCAB_SIZE = 50257  # of GPT-2's tokenizer, if a table omits the vocabulary
# Tokens per sequence if a table omits them: the median of the rows of measured_runs.csv that state them, of runs before
# 2023 and later ones.
USUAL_SEQ_LEN = (2048, 4096)
# For a model without learned positions, unlike GPT.
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
SAME_MEMORY = 0.15  # tables round a device's memory: 192 GiB for 180 of a B200, 186 of a GB200; 94 is a rare H100's
SAME_RATE = 0.02  # nominal rates of one link are told rounded
SLOWEST_NIC_BYTES_PER_S = 10e9  # slowest in GPU nodes; EDR and 100 Gb/s Ethernet have 12.5


def recipe_of(row: Row) -> Recipe:
    """Return the recipe of the row's framework, or of the most similar framework."""
    year = row.text("year", "?")
    sharding = row.text("sharding") if row.has("sharding") else ""
    recipe = recipe_called(row.text("framework", "?"), year, _sized_gpu(row)) or nearest_recipe(sharding, year)
    if recipe.in_pipelines and row.degree("pp", 1) > 1:
        return replace(recipe, framework=recipe.in_pipelines, is_similar=True)
    is_eager = recipe.uncompiled and row.options().get("cuda_graph") == "none"
    return replace(recipe, framework=recipe.uncompiled) if is_eager else recipe


def problem_of(row: Row, recipe: Recipe) -> Problem:
    """Return the problem of a row; UnpricedError if a cell cannot be read or has an unknown name."""
    framework = _framework(row, recipe)
    if recipe.is_similar:
        row.filled.append(f"framework treated as {recipe.framework}")
    cluster = _cluster(row)
    # The most common precision, on devices before Ampere that of their matrix units.
    usual = Precision.BF16 if "bf16" in cluster.device.peak_flops_per_s else Precision.FP16
    precision = row.word("precision", tuple(Precision), recipe.precision or usual)
    if recipe.precision and precision != recipe.precision:
        row.filled.append(f"precision={recipe.precision} as its scripts train")
        precision = recipe.precision
    training = TrainingSpec(
        seq_len=_seq_len(row),
        precision=precision,  # type: ignore[arg-type]
        fused_norm=row.flag("fused_norm", False) if row.has("fused_norm") else None,
        optimizer=_optimizer(row),
        finetuning=_finetuning(row),
        document_len=_document_len(row, recipe),
        balancing_loss=_balancing_loss(row, framework),
    )
    model = _model(row, recipe)
    if model.position_embedding == "learned":  # the table does not state the length of the position table
        model = replace(model, max_positions=max(model.max_positions, training.seq_len))
    return Problem(
        model=model,
        training=training,
        cluster=cluster,
        framework=framework,
        calibration=built_in_calibration(framework, cluster.device, is_similar=recipe.is_similar),
    )


def _framework(row: Row, recipe: Recipe) -> Framework:
    """Return the recipe's framework, with the activations of the row, which shows the peak that the row reports."""
    framework = recipe.software()
    if not row.option("activation_fusion", default=framework.kernels.fused_activation):
        framework = framework.changed(fused_activation=False)
    shown = row.options().get("peak_memory", framework.memory.logs_memory)
    if shown not in ("allocated", "reserved", "device"):
        raise UnpricedError(f"option peak_memory {shown[:40]!r} is not one of allocated, reserved, device")
    return framework.changed(logs_memory=shown)


def _seq_len(row: Row) -> int:
    """Return the tokens of a sequence, by default as many as most runs of its time have."""
    return row.integer("seq_len", USUAL_SEQ_LEN[row.text("year", "?") >= "2023"])


def _optimizer(row: Row) -> OptimizerName:
    """Return the row's optimizer, by default Adam."""
    name = optimizer_named(row.options().get("optimizer", "adam"))
    for optimizer in OPTIMIZERS:
        if name == optimizer:
            return optimizer
    raise UnpricedError(f"option optimizer {name[:40]!r} is not one of {', '.join(OPTIMIZERS)}")


def _document_len(row: Row, recipe: Recipe) -> int | None:
    """Return the mean length of packed documents; None if attention covers whole sequences."""
    return recipe.packed_document_len if row.option("packed", default=False) else None


def _balancing_loss(row: Row, framework: Framework) -> float:
    """Return the loss that balances experts, by what the row says of who chooses them."""
    chosen_by = row.options().get("expert_balance")
    if chosen_by is None:
        return usual_balancing_loss(is_tuned="finetune" in row.options(), routes_freely=framework.experts.routes_freely)
    if chosen_by not in ("forced", "router"):
        raise UnpricedError(f"option expert_balance {chosen_by[:40]!r} is neither forced nor router")
    return OWN_ROUTING_LOSS if chosen_by == "router" else 1.0


def _finetuning(row: Row) -> FineTuning | None:
    """Return the row's fine-tuning, written as for `--finetune`: "qlora:r=64,targets=q_proj+v_proj"."""
    text = row.options().get("finetune")
    if text is None:
        return None
    if text.partition(":")[0] not in METHODS:  # never a file on the machine that reads the table
        raise UnpricedError(f"option finetune {text[:40]!r} is not one of {', '.join(METHODS)} with its settings")
    return load_finetuning(text)


def _trains_mtp(model: str, recipe: Recipe) -> bool:
    """Return whether prediction layers are trained, which tables state after the name of a model."""
    return "(w/ MTP)" in model or (recipe.trains_mtp and "(w/o MTP)" not in model)


def _model(row: Row, recipe: Recipe) -> ModelSpec:
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
        "max_positions": 0 if gated else _seq_len(row),
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


def _experts(row: Row, preset: ModelSpec | None) -> Experts:
    """Return the MoE table of a row; values missing in the columns come from the preset of that name."""
    preset_moe = preset.moe if preset else None
    width = row.integer("expert_ffn_size")
    num_layers = row.integer("num_layers")
    dense = preset_moe.num_dense_layers if preset_moe else 0
    if preset and preset_moe and num_layers < preset.num_layers:
        dense = min(dense, 1)  # published cut-down models keep one dense layer
        row.filled.append(f"{dense} dense layers")
    if (stated := row.options().get("dense_layers", "")).isdecimal():
        dense = min(int(stated), num_layers)
    return Experts(
        num_experts=row.integer("num_experts"),
        experts_per_token=row.integer("experts_per_token"),
        expert_ffn_size=width,
        shared_expert_ffn_size=row.integer("num_shared_experts", 0) * width or _always_on(preset_moe, width),
        num_dense_layers=dense,
        interval=preset_moe.interval if preset_moe else 1,
    )


def _always_on(preset_moe: Experts | None, width: int) -> int:
    """Width of the shared expert if no column counts it, as in configs of Llama 4."""
    return preset_moe.shared_expert_ffn_size if preset_moe and preset_moe.expert_ffn_size == width else 0


@lru_cache(maxsize=1)
def _clusters_of_device() -> dict[str, list[str]]:
    """Return the shipped clusters of every device: the one of the same name first, then slower networks first.

    Tables without a machine's network are mostly of rented machines.
    """
    clusters: dict[str, list[ClusterSpec]] = {}
    for cluster in map(load_cluster, preset_clusters()):
        clusters.setdefault(cluster.device.name, []).append(cluster)

    def rank(cluster: ClusterSpec) -> tuple[bool, float]:
        network = cluster.network
        return cluster.name != cluster.device.name, network.nic_bytes_per_s * network.nics_per_device

    return {device: [cluster.name for cluster in sorted(nodes, key=rank)] for device, nodes in clusters.items()}


def _gpu(row: Row) -> str:
    """Return the id of the row's device, which tables spell in several ways: "rtx4090", "h100"."""
    gpu = row.text("gpu")
    if gpu in _clusters_of_device() or (name := cluster_called(gpu)) is None:
        return gpu
    return load_cluster(name).device.name


def _sized_gpu(row: Row) -> str:
    """Return the device's name including its memory: "a100-sxm-40"."""
    gpu = _gpu(row)
    return f"{gpu}-{row.number('gpu_memory_gib'):g}" if row.has("gpu_memory_gib") else gpu


def _cluster(row: Row) -> ClusterSpec:
    gpu = _gpu(row)
    memory_gib = row.number("gpu_memory_gib") if row.has("gpu_memory_gib") else None
    clusters = _clusters_of_device().get(_sized_gpu(row)) or _clusters_of_device().get(gpu)
    if clusters is None:
        raise UnpricedError(f"gpu {gpu[:40]!r} is not a known device: {suggestion(gpu, tuple(_clusters_of_device()))}")
    name = row.options().get("cluster", clusters[0])
    if name not in clusters:
        raise UnpricedError(f"cluster {name[:40]!r} is none of {gpu}: {listed(clusters)}")
    preset_gib = load_cluster(name).device.memory_bytes / GIB
    share = 1.0 if memory_gib is None else memory_gib / preset_gib
    if memory_gib is not None and abs(memory_gib - preset_gib) > 0.5 and abs(share - 1.0) < SAME_MEMORY:
        row.filled.append(f"gpu_memory_gib={preset_gib:g} as shipped")
        share = 1.0
    num_gpus = row.degree("num_gpus")
    per_node = row.degree("gpus_per_node", load_cluster(name).devices_per_node)
    if "cluster" not in row.options():
        name = next((other for other in clusters if load_cluster(other).devices_per_node == per_node), name)
    if per_node == load_cluster(name).levels[-1].num_devices:  # an NVLink domain of several nodes, which share no host
        per_node = load_cluster(name).devices_per_node
    per_node = min(per_node, num_gpus)
    cluster = _with_links(row, _sized_cluster(name, math.ceil(num_gpus / per_node), per_node), load_cluster(name))
    return cluster if share == 1.0 else _with_memory(cluster, share)


def _with_memory(cluster: ClusterSpec, share: float) -> ClusterSpec:
    """Return the cluster with a variant of its device that has `share` times the memory."""
    device = cluster.device
    memory, visible = share * device.memory_bytes, share * device.visible_memory_bytes
    return replace(cluster, device=replace(device, memory_bytes=memory, visible_memory_bytes=visible))


@lru_cache(maxsize=512)
def _sized_cluster(name: str, nodes: int, devices: int) -> ClusterSpec:
    return load_cluster(f"{name}:{nodes}x{devices}")


def _with_links(row: Row, cluster: ClusterSpec, full_size: ClusterSpec) -> ClusterSpec:
    """Return the cluster with the row's link rates, per device and direction, for nodes of `full_size`."""
    if row.has("intra_node_gbytes_per_s"):
        outer, nominal = full_size.levels[-1], row.number("intra_node_gbytes_per_s") * 1e9
        pair = outer.bandwidth_bytes_per_s / max(outer.num_devices - 1, 1)
        if outer.is_mesh and abs(nominal / pair - 1.0) < SAME_RATE:  # tables state the links to one peer for GH200
            nominal = outer.bandwidth_bytes_per_s
        rate = cluster.levels[-1].bandwidth_bytes_per_s / outer.bandwidth_bytes_per_s * nominal
        outer = replace(cluster.levels[-1], bandwidth_bytes_per_s=rate)
        cluster = replace(cluster, levels=(*cluster.levels[:-1], outer))
    if row.has("inter_node_gbytes_per_s"):
        rate = row.number("inter_node_gbytes_per_s") * 1e9
        # No adapter of these machines is slower, so a smaller rate is a device's share of an adapter, at least of the
        # node's only one.
        nics = min(max(rate / SLOWEST_NIC_BYTES_PER_S, 1.0 / full_size.devices_per_node), 1.0)
        network = replace(cluster.network, nic_bytes_per_s=rate / nics, nics_per_device=nics)
        cluster = replace(cluster, network=network)
    return cluster
