"""Megatron-LM as FlagScale patches it: pipelines over process meshes of different devices and tensor-parallel degrees.

Options are those that FlagScale da4935e adds to Megatron-LM (flagscale/backends/Megatron-LM/megatron/training/
arguments.py.patch) and checks (flagscale/train/arguments.py).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

from autoplan.base.errors import InputError
from autoplan.frameworks.common.job import Job, LaunchVariable, OptionGroup
from autoplan.frameworks.common.rules import Rule
from autoplan.frameworks.common.shared_rules import only
from autoplan.spec.enums import RankOrder
from autoplan.spec.plan_file import PartPlanFile, PlanFile

VERSION = "flagscale"
_ARGUMENTS = "flagscale/train/arguments.py"
LIMITS: tuple[Rule, ...] = (
    only("vp", 1, why="FlagScale has no virtual stages over process meshes", source=f"{_ARGUMENTS}:152"),
    only("dynamic_cp", False, why="leave it out", source=_ARGUMENTS),
    only("rank_order", RankOrder.DP_BEFORE_PP, why="a process mesh holds whole stages", source=_ARGUMENTS),
)
# Ranks are compared by the place of their device type in the list, then by number (flagscale/train/hetero/
# parallel_context.py, RankMapper): the launch files number nodes in the order of the meshes, so one type does for all.
_DEVICE_TYPE = "device"


def on_flagscale(job: Job, plan_file: PlanFile) -> Job:
    """Return the job of Megatron-LM as one of FlagScale's train_gpt.py."""
    _, *variables = job.variables  # where Megatron-LM is
    groups = job.groups
    if isinstance(plan_file, PartPlanFile):
        layout = "--pipeline-model-parallel-layout"
        groups = tuple(
            replace(group, lines=tuple(line for line in group.lines if line[0] != layout)) for group in groups
        )
        groups += (OptionGroup(name="MESHES", note="A process mesh: tp, cp, ep, dp, pp.", lines=_meshes(plan_file)),)
    where = LaunchVariable(name="FLAGSCALE_DIR", default=".", note="checkout of github.com/FlagOpen/FlagScale")
    path = LaunchVariable(
        name="PYTHONPATH",
        default=None,
        note="$FLAGSCALE_DIR/third_party/Megatron-LM:$FLAGSCALE_DIR, patched by tools/patch/unpatch.py",
    )
    return replace(
        job,
        framework="FlagScale",
        variables=(where, path, *variables),
        program='"$FLAGSCALE_DIR/flagscale/train/train_gpt.py"',
        groups=groups,
    )


def _meshes(plan_file: PartPlanFile) -> tuple[list[str], ...]:
    plan, model = plan_file.best.plan, plan_file.model
    stages = plan_file.mixed_file.best.plan.kinds[0].stages  # of all replicas but for their part
    meshes = [(tp, len(list(alike))) for (_, tp), alike in groupby(stages, lambda stage: (stage.part, stage.tp))]
    if (model.tied_embeddings or model.num_mtp_layers) and meshes[0][0] != meshes[-1][0]:
        raise InputError(
            f"FlagScale needs one tp for the first and the last stage of {model.name}, which share the embedding, not "
            f"{meshes[0][0]} and {meshes[-1][0]} ({_ARGUMENTS}:131): fix tp"
        )
    degrees = [(tp, plan.cp, plan.ep, plan.dp, pp) for tp, pp in meshes]
    lines = [
        ["--enable-hetero"],
        ["--hetero-process-meshes", *(str(degree) for mesh in degrees for degree in mesh)],
        ["--hetero-pipeline-layer-split", *(str(stage.layers) for stage in stages)],
        ["--hetero-device-types", *(_DEVICE_TYPE for _ in meshes)],
        ["--hetero-current-device-type", _DEVICE_TYPE],
    ]
    if model.moe:
        etp = (str(min(plan.etp, tp)) for tp, _ in meshes)
        lines.append(["--expert-tensor-parallel-size-per-process-mesh", *etp])
    return tuple(lines)
