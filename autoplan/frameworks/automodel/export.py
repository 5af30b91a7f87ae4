"""Export of a plan to the YAML of NeMo AutoModel (36044ad); places are below nemo_automodel/.

The model is a checkpoint on a hub, with the Transformer Engine layers that the cost model assumes.
"""

from __future__ import annotations

from typing import Any

from autoplan.base.arrays import Bools
from autoplan.base.errors import refuse
from autoplan.frameworks.automodel.options import (
    ADAPTER_DTYPE,
    DEGREES,
    DISPATCHERS,
    HEAD,
    MAIN_WEIGHTS,
    OFFLOAD,
    RECOMPUTE,
    REDUCTION,
    SCHEDULE_WORDS,
    STAGES,
)
from autoplan.frameworks.automodel.rules import RULES
from autoplan.frameworks.common.job import Job, Target
from autoplan.frameworks.common.option_table import written
from autoplan.frameworks.common.rules import Rule, all_true, check_legal, check_limits
from autoplan.frameworks.common.shared_rules import FSDP2_OVERLAPS, USUAL_RANK_ORDER
from autoplan.frameworks.common.tuning import refused_targets
from autoplan.frameworks.hf_trainer.write import INT8_IS_WHOLE, adapters_of, yaml_job
from autoplan.frameworks.torchtitan.options import stages
from autoplan.readers.model import hub_name
from autoplan.spec.blocks import Block
from autoplan.spec.enums import Dispatcher, Offload, Precision, Recompute, Schedule, Sharding
from autoplan.spec.finetuning import ALL_LINEAR, FineTuning
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan, PlanBatch, chunk_layers
from autoplan.spec.plan_file import PlanFile
from autoplan.spec.training import TrainingSpec
from autoplan.spec.workload import Workload

NAME = "automodel"
YAML = "automodel.yaml"
_CAPABILITIES = "_transformers/capabilities.py"
_CONFIG = "components/distributed/config.py"
_MESH = "components/distributed/mesh_utils.py"
_PIPELINING = "components/distributed/pipelining/functional.py"
_COMPONENTS = "nemo_automodel.components"
_DATA = f"{_COMPONENTS}.datasets"


def job(plan_file: PlanFile, version: str = "") -> Job:
    """Return the job; `automodel` can start it on one node, torchrun on several (cli/app.py)."""
    _check(plan_file)
    words = f'"$HERE/{YAML}" --model.pretrained_model_name_or_path "$BASE_MODEL" --step_scheduler.max_steps "$STEPS"'
    remark = "Yours to set: dataset, optimizer.lr and whatever else does not affect the time or memory of a step."
    title = TARGET.title
    return yaml_job(title, "-m nemo_automodel.cli.app", words, YAML, plan_file, _table(plan_file), [remark])


def _table(plan_file: PlanFile) -> dict[str, Any]:
    plan, training = plan_file.best.plan, plan_file.training
    is_packed = _is_packed(training)
    collate = "packed_sequence_thd_collater" if is_packed else "default_collater"
    table: dict[str, Any] = {
        "recipe": "TrainFinetuneRecipeForNextTokenPrediction",
        "step_scheduler": {
            "global_batch_size": plan.global_batch,
            "local_batch_size": plan.micro_batch * (plan.num_microbatches if plan.pp > 1 else 1),
        },
        "dist_env": {"backend": "nccl", "timeout_minutes": 10},
        "model": _model(plan_file),
        "distributed": _distributed(plan_file),
        **_precision(plan),
        **_tuning(training, plan_file.model),
        "checkpoint": {"enabled": False},
        "loss_fn": {"_target_": f"{_COMPONENTS}.loss.masked_ce.MaskedCrossEntropy"},
        "dataset": {
            "_target_": f"{_DATA}.llm.squad.make_squad_dataset",
            "dataset_name": "rajpurkar/squad",
            "split": "train",
            **({} if is_packed else {"seq_length": training.seq_len}),
        },
        "packed_sequence": {"packed_sequence_size": training.seq_len if is_packed else 0},
        "dataloader": {
            "_target_": "torchdata.stateful_dataloader.StatefulDataLoader",
            "collate_fn": f"{_DATA}.utils.{collate}",
        },
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1e-4 if adapters_of(training) else 1e-5, "foreach": True},
    }
    return table


