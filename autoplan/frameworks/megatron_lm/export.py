"""Which command line makes Megatron-LM's pretrain_gpt.py run a plan?

Options are those of Megatron-LM d98e8a6 (core 0.20); places in comments are below megatron/ there.
"""

from __future__ import annotations

from itertools import groupby

from autoplan.base.errors import InputError, refused
from autoplan.frameworks.common.job import Group, Job, Line, Setting, Target, Variable
from autoplan.frameworks.common.rules import Rule, check_legal
from autoplan.frameworks.megatron_lm.rules import RULES
from autoplan.spec.model import Block, Experts, LatentAttention, ModelSpec
from autoplan.spec.plan import ParallelPlan, chunk_layers
from autoplan.spec.plan_file import PlanFile

_STRATEGY = {"zero2": "optim_grads", "zero3": "optim_grads_params"}
# Who has the schedules that Megatron-Core has not.
_SCHEDULED_BY = {
    "gpipe": "torchtitan",
    "zb-h1": "primus",
    "zb-v": "primus or torchtitan",
    "dualpipe-v": "torchtitan",
}
_CP_KIND = {"ring": "p2p", "all_to_all": "a2a"}
# Generations without block-scaled matrix products.
_BLOCK_SCALED = ("volta", "ampere", "ada", "hopper", "cdna2", "cdna3")
_TOO_OLD = {"fp8": ("volta", "ampere", "cdna2"), "mxfp8": _BLOCK_SCALED, "nvfp4": _BLOCK_SCALED}


def words_of(groups: tuple[Group, ...]) -> list[str]:
    """All words of some groups of options, in order."""
    return [word for group in groups for line in group.lines for word in line]


def job(plan_file: PlanFile, version: str = "") -> Job:
    """What starts the plan in a checkout of Megatron-LM."""
    return Job(
        framework="Megatron-LM",
        environment=environment(plan_file),
        variables=(
            Variable(name="MEGATRON_LM_DIR", default=".", says="checkout of github.com/NVIDIA/Megatron-LM"),
            Variable(name="TRAIN_ITERS", default="100", says="steps", counts_steps=True),
        ),
        program='"$MEGATRON_LM_DIR/pretrain_gpt.py"',
        groups=(*megatron_core_groups(plan_file), optimisation(plan_file)),
        replaceable=Group(
            name="DATA",
            says="Mock data; DATA_ARGS='--data-path ... --tokenizer-type ...' in the environment replaces it.",
            lines=(["--mock-data"], ["--tokenizer-type", "NullTokenizer"]),
        ),
        trailing=('--train-iters "$TRAIN_ITERS"',),
    )


def megatron_core_groups(
    plan_file: PlanFile, says: str = "Megatron-LM", rules: tuple[Rule, ...] = RULES
) -> tuple[Group, ...]:
    """The options of model and plan for a framework that `says` its name, runs Megatron-Core and has these rules."""
    model, plan, training = plan_file.model, plan_file.best.plan, plan_file.training
    _check_model(model, says)
    _check_training(plan_file, says)
    if rules is RULES and (others := _SCHEDULED_BY.get(plan.schedule)):
        raise InputError(f"{says} has no schedule {plan.schedule!r}: plan and export for {others}, or plan with 1f1b")
    check_legal(rules, model, training, plan, f"{says} does not accept the plan")
    dropout = [] if plan_file.framework.kernels.dropout else [["--attention-dropout", "0.0", "--hidden-dropout", "0.0"]]
    sizes = [*_sizes(plan_file), *_attention(model), *_window(model), *_form(model), *dropout]
    groups = [
        Group(
            name="MODEL",
            says="The model, as far as it costs time and memory: gated MLPs are taken for SwiGLU, others for GELU.",
            lines=tuple(sizes),
        )
    ]
    if model.moe:
        groups.append(Group(name="EXPERTS", says="Its experts.", lines=tuple(_experts(plan_file, model.moe))))
    lines = (*_parallelism(model, plan), *_sharding(plan), *_overlap(plan), *_memory(plan), *_precision(plan_file))
    return (*groups, Group(name="PLAN", says="The plan.", lines=lines))


# -- what pretrain_gpt.py cannot be told ------------------------------------------------------------------------------


