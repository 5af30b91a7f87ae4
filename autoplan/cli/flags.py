"""Shared flags of commands, added to their signatures: those of a problem, a run, a plan."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer

from autoplan.cli import options
from autoplan.cli.complete import words
from autoplan.spec.axes import AXES, AXIS, shown
from autoplan.spec.axis import Axis, Kind
from autoplan.spec.enums import AttentionKernel
from autoplan.spec.lengths import BATCHINGS
from autoplan.spec.optimizers import OPTIMIZERS
from autoplan.spec.preference import LOSSES, REFERENCES

Command = Callable[..., None]


def _shared(
    name: str,
    metavar: str | None,
    text: str,
    default: str | None = None,
    *,
    kind: Any = str,
    choices: Iterable[str] = (),
    unset: str | None = None,
) -> tuple[str, tuple[Any, Any]]:
    """Return a flag with its parameter's name; without a default it is optional, and `unset` describes its absence.

    `choices` provides completion.
    """
    completion: dict[str, Any] = {"autocompletion": words(tuple(choices))} if choices else {}
    option = typer.Option(
        f"--{name.replace('_', '-')}", metavar=metavar, help=text, show_default=unset or True, **completion
    )
    return name, (Annotated[kind if default is not None else kind | None, option], default)


def _number(name: str, text: str, metavar: str = "N") -> tuple[str, tuple[Any, Any]]:
    """Return an optional flag with a whole number."""
    return name, (Annotated[int | None, options.whole_number(f"--{name.replace('_', '-')}", metavar, text)], None)


_PRECISIONS = ("bf16", "fp16", "fp8", "mxfp8", "nvfp4", "fp32")
_OBJECTIVES = (
    "step-time, tokens-per-device, cost-per-token, energy-per-token, time-to-tokens, devices, tokens or "
    "memory-headroom. Repeat it for the Pareto front of several."
)
# Flag and default by parameter name, which is that of the API's option.  `inputs` parses the values, not the command.
SHARED: dict[str, tuple[Any, Any]] = dict(
    (
        _shared(
            "precision",
            "NAME",
            "Data type of the GEMMs: bf16, fp16, fp8, mxfp8, nvfp4 or, with the built-in trainer, fp32.",
            "bf16",
            choices=_PRECISIONS,
        ),
        _shared(
            "attention",
            "NAME",
            AXIS["attention"].help,
            "flash",
            choices=AttentionKernel,
        ),
        ("framework", (options.FrameworkOption, "megatron-core")),
        ("calibration", (options.CalibrationOption, None)),
        _shared(
            "timings",
            "aiconfigurator|db",
            "Use measured kernel times before fitted curves: from the installed wheel or the timing database.",
            choices=("aiconfigurator", "db"),
        ),
        ("url", (options.DbOption, None)),
        _shared("reserve_memory", "SIZE", "Device memory to keep free, such as 4GiB.", "0"),
        _shared(
            "finetune",
            "FILE|METHOD",
            "Fine-tuning: PEFT's adapter_config.json, a YAML of axolotl, LLaMA-Factory or TRL, or a method such as "
            "lora:r=16,targets=all-linear, qlora:r=64 or full:freeze=embed_tokens.",
        ),
        _number("lora_rank", "Train adapters of this rank on frozen weights."),
        _shared(
            "lora_targets",
            "NAME,NAME,...",
            "Modules with adapters, by their names in PEFT, or all-linear.",
            unset="q_proj,v_proj",
        ),
        _shared(
            "quantize",
            "FORMAT",
            "Data type of the frozen weights: int8, nf4, nf4-dq or int4.",
            choices=("int8", "nf4", "nf4-dq", "int4"),
        ),
        _shared(
            "optimizer",
            "NAME",
            "adam, adam8bit, adam4bit (torchao), adam8bit-bnb (bitsandbytes), adafactor, lion, sgd or muon.",
            "adam",
            choices=OPTIMIZERS,
        ),
        _shared(
            "expert_imbalance",
            "RATIO",
            "Tokens on the busiest expert rank over the mean: 1.05 to 1.3 if a loss balances the routing.",
            kind=float,
            unset="as --balancing-loss says",
        ),
        _shared(
            "balancing_loss",
            "LOSS",
            "The loss that balances experts, as trainers log it (1: balanced), instead of --expert-imbalance.",
            kind=float,
            unset="1, but 1.3 in fine-tuning and in torchtitan",
        ),
        _shared(
            "capacity_factor",
            "FACTOR",
            "Tokens that an expert takes at most, over the mean; it drops the others.",
            kind=float,
            unset="no token is dropped",
        ),
        _number("document_len", "Mean length of packed documents; attention stays within a document.", "TOKENS"),
        _shared(
            "images",
            "N|IMAGES:SAMPLES,...",
            "Images (or tiles of them) per sample, for a model with an image encoder; IMAGES:SAMPLES pairs where "
            "samples differ.",
            "1",
        ),
        _shared(
            "encoder_ranks",
            "tp=T,dp=D|auto",
            "Ranks of its own for an image encoder, in front of those of the text model (MegatronMIMO); auto lets a "
            "search try them.",
            unset="those of the text model",
        ),
        _number(
            "encoder_len",
            "Sequence length of the encoder in an encoder-decoder model; default: from its file, or --seq-len.",
            "TOKENS",
        ),
        _number("image_tokens", "Tokens of one image, as part of --seq-len; default: from the model.", "TOKENS"),
        _shared(
            "lengths",
            "FILE|TOKENS:SAMPLES,...",
            "Sample lengths: TOKENS:SAMPLES pairs, a histogram file (tokens,samples) or a JSONL file of samples; "
            "--seq-len is then the maximum length of a sequence.",
        ),
        _shared(
            "batching",
            "HOW",
            "How samples become sequences: packed (attention stays within a sample), joined (it does not), padded (to "
            "the longest of a micro-batch), full (padded to --seq-len) or unpadded.",
            "packed",
            choices=BATCHINGS,
        ),
        _shared(
            "input_rate",
            "RATE",
            "Rate at which storage, tokenisation or loader deliver, in all or per node: 5000samples/s, "
            "400ktokens/s/node, 2GB/s/node. Of several (repeatable), the slowest counts.",
            kind=list[str],
            unset="faster than any step",
        ),
        _shared("sample_size", "SIZE", "Bytes read for a sample, such as 150kB, for an --input-rate in bytes."),
        _shared(
            "loss",
            "NAME",
            "Loss on pairs of answers: dpo, or reward for a reward model.",
            choices=LOSSES,
            unset="next token",
        ),
        _shared(
            "reference",
            "KIND",
            "Reference model of dpo: copy (frozen), base (the model without its adapters) or none (precomputed).",
            choices=REFERENCES,
            unset="base with adapters, otherwise copy",
        ),
        _shared("objective", "NAME", _OBJECTIVES, kind=list[str]),
        _shared("nodes", "N,N|LOW:HIGH", "Node counts to try; from a range, those that divide well."),
        _number("max_nodes", "Short for --nodes 1:N."),
        _shared("tokens", "N", "Tokens to train, such as 15T."),
        _shared("deadline", "TIME", "Time limit for training the tokens, such as 30d."),
        _shared("gpu_hours", "HOURS", "Budget in device hours."),
        _shared("price", "PRICE", "Price of a device per hour, instead of the cluster's."),
        _shared("device_mtbf", "TIME", "Mean time between failures of one device.", unset="2112d, as of Llama 3"),
        _shared("checkpoint_time", "TIME", "Time that a checkpoint stops training.", unset="60s"),
        _shared("restart_time", "TIME", "Time from a failure to the next step.", unset="10m"),
        _shared("pue", "RATIO", "Power usage effectiveness: facility power over node power.", unset="1"),
    )
)
_names = tuple(SHARED)
PROBLEM = _names[: _names.index("objective")]
RUN = _names[_names.index("objective") :]


def shared_flags(names: Iterable[str], *, after: str) -> Callable[[Command], Command]:
    """Return a decorator that replaces a command's keyword arguments by flags of `SHARED`, after parameter `after`."""
    added = []
    for name in names:
        annotation, default = SHARED[name]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        added.append(inspect.Parameter(name, kind, default=default, annotation=annotation))
    return _adding(added, after)


def plan_flags(*, after: str) -> Callable[[Command], Command]:
    """Return a decorator that adds the flags of a plan, one for each axis with a flag."""
    return _adding([_parameter(axis) for axis in AXES if axis.spelled and axis.name not in SHARED], after)


def _adding(added: Iterable[inspect.Parameter], after: str) -> Callable[[Command], Command]:
    def decorate(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        parameters = [
            parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD
        ]
        at = [parameter.name for parameter in parameters].index(after) + 1
        parameters[at:at] = added
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return command

    return decorate


def _parameter(axis: Axis) -> inspect.Parameter:
    default = axis.default if axis.flag_default is ... else axis.flag_default
    kind: Any = str
    option = typer.Option(axis.spelled, metavar=axis.metavar, help=axis.help)
    if axis.kind is Kind.COUNT:
        kind, option = int, options.whole_number(axis.spelled, axis.metavar or "N", axis.help)
    elif axis.kind is Kind.FLAG:
        kind = bool
    elif default is not None:
        default = shown(default)
    type_: Any = kind if default is not None else kind | None
    annotation = Annotated[type_, option]
    return inspect.Parameter(axis.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation)
