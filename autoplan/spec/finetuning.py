"""Fine-tuning: which weights are trained, with which adapters, and how the frozen ones are stored.

Names of modules are those of PEFT's `target_modules` (Hugging Face models), of Megatron-Bridge's and of torchtune's.
Parameters, operations, memory and traffic follow from the table of matrices (`cost/kernels/arithmetic.py`), in which a
frozen matrix says so and an adapter is two matrices of its own.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from autoplan.base.errors import InputError
from autoplan.base.units import check_count
from autoplan.spec.model import ModelSpec

MAX_RANK = 65536
ALL_LINEAR = "all-linear"
# PEFT's own choice for Llama, Mistral, Qwen and most others, where a config names none (peft/utils/constants.py,
# TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING).
DEFAULT_TARGETS = ("q_proj", "v_proj")

Quantization = Literal["none", "int8", "nf4", "nf4-dq", "int4"]

# Bytes per weight with the constants that undo the quantisation: LLM.int8() has one scale a row (arXiv:2208.07339); NF4
# an fp32 scale for every 64 weights, double-quantised an 8-bit one, and an fp32 scale for every 256 of these
# (arXiv:2305.14314, section 3); GPTQ and AWQ a 16-bit scale and a 4-bit zero point for every 128.
QUANTIZED_BYTES: Mapping[Quantization, float] = {
    "int8": 1.0,
    "nf4": 0.5 + 4 / 64,
    "nf4-dq": 0.5 + 1 / 64 + 4 / (64 * 256),
    "int4": 0.5 + 2.5 / 128,
}


class Target(NamedTuple):
    """Matrix of a module in the table, and which of its fused products; "": all of them."""

    linear: str
    part: Literal["", "q", "k", "v", "gate", "up"] = ""


# A module may be called the same in several kinds of block (GPT-2's c_proj), and the same thing have several names.
MODULES: Mapping[str, tuple[Target, ...]] = {
    **dict.fromkeys(("q_proj", "q", "query"), (Target("qkv", "q"), Target("q"))),  # q of T5, query of BERT
    **dict.fromkeys(("k_proj", "k", "key"), (Target("qkv", "k"), Target("kv", "k"))),
    **dict.fromkeys(("v_proj", "v", "value"), (Target("qkv", "v"), Target("kv", "v"))),
    **dict.fromkeys(("o_proj", "o"), (Target("out"),)),
    "gate_proj": (Target("fc1", "gate"), Target("expert_fc1", "gate"), Target("shared_fc1", "gate")),
    "up_proj": (Target("fc1", "up"), Target("expert_fc1", "up"), Target("shared_fc1", "up")),
    "down_proj": (Target("fc2"), Target("expert_fc2"), Target("shared_fc2")),
    # Latent attention (DeepSeek)
    "q_a_proj": (Target("q_down"),),
    "q_b_proj": (Target("q_up"),),
    "kv_a_proj_with_mqa": (Target("kv_down"),),
    "kv_b_proj": (Target("kv_up"),),
    # Mamba and gated delta nets
    "in_proj": (Target("in"),),
    "out_proj": (Target("out"),),
    # One matrix for queries, keys and values, or for gate and up
    "qkv_proj": (Target("qkv"),),
    "query_key_value": (Target("qkv"),),
    "c_attn": (Target("qkv"),),
    "W_pack": (Target("qkv"),),
    "Wqkv": (Target("qkv"),),
    "gate_up_proj": (Target("fc1"),),
    "dense": (Target("out"),),
    "c_proj": (Target("out"), Target("fc2")),
    "c_fc": (Target("fc1"),),
    "dense_h_to_4h": (Target("fc1"),),
    "dense_4h_to_h": (Target("fc2"),),
    "fc1": (Target("fc1"),),
    "fc2": (Target("fc2"),),
    # Megatron-Core's modules
    "linear_qkv": (Target("qkv"),),
    "linear_proj": (Target("out"),),
    "linear_fc1": (Target("fc1"), Target("expert_fc1"), Target("shared_fc1")),
    "linear_fc2": (Target("fc2"), Target("expert_fc2"), Target("shared_fc2")),
    # T5's
    "wi": (Target("fc1"),),
    "wi_0": (Target("fc1", "gate"),),
    "wi_1": (Target("fc1", "up"),),
    "wo": (Target("fc2"),),
    # torchtune's and Meta's
    "output_proj": (Target("out"),),
    "w1": (Target("fc1", "gate"),),
    "w3": (Target("fc1", "up"),),
    "w2": (Target("fc2"),),
}
# Whole parts of a model that may be frozen, or trained beside adapters.
EMBEDDING, HEAD, ENCODER = "embed_tokens", "lm_head", "encoder"
ENDS = (EMBEDDING, HEAD)
_ALIASES = {
    **dict.fromkeys(("wte", "word_embeddings", "embedding"), EMBEDDING),
    "output_layer": HEAD,
    **dict.fromkeys(("vision_tower", "vision_model", "visual"), ENCODER),  # as transformers' models call it
}
# Pattern of the modules beside the text model in transformers' models with images, which have one of these words.
BESIDE_TEXT = r".*(vision|visual|image|audio|projector|connector|qformer|aligner|abstractor).*"
# A pattern of modules of the text model alone, as `text_pattern` and axolotl's examples write it; of its names the last
# part is common.
_TEXT_PATTERN = re.compile(
    rf"({re.escape(f'(?!{BESIDE_TEXT})')}|[\w.]*language_model\b).*\((?P<names>\w+(\|\w+)*)\)(?P<end>\w*)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FineTuning:
    """Training of a part of a model: adapters on frozen weights where `rank` is given, else all but what is `frozen`.

    `targets` are the matrices with adapters, in both stacks of an encoder-decoder and none in an encoder of images;
    `saved_modules` are embedding or head, trained whole beside them, of which the frozen original stays (PEFT's
    `modules_to_save`).  Weights of the layers are held as `quantization` says.
    """

    rank: int | None = None
    alpha: int | float | None = None  # scale of the adapters times their rank; changes no cost; None: twice the rank
    targets: tuple[str, ...] = DEFAULT_TARGETS
    dora: bool = False  # magnitudes of columns trained apart from their directions (arXiv:2402.09353)
    dropout: float = 0.0  # of what enters the adapters
    adapts_experts: bool = True  # False: of the targets, routed experts have none (plain parameters, no linear modules)
    quantization: Quantization = "none"
    saved_modules: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.rank is not None:
            check_count("finetuning.rank", self.rank, at_most=MAX_RANK)
            if self.alpha is None:
                object.__setattr__(self, "alpha", 2 * self.rank)
        targets = tuple(_last_part(name) for name in self.targets)
        if unknown := [name for name in targets if name not in MODULES and name != ALL_LINEAR]:
            raise InputError(
                f"finetuning.targets: no module {unknown[0][:40]!r} is known: use {ALL_LINEAR} or names of linear "
                "layers such as q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj (patterns and embeddings "
                "are not priced)"
            )
        if not targets:
            raise InputError(f"finetuning.targets must name a module, or {ALL_LINEAR}")
        object.__setattr__(self, "targets", tuple(dict.fromkeys(targets)))
        for name, parts in (("saved_modules", ENDS), ("frozen", (*ENDS, ENCODER))):
            ends = tuple(_ALIASES.get(_last_part(end), _last_part(end)) for end in getattr(self, name))
            if unknown := [end for end in ends if end not in parts]:
                raise InputError(f"finetuning.{name} may contain {' and '.join(parts)}, got {unknown[0][:40]!r}")
            object.__setattr__(self, name, tuple(dict.fromkeys(ends)))
        if not 0.0 <= self.dropout < 1.0:
            raise InputError(f"finetuning.dropout must be in [0, 1), got {self.dropout:g}")
        self._check_together()

    def _check_together(self) -> None:
        if self.rank is not None and self.frozen:
            raise InputError(
                "finetuning.frozen needs full fine-tuning: with adapters everything else is frozen: leave it out"
            )
        if self.rank is None:
            for name in ("alpha", "dora", "dropout", "saved_modules"):
                if getattr(self, name):
                    raise InputError(f"finetuning.{name} needs adapters: give the LoRA rank too")
            if self.quantization != "none":
                raise InputError(f"weights in {self.quantization} cannot be trained: give the LoRA rank too")

    @property
    def has_adapters(self) -> bool:
        """Return whether the weights are frozen and adapters trained."""
        return self.rank is not None

    @property
    def targets_experts(self) -> bool:
        """Return whether routed experts of a model get adapters."""
        parts = (part.linear for name in self.targets for part in MODULES.get(name, ()))
        has_target = ALL_LINEAR in self.targets or any(part.startswith("expert_") for part in parts)
        return self.has_adapters and self.adapts_experts and has_target

    @property
    def weight_bytes(self) -> float | None:
        """Bytes per frozen weight of the layers; None: those of the precision of their products."""
        return QUANTIZED_BYTES.get(self.quantization)

    @property
    def saves_inputs(self) -> bool:
        """Return whether products of frozen weights keep their inputs; those of bitsandbytes always do.

        Source: bitsandbytes 0.41 autograd/_functions.py, MatMul4Bit and MatMul8bitLt (ctx.tensors).
        """
        return self.quantization in ("int8", "nf4", "nf4-dq")

    def trains(self, end: str) -> bool:
        """Return whether embedding or head is trained, or all of the encoder."""
        return end in self.saved_modules if self.has_adapters else end not in self.frozen

    def in_encoder(self, model: ModelSpec) -> FineTuning | None:
        """Return the fine-tuning of the encoder's layers, which has no targets if they are frozen; None: full."""
        if self.has_adapters and model.cross_attention:
            return self
        if self.trains(ENCODER):
            return None
        frozen = copy.copy(self)  # without the checks of what a user may ask for, which must have a target
        for name, value in (("rank", self.rank or 1), ("targets", ()), ("frozen", ())):
            object.__setattr__(frozen, name, value)
        return frozen

    def reaches_encoder(self, model: ModelSpec) -> bool:
        """Return whether the encoder has a backward pass."""
        own = self.in_encoder(model)
        return own is None or bool(own.targets)

    def __str__(self) -> str:
        if self.rank is None:
            return f"full fine-tuning, {' and '.join(self.frozen)} frozen" if self.frozen else "full fine-tuning"
        name = {True: "DoRA", False: "LoRA"}[self.dora]
        if self.quantization != "none":
            name = f"Q{name}"
        words = [f"{name} of rank {self.rank} on {'+'.join(self.targets)}"]
        if not self.adapts_experts:
            words[0] += " but the experts"
        if self.quantization != "none":
            words.append(f"weights in {self.quantization}")
        if self.saved_modules:
            words.append(f"{' and '.join(self.saved_modules)} trained")
        return ", ".join(words)


def text_pattern(targets: Iterable[str]) -> str:
    """Return a pattern, for PEFT's `target_modules`, of the modules of these names in the text model."""
    return rf"(?!{BESIDE_TEXT}).*\.({'|'.join(targets)})"


def names_in(pattern: str) -> tuple[str, ...]:
    """Return the names of modules in a pattern of modules of the text model; empty for any other text."""
    found = _TEXT_PATTERN.fullmatch(pattern)
    return tuple(f"{name}{found['end']}" for name in found["names"].split("|")) if found else ()


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]
