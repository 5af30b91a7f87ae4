"""Export of a plan to launch files of torchtitan.

Version 0.3 and main are configured by a function in a Python module, version 0.2 by a TOML file.  Places are below
torchtitan/ in the wheels of 0.3.0 and 0.2.2 and in b5bcd76 (main, 2026-08).
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from autoplan.base.errors import InputError, refuse
from autoplan.base.files import decode, read_table, shipped
from autoplan.frameworks.common.header import comment, header
from autoplan.frameworks.common.job import EnvironmentVariable, File, Job, LaunchVariable, OptionGroup, Target
from autoplan.frameworks.common.option_table import written
from autoplan.frameworks.common.rules import check_legal, check_limits
from autoplan.frameworks.torchtitan.families import builder_of, family_of, write_sizes
from autoplan.frameworks.torchtitan.limits import LIMITS, OLD_LIMITS
from autoplan.frameworks.torchtitan.options import (
    CONVERTERS,
    OFFLOAD,
    OLD_CONVERTERS,
    POLICIES,
    REDUCTION,
    SCALING,
    STATES,
    write_batch,
    write_parallelism,
)
from autoplan.frameworks.torchtitan.rules import RULES
from autoplan.frameworks.torchtitan.tuning import CONVERTER, converter_of, refused
from autoplan.spec.enums import AttentionKernel, ChunkedLoss
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.plan_file import PlanFile
from autoplan.spec.training import TrainingSpec

MODULE, TOML = "plan_cfg.py", "torchtitan.toml"
_OLD = "0.2"


@dataclass(frozen=True, slots=True)
class Code:
    """Python code that is written to a file verbatim, unlike quoted plain values."""

    text: str


def job(plan_file: PlanFile, version: str) -> Job:
    """Return the job that starts the plan with an installed torchtitan of `version`."""
    _check(plan_file, version)
    if version == "0.2":
        program, trailing = "-m torchtitan.train", (f'--job.config_file "$HERE/{TOML}"',)
        file = File(name=TOML, text=_toml(plan_file))
        data: tuple[list[str], ...] = (
            ["--training.dataset", "c4_test"],
            ["--model.hf_assets_path", "./tests/assets/tokenizer"],
        )
    else:
        # Started by its path, the module can also be imported by name, independent of PYTHONPATH.
        program, trailing = f'"$HERE/{MODULE}"', ("--module plan_cfg --config plan",)
        file = File(name=MODULE, text=module_text(plan_file, version))
        data = (["--hf_assets_path", "./tests/assets/tokenizer"],)
        if version == "0.3":
            data = (["--dataloader.dataset", "c4_test"], *data)
    return Job(
        framework=f"torchtitan {version}",
        environment=(
            EnvironmentVariable(
                name="PYTORCH_ALLOC_CONF", value="expandable_segments:True", note="as torchtitan's own run_train.sh"
            ),
        ),
        variables=(LaunchVariable(name="STEPS", default="100", note="steps", counts_steps=True),),
        program=program,
        replaceable=OptionGroup(
            name="DATA",
            note="Data of its tests, in a checkout; DATA_ARGS='OPTION VALUE ...' in the environment replaces these.",
            lines=data,
        ),
        trailing=(*trailing, '--training.steps "$STEPS"', "--metrics.log_freq 1"),
        files=(file,),
    )


def _check(plan_file: PlanFile, version: str) -> None:
    model, plan, training = plan_file.model, plan_file.best.plan, plan_file.training
    check_legal(RULES, model, training, plan, "torchtitan does not support the plan")
    check_limits(TARGET.at(version).limits, model, training, plan, "torchtitan cannot express")
    generation = plan_file.cluster.device.generation
    refusals = (
        (
            plan.precision in ("mxfp8", "nvfp4") and generation in ("volta", "turing", "ampere", "ada", "hopper"),
            f"precision {plan.precision!r} on {plan_file.cluster.device.name}: plan with another one",
        ),
        (
            plan.precision == "fp8" and generation in ("volta", "turing", "ampere"),
            f"precision 'fp8' on {plan_file.cluster.device.name}: plan with another one",
        ),
    )
    refuse(refusals, "torchtitan cannot express ")


def _header(plan_file: PlanFile, version: str) -> list[str]:
    """Return the comment above a file, noting a kernel that the version does not run as priced."""
    priced, runs = str(plan_file.framework.kernels.flash_kernel), "sdpa" if version == "0.2" else "flex"
    lines = header(plan_file, f"torchtitan {version}")
    if plan_file.best.plan.attention == AttentionKernel.FLASH and {priced, runs} == {"sdpa", "flex"}:
        lines.append(comment(f"Priced with {priced} attention, where version {version} runs {runs}"))
    return lines


# -- version 0.3 and main: a module of a config registry --------------------------------------------------------------


def module_text(plan_file: PlanFile, version: str) -> str:
    """Return a module whose function `plan` returns the Trainer.Config; every plan value in it is a literal."""
    model, plan, training = plan_file.model, plan_file.best.plan, plan_file.training
    family = family_of(model)
    converters = _converters(plan, model, compiled=_compiles(training))
    if training.finetuning is not None and training.has_adapters:
        converters.append((CONVERTER, _call(f"{CONVERTER}.Config", converter_of(training.finetuning), 4)))
    inside = {"flavor": model.name, "model": Code("model()")}
    body = [
        f'    model_spec = replace({family}.model_registry("debugmodel"), {_arguments(inside)})',
        *(f"    model_spec.model = {converter}.build().convert(model_spec.model)" for _, converter in converters),
        f"    return {_call('Trainer.Config', _trainer(plan_file, version), 4)}",
    ]
    return "\n".join(
        [
            *_header(plan_file, version),
            "# The model, as far as it costs time and memory.",
            "",
            "from dataclasses import replace",
            "",
            *_imports(family, plan_file, [name for name, _ in converters], version),
            "",
            "",
            "def model():",
            *_model_lines(family, plan_file, version),
            "",
            "",
            "def plan():",
            *body,
            "",
            "",
            'if __name__ == "__main__":',
            "    from torchtitan.train import main",
            "",
            "    main()",
            "",
        ]
    )


def _imports(family: str, plan_file: PlanFile, converters: list[str], version: str) -> list[str]:
    is_main = version == "main"  # its data loaders need further arguments
    rope = "CosSinRoPE" if family in ("qwen3", "gpt_oss") else "ComplexRoPE"
    recompute = plan_file.best.plan.recompute
    modules: dict[str, list[str]] = {
        "torchtitan.components.lora": [CONVERTER] if CONVERTER in converters else [],
        "torchtitan.components.loss": [
            *(["ChunkedLossWrapper"] if plan_file.best.plan.chunked_loss != ChunkedLoss.NONE else []),
            *([] if plan_file.model.num_mtp_layers else ["CrossEntropyLoss"]),
        ],
        "torchtitan.components.optimizer": ["default_adamw"],
        "torchtitan.components.quantization": sorted(set(converters) - {CONVERTER}),
        "torchtitan.config": ["CompileConfig", "ParallelismConfig", "TrainingConfig"],
        "torchtitan.distributed.activation_checkpoint": [POLICIES[recompute]] if recompute in POLICIES else [],
        "torchtitan.hf_datasets.text_datasets": [] if is_main else ["HuggingFaceTextDataLoader"],
        "torchtitan.models": [family],
        f"torchtitan.models.{family}.config_registry": [f"{family}_debugmodel"] if is_main else [],
        "torchtitan.models.common": [rope, "Embedding", "Linear", "RMSNorm"],
        "torchtitan.trainer": ["Trainer"],
    }
    return [f"from {module} import {', '.join(names)}" for module, names in modules.items() if names]


def _trainer(plan_file: PlanFile, version: str) -> dict[str, Any]:
    model, plan, training = plan_file.model, plan_file.best.plan, plan_file.training
    policy, batch = POLICIES.get(plan.recompute), write_batch(plan, training.seq_len, version)
    loss = "deepseek_v3.MTPLoss" if model.num_mtp_layers else "CrossEntropyLoss"
    loss_config = f"{loss}.Config(global_vocab_size={model.vocab_size})"
    is_chunked = plan.chunked_loss != ChunkedLoss.NONE
    compiling = {"enable": _compiles(training)} | ({"enable_async_tensor_parallel": True} if plan.tp_overlap else {})
    return {
        "model_spec": Code("model_spec"),
        "loss": Code(f"ChunkedLossWrapper.Config(loss_fn={loss_config})" if is_chunked else loss_config),
        "optimizer": Code("default_adamw(lr=3e-4)"),
        "dataloader": Code(
            f"{family_of(model)}_debugmodel().dataloader" if version == "main" else "HuggingFaceTextDataLoader.Config()"
        ),
        "training": Code(_call("TrainingConfig", batch | written((STATES, REDUCTION, OFFLOAD), plan_file), 8)),
        "parallelism": Code(_call("ParallelismConfig", write_parallelism(plan_file, version), 8)),
        "activation_checkpoint": Code(f"{policy}.Config()") if policy else None,
        "compile": Code(_call("CompileConfig", compiling, 8)),
    }


def _compiles(training: TrainingSpec) -> bool:
    """Return whether the model is compiled: fused norms come from torch.compile."""
    return training.fused_norm is not False


def _converters(plan: ParallelPlan, model: ModelSpec, *, compiled: bool) -> list[tuple[str, str]]:
    """Return (class, its configuration) of the model converters for a precision; head and router stay in 16 bits."""
    prefix = CONVERTERS.get(plan.precision)
    if prefix is None:
        return []
    inside = {"fqns": ["attention", "feed_forward", "shared_experts"]}
    outside = {"filter_fqns": ["lm_head", "router.gate"]}
    linear: dict[str, Any] = {**(outside if prefix == "Float8" else inside), "model_compile_enabled": compiled}
    configured = {f"{prefix}LinearConverter": linear}
    if model.moe:
        configured[f"{prefix}GroupedExpertsConverter"] = {"model_compile_enabled": compiled}
    return [(name, _call(f"{name}.Config", arguments, 4)) for name, arguments in configured.items()]


# -- the models that it builds ----------------------------------------------------------------------------------------


def _model_lines(family: str, plan_file: PlanFile, version: str) -> list[str]:
    """Return the body of a function that returns the model's config."""
    model = plan_file.model
    dim = model.hidden_size
    norm = f"qwen3._qwen3_norm({dim})" if family == "qwen3" else _norm(family, dim)
    skip = "SKIP_" if model.tied_embeddings else ""
    head = "qwen3._LINEAR_INIT" if family == "qwen3" else f"{family}._output_linear_init({dim})"
    class_name = {"llama3": "Llama3", "qwen3": "Qwen3", "deepseek_v3": "DeepSeekV3", "gpt_oss": "GptOss"}[family]
    embedding = {
        "num_embeddings": model.vocab_size,
        "embedding_dim": dim,
        "param_init": Code(f"{family}._EMBEDDING_{skip}INIT"),
    }
    output = {"in_features": dim, "out_features": model.vocab_size, "param_init": Code(head)}
    values: dict[str, Any] = {
        "dim": dim,
        "vocab_size": model.vocab_size,
        "enable_weight_tying": model.tied_embeddings,
        "tok_embeddings": Code(_call("Embedding.Config", embedding, 8)),
        "norm": Code(norm),
        "lm_head": Code(_call("Linear.Config", output, 8)),
        "layers": Code("layers"),
    }
    if model.num_mtp_layers:
        count = model.num_mtp_layers
        values["mtp_layers"] = Code(f"deepseek_v3._build_mtp_layers(layers[-1], dim={dim}, num_mtp_layers={count})")
    builder, inside = _layers(family, plan_file, version)
    return [
        f"    layers = {_call(builder, inside, 4)}",
        f"    return {_call(f'{family}.{class_name}Model.Config', values, 4)}",
    ]


