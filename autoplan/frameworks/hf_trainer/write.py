"""Shared parts of the exports to programs with the Trainer's arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from autoplan.base.errors import refuse
from autoplan.frameworks.accelerate import options as accelerate
from autoplan.frameworks.accelerate.export import is_unmixed
from autoplan.frameworks.accelerate.rules import RULES
from autoplan.frameworks.common.header import comment, header
from autoplan.frameworks.common.job import File, Job, LaunchVariable, Target
from autoplan.frameworks.common.option_table import Option, Value, written
from autoplan.frameworks.common.rules import Rule, check_legal, check_limits
from autoplan.frameworks.common.shared_rules import only
from autoplan.frameworks.common.tuning import ADAPTERS_IN_FP32
from autoplan.frameworks.hf_trainer.options import KERNELS, PRECISIONS, SKIPS
from autoplan.readers.model import hub_name
from autoplan.spec.enums import Precision, Sharding
from autoplan.spec.finetuning import ALL_LINEAR, FineTuning
from autoplan.spec.lengths import Batching
from autoplan.spec.model import ModelSpec
from autoplan.spec.optimizers import OptimizerName
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.plan_file import PlanFile
from autoplan.spec.training import TrainingSpec

IN_16_BITS = only("precision", Precision.BF16, Precision.FP16, why="its fp8 is not priced, use bf16 or fp16")


def written_precision(plan: ParallelPlan) -> dict[str, Value]:
    """Return the mixed-precision switches, all off if nothing is cast."""
    return {name: kind == plan.precision and not is_unmixed(plan) for name, kind in PRECISIONS.items()}


NO_MESH = (
    Rule(
        holds=lambda s, b: b.tp * b.cp == 1,
        text=lambda s, p: f"tp {p.tp} and cp {p.cp}: no argument sets a mesh, set both to 1 or use axolotl",
    ),
    Rule(
        holds=lambda s, b: (b.dp_replicate == 1) | (b.sharding == Sharding.NONE.code),
        text=lambda s, p: f"dp_replicate {p.dp_replicate}: no argument sets a mesh, shard over all or use axolotl",
    ),
)
INT8_IS_WHOLE = Rule(
    source="transformers/quantizers/quantizer_bnb_8bit.py; LLaMA-Factory model/model_utils/quantization.py:199",
    holds=lambda s, b: (b.sharding == Sharding.NONE.code) | (not _is_in_int8(s.training)),
    text=lambda s, p: f"{p.sharding} of weights in int8: use nf4, or sharding none",
)


def _is_in_int8(training: TrainingSpec) -> bool:
    return training.finetuning is not None and training.finetuning.quantization == "int8"


# Limits of programs without a device mesh that leave adapters as PEFT creates them.
LIMITS = (
    IN_16_BITS,
    ADAPTERS_IN_FP32,
    *NO_MESH,
    only("ep", 1, why="in transformers every rank has all experts, set ep 1"),
    INT8_IS_WHOLE,
)


def start_variables(plan_file: PlanFile) -> tuple[LaunchVariable, ...]:
    """Return the variables that the user may set at the start: the weights and the number of steps."""
    note = f"folder or name on the hub of a model of the architecture of {plan_file.model.name}"
    return (
        LaunchVariable(name="BASE_MODEL", default=hub_name(plan_file.model), note=note),
        LaunchVariable(name="STEPS", default="100", note="steps", counts_steps=True),
    )


def yaml_job(
    title: str,
    program: str,
    words: str,
    file_name: str,
    plan_file: PlanFile,
    table: Mapping[str, Any],
    remarks: Iterable[str],
) -> Job:
    """Return the job of a program that reads a YAML file, which begins with remarks; `words` follow its name."""
    import yaml

    notes = [*header(plan_file, title), *map(comment, remarks)]
    text = yaml.safe_dump(table, sort_keys=False, width=10**6)
    return Job(
        framework=title,
        variables=start_variables(plan_file),
        program=program,
        trailing=(words,),
        files=(File(name=file_name, text="\n".join(notes) + "\n" + text),),
    )


def yaml_target(
    name: str,
    title: str,
    *,
    program: str,
    words: str,
    yours: str,
    table: Callable[[PlanFile], Mapping[str, Any]],
    limits: tuple[Rule, ...],
    batchings: Iterable[Batching],
    refusals: Callable[[TrainingSpec, ModelSpec], Iterable[tuple[bool, str]]],
    refused_tuning: Callable[[FineTuning], str],
    optimizers: Iterable[OptimizerName],
    takes_sound: bool = False,
) -> Target:
    """Return the target of a program that reads renamed Trainer arguments from the YAML file `name`.

    `yours` are its settings without cost; `refusals` are additional to those of every such program.
    """
    file_name, remark = f"{name.replace('-', '_')}.yaml", f"Yours to set: {yours}"

    def job(plan_file: PlanFile, version: str = "") -> Job:
        more = refusals(plan_file.training, plan_file.model)
        check_expressible(plan_file, title, limits, batchings, more, takes_sound=takes_sound)
        behind = f'"$HERE/{file_name}" {words}'
        return yaml_job(title, program, behind, file_name, plan_file, table(plan_file), [remark])

    return Target(
        name=name,
        title=title,
        rules=("accelerate",),
        job=job,
        limits=limits,
        refused_tuning=refused_tuning,
        optimizers=tuple(optimizers),
    )


def all_linear_of_text(training: TrainingSpec, model: ModelSpec) -> tuple[bool, str]:
    """Return the refusal of adapters on all linear layers in a program that would put them beside the text model."""
    tuning = adapters_of(training)
    return (
        model.stands_before_text and tuning is not None and ALL_LINEAR in tuning.targets,
        f"adapters on {ALL_LINEAR} of the text model alone: name them, such as q_proj,k_proj,v_proj,o_proj",
    )


def adapters_of(training: TrainingSpec) -> FineTuning | None:
    """Return the trained adapters, or None if all weights are trained."""
    return training.finetuning if training.has_adapters else None


def batching_of(plan_file: PlanFile) -> Batching:
    """Return how samples form sequences: as planned; if all sequences have one length, in any supported way.

    Packing needs FlashAttention (trl/trainer/sft_trainer.py:1211).
    """
    training = plan_file.training
    if training.document_len is not None:
        return "packed"
    if training.lengths is not None:
        return training.batching
    if plan_file.model.stands_before_text:
        return "padded"
    return "packed" if training.preference is None and plan_file.best.plan.attention in SKIPS else "padded"


def written_fsdp(plan_file: PlanFile, *elsewhere: Option) -> dict[str, Value]:
    """Return section `fsdp_config` of FSDP2 for a plan, without the options written `elsewhere`."""
    sections = written((option for option in accelerate.FSDP if option not in elsewhere), plan_file)
    return {key.removeprefix("fsdp_"): value for key, value in sections.items()}


def check_expressible(
    plan_file: PlanFile,
    title: str,
    limits: Iterable[Rule],
    batchings: Iterable[Batching],
    more: Iterable[tuple[bool, str]] = (),
    *,
    rules: tuple[Rule, ...] = RULES,
    takes_sound: bool = False,
) -> None:
    """Raise an error for the first part of a plan or training that the program `title` does not support.

    `limits` are its rules in addition to `rules` (by default those of Accelerate), `batchings` its ways of forming
    sequences, and `more` (whether it applies, reason) for the refusals of this program only.  Samples with images are
    padded (trl/trainer/sft_trainer.py:1016, axolotl docs/multimodal.qmd), those with sound where it `takes_sound`.
    """
    encoder = plan_file.model.any_encoder
    model, plan, training = plan_file.model, plan_file.best.plan, plan_file.training
    check_legal(rules, model, training, plan, f"{title} does not support the plan")
    check_limits(tuple(limits), model, training, plan, f"{title} cannot express")
    refusals = (
        (
            plan.attention not in KERNELS.values(),
            f"attention {plan.attention!r}: plan with {', '.join(KERNELS.values())}",
        ),
        (
            plan.attention not in SKIPS and batching_of(plan_file) in ("packed", "unpadded"),
            f"attention {plan.attention!r} of samples without padding: plan with {' or '.join(map(repr, SKIPS))}",
        ),
        (
            model.cross_attention,
            "cross attention: its program trains models of one stack, export for accelerate or deepspeed",
        ),
        (
            model.bidirectional,
            "bidirectional attention: its program trains causal models, export for accelerate or deepspeed",
        ),
        (model.encoder_apart is not None, "an encoder on ranks of its own: plan without --encoder-ranks"),
        (encoder is not None and encoder.sound and not takes_sound, "an encoder of sound: give only its text model"),
        (
            model.stands_before_text and batching_of(plan_file) != "padded",
            f"batching {batching_of(plan_file)} of samples with images: plan with padded",
        ),
        (training.fused_norm is True, "fused_norm = true: the norms are those of transformers, leave it out"),
        (
            training.lengths is not None and training.batching not in batchings,
            f"batching {training.batching}: plan with {', '.join(batchings)}",
        ),
        *more,
    )
    refuse(refusals, f"{title} cannot express ")
