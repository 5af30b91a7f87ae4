"""Problems and search spaces from user input: model, cluster, framework and training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple, Unpack

from autoplan.api.calibrations import calibration_of, check_fitted
from autoplan.api.encoder_options import beside_encoder, with_encoder_options
from autoplan.api.options import ProblemOptions
from autoplan.api.timings import with_timings
from autoplan.base.errors import InputError, UnpricedError
from autoplan.base.files import decode
from autoplan.base.units import check_positive
from autoplan.base.values import parse_batches, parse_memory, parse_size
from autoplan.cost.kernels.block_shapes import block_shapes
from autoplan.frameworks import presets
from autoplan.frameworks.registry import (
    FRAMEWORKS,
    book_of,
    facts_of_version,
    find_target,
    rules_for,
    target_called,
    usual_target,
)
from autoplan.readers.calibration import built_in_calibration, load_calibration
from autoplan.readers.finetuning import combined, optimizer_named, optimizer_of, preference_of
from autoplan.readers.lengths import load_images, load_lengths
from autoplan.readers.mixed_cluster import load_parts
from autoplan.readers.model import load_model as read_model
from autoplan.search.flags import check_words, with_flags
from autoplan.search.limits import batch_grid, default_limits
from autoplan.search.placement import is_fragmented
from autoplan.search.space import Space
from autoplan.spec.calibration import Calibration
from autoplan.spec.enums import AttentionKernel, Fp8Scaling, Precision, enum_value
from autoplan.spec.framework import Framework
from autoplan.spec.input_rate import InputRate, parse_input_rate
from autoplan.spec.lengths import ImageCounts, Lengths
from autoplan.spec.mixed_problem import MixedProblem
from autoplan.spec.model import ModelSpec
from autoplan.spec.optimizers import OPTIMIZERS
from autoplan.spec.plan_file import SpaceFlags
from autoplan.spec.problem import Problem
from autoplan.spec.training import TrainingSpec, usual_balancing_loss
from autoplan.topology.cluster import ClusterSpec
from autoplan.topology.mixed_cluster import MixedCluster
from autoplan.topology.placement import by_switch

DEFAULT_FRAMEWORK = "megatron-core"
PREFERENCES = ("simple", "fastest", "robust")
USUAL_QUANTILE = 0.9
ADAPTER_FRAMEWORK = "transformers"  # with PEFT; Megatron-LM itself trains no adapters


class _Parts(NamedTuple):
    """The parts of a problem beside the cluster."""

    model: ModelSpec
    training: TrainingSpec
    framework: Framework
    reserve_bytes: float


# -- models, clusters and frameworks ----------------------------------------------------------------------------------


def load_model(model: str | Path | ModelSpec) -> ModelSpec:
    """Return the model for a name or path; a loaded model is returned unchanged.

    `model` is a preset ("llama3-70b") or one of its aliases, a Hugging Face config.json or its folder, or a TOML file.
    Raises InputError if the name is unknown or the file does not describe a model.
    """
    return model if isinstance(model, ModelSpec) else read_model(str(model))


def load_framework(framework: str | Path | Framework) -> Framework:
    """Return the framework for a name, TOML file or object; InputError if it is unknown or invalid."""
    return framework if isinstance(framework, Framework) else presets.load_framework(str(framework))


def load_any_cluster(cluster: str | Path | ClusterSpec | MixedCluster) -> ClusterSpec | MixedCluster:
    """Return the cluster for a text; it may be a mixed cluster.

    `cluster` is a preset with its size ("h100-sxm:16x8": 16 nodes of 8), a TOML file, several of these joined by +, or
    "local": this machine, or the nodes of this job.  Raises InputError for anything else.
    """
    if isinstance(cluster, ClusterSpec | MixedCluster):
        return cluster
    if cluster == "local":
        from autoplan.api.discovery import local_cluster  # looks at hardware, which nothing else here needs

        return local_cluster()
    return load_parts(str(cluster))


def load_cluster(cluster: str | Path | ClusterSpec | MixedCluster) -> ClusterSpec:
    """Return a cluster of equal nodes, as for `load_any_cluster`; InputError for a mixed cluster."""
    spec = load_any_cluster(cluster)
    if isinstance(spec, MixedCluster):
        raise InputError(f"{cluster} is a mixed cluster, which only autoplan search supports")
    return spec


# -- problems ---------------------------------------------------------------------------------------------------------


def make_problem(
    model: str | Path | ModelSpec,
    *,
    cluster: str | Path | ClusterSpec,
    seq_len: int | None = None,
    **options: Unpack[ProblemOptions],
) -> Problem:
    """Return the problem of training `model` on `cluster` with sequences of `seq_len` tokens.

    `seq_len` can be omitted if the option `training` has it.  Raises InputError for arguments that cannot be used.
    """
    cluster_spec = load_cluster(cluster)
    parts = _parts(model, seq_len, options)
    if options.get("encoder_ranks") is not None:
        cluster_spec = beside_encoder(cluster_spec, parts.model.encoder_apart)
    calibration = _calibration(parts.framework, cluster_spec, options)
    problem = Problem(**parts._asdict(), cluster=cluster_spec, calibration=calibration)
    block_shapes(parts.model, parts.training.finetuning)  # refuses adapters on what the model does not have
    timings = options.get("timings")
    if timings is not None:
        problem = with_timings(problem, timings, options.get("db"))
    if _is_from_runs(options):
        # Times first: the calibration is fitted to runs that were priced with them.
        fitted = calibration_of(cluster_spec, parts.framework, options.get("db"), problem.timings)
        return replace(problem, calibration=fitted.calibration)
    check_fitted(problem.calibration, problem)
    return problem


def make_mixed_problem(
    model: str | Path | ModelSpec,
    *,
    cluster: MixedCluster,
    seq_len: int | None = None,
    **options: Unpack[ProblemOptions],
) -> MixedProblem:
    """Return the problem of training `model` on a mixed cluster, whose parts are priced as by `make_problem`."""
    parts = _parts(model, seq_len, options)
    if parts.model.encoder_apart:
        raise InputError("--encoder-ranks are not priced on mixed clusters: leave them out")
    alone = [make_problem(parts.model, cluster=part, seq_len=seq_len, **options) for part in cluster.parts]
    return MixedProblem(
        **parts._asdict(),
        cluster=cluster,
        calibrations=tuple(problem.calibration for problem in alone),
        timings=tuple(problem.timings for problem in alone),
    )


def _parts(model: str | Path | ModelSpec, seq_len: int | None, options: ProblemOptions) -> _Parts:
    images = options.get("images")
    if images is not None and not isinstance(images, ImageCounts):
        images = load_images(str(images))
    loaded = with_encoder_options(
        load_model(model),
        images=images,
        image_tokens=options.get("image_tokens"),
        encoder_len=options.get("encoder_len"),
        ranks=options.get("encoder_ranks"),
    )
    encoder = loaded.any_encoder if loaded.stands_before_text else None
    image_tokens = round(encoder.images * encoder.image_tokens) if encoder else 0
    training = _training(seq_len, images, image_tokens, options)
    for name in ("expert_imbalance", "balancing_loss", "capacity_factor"):
        if loaded.moe is None and options.get(name) is not None:
            flag = name.replace("_", "-")
            raise InputError(f"--{flag} needs a model with experts, {loaded.name} has none: leave it out")
    is_tuned = training.preference is not None or (training.finetuning is not None and training.finetuning.has_adapters)
    framework = load_framework(options.get("framework", ADAPTER_FRAMEWORK if is_tuned else DEFAULT_FRAMEWORK))
    training = _with_routing(loaded, framework, training, options)
    if options.get("capacity_factor") is not None:
        framework = framework.preferring("token_dropping=on")
    if (kernel := options.get("attention")) is not None:
        framework = framework.preferring(f"attention={enum_value('--attention', AttentionKernel, kernel)}")
    reserve = options.get("reserve_memory", 0.0)
    return _Parts(
        model=loaded,
        training=training,
        framework=framework,
        reserve_bytes=parse_memory(reserve, "--reserve-memory") if isinstance(reserve, str) else reserve,
    )


def _training(
    seq_len: int | None, images: ImageCounts | None, image_tokens: int, options: ProblemOptions
) -> TrainingSpec:
    """Return the training that the options describe; they go before those of a whole `training` among them.

    A sample has `image_tokens` beside its text.
    """
    training, finetune = options.get("training"), options.get("finetune")
    table = asdict(training) if training else {}
    table |= {"seq_len": seq_len} if seq_len is not None else {}
    for name, words in (("precision", tuple(Precision)), ("optimizer", OPTIMIZERS)):
        value = options.get(name)
        if value is None:
            continue
        value = optimizer_named(str(value)) if name == "optimizer" else value
        if value not in words:
            is_scaled = name == "precision" and str(value).startswith("fp8")
            hint = (
                f"; scales of fp8 are part of the plan: --fix fp8_scaling={' or '.join(Fp8Scaling)}"
                if is_scaled
                else ""
            )
            raise InputError(f"--{name} {value!r}: must be one of {', '.join(words)}{hint}")
        table[name] = value
    if options.get("optimizer") is None and (optimizer := optimizer_of(finetune)) is not None:
        table["optimizer"] = optimizer
    tuning = combined(finetune, options.get("lora_rank"), options.get("lora_targets"), options.get("quantize"))
    if tuning is not None:
        table["finetuning"] = asdict(tuning)
    if (lengths := options.get("lengths")) is not None:
        read = lengths if isinstance(lengths, Lengths) else load_lengths(str(lengths), image_tokens)
        table["lengths"] = asdict(read)
    if images is not None and len(images.histogram) > 1:
        table["images"] = asdict(images)
    for name in ("document_len", "expert_imbalance", "balancing_loss", "capacity_factor", "batching"):
        if (value := options.get(name)) is not None:
            table[name] = value
    if rates := _input_rates(options):
        table["input_rates"] = [asdict(rate) for rate in rates]
    if preference := preference_of(finetune, options.get("loss"), options.get("reference")):
        table["preference"] = asdict(preference)
    if options.get("batching") is not None and not table.get("lengths"):
        raise InputError(f"--batching {options['batching']!r} needs samples of different lengths: give --lengths too")
    return decode(TrainingSpec, table, "training")


def _with_routing(
    model: ModelSpec, framework: Framework, training: TrainingSpec, options: ProblemOptions
) -> TrainingSpec:
    """Return the training with experts as even as they usually are, unless the options say how even."""
    imbalance, loss = options.get("expert_imbalance"), options.get("balancing_loss")
    if imbalance is not None and loss is not None:
        raise InputError(
            f"--expert-imbalance {imbalance:g} and --balancing-loss {loss:g} both say how uneven experts are: give one"
        )
    is_said = imbalance is not None or loss is not None or options.get("training") is not None
    return training if is_said else with_usual_routing(model, framework, training)


def with_usual_routing(model: ModelSpec, framework: Framework, training: TrainingSpec) -> TrainingSpec:
    """Return the training with experts as even as they are where nothing says how even."""
    if model.moe is None:
        return training
    is_tuned = training.finetuning is not None or training.preference is not None
    loss = usual_balancing_loss(is_tuned=is_tuned, routes_freely=framework.experts.routes_freely)
    return replace(training, balancing_loss=loss)


def _input_rates(options: ProblemOptions) -> list[InputRate]:
    rates, size = options.get("input_rate") or (), options.get("sample_size")
    if size is not None and not rates:
        raise InputError("--sample-size is for a rate in bytes: give --input-rate too, such as 2GB/s/node")
    sample_bytes = parse_size(size, "--sample-size") if isinstance(size, str) else size
    if sample_bytes is not None:
        check_positive("--sample-size", sample_bytes)
    return [parse_input_rate(text, sample_bytes) for text in ([rates] if isinstance(rates, str) else rates)]


def _is_from_runs(options: ProblemOptions) -> bool:
    """Return whether the calibration is to be fitted to the runs in the database."""
    calibration = options.get("calibration")
    return not isinstance(calibration, Calibration) and str(calibration) == "db"


def _calibration(framework: Framework, cluster: ClusterSpec, options: ProblemOptions) -> Calibration:
    """Return the calibration that is given, or the shipped one, from which one of the database's runs starts."""
    calibration = options.get("calibration")
    if isinstance(calibration, Calibration):
        return calibration
    if calibration is None or _is_from_runs(options):
        return built_in_calibration(framework, cluster.device)
    return load_calibration(Path(calibration))


