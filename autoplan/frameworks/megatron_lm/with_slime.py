"""Options of slime (THUDM/slime), which trains the actor of reinforcement learning with Megatron-LM.

Only the training half is read; other programs generate the samples.
"""

from __future__ import annotations

from autoplan.frameworks.common.option_table import Assumed, remark_assumed
from autoplan.frameworks.common.options import Argument, Options

_ACTOR = ("actor_num_nodes", "actor_num_gpus_per_node")
# Options of the programs that make samples, score them and log (slime/utils/arguments.py): by how they begin, or whole.
_ELSEWHERE = ("rollout_", "sglang_", "eval_", "wandb_", "tb_")
_COSTLESS = (
    *("hf_checkpoint", "ref_load", "ref_ckpt_step", "prompt_data", "data_source_path", "num_rollout", "num_epoch"),
    *("input_key", "label_key", "metadata_key", "tool_key", "reward_key", "apply_chat_template", "start_rollout_id"),
    *("apply_chat_template_kwargs", "over_sampling_batch_size", "dynamic_sampling_filter_path", "buffer_filter_path"),
    *("custom_generate_function_path", "custom_rm_path", "custom_reward_post_process_path", "n_samples_per_prompt"),
    *("n_samples_per_eval_prompt", "rm_type", "rm_url", "group_rm", "use_slime_router", "use_wandb"),
    *("use_tensorboard", "skip_eval_before_train", "colocate", "balance_data", "advantage_estimator"),
    *("normalize_advantages", "gamma", "lambd", "kl_coef", "use_kl_loss", "kl_loss_coef", "kl_loss_type"),
    *("eps_clip", "eps_clip_high", "eps_clip_c", "value_clip"),
    *("disable_grpo_std_normalization", "disable_rewards_normalization"),
)
_ASSUMED = (Assumed("entropy_coef", (0, 0.0, None), "the loss is priced without the entropy of the logits"),)


def is_with_slime(arguments: Options) -> bool:
    """Return whether the options belong to slime."""
    return arguments.has("rollout_batch_size")


def translate(arguments: Options) -> int | None:
    """Add slime's settings to the options of Megatron-LM; return the number of actor devices if the options set it.

    Source: slime/backends/megatron_utils/arguments.py, `slime_validate_args` and `_set_default_megatron_args`.
    """
    arguments.remark("rollout_batch_size", "samples are made elsewhere: the training half alone is priced")
    _set_batch(arguments)
    set_by_slime = {"use_distributed_optimizer": True, "bf16": not arguments.flag("fp16")}
    for name, value in set_by_slime.items():
        arguments.arguments[name] = Argument(f"--{name.replace('_', '-')}", str(value), name, value)
    if arguments.flag("use_dynamic_batch_size"):
        arguments.remark("use_dynamic_batch_size", "micro-batches are packed: priced as sequences of one length")
        arguments.pass_over("max_tokens_per_gpu", "log_probs_max_tokens_per_gpu")
    remark_assumed(_ASSUMED, arguments)
    elsewhere = (key for key in arguments.arguments if key.startswith(_ELSEWHERE) and key != "rollout_batch_size")
    arguments.pass_over(*_COSTLESS, *elsewhere)
    nodes, per_node = (arguments.optional_count(name) for name in _ACTOR)
    return nodes * per_node if nodes and per_node else None


def _set_batch(arguments: Options) -> None:
    """Set the batch that follows from the samples of a rollout and its steps (slime/utils/arguments.py)."""
    steps = arguments.optional_count("num_steps_per_rollout", least=1)
    if not steps or arguments.has("global_batch_size"):
        return
    samples = arguments.count("rollout_batch_size") * arguments.count("n_samples_per_prompt", 1)
    value = max(samples // steps, 1)
    arguments.arguments["global_batch_size"] = Argument("--global-batch-size", str(value), "global_batch_size", value)
