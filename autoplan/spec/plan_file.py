"""Content of `plan.json`, of one kind of device and of a mixed cluster."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from autoplan.base.errors import InputError
from autoplan.spec.axes import AXIS, shown
from autoplan.spec.calibration import Calibration
from autoplan.spec.enums import NARROW_PRECISIONS, CudaGraphs, Dispatcher, Fp8Scaling, GradType, Precision
from autoplan.spec.estimate import StageCost
from autoplan.spec.explanation import CurrentPlan
from autoplan.spec.framework import Framework
from autoplan.spec.mixed_result import MixedCertificate, MixedCost
from autoplan.spec.model import ModelSpec
from autoplan.spec.pinned_timings import PinnedTimings
from autoplan.spec.ranks import HostRanks
from autoplan.spec.run_report import RunReport
from autoplan.spec.search_result import Allowance, Certificate, Confidence, MemoryKnob, RankedPlan
from autoplan.spec.timing import Provenance
from autoplan.spec.training import TrainingSpec
from autoplan.topology.cluster import ClusterSpec
from autoplan.topology.mixed_cluster import MixedCluster

# What older searches left out unless they were told otherwise, by what --allow and --forbid call it.
_ONCE_ALLOWED = {
    "zero2": "sharding=zero2",
    "zero3": "sharding=zero3",
    "ep_overlap": "ep_overlap",
    **{name: name for name in ("tp_overlap", "offload", "partial_recompute", "uneven_stages", "partial_sharding")},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceFlags:
    """Flags of the searched space, as typed: with the problem they make the same space again."""

    global_batch: str
    fix: tuple[str, ...] = ()
    at_most: tuple[str, ...] = ()
    forbid: tuple[str, ...] = ()
    allowed: tuple[str, ...] = ()  # options that change the numerics of training
    to: str = ""  # target of export that has to be able to express the plans

    @staticmethod
    def upgraded(table: dict[str, Any]) -> dict[str, Any]:
        """Return the table of a file; older ones say what was allowed, and forbid all else that is searched today."""
        if "allow" not in table:
            return table
        allowed = {str(choice).replace("-", "_") for choice in table["allow"]}
        forbidden = [choice for allowance, choice in _ONCE_ALLOWED.items() if allowance not in allowed]
        return {key: value for key, value in table.items() if key != "allow"} | {"forbid": forbidden}

    @property
    def barred(self) -> tuple[str, ...]:
        """Axes fixed or bounded, and values that are forbidden, such as "schedule=gpipe", as plans spell them."""
        axes = (text.partition("=")[0].strip().lower().replace("-", "_") for text in (*self.fix, *self.at_most))
        return (*axes, *map(_spelled, self.forbid))

    @property
    def narrows(self) -> bool:
        """Return whether plans were left out that are usually looked at."""
        return bool(self.fix or self.at_most or self.forbid or self.to)


def _spelled(text: str) -> str:
    """Return what --forbid was given as plans spell it: an axis, or AXIS=VALUE."""
    name, sign, value = text.strip().lower().partition("=")
    name = name.replace("-", "_")
    return f"{name}={shown(AXIS[name].parse(value, '--forbid'))}" if sign and name in AXIS else f"{name}{sign}{value}"


PLAN_FILE_VERSION = 9
# In 2 a framework's traits stood in no groups; in 3 the dispatcher was one of them, in 4 the types of gradients and of
# gathered weights, in 5 attention in 8 bits, the dropping of tokens and kernels of router and rotation, in 6
# dropout, in 7 what the matrices of 8-bit products have a scale for, in 8 what adapters in fp32 multiply in.
_READABLE_PLAN_FILES = (2, 3, 4, 5, 6, 7, 8, PLAN_FILE_VERSION)


# Of Megatron-Bridge, in files of before they were an option of the plan.
_TRAITS_OF_16_BIT_GRADIENTS = {"bytes_per_grad": 2.0, "bytes_per_update_copy": 4.0, "bytes_per_reduced_grad": 2.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFile:
    """The content of `plan.json`: what was asked, the plan, what it costs and why, and what else would do."""

    schema_version: int
    versions: dict[str, str]  # autoplan and the libraries that the numbers rest on
    command: str
    model: ModelSpec
    training: TrainingSpec
    cluster: ClusterSpec
    framework: Framework
    calibration: Calibration
    reserve_bytes: float
    best: RankedPlan
    stages: tuple[StageCost, ...]
    alternatives: tuple[RankedPlan, ...]  # of other degrees, best first
    certificate: Certificate | None  # None where one plan was priced, not searched
    allowances: tuple[Allowance, ...] = ()  # what options would bring that the search left out
    memory_knobs: tuple[MemoryKnob, ...] = ()  # most freed first, where they were asked for
    timings: str = ""  # whose measured times were taken before the reference curves
    pinned: PinnedTimings | None = (
        None  # these times, where there are some and the file is not of before they travelled
    )
    rests_on: dict[Provenance, float] = field(default_factory=dict)  # share of the best plan's step
    hosts: tuple[HostRanks, ...] = ()  # of the best plan, in the order of its ranks, where the cluster lists its nodes
    listed_step_s: float | None = None  # of the best plan on the nodes as listed, where it has a placement
    choice: Confidence | None = None  # where plans were searched
    run: RunReport | None = None  # where objectives, numbers of nodes or a run were given
    today: CurrentPlan | None = None  # where the search began with a launch file
    space: SpaceFlags | None = None  # where plans were searched

    @property
    def capacity_bytes(self) -> float:
        """Memory of a device that a plan may use."""
        return self.cluster.device.visible_memory_bytes - self.reserve_bytes

    @staticmethod
    def upgraded(table: dict[str, Any]) -> dict[str, Any]:
        """Return the table of a file; in older ones the framework has what plans choose today."""
        _check_version(table, "schema_version", _READABLE_PLAN_FILES)
        framework = table.get("framework")
        if table.get("schema_version") not in _READABLE_PLAN_FILES[:-1] or not isinstance(framework, dict):
            return table
        table = _with_past_scales_chosen(_with_adapters_chosen(_with_graphs_chosen(table)))
        if table["schema_version"] == 8:
            return table
        table = _with_scaling_chosen(table)
        if table["schema_version"] == 7:
            return table
        framework = table["framework"]
        table = _with_dropout_chosen(table)
        if table["schema_version"] == 6:
            return table
        table = _with_kernels_chosen(table)
        if table["schema_version"] == 5:
            return table
        experts = framework.get("experts", framework)
        if table["schema_version"] < 4 and isinstance(experts, dict) and experts.get("dispatches_once"):
            table = _with_choice(table, dispatcher=Dispatcher.HYBRIDEP)
        memory = framework.get("memory", framework)
        narrow = memory.get("narrow_weights") if isinstance(memory, dict) else None
        if isinstance(narrow, list) and isinstance(table.get("training"), dict):
            is_narrow = table["training"].get("precision") in narrow
            table = _with_choice(table, narrow_params=True) if is_narrow else table
        network = framework.get("network", framework)
        if framework.get("rules", "megatron-lm") != "megatron-lm" or not (
            isinstance(memory, dict) and isinstance(network, dict)
        ):
            return table
        traits = memory | network
        is_narrow = all(traits.get(name) == value for name, value in _TRAITS_OF_16_BIT_GRADIENTS.items())
        return _with_16_bit_gradients(table) if is_narrow else table

    def __post_init__(self) -> None:
        for name, checked in (
            ("best", self.best),
            *((f"alternatives[{at}]", ranked) for at, ranked in enumerate(self.alternatives)),
        ):
            if checked.plan.precision != self.training.precision:
                raise InputError(
                    f"{name}.plan.precision is {checked.plan.precision}, training.precision {self.training.precision}: "
                    "make them the same"
                )


def _check_version(table: dict[str, Any], key: str, readable: tuple[int, ...]) -> None:
    """Refuse a file of another version before its keys, which may be unlike those of today, are looked at."""
    if table.get(key, readable[-1]) not in readable:
        command = f": make the file again with {table['command']}" if table.get("command") else ""
        raise InputError(f"{key} is {table[key]}, this autoplan reads {readable[-1]}{command}")


def _with_past_scales_chosen(table: dict[str, Any]) -> dict[str, Any]:
    """Return a plan file in which plans choose scales of past steps, which frameworks had but for a trait."""
    framework, training = table["framework"], table.get("training")
    kernels = framework.get("kernels", framework)
    is_own = isinstance(kernels, dict) and kernels.get("scales_by_own_largest") is True
    is_fp8 = isinstance(training, dict) and training.get("precision") == Precision.FP8
    usual = framework.get("usual", [])
    if is_own or not is_fp8 or not isinstance(usual, list):
        return table
    choice = f"fp8_scaling={Fp8Scaling.DELAYED}"
    return _with_choice(table, fp8_scaling=Fp8Scaling.DELAYED) | {"framework": framework | {"usual": [*usual, choice]}}


def _with_graphs_chosen(table: dict[str, Any]) -> dict[str, Any]:
    """Return a plan file in which plans choose the one graph that those with overlap of expert traffic had."""
    framework, training = table["framework"], table.get("training")
    experts = framework.get("experts", framework)
    graphed = experts.get("static_overlap", ()) if isinstance(experts, dict) else ()
    is_graphed = isinstance(training, dict) and isinstance(graphed, list) and training.get("precision") in graphed
    return _with_choice(table, "ep_overlap", cuda_graphs=CudaGraphs.FULL_ITERATION) if is_graphed else table


def _with_adapters_chosen(table: dict[str, Any]) -> dict[str, Any]:
    """Return a plan file in which plans choose what adapters in fp32 multiply in, which a trait told."""
    framework = table["framework"]
    kernels = framework.get("kernels", framework)
    kind = kernels.get("wide_adapters", "none") if isinstance(kernels, dict) else "none"
    if kind not in ("inputs", "all"):
        return table
    cast = {"casts_for_adapters": True}
    group = {"kernels": kernels | cast} if "kernels" in framework else cast
    table = _with_choice(table, wide_adapters=True) if kind == "all" else table
    return table | {"framework": framework | group}


def _with_scaling_chosen(table: dict[str, Any]) -> dict[str, Any]:
    """Return a plan file in which plans choose the scales of 8-bit products, which the framework's share told."""
    framework, training = table["framework"], table.get("training")
    kernels, usual = framework.get("kernels", framework), framework.get("usual", [])
    share = kernels.get("narrow_gemm_share", 1.0) if isinstance(kernels, dict) else 1.0
    if not (isinstance(share, float | int) and share < 1 and isinstance(training, dict) and isinstance(usual, list)):
        return table
    if training.get("precision") == Precision.FP8:
        table = _with_choice(table, fp8_scaling=Fp8Scaling.ROWWISE)
    rowwise = {"rowwise_gemm_share": share}
    group = {"kernels": kernels | rowwise} if "kernels" in framework else rowwise
    return table | {"framework": framework | group | {"usual": [*usual, f"fp8_scaling={Fp8Scaling.ROWWISE}"]}}


