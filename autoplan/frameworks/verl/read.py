"""Reader of scripts that start verl (1dda039) on Megatron-Core: its SFT trainer, or an actor's update.

Rollout, reference and rewards of reinforcement learning are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from autoplan.base.errors import InputError
from autoplan.frameworks.common.launch import Launch, LaunchContext, Reader, Unread
from autoplan.frameworks.common.option_table import Assumed, remark_assumed
from autoplan.frameworks.common.options import Argument, Options, Unknown, parse_yaml, whole_names
from autoplan.frameworks.common.shell import script_of
from autoplan.frameworks.common.shell_words import is_open
from autoplan.frameworks.hf_trainer.launch import model_of
from autoplan.frameworks.hf_trainer.script import devices_of
from autoplan.frameworks.megatron_bridge.read import DELETED
from autoplan.frameworks.megatron_bridge.tuning import FUSED
from autoplan.frameworks.megatron_lm import launch as megatron
from autoplan.frameworks.megatron_lm.options import BRIDGE_FIELDS
from autoplan.frameworks.megatron_lm.read import Entry, started
from autoplan.frameworks.verl.options import (
    ACTOR_TOKENS,
    ARGUMENTS,
    DDP,
    DEFAULT_LENGTH,
    DEFAULTS,
    DTYPE,
    DYNAMIC,
    MAX_TOKENS,
    OF_ACTOR,
    OPTIMIZER,
    SFT_TOKENS,
    TRANSFORMER,
)
from autoplan.spec.finetuning import FineTuning

_SFT, _PPO = "verl.trainer.sft_trainer", "verl.trainer.main_ppo"
_CONFIGS = ("", "ppo_trainer", "ppo_megatron_trainer", "sft_trainer", "sft_trainer_engine")  # trainer/config
_WORD = re.compile(r"(\+{0,2})([\w.@/]+)=(.*)", re.DOTALL)
_FIELDS = {path.partition(".")[2]: name for name, path in BRIDGE_FIELDS.items() if path.startswith("model.")}
_ACTOR = "actor_rollout_ref.actor."
# Settings that affect neither time nor memory of an update, whole names or families of them: the actor's, and all.
_ACTORS_OWN = (
    *("_target_", "strategy", "ppo_epochs", "clip_ratio*", "policy_loss*", "loss_agg_mode", "loss_scale_factor"),
    *("kl_loss_*", "use_kl_loss", "shuffle", "data_loader_seed", "checkpoint.*", "optim", "profiler.*", "grad_clip"),
    *("rollout_n", "tis_*", "load_weight", "use_torch_compile", "fsdp_config.*", "ppo_max_token_len*"),
)
_HARMLESS = whole_names(
    # other parts than the actor's update
    "trainer.* profiler.* global_profiler.* checkpoint.* algorithm.* reward.* reward_*.* critic.* ray_kwargs.*",
    "model_engine engine optim model actor_rollout_ref.rollout.* actor_rollout_ref.ref.*",
    "actor_rollout_ref.hybrid_engine actor_rollout_ref.nccl_timeout",
    # data
    "data.train_file data.train_files data.train_max_samples data.val_* data.validation_shuffle data.shuffle",
    "data.seed data.path data.output_path data.prompt* data.response* data.messages_key data.multiturn.*",
    "data.tools_key data.enable_thinking* data.image_* data.video_* data.return_* data.reward_fn_key data.tokenizer",
    "data.custom_cls.* data.filter_* data.truncation data.trust_remote_code data.apply_chat_template_kwargs*",
    "data.sampler.* data.num_workers data.dataloader_num_workers data.gen_batch_size data.n_samples data.batch_size",
    "data.ignore_input_ids_mismatch data.datagen.* data.continuous_token.*",
    # model and update
    "model.path model.trust_remote_code model.lora.alpha model.override_config.model_config.max_position_embeddings",
    "model.override_config.max_position_embeddings optim.lr optim.lr_* optim.min_lr optim.min_lr_* optim.weight_decay",
    "optim.weight_decay_* optim.betas optim.clip_grad engine.use_mbridge engine.vanilla_mbridge engine.seed",
    "engine.use_dist_checkpointing engine.dist_checkpointing_*",
    *(f"{_ACTOR}{name}" for name in _ACTORS_OWN),
)
_FUSED_LOSS = "the loss is priced with whole logits"
_ASSUMED = (  # of trainer/config/actor/actor.yaml, trainer/config/model/hf_model.yaml and Megatron-Core's own classes
    Assumed(f"{_ACTOR}entropy_coeff", (0, 0.0, None), "the loss is priced without the entropy of the logits"),
    Assumed(f"{_ACTOR}calculate_entropy", (False, None), "the loss is priced without the entropy of the logits"),
    Assumed("data.pad_mode", ("no_padding", None), "samples are priced without padding"),
    Assumed("model.use_remove_padding", (True, None), "samples are priced without padding"),
    Assumed(f"{_ACTOR}freeze_vision_tower", (False, None), "all weights are priced as trained"),
    Assumed(f"{_ACTOR}use_fused_kernels", (False, None), _FUSED_LOSS),
    Assumed("model.use_fused_kernels", (False, None), _FUSED_LOSS),
    Assumed("bias_activation_fusion", (True, None), "priced with a fused activation"),
    Assumed("deallocate_pipeline_outputs", (True, None), "what a stage has sent is priced as freed"),
    Assumed("persist_layer_norm"),  # Transformer Engine's norms have one kernel
)


def recognises(name: str, text: str) -> bool:
    """Return whether a file is a script that starts a trainer of verl on Megatron-Core."""
    if not name.endswith((".sh", ".slurm", ".sbatch", ".txt")) or not (_SFT in text or _PPO in text):
        return False
    return (
        re.search(r"\bengine=[\"']?(megatron|\$)|\.actor\.megatron\.|=megatron\b|engine\.tensor_model", text)
        is not None
    )


def read(text: str, context: LaunchContext) -> Launch:
    """Return the launch of the last command of a script that starts a trainer."""
    script = script_of(text, context)
    entry = Entry(_position, lambda inner: _SFT in inner or _PPO in inner)
    before, words = started(script, entry, context)
    if words is None:
        raise InputError(f"no command of the script starts {_SFT} or {_PPO}")
    settings = _settings(words)
    if (engine := settings.get("engine", ("", "megatron"))[1]) != "megatron":
        raise InputError(f"engine {engine[:20]!r} is not read: only megatron is")
    arguments = Options(_arguments(settings), DEFAULTS, way_out="pass --model")
    for key in [key for key in arguments.arguments if _HARMLESS.fullmatch(key)]:
        arguments.pass_over(key)
    arguments.remarks += script.unread()
    remark_assumed(_ASSUMED, arguments)
    if before[-1] == _PPO:
        why = "the update of the actor alone is priced: rollout, reference and rewards are left alone"
        arguments.remarks.append(Unread(option=_PPO, value="", why=why, matters=False))
    if (config := _config_name(words)) not in _CONFIGS:
        why = "a configuration of its own, whose settings are not read"
        arguments.remarks.append(Unread(option="--config-name", value=config, why=why))
        arguments.is_partial = True
    arguments.remarks += [Unread(option=word, value="", why=DELETED) for word in words if word.startswith("~")]
    model = model_of(arguments, "model.path", context)
    if not arguments.flag("model.mtp.enable_train"):
        model = replace(model, num_mtp_layers=0)
    arguments.pass_over("model.mtp.enable")
    if arguments.flag("use_megatron_fsdp"):  # Megatron-Bridge, training/utils/config_utils.py, create_ddp_config
        arguments.defaults |= {"data_parallel_sharding_strategy": "optim_grads_params", "overlap_grad_reduce": True}
    finetuning = _finetuning(arguments)
    _batch(arguments, context, ACTOR_TOKENS if before[-1] == _PPO else SFT_TOKENS)
    _types(arguments)
    for key in ("param_offload", "optimizer_offload", "grad_offload"):
        if arguments.flag(f"engine.{key}"):
            arguments.remark(f"engine.{key}", "states go to the host and back once a step; priced as kept")
    devices = _devices(settings) or devices_of(before, script, text)
    launch = megatron.launch_of(
        arguments,
        replace(context, model=model),
        target="verl",
        framework="megatron-core",
        num_devices=devices,
    )
    return replace(launch, training=replace(launch.training, finetuning=finetuning, batching="unpadded"))


def _position(words: Sequence[str]) -> int | None:
    return next((at for at, word in enumerate(words) if word in (_SFT, _PPO)), None)


def _settings(words: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return (word, value) by the names of settings in the SFT trainer."""
    settings: dict[str, tuple[str, str]] = {}
    for word in words:
        if (pair := _WORD.fullmatch(word)) is None:
            continue
        name = pair[2]
        for place, option_prefix in OF_ACTOR.items():
            if name.startswith(place) and (place.endswith(".") or name == place):
                name = option_prefix + name[len(place) :]
        settings[name] = (pair[2], pair[3])
    return settings