def _norm(family: str, dim: int) -> str:
    return _call("RMSNorm.Config", {"normalized_shape": dim, "param_init": Code(f"{family}._NORM_INIT")}, 8)


def _layers(family: str, plan_file: PlanFile, version: str) -> tuple[str, dict[str, Any]]:
    """Return the builder of a family's layers and its arguments."""
    model, mla = plan_file.model, plan_file.model.mla
    width = mla.qk_rope_head_dim if mla else model.qk_head_dim
    length = "max_context_length" if version == "main" else "max_seq_len"
    rope = "CosSinRoPE" if family in ("qwen3", "gpt_oss") else "ComplexRoPE"
    theta, seq_len = float(model.rope_base), plan_file.training.seq_len
    values: dict[str, Any] = {
        "n_layers": model.num_layers,
        "dim": model.hidden_size,
        "rope": Code(f"{rope}.Config(dim={width}, {length}={seq_len}, theta={theta!r})"),
        "attn_backend": "varlen" if plan_file.best.plan.attention == AttentionKernel.FLASH2 else "flex",
    }
    if model.moe:
        values["moe_comm_backend"] = "standard"
    if plan_file.training.has_adapters:
        values["fuse_qkv"] = False  # with adapters for queries, keys and values, as priced
    builder = builder_of(family, model)
    return f"{family}.{builder}", values | write_sizes(builder, plan_file)


