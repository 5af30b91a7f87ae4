"""Options that older releases of Megatron-LM lack, by the release of Megatron-Core that is part of them.

From megatron/training/arguments.py and megatron/core/transformer/transformer_config.py of the tags core_v0.12.3,
core_v0.13.1, core_v0.14.0, core_v0.15.0, core_v0.16.1, core_v0.17.1 and core_v0.18.2, which has all that are written.
"""

from __future__ import annotations

from collections.abc import Iterable

from autoplan.base.errors import InputError
from autoplan.frameworks.common.job import OptionGroup
from autoplan.frameworks.common.rules import Rule, SupportedWords
from autoplan.frameworks.common.universal_rules import options_lacked
from autoplan.spec.enums import RecomputeModule

RELEASES = ("0.17", "0.16", "0.15", "0.14", "0.13", "0.12")
# First release with an option, or with a value of it.
_SINCE = {
    **dict.fromkeys(("--pipeline-model-parallel-layout", "--exp-avg-dtype bf16", "--exp-avg-sq-dtype bf16"), "0.13"),
    "--fp8-recipe blockwise": "0.13",
    **dict.fromkeys(
        (
            *("--use-megatron-fsdp", "--moe-router-fusion", "--rope-type", "--overlap-moe-expert-parallel-comm"),
            "--recompute-modules shared_experts",
        ),
        "0.14",
    ),
    **dict.fromkeys(
        (
            *("--window-size", "--window-attn-skip-freq", "--softmax-type", "--quick-geglu"),
            *("--glu-linear-offset", "--activation-func-clamp-value"),
        ),
        "0.15",
    ),
    **dict.fromkeys(
        (
            *("--moe-flex-dispatcher-backend", "--moe-shared-expert-gate", "--moe-router-padding-for-quantization"),
            "--hybrid-context-parallel",
        ),
        "0.16",
    ),
    "--cuda-graph-impl": "0.18",  # older ones have it with other scopes
}
_SHARED = 1 << RecomputeModule.SHARED_EXPERTS.code
# Limits of plans for the releases before one.
_BEFORE: dict[str, tuple[Rule, ...]] = {
    "0.13": (
        *options_lacked(("layers_per_chunk",)),
        SupportedWords(axis="moment_dtype", words=("fp32", "fp8"), source="training/arguments.py:2689").rule(),
        SupportedWords(axis="fp8_scaling", words=("tensorwise", "delayed"), source="training/arguments.py:1068").rule(),
    ),
    "0.14": (
        *options_lacked(("router_fusion", "ep_overlap", "delay_wgrad")),
        SupportedWords(axis="sharding", words=("none", "zero1"), source="training/arguments.py:2360").rule(),
        Rule(
            source="core/transformer/transformer_config.py:818",
            holds=lambda s, b: b.recompute_modules & _SHARED == 0,
            text=lambda s, p: "recompute of shared_experts is known of other versions only: leave it out",
        ),
    ),
    "0.16": (
        *options_lacked(("dynamic_cp",)),
        SupportedWords(axis="dispatcher", words=("alltoall", "allgather"), source="training/arguments.py:3131").rule(),
    ),
    "0.18": options_lacked(("cuda_graphs",)),
}


def lacked(release: str) -> tuple[Rule, ...]:
    """Return the limits of plans for a release."""
    return tuple(rule for since, rules in _BEFORE.items() if release < since for rule in rules)


def check_release(groups: Iterable[OptionGroup], release: str) -> None:
    """Raise an error for an option that a release does not have."""
    option = ""
    for word in (word for group in groups for line in group.lines for word in line):
        option = word if word.startswith("--") else option
        since = _SINCE.get(word) or _SINCE.get(f"{option} {word}", "")
        if release < since:
            said = option if option == word else f"{option} {word}"
            raise InputError(f"Megatron-LM {release} has no {said}, which is of {since}: export for a newer release")