def _with_dropout_chosen(table: dict[str, Any]) -> dict[str, Any]:
    """Return a plan file in which plans choose dropout, which was a trait of the framework, of some for GPT alone."""
    framework, model = table["framework"], table.get("model")
    kernels = framework.get("kernels", framework)
    if not (isinstance(kernels, dict) and isinstance(model, dict)):
        return table
    is_gpt = model.get("position_embedding") == "learned"
    drops = kernels.get("dropout") is True or (is_gpt and kernels.get("gpt_dropout") is True)
    table = _with_choice(table, dropout=True) if drops else table
    usual = framework.get("usual", [])
    return (
        table | {"framework": framework | {"usual": [*usual, "dropout=on"]}}
        if drops and isinstance(usual, list)
        else table
    )


def _with_kernels_chosen(table: dict[str, Any]) -> dict[str, Any]:
    """Return a plan file in which plans choose the kernels that were traits of the framework, or of the training."""
    framework, training, model = (table.get(name) for name in ("framework", "training", "model"))
    if not (isinstance(framework, dict) and isinstance(training, dict) and isinstance(model, dict)):
        return table
    groups = (framework.get(group, framework) for group in ("kernels", "experts"))
    kernels, experts = (group if isinstance(group, dict) else {} for group in groups)
    has_experts, narrow = model.get("moe") is not None, experts.get("narrow_attention")
    is_asked = training.get("attention") == "flash-fp8"
    is_usual = has_experts and isinstance(narrow, list) and training.get("precision") in narrow
    chosen = {
        "fp8_attention": (is_asked and training.get("precision") in NARROW_PRECISIONS) or is_usual,
        "token_dropping": has_experts and experts.get("drops_tokens") is True,
        "router_fusion": has_experts and experts.get("fused_router") is True,
        "rope_fusion": model.get("mla") is not None and kernels.get("fused_latent_rope") is True,
    }
    table = _with_choice(table, **{name: True for name, is_chosen in chosen.items() if is_chosen})
    if chosen["token_dropping"]:  # which no other dispatcher does
        table = _with_choice(table, dispatcher=Dispatcher.ALL_TO_ALL)
    return table | {"training": training | {"attention": "flash"}} if is_asked else table


