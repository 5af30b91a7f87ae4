"""Names and types of the options that functions of the API share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, cast

from autoplan.api.training_run import RunOptions
from autoplan.spec.calibration import Calibration
from autoplan.spec.finetuning import FineTuning
from autoplan.spec.framework import Framework
from autoplan.spec.lengths import ImageCounts, Lengths
from autoplan.spec.training import TrainingSpec


class ProblemOptions(TypedDict, total=False):
    """Options of a problem other than model, cluster and sequence length; `make_problem` has the defaults."""

    precision: str  # of the matrix products: bf16, fp16, fp8, mxfp8, nvfp4 or, with the built-in trainer, fp32
    attention: str  # kernel: flash, flash1, flash2, flash3, cudnn, megatron-fused or unfused
    framework: str | Path | Framework  # preset or TOML file
    calibration: str | Path | Calibration | None  # a TOML file, or "db": fitted to the runs in the timing database
    timings: str | None  # measured times of kernels: "aiconfigurator" or "db"
    db: str | None  # the timing database: a path or a URL; None: AUTOPLAN_DB, else a file in the user's data folder
    reserve_memory: str | float  # of every device, to be kept free: bytes, or a text such as "4GiB"
    training: TrainingSpec | None  # for what precision and attention do not say
    # A text such as "lora:r=16,targets=all-linear" or "qlora:r=64"; adapter_config.json, or a YAML of axolotl,
    # LLaMA-Factory or TRL.
    finetune: str | Path | FineTuning | None
    # Of storage, tokenisation and loader, in all or per node: "5000samples/s", "400ktokens/s/node", "2GB/s/node"; the
    # slowest of several counts.
    input_rate: str | Sequence[str] | None
    sample_size: str | float | None  # bytes that are read for a sample: a number, or a text such as "150kB"
    lora_rank: int | None  # of adapters on frozen weights
    lora_targets: str | None  # modules with adapters, as PEFT calls them, joined by commas; or "all-linear"
    expert_imbalance: float | None  # tokens of the busiest rank of experts over their mean, 1 to 1000
    balancing_loss: float | None  # of experts, instead, as trainers log it: 1 where all get as many tokens
    capacity_factor: float | None  # experts take so many times the mean of tokens at most, and drop the others
    document_len: int | None  # mean tokens of the documents packed into a sequence
    # Of samples that differ: "1k:56,64k:1" (tokens:samples), a histogram file, or a JSONL whose samples are counted.
    lengths: str | Path | Lengths | None
    batching: str | None  # how samples become sequences: packed, joined, padded, full or unpadded
    loss: str | None  # over pairs of answers, instead of the next token: dpo or reward
    reference: str | None  # of dpo: copy, base (the model without its adapters) or none (worked out before)
    optimizer: str  # adam, adam8bit, adam8bit-bnb, adam4bit, adafactor, lion, sgd or muon
    # In a sample, of a model with an encoder of images; where samples differ: "1:1,8:1" (images:samples).
    images: int | str | ImageCounts | None
    encoder_ranks: str | None  # ranks of its own for the encoder of images: "tp=2,dp=4"; of a search also "auto"
    image_tokens: int | None  # of the text model, that one image becomes
    encoder_len: int | None  # tokens of the text, or positions of the sound, that a decoder attends to
    quantize: str | None  # the frozen weights: int8, nf4, nf4-dq or int4


class SearchOptions(ProblemOptions, RunOptions, total=False):
    """Options of a search other than those of its space: of the problem and of the planned run."""


def check_names(options: Mapping[str, Any], table: type, function: str) -> None:
    """Raise TypeError, as Python does, where `function` was given an option that its `table` does not name."""
    if unknown := options.keys() - table.__annotations__.keys():
        raise TypeError(f"{function}() has no option {', '.join(sorted(unknown))}")


def split_options(options: Mapping[str, Any], function: str) -> tuple[ProblemOptions, RunOptions | None]:
    """Return (the options of the problem, those of the run to plan for; None if none is given)."""
    check_names(options, SearchOptions, function)
    run = {name: options.get(name) for name in RunOptions.__annotations__}
    is_for_run = any(value not in (None, []) for value in run.values())
    problem_options = {name: options[name] for name in options if name in ProblemOptions.__annotations__}
    return cast("ProblemOptions", problem_options), cast("RunOptions", run) if is_for_run else None