# -- version 0.2: TOML ------------------------------------------------------------------------------------------------


def _toml(plan_file: PlanFile) -> str:
    model, plan, training = plan_file.model, plan_file.best.plan, plan_file.training
    family, flavor = _flavor(model)
    tables: dict[str, Mapping[str, Any]] = {
        "model": {"name": family, "flavor": flavor},
        "optimizer": {"name": "AdamW", "lr": 3e-4},
        "training": write_batch(plan, training.seq_len, "0.2") | written((STATES, REDUCTION, OFFLOAD), plan_file),
        "parallelism": write_parallelism(plan_file, "0.2"),
        "activation_checkpoint": {"mode": plan.recompute},
        "compile": {"enable": _compiles(training), "components": ["model", "loss"]},
    }
    if plan.recompute == "selective":
        tables["activation_checkpoint"] = {"mode": "selective", "selective_ac_option": "op"}
    if plan.precision != "bf16":
        kind = OLD_CONVERTERS[plan.precision]
        outside = {"filter_fqns": ["output", "router.gate"]}
        recipe = written((SCALING,), plan_file) if kind == "float8" else {"recipe_name": "mxfp8_cublas"}
        grouped = [f"quantize.grouped_mm.{kind}"] if model.moe else []
        tables["model"] = {**tables["model"], "converters": [f"quantize.linear.{kind}", *grouped]}
        tables[f"quantize.linear.{kind}"] = recipe | outside
        if model.moe:
            tables[f"quantize.grouped_mm.{kind}"] = {"fqns": ["experts"]}
    lines = _header(plan_file, "0.2")
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f"{key} = {_toml_value(value)}" for key, value in table.items())]
    text = "\n".join(lines) + "\n"
    assert tomllib.loads(text)
    return text