def _with_16_bit_gradients(table: dict[str, Any]) -> dict[str, Any]:
    """Return a plan file in which plans choose the gradients that the framework's traits were those of."""
    chosen: dict[str, Any] = _with_choice(table, grad_dtype=GradType.BF16)
    framework = dict(chosen["framework"]) | {"usual": [f"grad_dtype={GradType.BF16}"]}
    for group in ("memory", "network"):
        own = framework[group] = dict(framework.get(group, {}))
        for trait in _TRAITS_OF_16_BIT_GRADIENTS:
            own.pop(trait, None)
            framework.pop(trait, None)
    return chosen | {"framework": framework}


def _with_choice(value: Any, where: str = "", /, **choice: str | bool) -> Any:
    """Return part of a plan file in which every plan, or every one with the option `where`, has a choice."""
    if isinstance(value, list):
        return [_with_choice(part, where, **choice) for part in value]
    if not isinstance(value, dict):
        return value
    changed = {key: _with_choice(part, where, **choice) for key, part in value.items()}
    if isinstance(plan := changed.get("plan"), dict) and (not where or plan.get(where)):
        changed["plan"] = plan | choice
    return changed


MIXED_FILE_VERSION = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedPlanFile:
    """The content of the plan file of a mixed cluster."""

    mixed_schema_version: int
    versions: dict[str, str]
    command: str
    model: ModelSpec
    training: TrainingSpec
    cluster: MixedCluster
    framework: Framework
    calibrations: tuple[Calibration, ...]
    reserve_bytes: float
    best: MixedCost
    alternatives: tuple[MixedCost, ...]
    certificate: MixedCertificate | None
    to: str = ""  # target of export that has to be able to express the plans

    @staticmethod
    def upgraded(table: dict[str, Any]) -> dict[str, Any]:
        """Return the table of a file, of which older versions are not read."""
        _check_version(table, "mixed_schema_version", (MIXED_FILE_VERSION,))
        return table


@dataclass(frozen=True, slots=True, kw_only=True)
class PartPlanFile(PlanFile):
    """A plan of the mixed cluster of `whole` as if all of its nodes were those of one part, as frameworks start it."""

    whole: MixedPlanFile
