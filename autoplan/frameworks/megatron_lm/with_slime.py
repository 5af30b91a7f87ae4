"""Options of slime (THUDM/slime), which trains the actor of reinforcement learning with Megatron-LM.

Only the training half is read; other programs generate the samples.
"""

from __future__ import annotations

from autoplan.frameworks.common.options import Argument, Options

_TELLING = ("rollout_batch_size", "n_samples_per_prompt")
_ACTOR = ("actor_num_nodes", "actor_num_gpus_per_node")


def is_with_slime(arguments: Options) -> bool:
    """Return whether the options belong to slime."""
    return all(map(arguments.has, _TELLING))


def translate(arguments: Options) -> int | None:
    """Add slime's settings to the options of Megatron-LM; return the number of actor devices if the options set it.

    Source: slime/backends/megatron_utils/arguments.py, `slime_validate_args` and `_set_default_megatron_args`.
    """
    arguments.remark("rollout_batch_size", "samples are made elsewhere: the training half alone is priced")
    set_by_slime = {"use_distributed_optimizer": True, "bf16": not arguments.flag("fp16")}
    for name, value in set_by_slime.items():
        arguments.arguments[name] = Argument(f"--{name.replace('_', '-')}", str(value), name, value)
    if arguments.flag("use_dynamic_batch_size"):
        arguments.remark("use_dynamic_batch_size", "micro-batches are packed: priced as sequences of one length")
    nodes, per_node = (arguments.optional_count(name) for name in _ACTOR)
    return nodes * per_node if nodes and per_node else None
