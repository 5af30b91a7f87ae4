"""Training settings that plans do not change: sequence length, precision and optimizer."""

from __future__ import annotations

from dataclasses import dataclass

from autoplan.base.errors import InputError
from autoplan.base.units import check_count
from autoplan.spec.enums import Precision, enum_value
from autoplan.spec.finetuning import FineTuning
from autoplan.spec.input_rate import InputRate
from autoplan.spec.lengths import BATCHINGS, Batching, ImageCounts, Lengths
from autoplan.spec.optimizers import OptimizerName
from autoplan.spec.preference import Preference

# Loss of experts that their router alone chooses, about the median of published logs: of trained routers in fine-tuning
# 1.03 (Qwen3.5-35B, Dao-AILab/flash-attention pull request 2647), 1.27 (Qwen3-Omni-30B, modelscope/ms-swift issue
# 7832), 1.43 (Qwen3-30B, songCNMS/Nemotron pull request 362) and 1.87 (mlc-ai/pith-train issue 79); of a new one after
# 100 steps 1.33 (Qwen3-30B, Megatron-Bridge 34ddd53, docs/training/multi-token-prediction.md).
OWN_ROUTING_LOSS = 1.3


def usual_balancing_loss(*, is_tuned: bool, routes_freely: bool) -> float:
    """Return the loss of experts where nothing says it: balanced, unless nothing but a router chooses them.

    Published pretraining that says nothing is predicted best as balanced (Megatron-Bridge's 53 such runs within 3 %
    in the median, with 1.3 within 8 %; DeepSeek-V3's own within 5 and 19 %), but for frameworks that route freely.
    """
    return OWN_ROUTING_LOSS if is_tuned or routes_freely else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSpec:
    """The training run around the plan.  `precision` is that of the matrix products; lengths are in tokens."""

    seq_len: int
    precision: Precision = Precision.BF16
    fused_norm: bool | None = None  # None: what the framework does
    optimizer: OptimizerName = "adam"
    # Tokens of the busiest rank of experts over their mean, whose memory and time a step waits for: 1.05-1.3 where a
    # loss balances the routing, 1.5 and more without (`modelling` B5).
    expert_imbalance: float = 1.0
    # The loss that balances experts as trainers log it, without its coefficient: 1 where all get as many tokens, else 1
    # plus the squared coefficient of variation of their tokens.  It decides the imbalance of any number of ranks.
    balancing_loss: float = 1.0
    # Of plans that drop tokens: the most tokens of an expert over its mean, and whether it is padded to as many.
    capacity_factor: float = 1.0
    pads_experts: bool = True
    finetuning: FineTuning | None = None  # None: all weights are trained
    # Mean tokens of the documents packed into a sequence, over tokens, beyond which attention does not look; None: it
    # looks at the whole sequence.
    document_len: int | None = None
    lengths: Lengths | None = None  # of samples; None: every sequence has `seq_len` tokens
    batching: Batching = "packed"  # how samples become sequences, where `lengths` are known
    images: ImageCounts | None = None  # of samples; None: each has those of the model's encoder
    preference: Preference | None = None  # None: the next token is learnt
    input_rates: tuple[InputRate, ...] = ()  # of storage, tokenisation and loader; none: faster than any step

    def __post_init__(self) -> None:
        object.__setattr__(self, "precision", enum_value("precision", Precision, self.precision))
        check_count("seq_len", self.seq_len, at_most=10**8)
        if self.document_len is not None:
            check_count("document_len", self.document_len, at_most=self.seq_len)
        if self.batching not in BATCHINGS:
            raise InputError(f"batching must be one of {', '.join(BATCHINGS)}, got {str(self.batching)[:20]!r}")
        if self.lengths is not None:
            self._check_lengths()
        if self.preference is not None:
            if self.document_len is not None:
                raise InputError("pairs of sequences are not packed: leave document_len out")
            object.__setattr__(self, "preference", self.preference.with_reference(has_adapters=self.has_adapters))
        if not 1.0 <= self.expert_imbalance <= 1000.0:
            raise InputError(f"expert_imbalance must be between 1 (balanced) and 1000, got {self.expert_imbalance:g}")
        if not 1.0 <= self.balancing_loss <= 1000.0:
            raise InputError(f"balancing_loss must be between 1 (balanced) and 1000, got {self.balancing_loss:g}")
        if not 0.01 <= self.capacity_factor <= 1000.0:
            raise InputError(f"capacity_factor must be between 0.01 and 1000, got {self.capacity_factor:g}")

    def _check_lengths(self) -> None:
        if self.document_len is not None:
            raise InputError("document_len is the mean of lengths: leave one of them out")
        if self.batching in ("packed", "joined") and self.preference is not None:
            raise InputError(f"pairs of sequences are not {self.batching}: use batching padded or unpadded")

    @property
    def skips_documents(self) -> bool:
        """Return whether attention looks at single documents of a sequence."""
        return self.document_len is not None or (self.lengths is not None and self.batching == "packed")

    @property
    def separates_samples(self) -> bool:
        """Return whether lengths are known of samples that follow one another without padding, each attended alone."""
        return self.lengths is not None and self.batching in ("packed", "unpadded") and self.preference is None

    @property
    def has_adapters(self) -> bool:
        """Return whether adapters are trained, beside frozen weights."""
        return self.finetuning is not None and self.finetuning.has_adapters

    @property
    def sequences_per_sample(self) -> int:
        """Sequences of one sample of a batch: the two answers of a preference."""
        return 1 if self.preference is None else 2

    @property
    def runs_reference(self) -> bool:
        """Return whether every micro-batch goes forward through a reference too."""
        return self.preference is not None and self.preference.reference in ("copy", "base")

    @property
    def holds_reference(self) -> bool:
        """Return whether the weights of a reference lie beside those of the model."""
        return self.preference is not None and self.preference.reference == "copy"

    @property
    def has_scores(self) -> bool:
        """Return whether the head gives one score instead of logits."""
        return self.preference is not None and self.preference.loss == "reward"

    @property
    def element_bytes(self) -> float:
        """Bytes per element of activations, gradients and weights as products read them: 2 where some are quantised."""
        return 4.0 if self.precision == "fp32" else 2.0