def _config_name(words: Sequence[str]) -> str:
    """Return the name of the configuration that a command starts from; empty if it does not name one."""
    for at, word in enumerate(words):
        option, sign, value = word.partition("=")
        if option in ("--config-name", "-cn"):
            return (value if sign else "".join(words[at + 1 : at + 2])).removesuffix(".yaml").removesuffix(".yml")
    return ""


def _name_in(setting: str, in_file: Mapping[str, str]) -> str:
    """Return the name of a setting of the SFT trainer in a script with these settings: an actor's, if it starts one."""
    if any(name.startswith("actor_rollout_ref.") for name in in_file):
        for place, prefix in OF_ACTOR.items():
            if setting.startswith(prefix) and (prefix.endswith(".") or setting == prefix):
                return place + setting[len(prefix) :]
    return setting


def _arguments(settings: dict[str, tuple[str, str]]) -> Iterator[Argument]:
    """Yield the settings that correspond to arguments of Megatron-LM, by these arguments' names."""
    for name, (option, text) in settings.items():
        value = Unknown(text) if is_open(text) else parse_yaml(f"value: {text}", option)["value"]
        if value is None and name.startswith(("engine.virtual", "engine.expert_tensor", TRANSFORMER)):
            continue
        section, _, field = name.rpartition(".")
        if name in ARGUMENTS:
            yield Argument(option, text, ARGUMENTS[name], value)
        elif section == TRANSFORMER:
            yield Argument(option, text, _FIELDS.get(field, field), value)
        elif section in (DDP, OPTIMIZER):
            yield Argument(option, text, field, value)
        else:
            yield Argument(option, text, name, value)


