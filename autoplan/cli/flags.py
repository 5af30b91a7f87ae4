"""Flags that commands share, put into their signatures: those of a problem, a run, a plan."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer

from autoplan.cli import options
from autoplan.cli.complete import words
from autoplan.spec.axes import AXES, Axis, Kind, shown
from autoplan.spec.optimizers import OPTIMIZERS

Command = Callable[..., None]
TEXT = str | None


def _option(kind: Any, default: Any, flag: str, metavar: str | None, text: str, **more: Any) -> tuple[Any, Any]:
    return Annotated[kind, typer.Option(flag, metavar=metavar, help=text, **more)], default


# By the name of its parameter, a flag and its default.  What is typed is read by `inputs`, not by the command.
SHARED: dict[str, tuple[Any, Any]] = {
    "precision": _option(
        str,
        "bf16",
        "--precision",
        None,
        "Number format of the matrix products: bf16, fp16, fp8, mxfp8, nvfp4 or, with the built-in trainer, fp32.",
        autocompletion=words(("bf16", "fp16", "fp8", "mxfp8", "nvfp4", "fp32")),
    ),
    "attention": _option(
        str,
        "flash",
        "--attention",
        None,
        "Attention kernel: flash, flash1, flash2, flash-fp8, megatron-fused or unfused.",
        autocompletion=words(("flash", "flash1", "flash2", "flash-fp8", "megatron-fused", "unfused")),
    ),
    "framework": (options.FrameworkOption, "megatron-core"),
    "calibration": (options.CalibrationOption, None),
    "timings": _option(
        TEXT,
        None,
        "--timings",
        "aiconfigurator|db",
        "Measured times of kernels before fitted curves: of the installed wheel, or of the timing database.",
        autocompletion=words(("aiconfigurator", "db")),
    ),
    "url": (options.DbOption, None),
    "reserve_memory": _option(str, "0", "--reserve-memory", "SIZE", "Device memory to keep free, such as 4GiB."),
    "finetune": _option(
        TEXT,
        None,
        "--finetune",
        "FILE|METHOD",
        "Fine-tuning: PEFT's adapter_config.json, a YAML of axolotl, LLaMA-Factory or TRL, or a method such as "
        "lora:r=16,targets=all-linear, qlora:r=64 or full:freeze=embed_tokens.",
    ),
    "lora_rank": (
        Annotated[
            int | None, options.whole_number("--lora-rank", "N", "Train adapters of this rank on frozen weights.")
        ],
        None,
    ),
    "lora_targets": _option(
        TEXT,
        None,
        "--lora-targets",
        "NAME,NAME,...",
        "Modules with adapters, as PEFT calls them, or all-linear; q_proj,v_proj.",
    ),
    "quantize": _option(
        TEXT,
        None,
        "--quantize",
        "FORMAT",
        "Number format of the frozen weights: int8, nf4, nf4-dq or int4.",
        autocompletion=words(("int8", "nf4", "nf4-dq", "int4")),
    ),
    "optimizer": _option(
        str,
        "adam",
        "--optimizer",
        "NAME",
        "adam, adam8bit (bitsandbytes, torchao), adam4bit (torchao), adafactor, lion, sgd (with momentum) or muon.",
        autocompletion=words(OPTIMIZERS),
    ),
    "document_len": (
        Annotated[
            int | None,
            options.whole_number(
                "--document-len",
                "TOKENS",
                "Mean length of packed documents, to which attention keeps.",
            ),
        ],
        None,
    ),
    "objective": _option(
        list[str] | None,
        None,
        "--objective",
        "NAME",
        "step-time, tokens-per-device, cost-per-token, energy-per-token, time-to-tokens, devices, tokens or "
        "memory-headroom; of several (repeatable) all plans that no other beats in every one.",
    ),
    "nodes": _option(
        TEXT, None, "--nodes", "N,N|LOW:HIGH", "Numbers of nodes to try; of a range those that divide well."
    ),
    "max_nodes": (Annotated[int | None, options.whole_number("--max-nodes", "N", "Short for --nodes 1:N.")], None),
    "tokens": _option(TEXT, None, "--tokens", "N", "Tokens to train, such as 15T."),
    "deadline": _option(TEXT, None, "--deadline", "TIME", "Time in which the tokens are to be trained, such as 30d."),
    "gpu_hours": _option(TEXT, None, "--gpu-hours", "HOURS", "Device hours that may be spent."),
    "price": _option(TEXT, None, "--price", "PRICE", "Price of a device for an hour, in place of the cluster's."),
    "device_mtbf": _option(
        TEXT, None, "--device-mtbf", "TIME", "Mean time between failures of one device; as Llama 3: 2112d."
    ),
    "checkpoint_time": _option(
        TEXT, None, "--checkpoint-time", "TIME", "Time that a checkpoint stops the run for; 60s."
    ),
    "restart_time": _option(TEXT, None, "--restart-time", "TIME", "Time from a failure to the next step; 10m."),
    "pue": _option(TEXT, None, "--pue", "RATIO", "Power of the building over that of its nodes; 1."),
}
_names = tuple(SHARED)
PROBLEM = _names[: _names.index("objective")]
RUN = _names[_names.index("objective") :]


def shared_flags(names: Iterable[str], *, after: str) -> Callable[[Command], Command]:
    """Return what gives a command flags of `SHARED` in place of its keyword arguments, behind the parameter `after`."""
    added = []
    for name in names:
        annotation, default = SHARED[name]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        added.append(inspect.Parameter(name, kind, default=default, annotation=annotation))
    return _adding(added, after)


def plan_flags(*, after: str) -> Callable[[Command], Command]:
    """Return what gives a command the flags of a plan, one for each row of the table of axes that has one."""
    return _adding([_parameter(axis) for axis in AXES if axis.spelled], after)


def _adding(added: Iterable[inspect.Parameter], after: str) -> Callable[[Command], Command]:
    def decorate(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        parameters = [known for known in signature.parameters.values() if known.kind is not known.VAR_KEYWORD]
        place = [known.name for known in parameters].index(after) + 1
        parameters[place:place] = added
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