def _toml_value(value: Any) -> str:
    """Return a value as TOML: numbers, flags, plain words and lists of them are the same in JSON."""
    if isinstance(value, list) and value and isinstance(value[0], list):
        return "[\n" + "".join(f"    {json.dumps(item)},\n" for item in value) + "]"
    return json.dumps(value)


def _flavor(model: ModelSpec) -> tuple[str, str]:
    """Return the name and flavor in version 0.2 of a model with these sizes."""
    for family, flavors in read_table(shipped()["torchtitan"])["flavors"].items():
        for flavor, name in flavors.items():
            table = read_table(shipped("models")[name])
            preset = decode(ModelSpec, {"name": name, **table}, name)
            renamed = replace(model, name=name, aliases=preset.aliases, sources=preset.sources)
            if renamed == replace(preset, num_mtp_layers=0):
                return str(family), str(flavor)
    raise InputError(
        f"torchtitan 0.2 knows models by name, and none of the sizes of {model.name!r} (without MTP): export for 0.3"
    )


# -- values as Python -------------------------------------------------------------------------------------------------


def _literal(value: Any) -> str:
    return value.text if isinstance(value, Code) else repr(value).replace("'", '"') if _is_names(value) else repr(value)


def _is_names(value: Any) -> bool:
    """Return whether a value contains only words without quotes, which may be double-quoted."""
    if isinstance(value, list):
        return all(_is_names(item) for item in value)
    return isinstance(value, str) and '"' not in value and "'" not in value and "\\" not in value


def _arguments(arguments: dict[str, Any]) -> str:
    return ", ".join(f"{name}={_literal(value)}" for name, value in arguments.items())


def _call(function: str, arguments: dict[str, Any], indent: int) -> str:
    """Return a call with keyword arguments, on one line if it fits."""
    line = f"{function}({_arguments(arguments)})"
    if len(line) + indent <= 100 and "\n" not in line:
        return line
    inside = " " * (indent + 4)
    lines = []
    for name, value in arguments.items():
        if isinstance(value, list) and len(value) > 1:
            parts = "".join(f"{inside}    {_literal(part)},\n" for part in value)
            lines.append(f"{inside}{name}=[\n{parts}{inside}],\n")
        else:
            lines.append(f"{inside}{name}={_literal(value)},\n")
    return f"{function}(\n{''.join(lines)}{' ' * indent})"


TARGET = Target(
    name="torchtitan",
    title="torchtitan",
    rules=("torchtitan",),
    job=job,
    versions=("0.3", _OLD, "main"),
    limits=LIMITS,
    other_limits={_OLD: OLD_LIMITS},
    refused_tuning=refused,
)
