"""Variables of the environment that choose kernels, links or wrappers, whatever the options of a program say.

Transformer Engine's are in its docs/envvars.rst, NCCL's in its user guide, accelerate's in its utils/dataclasses.py,
LLaMA-Factory's in its extras/misc.py and launcher.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from autoplan.frameworks.common.launch import Silent, Unread
from autoplan.frameworks.common.media import OF_MEDIA, media_variables

_OFF = ("", "0", "false", "no", "off")
_OF_ACCELERATE = (
    r"ACCELERATE_(USE_(FSDP|DEEPSPEED|MEGATRON_LM|PARALLELISM_CONFIG|CPU)|MIXED_PRECISION|GRADIENT_ACCUMULATION_STEPS"
    r"|DOWNCAST_BF16|TORCH_DEVICE|(DEEPSPEED|DYNAMO|FP8)_\w+)|PARALLELISM_CONFIG_\w+"
    r"|FSDP_(VERSION|SHARDING_STRATEGY|RESHARD_AFTER_FORWARD|OFFLOAD_PARAMS|AUTO_WRAP_POLICY|MIN_NUM_PARAMS"
    r"|IGNORED_MODULES|ACTIVATION_CHECKPOINTING(_OFFLOAD)?|FLOAT8_ALL_GATHER)"
)
# (names, why a value other than "off" matters)
_WHEN_ON: tuple[tuple[str, str], ...] = (
    (r"NCCL_(P2P|IB|SHM)_DISABLE", "links are priced as used"),
    (r"NCCL_(ALGO|PROTO|MIN_NCHANNELS|MAX_NCHANNELS|MAX_CTAS)", "collectives are priced as NCCL chooses them"),
    (r"CUDA_LAUNCH_BLOCKING|(TORCH_)?NCCL_BLOCKING_WAIT", "the host is priced as running ahead of the device"),
    (r"(TORCH_COMPILE|TORCHDYNAMO)_DISABLE", "compiled functions are priced as compiled"),
    (r"NVTE_(DEBUG_QUANTIZATION|\w+_SM_MARGIN|WITH_NVSHMEM|CPU_OFFLOAD_V1)", "Transformer Engine is priced without it"),
    (_OF_ACCELERATE, "accelerate takes it for an option, which is not read"),
    (r"USE_(MCA|MEGATRON_BRIDGE|RAY|V1)", "LLaMA-Factory trains with other code, which is not read"),
)
# (names, why "off" matters)
_WHEN_OFF: tuple[tuple[str, str], ...] = (
    (r"NVTE_(FLASH|FUSED|UNFUSED)_ATTN", "Transformer Engine may take another kernel of attention than is priced"),
    (r"NVTE_ALLOW_NONDETERMINISTIC_ALGO", "deterministic kernels are slower than is priced"),
    (r"NCCL_NVLS_ENABLE|NCCL_CUMEM_ENABLE", "links are priced as used"),
)
_NAMED = re.compile(r"(?<![\w$-])([A-Z][A-Z0-9_]{3,})[\"']?[ \t]*[=:][ \t]*[\"']?([^\s,;\"'}]*)")


def variables_in(words: Iterable[str]) -> dict[str, str]:
    """Return the variables that a command hands on in its words: NAME=VALUE, or a table of them such as Ray's."""
    return {match[1]: match[2] for word in words for match in _NAMED.finditer(word)}


def unread_variables(environment: Mapping[str, str]) -> list[Unread]:
    """Return the variables of an environment that may change the time or memory of a step."""
    found: list[Unread] = [
        Silent(option=name, value=environment[name][:80], why=OF_MEDIA) for name in media_variables(environment)
    ]
    for name, value in sorted(environment.items()):
        is_off = value.strip().casefold() in _OFF
        table = _WHEN_OFF if is_off else _WHEN_ON
        why = next((why for names, why in table if re.fullmatch(names, name)), None)
        if why is not None:
            found.append(Unread(option=name, value=value[:80], why=f"in the environment: {why}"))
    return found