def _check_model(model: ModelSpec, says: str) -> None:
    """Refuse an architecture that would silently become another one."""
    refusals = (
        (model.layer_pattern is not None, "a layer_pattern (hybrid models have their own pretrain_hybrid.py)"),
        (model.position_embedding == "alibi", "position_embedding 'alibi'"),
        (model.num_mtp_layers > 0 and model.position_embedding == "learned", "num_mtp_layers with learned positions"),
        (model.shares_mtp_layer, "shares_mtp_layer"),
        (model.norms_per_block != 1, "norms_per_block 2"),
        (model.embedding_norm, "embedding_norm"),
        (model.norm == "layernorm" and not model.norm_bias, "a layernorm without bias"),
        (model.qk_norm == "full", "qk_norm 'full' (its --qk-layernorm is per head)"),
        (model.mla is not None and model.qkv_bias, "qkv_bias with latent attention"),
        (not float(model.rope_base).is_integer(), f"rope_base {model.rope_base:g} (it takes a whole number)"),
        (_has_bias(model) is None, "this mixture of mlp_bias, qkv_bias and attention_output_bias (all or qkv alone)"),
        (
            model.moe is not None and model.moe.router_bias != bool(_has_bias(model)),
            "a router_bias that differs from the other biases",
        ),
    )
    if what := refused(refusals):
        raise InputError(f"{says}'s pretraining of GPT models cannot express {what} of model {model.name!r}")


def _has_bias(model: ModelSpec) -> bool | None:
    """Whether the linear layers have biases: one switch in Megatron-LM, from which only qkv can differ."""
    if model.mlp_bias and model.attention_output_bias and model.qkv_bias:
        return True
    return None if model.mlp_bias or model.attention_output_bias else False


def _check_training(plan_file: PlanFile, says: str) -> None:
    training, device, precision = plan_file.training, plan_file.cluster.device, plan_file.best.plan.precision
    if training.attention == "megatron-fused":
        raise InputError(f"{says} has no attention 'megatron-fused' any more: plan with flash or unfused")
    if training.fused_norm is False:
        raise InputError(f"{says} always fuses norms (Transformer Engine): leave fused_norm out")
    if device.generation in _TOO_OLD.get(precision, ()):
        raise InputError(f"precision {precision!r} does not exist on {device.name}: plan with another one")


# -- the model --------------------------------------------------------------------------------------------------------


def _sizes(plan_file: PlanFile) -> list[Line]:
    model, seq_len = plan_file.model, plan_file.training.seq_len
    ffn_size = model.ffn_size or (model.moe.expert_ffn_size if model.moe else 0)
    return [
        ["--num-layers", str(model.num_layers), "--hidden-size", str(model.hidden_size)],
        ["--ffn-hidden-size", str(ffn_size), "--num-attention-heads", str(model.num_heads)],
        ["--seq-length", str(seq_len), "--max-position-embeddings", str(max(seq_len, model.max_positions))],
        [
            "--vocab-size",
            str(model.vocab_size),
            "--make-vocab-size-divisible-by",
            str(plan_file.framework.memory.pads_vocab_to),
        ],
    ]


def _attention(model: ModelSpec) -> list[Line]:
    if model.mla:
        return _latent_attention(model, model.mla)
    lines: list[Line] = []
    if model.kv_heads != model.num_heads:
        lines.append(["--group-query-attention", "--num-query-groups", str(model.kv_heads)])
    if model.head_dim is not None:
        lines.append(["--kv-channels", str(model.head_dim)])
    if model.qk_norm == "head":
        lines.append(["--qk-layernorm"])
    return lines


def _latent_attention(model: ModelSpec, mla: LatentAttention) -> list[Line]:
    """The latents are normalised; kv_channels is not used, but must not be derived from hidden_size."""
    lines: list[Line] = [["--multi-latent-attention", "--qk-layernorm", "--kv-channels", str(mla.v_head_dim)]]
    if mla.q_lora_rank is not None:
        lines.append(["--q-lora-rank", str(mla.q_lora_rank)])
    lines.append(["--kv-lora-rank", str(mla.kv_lora_rank), "--qk-head-dim", str(mla.qk_nope_head_dim)])
    lines.append(["--qk-pos-emb-head-dim", str(mla.qk_rope_head_dim), "--v-head-dim", str(mla.v_head_dim)])
    if model.position_embedding == "rope":
        lines.append(["--rope-type", "yarn", "--rotary-scaling-factor", "1.0"])  # plain rope is not fused here
    return lines


def _window(model: ModelSpec) -> list[Line]:
    lines: list[Line] = []
    if model.window is not None:
        lines.append(["--window-size", f"{model.window - 1},0"])  # tokens to the left of the token itself
        if model.full_attention_interval:
            lines.append(["--window-attn-skip-freq", str(model.full_attention_interval)])
    if model.attention_sinks:
        lines.append(["--softmax-type", "learnable"])
    return lines