# -- the space of plans -----------------------------------------------------------------------------------------------


def _check_framework(framework: Framework) -> None:
    """Reject a framework whose rules are not implemented yet."""
    if framework.rules == "unknown":
        known = dict.fromkeys(entry.facts for entry in FRAMEWORKS if entry.facts)
        raise UnpricedError(
            f"which plans {framework.name} supports is not known yet: use {', '.join(known)}, or your own TOML file"
        )


def check_tp_overlap(framework: Framework) -> None:
    """Reject tp_overlap if the framework hides no communication: it would have no effect."""
    if framework.overlap.tp_overlap_share == 0:
        raise InputError(
            f"{framework.name} does not overlap tensor-parallel traffic (tp_overlap_share is 0): leave tp_overlap out, "
            "or use --framework nemo or your own framework TOML"
        )


def check_rank_order(framework: Framework, rank_order: str) -> None:
    """Reject a rank order that the framework does not support."""
    if rank_order not in framework.rank_orders:
        raise InputError(f"{framework.name} has no rank_order {rank_order!r}: use {' or '.join(framework.rank_orders)}")


def make_space(
    problem: Problem,
    global_batch: int | str,
    *,
    fix: Iterable[str] = (),
    at_most: Iterable[str] = (),
    forbid: Iterable[str] = (),
    allow: Iterable[str] = (),
    to: str = "",
) -> Space:
    """Return the space of plans that the framework supports for `problem`, within the user's limits.

    `global_batch` is a number of sequences, or a range such as "256:512"; plans are those that the target `to` can
    express, where one is given.  Raises InputError where a limit names no
    axis, or a value that it cannot have; UnpricedError where the rules of the framework are not known.
    """
    _check_framework(problem.framework)
    batches = batches_of(global_batch, problem.cluster.num_devices)
    book = book_of(problem.framework)
    unasked = default_limits(problem, batches)
    limits = with_flags(unasked, fix=fix, at_most=at_most, forbid=forbid, allow=allow, offered=book.offers)
    check_words(problem.framework.name, book, limits, unasked)
    if any(limits.of("tp_overlap")):
        check_tp_overlap(problem.framework)
    for rank_order in limits.of("rank_order"):
        check_rank_order(problem.framework, str(rank_order))
    placement = by_switch(problem.cluster) if is_fragmented(problem) else None
    rules = rules_for(problem.framework, to)
    return Space(workload=problem.workload, limits=limits, rules=rules, placement=placement)


