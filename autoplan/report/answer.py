"""Answer of a search on a terminal: the plan, its time and memory, their confidence; then the details."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from rich.console import Console
from rich.text import Text

from autoplan.base.units import (
    GIB,
    format_bytes,
    format_flops,
    format_percent,
    format_seconds,
    format_two_figures,
    repetitions,
)
from autoplan.cost.input_rate import slowest_input
from autoplan.cost.kernels.arithmetic import count_parameters, count_trained_parameters
from autoplan.cost.kernels.sequences import tokens_per_sample, useful
from autoplan.report.ranking import (
    LESS_SIMPLE,
    MIN_OFF,
    SHOWN_PLANS,
    choice_lines,
    print_ranking,
    reasons,
    slower,
    why_first,
)
from autoplan.report.terminal import number_ranges, print_lines, print_part
from autoplan.spec.chunk_order import chunks_of_stages
from autoplan.spec.estimate import datasheet_peak
from autoplan.spec.model import ModelSpec
from autoplan.spec.optimizers import TRAITS
from autoplan.spec.plan import ParallelPlan, chunk_layers
from autoplan.spec.plan_file import MixedPlanFile, PlanFile
from autoplan.spec.ranks import HostRanks
from autoplan.spec.search_result import Allowance, Certificate, Confidence, RankedPlan
from autoplan.spec.timing import Provenance
from autoplan.spec.training import TrainingSpec

MAX_ALLOWANCES_TEXT = 69  # characters: one line of 80 columns
SHOWN_SWITCHES = 8
MIN_SHOWN_SHARE = 0.0005  # less would show as 0.0 %
MIN_SHOWN_BYTES = 0.05 * GIB  # less would show as 0.0 GiB
SHOWN_HOST_SHARE = 0.5  # of a node's memory; less is only shown if the plan offloads
MIN_SHARED = 4  # number of options shared by two plans from which they are not repeated
MAX_SPELLED = 130  # characters of a plan description in full: two lines of 80 columns
PROVENANCE_WORDS: dict[Provenance, str] = {
    "measured": "measurements",
    "interpolated": "interpolated measurements",
    "disturbed": "disturbed measurements",
    "scaled": "scaled measurements",
    "reference": "published measurements",
    "datasheet": "datasheets",
}


def print_search(console: Console, file: PlanFile, *, details: bool = False) -> None:
    """Print the answer of a search; with `details` also the other plans, the search space, and memory by stage."""
    print_answer(console, file)
    lines = [*(detail_lines(file) if details else ()), *(choice_lines(file.best, file.choice) if file.choice else ())]
    if details and file.alternatives:
        console.print()
        quantile = file.certificate.quantile if file.certificate else None
        print_ranking(console, [file.best, *file.alternatives[: SHOWN_PLANS - 1]], quantile)
    if lines:
        console.print()
        print_lines(console, lines)


def print_answer(console: Console, file: PlanFile) -> None:
    """Print the question, and the plan with its figures."""
    print_part(console, headline(file))
    console.print()
    (label, plan), *lines = answer_lines(file)
    print_lines(console, [(label, Text(plan, style="bold green")), *lines])


def headline(file: PlanFile) -> str:
    """Return the question: model, cluster and training."""
    cluster, training = file.cluster, file.training
    slow = f" ({len(cluster.faults)} slow parts)" if cluster.faults else ""
    devices = f"{cluster.num_nodes} x {cluster.devices_per_node} {cluster.device.name}"
    where = devices if cluster.name == cluster.device.name else f"{cluster.name}: {devices}"
    return (
        f"{file.model.name} on {where}{slow}, {training.precision}, {training.seq_len:,} tokens, "
        f"global batch {file.best.plan.global_batch:,}{optimizer_text(training)}"
    )


def optimizer_text(training: TrainingSpec) -> str:
    """Return the optimizer after a comma, unless it is Adam."""
    return "" if training.optimizer == "adam" else f", {TRAITS[training.optimizer].title}"


def training_lines(model: ModelSpec, training: TrainingSpec) -> Iterator[tuple[str, str]]:
    """Yield (label, text) for trained weights and loss where they are not the usual ones, and for experts."""
    if (tuning := training.finetuning) is not None:
        trained = count_trained_parameters(model, tuning)
        percent = 100 * trained / count_parameters(model)
        yield "trains", f"{tuning}: {trained:,} parameters, {format_two_figures(percent)} %"
    if (preference := training.preference) is not None:
        yield "loss", str(preference)
    if model.moe is not None:
        yield "experts", _balance_text(training)


def _balance_text(training: TrainingSpec) -> str:
    """Return how evenly experts are assumed to be used."""
    if (imbalance := training.expert_imbalance) > 1.0:
        return f"the busiest rank has {imbalance:g} times the mean of tokens (--expert-imbalance)"
    loss = training.balancing_loss
    how = "evenly" if loss == 1.0 else f"as unevenly as a balancing loss of {loss:g} says"
    return f"assumed to be used {how}; --balancing-loss changes it"


def answer_lines(file: PlanFile) -> Iterator[tuple[str, str]]:
    """Yield (label, text) for the plan, its time and memory, and their confidence."""
    best = file.best
    spelled = best.plan.spell_out()
    yield "plan", spelled if len(spelled) <= MAX_SPELLED else best.plan.describe()
    yield from training_lines(file.model, file.training)
    yield from lengths_lines(file)
    yield from encoder_lines(file)
    interval = f"{format_seconds(best.low_s)} to {format_seconds(best.high_s)}"
    yield "time", f"{format_seconds(best.step_s)} per step; 90 % interval {interval}"
    name, peak = datasheet_peak(file.cluster.device, file.training.precision)
    yield (
        "",
        f"{best.tokens_per_s_per_device:,.0f} tokens/s per device, MFU {format_percent(best.mfu)} of "
        f"{format_flops(peak)} ({name} peak)",
    )
    if text := input_text(file):
        yield "input", text
    yield "memory", _memory(file)
    host = file.cluster.host.memory_bytes
    if best.plan.offload != "none" or best.host_memory_bytes > SHOWN_HOST_SHARE * host:
        yield "", f"{best.host_memory_bytes / GIB:,.1f} of {format_bytes(host)} on the host of a node"
    if file.rests_on:
        yield "based on", sources_text(file.rests_on)
    if file.listed_step_s is not None:
        yield "nodes", _placement_line(file.hosts, file.listed_step_s, best.step_s)
    if file.certificate:
        yield "proof", proof_line(file.certificate)
        if file.choice and file.choice.runner_up:
            yield "next best", next_best_line(file.choice, file.certificate, best.plan)
    if file.allowances:
        yield "--allow", _allowances_text(file.allowances)


def lengths_lines(file: PlanFile) -> Iterator[tuple[str, str]]:
    """Yield (label, text) for samples of different lengths and their cost."""
    training, best = file.training, file.best
    if (lengths := training.lengths) is None:
        return
    cut = 0.0 if training.batching == "joined" else lengths.share_above(training.seq_len)
    shortened = f", {risk_text(cut)} of them truncated" if cut else ""
    kind = ("sample" if training.preference is None else "sequence") + "s" * (lengths.num_samples > 1)
    number = f"{lengths.num_samples:,} {kind}, {lengths.mean:,.0f} tokens on average"
    yield "lengths", f"{lengths.source}: {number}{shortened}"
    learnt = useful(training)
    computed = float(np.max(tokens_per_sample(training, np.array([best.plan.micro_batch]))))
    words = [f"{learnt.samples:,.1f} samples per sequence"] if learnt.samples != 1 else []
    padding = max(1.0 - learnt.tokens / computed, 0.0)  # which rounding may leave below
    words.append(f"{format_percent(padding)} padding")
    idle = best.terms_s.get("uneven_lengths", 0.0) / best.step_s
    waiting = f"ranks wait for longer samples for {format_percent(idle)} of the step"
    yield "", f"{training.batching}: {', '.join(words)}; {waiting}"


def encoder_lines(file: PlanFile) -> Iterator[tuple[str, str]]:
    """Yield (label, text) for unlike numbers of images and for an encoder on ranks of its own, and their cost."""
    terms, step_s = file.best.terms_s, file.best.step_s
    if (counts := file.training.images) is not None:
        idle = format_percent(terms.get("uneven_lengths", 0.0) / step_s)
        mean = f"{counts.mean:,.1f} per sample on average, {counts.most:,} at most"
        yield "images", f"{counts.source}: {mean}; ranks wait for samples with more images for {idle} of the step"
    if (apart := file.model.encoder_apart) is not None:
        waiting = format_percent(terms.get("encoder_ranks", 0.0) / step_s)
        ranks = f"tp {apart.tp} x dp {apart.dp} on {apart.num_devices:,} devices beside those of the text model"
        yield "encoder", f"{ranks}, which waits for it for {waiting} of the step"


def input_text(file: PlanFile | MixedPlanFile) -> str:
    """Say whether steps wait for samples, and by which factor the input is too slow; blank without an input rate."""
    best = file.best
    delivered_s, rate = slowest_input(file.training, file.cluster.num_nodes)
    if rate is None:
        return ""
    wait_s = best.terms_s["input"]
    computed_s, batch_s = best.step_s - wait_s, best.plan.global_batch * delivered_s
    if not wait_s:
        return f"{rate} deliver a batch in {format_seconds(batch_s)}, while a step computes"
    ways = "more nodes bring more" if rate.per_node else "more devices do not help"
    return (
        f"input-bound: {rate} are {format_two_figures(batch_s / computed_s)} times too slow for devices that compute "
        f"a step in {format_seconds(computed_s)} and wait for {format_percent(wait_s / best.step_s)} of it; {ways}"
    )


def _allowances_text(allowances: Sequence[Allowance]) -> str:
    """Describe the first options that change the numerics of training: as many as one line holds, at least one."""
    text, *more = map(_allowance_text, allowances)
    for other in more:
        if len(text) + len(f"; {other}") > MAX_ALLOWANCES_TEXT:
            break
        text += f"; {other}"
    return text


def _allowance_text(allowance: Allowance) -> str:
    """Describe the gain of an option that changes the numerics of training."""
    freed = allowance.freed_bytes
    gain = [slower(allowance.ratio - 1.0)] if abs(allowance.ratio - 1.0) >= MIN_OFF else []
    memory = [f"{format_bytes(abs(freed))} {'less' if freed > 0 else 'more'}"] if abs(freed) >= MIN_SHOWN_BYTES else []
    return f"{allowance.choice}: {', '.join([*gain, *memory])}"


def _memory(file: PlanFile) -> str:
    best = file.best
    used = f"{best.memory_bytes / GIB:,.1f} of {format_bytes(file.capacity_bytes)} on the fullest device"
    if best.memory_headroom_bytes < 0:
        return f"does not fit: {used}"
    return f"{used}, OOM risk {risk_text(best.oom_probability)}"


def risk_text(probability: float) -> str:
    """Return the probability of running out of memory as text."""
    return format_percent(probability) if probability >= MIN_OFF else f"under {format_percent(MIN_OFF)}"


def sources_text(shares: Mapping[Provenance, float]) -> str:
    """Describe the shares of time sources in a step."""
    return ", ".join(
        f"{format_percent(share)} {PROVENANCE_WORDS[name]}"
        for name, share in shares.items()
        if share >= MIN_SHOWN_SHARE
    )


def proof_line(certificate: Certificate) -> str:
    """Return a sentence on why there is no better plan."""
    least, plans = certificate.least_left, f"{certificate.plans:,} plans"
    if not certificate.proven:
        assert least is not None, "of what was not looked at"
        if certificate.quantile is not None and least >= 1:
            return (
                f"not proven: lowest {certificate.quantile:g} quantile of the step time among plans at most "
                f"{format_percent(least - 1)} slower than the fastest; others were not considered"
            )
        return (
            f"not proven: best of {certificate.priced:,} priced plans; another plan may be up to "
            f"{format_percent(1 / least - 1)} faster"
        )
    if certificate.best_in:
        return f"none of {plans} is better in {' and '.join(certificate.best_in)}, under this model"
    if certificate.quantile is not None:
        return f"none of {plans} has a lower {certificate.quantile:g} quantile of the step time, under this model"
    if certificate.slower_than_fastest is not None:
        return (
            f"none of {plans} is more than {_at_least_shown(certificate.slower_than_fastest)} faster, under this model"
        )
    return f"none of {plans} is faster, under this model"


def _at_least_shown(share: float) -> str:
    return format_percent(max(share, MIN_OFF))


def _searched_line(certificate: Certificate) -> str:
    """Return a sentence on the number of priced plans, and what is known of the others."""
    least, margin = certificate.least_left, certificate.margin
    others_text = "do not fit in memory" if least is None else f"are at least {format_percent(least - 1)} slower"
    text = (
        f"{certificate.plans:,} plans with {certificate.cells:,} combinations of degrees: {certificate.priced:,} priced"
    )
    if not certificate.proven:
        return f"{text}, of {certificate.expanded:,} combinations"
    if certificate.best_in:
        return f"{text}; {certificate.bounded:,} lower bounds on time and memory show that no other is better"
    text += f"; {certificate.bounded:,} lower bounds on time and memory show that all others {others_text}"
    return f"{text} (plans up to {format_percent(margin)} slower may have the lowest quantile)" if margin else text


def next_best_line(choice: Confidence, certificate: Certificate, best: ParallelPlan) -> str:
    """Return a sentence on the next best kind of plan, and whether the model can distinguish the two.

    Plans at least as slow as `least_left` may not have been priced, so a wider interval may contain more plans, and the
    next best may be one of them.
    """
    assert choice.runner_up is not None
    ratio, width = choice.ratio or 1.0, choice.width or 1.0
    least_left = certificate.least_left
    if not choice.is_close and least_left is not None and 1.0 < least_left < min(ratio, width):
        return f"at least {slower(least_left - 1.0)}: it may be too close to call; --details shows what was priced"
    plan = _beside(choice.runner_up.plan, best)
    but = "" if certificate.slower_than_fastest is None else LESS_SIMPLE
    text = f"{plan}: {slower(ratio - 1.0, but=but)}, {closeness(width, is_close=choice.is_close)}"
    if not choice.is_close:
        return text
    more = choice.num_contenders - 1
    if not more:
        return f"{text}: measure both"
    least = "at least " if least_left is not None and width > least_left else ""
    return f"{text}, like {least}{more} more: measure them"


def _beside(plan: ParallelPlan, best: ParallelPlan) -> str:
    """Describe a plan; if it shares many options with the best plan, by its degrees, or options if those are equal."""
    words, words_of_best = plan.describe().split(", "), best.describe().split(", ")
    degrees, options = words[:2], words[2:]
    differing = [option for option in options if option not in words_of_best]
    if len(options) - len(differing) < MIN_SHARED:
        return plan.describe()
    if degrees != words_of_best[:2]:
        return ", ".join(degrees)
    missing = [option for option in words_of_best[2:] if option not in options]
    if not differing and not missing:
        return plan.describe()
    if not differing or not missing:
        return f"the same with {', '.join(differing)}" if differing else f"the same without {', '.join(missing)}"
    if len(words) == len(words_of_best):
        return f"{', '.join(differing)} instead"
    return f"{', '.join(differing)} instead of {', '.join(missing)}"


def closeness(width: float, *, is_close: bool) -> str:
    """Say whether the model can distinguish plans; the 90 % interval of their ratio extends by a factor of `width`."""
    share = format_percent(width - 1.0)
    return f"too close to call (under {share})" if is_close else f"a clear gap (over {share})"


def detail_lines(file: PlanFile) -> Iterator[tuple[str, str]]:
    """Yield (label, text) for the background of the answer."""
    if layers := layers_line(file):
        yield "layers", layers
    if len(file.stages) > 1:
        yield "memory", f"{repetitions(f'{stage.memory_bytes / GIB:,.1f}' for stage in file.stages)} GiB on the stages"
    yield "MFU", mfu_convention(file)
    if (choice := file.choice) and choice.runner_up:
        yield "why", why_first(file.best, choice.runner_up, keeps_today=file.today is not None)
    if fastest := _fastest_of(file):
        gain = risk_text(file.best.s_per_sequence / fastest.s_per_sequence - 1.0)
        yield "fastest", f"{fastest.plan.describe()}: {gain} faster, {reasons(fastest, file.best)}"
    if file.certificate:
        yield "searched", _searched_line(file.certificate)
        yield "space", "; ".join(file.certificate.limits)


def layers_line(file: PlanFile) -> str:
    """Return the layers of every stage or chunk if they are spread unevenly."""
    plan = file.best.plan
    chunks = chunk_layers(plan, file.model.num_layers)
    if len(set(chunks)) == 1:
        return ""
    text = f"{repetitions(map(sum, chunks_of_stages(chunks, plan.pp, plan.schedule)))} on the stages"
    return f"{text}; {repetitions(chunks)} in the chunks" if plan.vp > 1 else text


def mfu_convention(file: PlanFile) -> str:
    """Return the peak rate that an MFU refers to; for a CPU it is computed from its clock, as datasheets lack it."""
    device = file.cluster.device
    name, peak = datasheet_peak(device, file.training.precision)
    peak_name = "peak" if device.vendor == "cpu" else "datasheet peak"
    return f"Megatron model FLOPs over the {name} {peak_name}, {format_flops(peak)}"


def _placement_line(hosts: Sequence[HostRanks], listed_step_s: float, step_s: float) -> str:
    """Describe the leaf switches above the stages, and the gain from the order of the nodes."""
    below: dict[str, set[int]] = {}
    for host in hosts:
        below.setdefault(host.switches[0] if host.switches else host.site, set()).update(host.stages)
    shown = [f"{switch}: stage {number_ranges(stages)}" for switch, stages in below.items()]
    more = [f"{len(shown) - SHOWN_SWITCHES} more"] if len(shown) > SHOWN_SWITCHES else []
    gain = format_percent(listed_step_s / step_s - 1)
    return f"{gain} faster than in the listed order of the nodes; {', '.join((*shown[:SHOWN_SWITCHES], *more))}"


def _fastest_of(file: PlanFile) -> RankedPlan | None:
    """Return the fastest plan if the best one is a simpler one that is about as fast."""
    if file.certificate is None or file.certificate.slower_than_fastest is None:
        return None
    return min(file.alternatives, key=lambda plan: plan.s_per_sequence)