def _form(model: ModelSpec) -> list[Line]:
    kind = {"rope": "rope", "learned": "learned_absolute", "none": "none"}[model.position_embedding]
    lines: list[Line] = [["--position-embedding-type", kind]]
    if kind == "rope":
        lines[0] += ["--rotary-base", str(int(model.rope_base))]
    lines.append(["--normalization", {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}[model.norm]])
    if model.gated_mlp:
        lines.append(["--swiglu"])  # otherwise GELU: the activation itself changes no shape
    if not _has_bias(model):
        lines.append(["--disable-bias-linear", *(["--add-qkv-bias"] if model.qkv_bias else [])])
    if not model.tied_embeddings:
        lines.append(["--untie-embeddings-and-output-weights"])
    if model.num_mtp_layers:
        lines.append(["--mtp-num-layers", str(model.num_mtp_layers)])
    return lines


def _experts(plan_file: PlanFile, moe: Experts) -> list[Line]:
    model, plan = plan_file.model, plan_file.best.plan
    lines: list[Line] = [
        ["--num-experts", str(moe.num_experts), "--moe-router-topk", str(moe.experts_per_token)],
        ["--moe-ffn-hidden-size", str(moe.expert_ffn_size)],
    ]
    places = [int(Block.MOE in layer) for layer in model.layers]
    if not all(places):
        runs = [f"[{place}]*{len(list(run))}" for place, run in groupby(places)]
        lines.append(["--moe-layer-freq", f"({'+'.join(runs)})"])
    if moe.shared_expert_ffn_size:
        gate = ["--moe-shared-expert-gate"] if moe.shared_expert_gate else []
        lines.append(["--moe-shared-expert-intermediate-size", str(moe.shared_expert_ffn_size), *gate])
    if moe.latent_size is not None:
        lines.append(["--moe-latent-size", str(moe.latent_size)])
    lines.append(["--moe-grouped-gemm", "--moe-permute-fusion", *_dispatcher(plan_file)])
    lines.append(["--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", "1e-2"])
    lines.append(["--moe-router-dtype", "fp32"])
    if moe.experts_per_token == 1:
        lines[-1].append("--moe-router-pre-softmax")  # core/transformer/transformer_config.py:2669
    if plan.precision in ("fp8", "mxfp8", "nvfp4"):
        lines[-1].append("--moe-router-padding-for-quantization")  # experts see any number of tokens
    return lines


def _dispatcher(plan_file: PlanFile) -> Line:
    """How tokens reach their experts, as the framework was priced with."""
    if plan_file.framework.experts.drops_tokens:
        capacity = ["--moe-expert-capacity-factor", "1.0", "--moe-pad-expert-input-to-capacity"]
        return ["--moe-token-dispatcher-type", "alltoall", *capacity]
    if not plan_file.framework.experts.sends_tokens_once or plan_file.best.plan.ep == 1:
        return ["--moe-token-dispatcher-type", "alltoall"]
    return ["--moe-token-dispatcher-type", "flex", "--moe-flex-dispatcher-backend", "hybridep"]


# -- the plan ---------------------------------------------------------------------------------------------------------


def _parallelism(model: ModelSpec, plan: ParallelPlan) -> list[Line]:
    lines: list[Line] = [
        ["--micro-batch-size", str(plan.micro_batch), "--global-batch-size", str(plan.global_batch)],
        ["--tensor-model-parallel-size", str(plan.tp), *(["--sequence-parallel"] if plan.sp else [])],
    ]
    if plan.cp > 1:
        lines.append(["--context-parallel-size", str(plan.cp), "--cp-comm-type", _CP_KIND[plan.cp_kind]])
    mapping = ["--use-tp-pp-dp-mapping"] if plan.pp > 1 and plan.rank_order == "tp-cp-ep-pp-dp" else []
    lines.append(["--pipeline-model-parallel-size", str(plan.pp), *mapping])
    counts = chunk_layers(plan, model.num_layers)
    if len(set(counts)) > 1:
        lines.append(["--pipeline-model-parallel-layout", pipeline_layout(counts, model.num_mtp_layers)])
    elif plan.vp > 1:
        lines.append(["--num-virtual-stages-per-pipeline-rank", str(plan.vp)])
    if model.moe:
        lines.append(["--expert-model-parallel-size", str(plan.ep), "--expert-tensor-parallel-size", str(plan.etp)])
    return lines