def batches_of(global_batch: int | str, num_devices: int) -> tuple[int, ...]:
    """Return the batches of a number of sequences, or of a range such as "256:512", that a search tries."""
    low, high = parse_batches(str(global_batch))
    return (low,) if low == high else batch_grid(low, high, num_devices)


def limit_texts(limits: Iterable[str] | Mapping[str, Any]) -> tuple[str, ...]:
    """Return limits as texts, AXIS=VALUE."""
    return tuple(f"{axis}={value}" for axis, value in limits.items()) if isinstance(limits, Mapping) else tuple(limits)


def space_flags(
    global_batch: int | str,
    *,
    fix: Iterable[str] | Mapping[str, Any],
    at_most: Iterable[str] | Mapping[str, Any],
    forbid: Iterable[str],
    allow: Iterable[str] = (),
    to: str | None = None,
) -> SpaceFlags:
    """Return the flags of a space as a plan file keeps them."""
    return SpaceFlags(
        global_batch=str(global_batch),
        fix=limit_texts(fix),
        at_most=limit_texts(at_most),
        forbid=tuple(forbid),
        allowed=tuple(allow),
        to=to or "",
    )


def quantile_of(prefer: str, robust: float | None) -> float | None:
    """Return the quantile of the step time that is to be the least; None: no quantile was asked for."""
    if robust is not None and not 0.5 <= robust < 1:
        raise InputError(f"--robust {robust:g}: must be a quantile from 0.5 to below 1, such as 0.9")
    if prefer not in PREFERENCES:
        raise InputError(f"--prefer {prefer}: must be one of {', '.join(PREFERENCES)}")
    return USUAL_QUANTILE if prefer == "robust" and robust is None else robust


def priced_target(to: str | None, options: ProblemOptions) -> str | None:
    """Return the target of export that a search is for; `options` that name no framework get that of the target."""
    to = to or target_called(options.get("framework"))
    if to is None:
        return None
    find_target(to)
    options.setdefault("framework", facts_of_version(to))
    return usual_target(to)


def space_of(problem: Problem, flags: SpaceFlags) -> Space:
    """Return the space that the flags of a search describe, for its problem or one on another number of nodes."""
    return make_space(
        problem,
        flags.global_batch,
        fix=flags.fix,
        at_most=flags.at_most,
        forbid=flags.forbid,
        allow=flags.allowed,
        to=flags.to,
    )


def unpriced_parts(model: ModelSpec) -> tuple[str, ...]:
    """Return warnings about a model's config.json: that it was downloaded, and parts of it that are not priced."""
    downloaded = [f"{model.name} is read from {url}" for url in model.sources if url.endswith("/config.json")]
    left_out = f"{model.name} is priced without the {model.left_out} in its config.json"
    return (*downloaded, *([left_out] if model.left_out else ()))