def _is_packed(training: TrainingSpec) -> bool:
    return training.lengths is None or training.batching == "packed"


def _model(plan_file: PlanFile) -> dict[str, Any]:
    plan = plan_file.best.plan
    backend: dict[str, Any] = {
        "_target_": f"{_COMPONENTS}.models.common.BackendConfig",
        **dict.fromkeys(("attn", "linear", "rms_norm"), "te"),
    }
    if plan_file.model.moe is not None:
        words = [word for word, kind in DISPATCHERS.items() if kind == plan.dispatcher and plan.ep > 1]
        backend |= {"experts": "torch_mm", **({"dispatcher": words[0]} if words else {})}
    return {
        "_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained",
        "pretrained_model_name_or_path": hub_name(plan_file.model),
        **written((MAIN_WEIGHTS,), plan_file),
        "backend": backend,
    }


def _distributed(plan_file: PlanFile) -> dict[str, Any]:
    """Return sizes and strategy; the FSDP2 switch also applies to experts (_transformers/infrastructure.py:407)."""
    plan = plan_file.best.plan
    if _is_ddp(plan):
        return {"strategy": "ddp", **written((RECOMPUTE,), plan_file)}
    sizes = {key: value for key, value in written(DEGREES, plan_file).items() if isinstance(value, bool) or value > 1}
    table: dict[str, Any] = {"strategy": "fsdp2", **sizes, **written((RECOMPUTE,), plan_file)}
    if plan.sharding != Sharding.NONE:
        # By default the layers of a pipeline stay gathered.
        table["reshard_after_forward"] = plan.sharding == Sharding.ZERO3 and plan.pp == 1
    table["mp_policy"] = {
        "_target_": "torch.distributed.fsdp.MixedPrecisionPolicy",
        "param_dtype": "bfloat16",
        **written((REDUCTION,), plan_file),
        "output_dtype": "bfloat16",
    }
    if plan.offload == Offload.PARAMETERS:
        table[OFFLOAD] = {"_target_": "torch.distributed.fsdp.CPUOffloadPolicy"}
    if plan.pp > 1:
        table["pipeline"] = {
            "pp_schedule": SCHEDULE_WORDS[plan.schedule],
            "pp_microbatch_size": plan.micro_batch,
            "layers_per_stage": -(-plan_file.model.num_layers // (plan.pp * plan.vp)),
            **_chunks(chunk_layers(plan, plan_file.model.num_layers)),
        }
    return table


def _chunks(counts: tuple[int, ...]) -> dict[str, Any]:
    """Return the modules of every stage if stages have different numbers of layers."""
    if len(set(counts)) == 1:
        return {}
    names = {"tok_embeddings": "model.embed_tokens", HEAD: HEAD}
    parts = [[names.get(name, f"model.{name}") for name in stage] for stage in stages(counts, HEAD)]
    return {STAGES: [[*stage, "model.rotary_emb"] for stage in parts]}


def _is_ddp(plan: ParallelPlan) -> bool:
    return plan.sharding == Sharding.NONE and plan.tp * plan.pp * plan.cp * plan.ep == 1


def _precision(plan: ParallelPlan) -> dict[str, Any]:
    """Return torchao's section, with the scales and the fp8 all-gathers that the cost model assumes."""
    if plan.precision != Precision.FP8:
        return {}
    return {"fp8": {"enabled": True, "recipe_name": "tensorwise", "enable_fsdp_float8_all_gather": True}}


def _tuning(training: TrainingSpec, model: ModelSpec) -> dict[str, Any]:
    """Return the sections for adapters (components/_peft/lora.py) and for the storage type of weights."""
    if (tuning := adapters_of(training)) is None:
        return {}
    # match_all_linear includes the head (components/_peft/module_matcher.py:118), and no experts.
    names = ["*_proj"] if ALL_LINEAR in tuning.targets else [f"*.{name}" for name in tuning.targets]
    names += ["*.experts"] if model.moe is not None and tuning.targets_experts else []
    rank = tuning.rank or 0
    peft: dict[str, Any] = {"_target_": f"{_COMPONENTS}._peft.lora.PeftConfig", "target_modules": names}
    peft |= {"dim": rank, "alpha": tuning.alpha, "dropout": tuning.dropout, "use_dora": tuning.dora}
    sections: dict[str, Any] = {"peft": peft | {"lora_dtype": ADAPTER_DTYPE}}
    if tuning.quantization == "int8":
        sections["quantization"] = {"load_in_8bit": True}
    elif tuning.quantization != "none":
        sections["quantization"] = {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": tuning.quantization == "nf4-dq",
        }
    return sections


# -- what the target does not support ---------------------------------------------------------------------------------


def _has_plans(model: ModelSpec) -> bool:
    """Return whether AutoModel has its own dense implementation (components/models/llama, qwen2, qwen3)."""
    return (
        model.moe is None
        and model.mla is None
        and not model.attention_sinks
        and model.position_embedding == "rope"
        and not model.unusual_parts
        and (model.norm, model.gated_mlp) == ("rmsnorm", True)
        and {Block.ATTENTION, Block.MLP} >= {block for layer in model.layers for block in layer}
    )


def _splits(model: ModelSpec) -> bool:
    """Return whether a model supports context and pipeline parallelism: gpt-oss and hybrids do not."""
    is_plain = {Block.ATTENTION, Block.MLP, Block.MOE} >= {block for layer in model.layers for block in layer}
    return _has_plans(model) or (model.moe is not None and is_plain and not model.attention_sinks)


def _fits_schedule(workload: Workload, batch: PlanBatch) -> Bools:
    """Return which plans use a supported pipeline schedule: any but ZB-H1 and DualPipeV."""
    lacks = (batch.schedule == Schedule.ZB_H1.code) | (batch.schedule == Schedule.DUALPIPE_V.code)
    return (batch.pp == 1) | ~lacks


def _is_unsharded_alone(workload: Workload, batch: PlanBatch) -> Bools:
    is_alone = batch.tp * batch.pp * batch.cp * batch.ep == 1
    return (batch.sharding != Sharding.NONE.code) | is_alone | (batch.dp * batch.cp == 1)


def _makes_stages(workload: Workload, batch: PlanBatch) -> Bools:
    """Return which plans have a number of stages that some layers_per_stage gives, even if modules are listed."""
    num_layers, num_stages = workload.model.num_layers, batch.pp * batch.vp
    return (batch.pp == 1) | (-(-num_layers // -(-num_layers // num_stages)) == num_stages)


LIMITS = (
    Rule(
        source=f"{_CAPABILITIES}:437",
        holds=lambda s, b: (b.tp == 1) | (all_true(b) & _has_plans(s.model)),
        text=lambda s, p: f"tp {p.tp} of {s.model.name}: it splits Llama, Qwen 2 and Qwen 3 alone, set tp 1",
    ),
    Rule(
        source=f"{_CAPABILITIES}:447",
        holds=lambda s, b: (b.pp * b.cp == 1) | (all_true(b) & _splits(s.model)),
        text=lambda s, p: f"pp {p.pp} and cp {p.cp} of {s.model.name}, which it does not split: set both to 1",
    ),
    Rule(
        source=f"{_MESH}:93",
        holds=_is_unsharded_alone,
        text=lambda s, p: f"unsharded states of {p.dp} replicas with tp, pp or ep: shard them, or set 1",
    ),
    Rule(
        source=f"{_MESH}:285",
        holds=lambda s, b: (b.dp_replicate == 1) | (b.sharding == Sharding.NONE.code) | (b.dp_shard > 1),
        text=lambda s, p: f"dp_replicate {p.dp_replicate} of dp_shard 1: raise dp_shard",
    ),
    Rule(  # experts are sharded over the ranks of all replicas
        source=f"{_MESH}:301",
        holds=lambda s, b: (b.dp_replicate == 1) | (b.sharding == Sharding.NONE.code) | (b.ep == 1),
        text=lambda s, p: f"dp_replicate {p.dp_replicate} with ep {p.ep}: shard over all replicas",
    ),
    Rule(
        source=f"{_PIPELINING}:233",
        holds=_fits_schedule,
        text=lambda s, p: f"schedule {p.schedule!r}: use 1f1b, gpipe, interleaved or zb-v",
    ),
    Rule(
        source="recipes/llm/train_ft.py:547",
        holds=lambda s, b: (b.pp == 1) | (b.num_microbatches >= b.pp),
        text=lambda s, p: f"{p.num_microbatches} micro-batches of pp {p.pp}: it needs at least as many, lower pp",
    ),
    Rule(
        source=f"{_PIPELINING}:210",
        holds=_makes_stages,
        text=lambda s, p: (
            f"{s.model.num_layers} layers in {p.pp * p.vp} chunks, which no layers_per_stage produces: change pp or vp"
        ),
    ),
    *FSDP2_OVERLAPS,
    USUAL_RANK_ORDER,
    Rule(
        source="components/models/common/utils.py:305",
        holds=lambda s, b: (b.ep == 1) | (b.dispatcher != Dispatcher.ALL_TO_ALL.code),
        text=lambda s, p: f"ep {p.ep} with dispatcher {p.dispatcher!r}: it has none, use allgather, deepep or hybridep",
    ),
    Rule(
        source="components/quantization/fp8.py",
        holds=lambda s, b: (
            (b.precision == Precision.BF16.code) | ((b.precision == Precision.FP8.code) & (s.model.moe is None))
        ),
        text=lambda s, p: (
            f"precision {p.precision!r}{' of experts' if s.model.moe else ''}: Transformer Engine's recipes are not "
            "priced, use bf16"
        ),
    ),
    Rule(
        source=_CONFIG,
        holds=lambda s, b: (b.offload == Offload.NONE.code) | ((b.sharding == Sharding.ZERO3.code) & (b.pp == 1)),
        text=lambda s, p: f"offload {p.offload!r} without passes that fetch weights: use zero3 and pp 1",
    ),
    Rule(
        source=_CONFIG,
        holds=lambda s, b: (b.recompute != Recompute.SELECTIVE.code) | (all_true(b) & (s.training.finetuning is None)),
        text=lambda s, p: "recompute 'selective' of adapters: use full or none",
    ),
    INT8_IS_WHOLE,
)


def _check(plan_file: PlanFile) -> None:
    model, training = plan_file.model, plan_file.training
    check_legal(RULES, model, training, plan_file.best.plan, "NeMo AutoModel does not support the plan")
    check_limits(LIMITS, model, training, plan_file.best.plan, "NeMo AutoModel cannot express")
    refusals = (
        (plan_file.best.plan.attention != "flash", f"attention {plan_file.best.plan.attention!r}: plan with flash"),
        (model.cross_attention, "cross attention: its program trains models of one stack"),
        (model.bidirectional, "bidirectional attention: its program trains causal models"),
        (  # whose layers are transformers' own in most of its recipes (recipes/vlm/finetune.py)
            model.any_encoder is not None,
            "an image encoder, whose model runs other layers than are priced here: plan with --framework transformers",
        ),
        (training.fused_norm is False, "fused_norm = false: the norms are Transformer Engine's, leave it out"),
        (
            model.mla is not None and model.num_mtp_layers > 0,
            f"layers of {model.name} for multi-token prediction: set num_mtp_layers of the model to 0",
        ),
        (
            adapters_of(training) is not None and model.moe is not None,
            f"adapters of {model.name}, which has experts: export for megatron-bridge",
        ),
        (
            training.lengths is not None and training.batching not in ("packed", "padded"),
            f"batching {training.batching}: plan with packed or padded",
        ),
    )
    refuse(refusals, "NeMo AutoModel cannot express ")


def _refused_tuning(finetuning: FineTuning) -> str:
    """Describe what the target cannot express of a fine-tuning; empty if it can express all of it."""
    ends = (*finetuning.frozen, *finetuning.saved_modules)
    if ends:
        return f"{' and '.join(ends)} apart from other weights"
    if finetuning.quantization == "int4":
        return "weights in int4 (it quantises with bitsandbytes)"
    return refused_targets(finetuning)


TARGET = Target(
    name=NAME,
    title="NeMo AutoModel",
    rules=("automodel",),
    job=job,
    limits=LIMITS,
    refused_tuning=_refused_tuning,
)
