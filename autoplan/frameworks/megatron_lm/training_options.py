"""Options of the training: number formats, kernels, batches and data."""

from __future__ import annotations

from autoplan.base.errors import InputError
from autoplan.frameworks.common.option_table import Constant, Fields, Value
from autoplan.frameworks.common.options import Options
from autoplan.frameworks.megatron_lm.rules import KERNELS
from autoplan.frameworks.megatron_lm.table import OPTIMIZER, Line, Reading, Special, switches, valued
from autoplan.spec.enums import AttentionKernel, Fp8Scaling, Precision
from autoplan.spec.plan_file import PlanFile

_PRECISIONS: dict[Precision, dict[str, Value]] = {
    Precision.FP16: {"fp16": True},
    Precision.BF16: {"bf16": True},
    Precision.FP8: {"bf16": True, "fp8_format": "hybrid"},
    Precision.MXFP8: {"bf16": True, "fp8_format": "e4m3", "fp8_recipe": "mxfp8"},
    Precision.NVFP4: {"bf16": True, "fp4_format": "e2m1", "fp4_recipe": "nvfp4"},
}


_SCALINGS = (Fp8Scaling.TENSORWISE, Fp8Scaling.DELAYED, Fp8Scaling.BLOCKWISE)


def _write_precision(file: PlanFile) -> dict[str, Value]:
    plan = file.best.plan
    scales = {"fp8_recipe": str(plan.fp8_scaling)} if plan.precision == Precision.FP8 else {}
    return _PRECISIONS[plan.precision] | scales


def read_scaling(arguments: Options) -> Fp8Scaling:
    """Return the scaling granularity of 8-bit matrix products."""
    recipe = arguments.text("fp8_recipe", "delayed")
    return Fp8Scaling(recipe) if recipe in _SCALINGS else Fp8Scaling.TENSORWISE


def read_precision(arguments: Options) -> Precision:
    """Return the number format of the matrix products."""
    bf16, fp16 = arguments.flag("bf16"), arguments.flag("fp16")
    fp8, fp4 = arguments.text("fp8"), arguments.text("fp4")
    recipe = arguments.text("fp8_recipe", "delayed")
    arguments.understood.add("fp4_recipe")
    if fp4 and fp4 != "None":
        return Precision.NVFP4
    if fp8 and fp8 != "None":
        if recipe == "mxfp8":
            return Precision.MXFP8
        if recipe not in _SCALINGS:
            arguments.remark("fp8_recipe", "priced with one scale a tensor")
        return Precision.FP8
    if not bf16 and not fp16:
        raise InputError("neither bf16 nor fp16 is on: 32-bit training is not priced")
    return Precision.FP16 if fp16 else Precision.BF16


def _write_attention_backend(file: PlanFile) -> dict[str, Value]:
    word = next(word for word, kernel in KERNELS.items() if kernel == file.best.plan.attention)
    return {} if word == "auto" else {"attention_backend": word}


def _read_attention_backend(reading: Reading) -> Fields:
    """Read the backend, which Transformer Engine chooses by default."""
    arguments = reading.arguments
    backend = str(arguments.text("attention_backend", "auto")).rpartition(".")[2]
    takes_flash, layers = arguments.flag("use_flash_attn"), arguments.text("transformer_impl")
    # Megatron-Core's own attention is not fused (core/models/gpt/gpt_layer_specs.py, get_gpt_layer_local_spec).
    is_local = layers == "local" and backend == "auto" and not takes_flash
    if backend == "local" or is_local:
        return {"attention": AttentionKernel.UNFUSED}
    if layers == "local" and backend == "auto":
        return {"attention": AttentionKernel.FLASH2}
    if backend not in KERNELS:
        raise InputError(
            f"{arguments.name('attention_backend')} {backend[:30]!r} is not one of {', '.join(KERNELS)}, local"
        )
    return {"attention": KERNELS[backend]}


# fmt: off
PRECISION: tuple[Line, ...] = (
    (Special("bf16", _write_precision, is_switch=True,
             companions=(*switches("fp16"), *valued("fp8", "fp8_recipe", "fp4", "fp4_recipe"))),),
    (Special("attention_backend", _write_attention_backend, _read_attention_backend,
             companions=switches("use_flash_attn")),),
)
# fmt: on

# fmt: off
TRAINING: tuple[Line, ...] = (
    (
        Constant("lr", "3e-4"), Constant("min_lr", "3e-5"), Constant("lr_decay_style", "cosine"),
        Constant("clip_grad", "1.0"),
    ),
    (
        Constant("optimizer", lambda file: file.training.optimizer, names=OPTIMIZER),
        Constant("adam_beta1", "0.9"), Constant("adam_beta2", "0.95"),
    ),
    (Constant("weight_decay", "0.1"), Constant("init_method_std", "0.02")),
    (Constant("eval_iters", "0"), Constant("log_interval", "1"), Constant("log_throughput", True, is_switch=True)),
)
DATA: tuple[Line, ...] = (
    (Constant("mock_data", True, is_switch=True),),
    (Constant("tokenizer_type", "NullTokenizer"),),
)
# fmt: on