def _devices(settings: dict[str, tuple[str, str]]) -> int | None:
    """Return the number of devices set for Ray."""
    counts = [settings.get(f"trainer.{name}", ("", ""))[1] for name in ("nnodes", "n_gpus_per_node")]
    return int(counts[0]) * int(counts[1]) if all(re.fullmatch(r"[1-9]\d{0,4}", count) for count in counts) else None


def _finetuning(arguments: Options) -> FineTuning | None:
    """Return the adapters of `model.lora` (config/model/hf_model.yaml), or None if all weights are trained."""
    rank = arguments.optional_count("model.lora.rank", 0) or 0
    if not rank:
        return None
    if (kind := arguments.text("model.lora.type", "lora")) not in ("lora", "dora"):
        raise InputError(f"model.lora.type {str(kind)[:20]!r} is not priced: only lora and dora are")
    return FineTuning(
        rank=rank,
        alpha=arguments.count("model.lora.alpha", 32),
        targets=arguments.words("model.lora.target_modules", FUSED),
        dropout=arguments.number("model.lora.dropout", 0.0),
        dora=kind == "dora",
    )


def _batch(arguments: Options, context: LaunchContext, defaults: tuple[bool, int]) -> None:
    """Translate lengths and batch sizes to Megatron-LM's arguments; the trainer has its own `defaults` for tokens."""
    is_dynamic, most_tokens = defaults
    prompt, answer = (arguments.optional_count(f"data.max_{part}_length", 0) or 0 for part in ("prompt", "response"))
    length = context.seq_len or prompt + answer or arguments.optional_count("seq_length") or DEFAULT_LENGTH
    if not arguments.has("seq_length"):
        arguments.defaults["seq_length"] = length
    if (samples := arguments.optional_count("actor_rollout_ref.rollout.n", 1) or 1) > 1:
        total = arguments.count("global_batch_size", 256) * samples
        option = arguments.name("global_batch_size")
        arguments.arguments["global_batch_size"] = Argument(option, str(total), "global_batch_size", total)
    if arguments.flag(DYNAMIC, is_dynamic):
        tokens = arguments.count(MAX_TOKENS, most_tokens) * arguments.count("context_parallel_size", 1)
        size = max(1, tokens // length)
        arguments.arguments["micro_batch_size"] = Argument(DYNAMIC, "True", "micro_batch_size", size)
        arguments.remark(DYNAMIC, f"micro-batches are as many tokens; priced as {size} sequences", default="True")
    arguments.pass_over(MAX_TOKENS)
    if not context.has_lengths and context.seq_len is None:
        why = "samples are shorter than that: priced as all of this length; pass --lengths, or --seq-len their mean"
        arguments.remark("seq_length", why, matters=False, default=str(length))


def _types(arguments: Options) -> None:
    """Add the precision of the weights, and sequence parallelism if there is tensor parallelism."""
    is_half = arguments.text(DTYPE, "bfloat16") == "float16"
    arguments.defaults |= {"bf16": not is_half, "fp16": is_half}
    arguments.defaults["sequence_parallel"] = arguments.count("tensor_model_parallel_size", 1) > 1


READER = Reader(target="verl", recognises=recognises, read=read, name_in=_name_in)