def pipeline_layout(counts: tuple[int, ...], num_mtp_layers: int = 0) -> str:
    """The layers of every chunk in Megatron-LM's notation: (3, 4, 4, 2) is 'Et*3|(t*4|)*2t*2L'."""
    texts = [_times("t", count) for count in counts]
    texts[0] = f"E{texts[0]}"
    texts[-1] += _times("m", num_mtp_layers) + "L"
    chunks = [f"{text}|" for text in texts[:-1]] + texts[-1:]
    runs = [(text, len(list(run))) for text, run in groupby(chunks)]
    return "".join(text if times == 1 else f"({text})*{times}" for text, times in runs)


def _times(symbol: str, count: int) -> str:
    return symbol if count == 1 else f"{symbol}*{count}" if count else ""


def _sharding(plan: ParallelPlan) -> list[Line]:
    if plan.sharding == "none":
        return []
    lines: list[Line] = [["--use-distributed-optimizer"]]
    if strategy := _STRATEGY.get(plan.sharding):
        lines[0] += ["--use-megatron-fsdp", "--data-parallel-sharding-strategy", strategy]
        lines.append(["--ckpt-format", "fsdp_dtensor", "--no-gradient-accumulation-fusion"])
        if plan.sharding == "zero3":
            lines.append(["--init-model-with-meta-device"])  # the whole model need not fit on one device
    if plan.dp_replicate > 1:
        lines.append(["--num-distributed-optimizer-instances", str(plan.dp_replicate)])
    return lines


def _overlap(plan: ParallelPlan) -> list[Line]:
    words = []
    if plan.grad_reduce_overlap:
        words.append("--overlap-grad-reduce")
    if plan.param_gather_overlap and plan.sharding != "none":
        words.append("--overlap-param-gather")
    if plan.tp_overlap:
        words.append("--tp-comm-overlap")
    if plan.ep_overlap:
        words.append("--overlap-moe-expert-parallel-comm")
    return [words] if words else []


def _memory(plan: ParallelPlan) -> list[Line]:
    lines: list[Line] = []
    if plan.recompute == "selective":
        lines.append(["--recompute-granularity", "selective", "--recompute-modules", *map(str, plan.recompute_modules)])
    elif plan.recompute == "full":
        # Uniform units of one layer, or the first layers of every chunk.
        method = "uniform" if plan.recompute_num_layers is None else "block"
        count = str(plan.recompute_num_layers or 1)
        lines.append(["--recompute-granularity", "full", "--recompute-method", method, "--recompute-num-layers", count])
    if plan.offload == "optimizer":
        lines.append(["--optimizer-cpu-offload", "--use-precision-aware-optimizer", "--overlap-cpu-optimizer-d2h-h2d"])
    return lines


def _precision(plan_file: PlanFile) -> list[Line]:
    kinds: dict[str, Line] = {
        "fp16": ["--fp16"],
        "bf16": ["--bf16"],
        "fp8": ["--bf16", "--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"],
        "mxfp8": ["--bf16", "--fp8-format", "e4m3", "--fp8-recipe", "mxfp8"],
        "nvfp4": ["--bf16", "--fp4-format", "e2m1", "--fp4-recipe", "nvfp4"],
    }
    lines = [kinds[plan_file.best.plan.precision]]
    if plan_file.training.attention == "unfused":
        lines.append(["--attention-backend", "unfused"])
    return lines


# -- around it --------------------------------------------------------------------------------------------------------


def optimisation(plan_file: PlanFile) -> Group:
    """What a person will replace."""
    return Group(
        name="TRAINING",
        says="Yours to choose; of these only evaluation costs time.",
        lines=(
            ["--lr", "3e-4", "--min-lr", "3e-5", "--lr-decay-style", "cosine", "--clip-grad", "1.0"],
            ["--optimizer", plan_file.training.optimizer, "--adam-beta1", "0.9", "--adam-beta2", "0.95"],
            ["--weight-decay", "0.1", "--init-method-std", "0.02"],
            ["--eval-iters", "0", "--log-interval", "1", "--log-throughput"],
        ),
    )


def environment(plan_file: PlanFile) -> tuple[Setting, ...]:
    """How many queues the device reads: one orders collectives before Blackwell, FSDP needs several.

    Both are asserted: training/arguments.py:1166 and :1477.
    """
    plan, device = plan_file.best.plan, plan_file.cluster.device
    queues = "CUDA_DEVICE_MAX_CONNECTIONS"
    if plan.sharding in _STRATEGY:
        return (Setting(name=queues, value=None, says="Megatron-FSDP refuses 1"),)
    if (plan.tp > 1 or plan.cp > 1) and device.generation != "blackwell":
        return (Setting(name=queues, value="1", says="demanded under tensor or context parallelism"),)
    return ()


TARGET = Target(name="megatron-lm", says="Megatron-LM", rules=("megatron-lm", "unknown"), job=job)
