"""Are step times read from logs as the frameworks write them, and is everything else passed over?

The lines are made by the frameworks' own format strings, copied field by field from the sources that the readers name.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tqdm.std import tqdm

from autoplan.base.errors import InputError
from autoplan.base.units import GIB, MIB
from autoplan.frameworks.logs import Batch, LoggedRun, LogReader
from commands import run
from logged import read_log

BATCH = Batch(num_sequences=64, seq_len=4096, num_devices=8)
SECONDS = (40.0, 9.0, 2.0, 2.1, 1.9, 2.2, 2.0)  # of seven steps, of which two warm up
KEPT = pytest.approx(SECONDS[2:], rel=2e-3)


def read(lines: list[str], batch: Batch | None = BATCH, warmup: int = 2) -> LoggedRun:
    reader = LogReader(batch, warmup=warmup)
    reader.feed("".join(f"{line}\n" for line in lines).encode())
    return reader.finish()


def megatron(step: int, seconds: float, version: str = "core_v0.8.0", unit: str = "ms") -> str:
    line = "" if version == "v2.5" else " [2026-08-22 15:22:22.123456]"
    line += f" iteration {step:8d}/{500_000:8d} |"
    line += f" consumed samples: {step * 64:12d} |"
    value = seconds * 1000.0 if unit == "ms" else seconds
    line += f" elapsed time per iteration ({unit}): {value:.1f} |"
    if version != "v2.5":
        line += f" throughput per GPU (TFLOP/s/GPU): {401.2:.1f} |"
    line += f" learning rate: {1e-4:.6E} |"
    line += f" global batch size: {64:5d} |"
    line += " {}: {:.6E} |".format("lm loss", 10.5 - step)
    line += f" loss scale: {1.0:.1f} |"
    line += f" grad norm: {0.7:.3f} |"
    return line + f" number of skipped iterations: {0:3d} | number of nan iterations: {0:3d} |"


def torchtitan(step: int, seconds: float, version: str = "v0.2.2", at_s: float = 0.0, color: bool = True) -> str:
    tps = 64 * 4096 / 8 / seconds
    red, green, reset = ("\033[31m", "\033[32m", "\033[39m") if color else ("", "", "")
    head = f"[titan] 2026-08-21 21:{int(at_s) // 60:02}:{at_s % 60:06.3f}".replace(".", ",") + " - root - INFO - "
    if version == "6d9e4e6":
        return (
            f"{head}{red}step: {step:>2}  {green}loss: {7.3:>7}  iter: {round(seconds, 4):>7}  data: {0.01:>5}  lr: 0.1"
        )
    if version == "e62573d":
        return (
            f"{head}step: {step:2}  loss: {7.3:7.4f}  memory: {61.5:5.2f}GiB({77.1:.2f}%)  wps: {round(tps):,}  mfu: 4%"
        )
    return (
        f"{head}{red}step: {step:2}  {green}loss: {7.3:8.5f}  \033[38;2;180;60;0mgrad_norm: {1.5:7.4f}  "
        f"memory: {61.5:5.2f}GiB({77.1:.2f}%)  tps: {round(tps):,}  tflops: {400.1:,.2f}  mfu: {41.2:.2f}%{reset}"
    )


def human(value: float) -> str:
    """Text that `human_format` of nanotron's logging.py makes of a number above 1."""
    value = float(f"{value:.3g}")
    sizes = ["", "K", "M", "B", "T"]
    while abs(value) >= 1000:
        value /= 1000.0
        sizes.pop(0)
    return f"{value:f}".rstrip("0").rstrip(".") + sizes[0]


def nanotron(step: int, seconds: float, tag: str = "elapsed_time_per_iteration_ms") -> str:
    fields = {
        "consumed_tokens": human(step * 64 * 4096),
        tag: human(seconds * 1000),
        "tokens_per_sec": human(64 * 4096 / seconds),
        "global_batch_size": human(64),
        "lm_loss": human(10.4),
        "cuda_max_memory_reserved": human(3.21e10),
    }
    head = "\033[2;3m08/22 15:22:22 [INFO|DP=0|PP=0|TP=0|node7]\033[0m: "
    return head + " | ".join([f"iteration: {step} / 100", *(f"{name}: {value}" for name, value in fields.items())])


def pipeline(step: int, seconds: float) -> str:
    return f"steps: {step} loss: {2.5:0.4f} iter time (s): {seconds:0.3f} samples/sec: {64 / seconds:0.3f}"


def throughput(step: int, seconds: float, version: str = "v0.9.5") -> str:
    head = "[2026-08-22 12:19:04,123] [INFO] [timer.py:264:stop] "
    if version == "v0.7.0":
        rates = f"RunningAvgSamplesPerSec={30.0}, CurrSamplesPerSec={64 / seconds}"
        return f"{head}0/{step}, {rates}, MemAllocated={9.1}GB, MaxMemAllocated={55.25}GB"
    return (
        f"{head}epoch=0/micro_step={4 * step}/global_step={step}, RunningAvgSamplesPerSec={30.0}, "
        f"CurrSamplesPerSec={64 / seconds}, MemAllocated={9.1}GB, MaxMemAllocated={55.25}GB"
    )


def breakdown(seconds: float) -> list[str]:
    micro = f"time (ms) | fwd_microstep: {1.0:.2f} | bwd_microstep: {2.0:.2f} | step_microstep: {3.0:.2f}"
    parts = [300 * seconds, 600 * seconds, 500 * seconds, 100 * seconds, 100 * seconds]
    names = ("fwd", "bwd", "bwd_inner", "bwd_allreduce", "step")
    return [micro, "time (ms)" + "".join(f" | {name}: {part:.2f}" for name, part in zip(names, parts, strict=True))]


def bar(step: int, step_s: float | None, total: int = 100) -> str:
    """Lines that tqdm writes; each one goes back to the start of the line."""
    rate = None if step_s is None else 1 / step_s
    return "\r" + tqdm.format_meter(step, total, 0.0 if rate is None else 12.0, ncols=80, rate=rate)


STATED = {
    "Megatron-LM core_v0.8.0": lambda step, seconds: megatron(step, seconds),
    "Megatron-LM v2.5": lambda step, seconds: megatron(step, seconds, "v2.5"),
    "Megatron-LM in seconds": lambda step, seconds: megatron(step, seconds, unit="s"),
    "torchtitan v0.2.2": lambda step, seconds: torchtitan(step, seconds),
    "torchtitan without colours": lambda step, seconds: torchtitan(step, seconds, color=False),
    "torchtitan e62573d": lambda step, seconds: torchtitan(step, seconds, "e62573d"),
    "torchtitan 6d9e4e6": lambda step, seconds: torchtitan(step, seconds, "6d9e4e6"),
    "nanotron v0.5": lambda step, seconds: nanotron(step, seconds),
    "nanotron 2411b02": lambda step, seconds: nanotron(step, seconds, "time_per_iteration_ms"),
    "DeepSpeed pipeline": lambda step, seconds: pipeline(step, seconds),
    "DeepSpeed v0.9.5": lambda step, seconds: throughput(step, seconds),
    "DeepSpeed v0.7.0": lambda step, seconds: throughput(step, seconds, "v0.7.0"),
    "DeepSpeed v0.4.3": lambda step, seconds: f"[INFO] [timer.py:157:stop] 0/{step}, SamplesPerSec={64 / seconds}",
    "DeepSpeed breakdown": lambda step, seconds: "\n".join(breakdown(seconds)),
}


LABELS = (
    "",
    "[rank0]:",
    "[default3]:",
    "12: ",
    "[1,0]<stdout>:",
    "0: [default7]:",
    "[pod/llama-worker-0/torch] 2026-08-22T15:22:22.123456789Z [rank0]:",
)


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("form", STATED)
def test_each_frameworks_lines_are_read_after_two_steps_of_warm_up(form: str, label: str) -> None:
    run = read(
        [label + part for at, seconds in enumerate(SECONDS) for part in STATED[form](at + 1, seconds).split("\n")]
    )
    assert form.startswith(run.framework)
    assert run.step_s == KEPT
    assert run.num_steps == 5
    assert run.median_s == pytest.approx(2.0, rel=2e-3)
    assert run.interval_s == (min(run.step_s), max(run.step_s))


def test_the_newest_form_of_each_format_string_is_the_one_of_its_source() -> None:
    """Whole lines as the sources make them, so that no helper above hides a blank that a reader relies on."""
    assert megatron(7, 1.25).startswith(
        " [2026-08-22 15:22:22.123456] iteration        7/  500000 | consumed samples:          448 |"
        " elapsed time per iteration (ms): 1250.0 | throughput per GPU (TFLOP/s/GPU): 401.2 |"
    )
    assert "step:  7  loss:  7.30000  grad_norm:  1.5000  memory: 61.50GiB(77.10%)  tps: 26,214" in torchtitan(
        7, 1.25, color=False
    ).replace("\033[38;2;180;60;0m", "")


def test_a_forks_wider_blanks_are_read() -> None:
    """A line of ModelLink, https://gitee.com/ascend/ModelLink, as examples/llama shows one."""
    line = (
        " iteration  {}/50000 | consumed samples: 5632 | consumed tokens:  11534336 | elapsed time per iteration (ms):"
        "  52728.1 | learning rate:    1.499E-05 | gloabl batch size:  512 | lm loss:  1.376514E+01 | grad norm:  4.6"
    )
    run = read([line.format(at) for at in range(1, 5)])
    assert run.step_s == (52.7281, 52.7281)
    assert run.losses == (13.76514,) * 4


def test_memory_and_loss_are_read_where_a_log_has_them() -> None:
    report = "[Rank 3] (after 2 iterations) memory (MB) | allocated: 5000.25 | max allocated: {}"
    report += " | reserved: 1.0 | max reserved: {}"
    run = read(
        [
            megatron(1, 2.0),
            report.format("61000.5", "70000.00"),
            report.format("60000.5", "71000.00"),
            *(megatron(at, 2.0) for at in (2, 3, 4)),
        ]
    )
    assert (run.allocated_bytes, run.reserved_bytes) == (61000.5 * MIB, 71000 * MIB)
    assert run.losses == (9.5, 8.5, 7.5, 6.5)
    assert read([torchtitan(at, 2.0) for at in range(1, 5)]).reserved_bytes == 61.5 * GIB
    assert read([throughput(at, 2.0) for at in range(1, 5)]).allocated_bytes == 55.25 * GIB
    peaks = "08/22/2026 15:22:22 [INFO|DP=0|PP=0|TP=0]: [After train batch iter] Memory usage: 1.00MiB."
    peaks += " Peak allocated 10.50MiB. Peak reserved: 12.00MiB"
    run = read([peaks, *(nanotron(at, 2.0) for at in range(1, 5))])
    assert (run.allocated_bytes, run.reserved_bytes) == (10.5 * MIB, 3.21e10)


def test_bars_of_the_trainer_are_read_and_those_of_evaluation_and_of_data_are_not() -> None:
    lines = ["Map: 100%|██████████| 900/900 [00:01<00:00, 812.00 examples/s]", bar(0, None)]
    for at in range(1, 31):
        lines.append(bar(at, 4.0 if at < 13 else 2.0))
        lines.append("{'loss': '2.5', 'grad_norm': '1.2', 'learning_rate': '5e-05', 'epoch': '0.1'}")
    lines += [bar(at, 9.0, total=7) for at in range(1, 7)]
    lines += ["{'eval_loss': '2.1', 'eval_runtime': '3.1', 'epoch': '1'}", *(bar(at, 8.0) for at in range(31, 42))]
    lines += [bar(42, 2.1), bar(42, 5.0)]  # closed: the mean of all steps
    run = read(lines)
    assert (run.framework, run.source) == ("HF Trainer", "bar")
    assert set(run.step_s) == {2.0, 2.1}
    assert len(run.step_s) == 30 + 12 - (12 + 11)  # the average holds the first steps, and the evaluation, for ten more
    assert read([bar(at, 0.25) for at in range(1, 20)]).median_s == 0.25
    done = "{'train_runtime': 80.0, 'train_samples_per_second': 8.0, 'train_steps_per_second': 0.5, 'epoch': 1.0}"
    assert read([done]).step_s == (2.0,)


@pytest.mark.parametrize("label", LABELS)
def test_a_launchers_labels_do_not_hide_the_trainers_bar(label: str) -> None:
    assert read([label + bar(at, 2.0).lstrip("\r") for at in range(1, 16)]).step_s == (2.0, 2.0, 2.0)


def test_ranks_below_several_labels_are_told_apart() -> None:
    """A rank whose lines come late has not started again."""
    lines = []
    for at in range(1, 9):
        lines.append(f"0: [rank0]:{torchtitan(at, 2.0)}")
        if at > 1:
            lines.append(f"0: [rank7]:{torchtitan(at - 1, 2.5)}")
    assert read(lines).step_s == pytest.approx((2.5,) * 5 + (2.0,), rel=1e-3)


def test_steps_with_another_batch_than_the_plans_do_not_count() -> None:
    """Batches that grow (--rampup-batch-size) and sequences that do (curriculum of Megatron-DeepSpeed)."""
    grows = [megatron(at, 0.5).replace("size:    64", "size:    16") for at in range(1, 9)]
    grows += [megatron(at, 2.0 if at > 9 else 1.0) for at in range(9, 14)]
    assert read(grows).step_s == (2.0,) * 4  # the first one may cover steps of both
    assert read(grows, batch=None).num_steps == 11
    longer = [f"{megatron(at, 0.3)} curriculum seqlen:  512 |" for at in range(1, 9)]
    longer += [f"{megatron(at, 2.0)} curriculum seqlen:  4096 |" for at in range(9, 14)]
    assert read(longer).step_s == (2.0,) * 4
    with pytest.raises(
        InputError, match=r"no step time of the plan's batch: steps in the log have 16 seq.* of 4,096 t"
    ):
        read(grows[:8])
    beside = [line for at, step in enumerate(grows[:8], 1) for line in (throughput(at, 0.5), step)]
    with pytest.raises(InputError, match="no step time of the plan's batch"):  # nor by the rate that DeepSpeed states
        read(beside)


def test_moments_of_arrival_serve_a_bar_better_than_its_moving_average() -> None:
    reader = LogReader(BATCH)
    now_s = 100.0
    for at, seconds in enumerate(SECONDS, 1):
        now_s += seconds
        reader.feed(bar(at, 9.0).encode(), now_s)
        reader.feed(b"\r", now_s)
    run = reader.finish()
    assert run.source == "moments"
    assert run.step_s == KEPT


def test_without_the_batch_rates_give_way_to_moments_or_are_refused() -> None:
    at_s, lines = 0.0, []
    for at, seconds in enumerate(SECONDS, 1):
        at_s += seconds
        lines.append(torchtitan(at, 123.0, at_s=at_s))
    run = read(lines, batch=None)
    assert run.source == "moments"
    assert run.step_s == KEPT
    with pytest.raises(InputError, match="DeepSpeed has only rates: give the global batch"):
        read([throughput(at, 2.0) for at in range(1, 9)], batch=None)


def test_a_line_may_stand_for_many_steps() -> None:
    run = read([megatron(at, 2.0 + at / 1000) for at in (10, 20, 30)])
    assert run.step_s == pytest.approx((2.02, 2.03))
    assert run.num_steps == 20
    assert read([megatron(at, 2.0) for at in (1, 10, 20)]).num_steps == 10


def test_the_slowest_rank_counts_and_a_new_start_warms_up_again() -> None:
    lines = []
    for at in range(1, 6):
        lines += [f"[rank0]:{torchtitan(at, 2.0)}", f"[rank1]:{torchtitan(at, 2.5)}", f"[rank2]:{torchtitan(at, 1.5)}"]
    assert read(lines).step_s == pytest.approx((2.5, 2.5, 2.5), rel=1e-3)
    again = [megatron(at, 2.0) for at in range(1, 6)] + [megatron(at, 30.0 if at < 6 else 3.0) for at in range(4, 8)]
    assert read(again).step_s == (2.0, 2.0, 2.0, 3.0, 3.0)


def test_steps_after_an_evaluation_or_a_checkpoint_are_left_out_where_others_remain() -> None:
    pause = {
        3: " validation loss at iteration 3 | lm loss value: 2.1E+00 | lm loss PPL: 8.2E+00 | ",
        5: "saving checkpoint at iteration       5 to /data in torch_dist format",
    }
    lines = []
    for at in range(1, 8):
        lines.append(megatron(at, 9.0 if at - 1 in pause else 2.0))
        if at in pause:
            lines.append(pause[at])
    assert read(lines).step_s == (2.0, 2.0, 2.0)
    assert read(lines[:5]).step_s == (2.0,)
    titan = [torchtitan(1, 2.0), torchtitan(2, 2.0)]
    titan.append(
        "[titan] 2026-08-21 21:00:09,000 - root - INFO - validate step:  2  loss:  7.1000  memory: 1GiB  tps: 9"
    )
    titan += ["[titan] ... Saving the checkpoint (or staging if async is enabled).", torchtitan(3, 7.0)]
    assert read(titan).step_s == pytest.approx((7.0,), rel=1e-3)
    assert read([*titan, torchtitan(4, 2.0)]).step_s == pytest.approx((2.0,), rel=1e-3)


def test_the_median_withstands_outliers_and_its_interval_holds_the_truth() -> None:
    rng = random.Random(1)
    num_inside = 0
    for _ in range(200):
        times = [2.0 + rng.gauss(0, 0.1) for _ in range(20)]
        low, high = read([megatron(at, seconds) for at, seconds in enumerate(times, 1)], warmup=0).interval_s
        num_inside += low <= 2.0 <= high
    assert 180 <= num_inside < 200
    run = read([megatron(at, 50.0 if at % 5 == 0 else 2.0) for at in range(1, 40)])
    assert run.median_s == 2.0


def test_a_log_without_steps_says_what_was_looked_for() -> None:
    with pytest.raises(InputError, match=r"no step time.*Megatron-LM: .*torchtitan: .*nanotron: .*DeepSpeed: .*HF Tra"):
        read(["hello", "iteration 5", "step: five"])
    with pytest.raises(InputError, match="no step time after the first 2 steps, which warm up"):
        read([megatron(1, 2.0), megatron(2, 2.0)])


def test_hostile_numbers_are_passed_over(tmp_path: Path) -> None:
    good = [megatron(at, 2.0) for at in range(1, 5)]
    bad = [
        megatron(5, 2.0).replace("2000.0", number)
        for number in ("nan", "inf", "-3", "0", "1e999", "1.2.3", "9" * 5000, "e")
    ]
    assert read([*good, *bad]).step_s == (2.0, 2.0)
    log = tmp_path / "a.log"
    log.write_bytes(b"\0\xff" * 10 + b"x" * 3_000_000 + b"\n" + "\n".join(good).encode())
    assert read_log(log).step_s == (2.0, 2.0)
    for path in (tmp_path, tmp_path / "none", Path("a\0b")):
        with pytest.raises(InputError, match="cannot be read"):
            read_log(path)
    log.write_bytes(b"\x7fELF\x00")
    with pytest.raises(InputError, match="the log contains no step time"):
        read_log(log)


PIECES = st.one_of(
    st.binary(max_size=60),
    st.sampled_from([STATED[form](at, 2.0).encode() for form in STATED for at in (1, 2, 9)]),
    st.sampled_from([bar(at, rate).encode() for at in (0, 3, 4) for rate in (2.0, None, 1e-9)]),
    st.sampled_from([b"\n", b"\r", b"\x1b[31m", b"[rank0]:", b"0: ", b"{'loss': ", b"iteration ", b"step: ", b"|"]),
)


@settings(max_examples=60, deadline=None)
@given(pieces=st.lists(PIECES, max_size=30), cut=st.integers(1, 50), is_batch_known=st.booleans())
def test_whatever_comes_in_whatever_pieces_gives_one_answer_or_an_input_error(
    pieces: list[bytes], cut: int, is_batch_known: bool
) -> None:
    data = b"".join(pieces)
    answers = []
    for size in (len(data) + 1, cut):
        reader = LogReader(BATCH if is_batch_known else None)
        for at in range(0, len(data), size):
            reader.feed(data[at : at + size])
        try:
            answers.append(reader.finish())
        except InputError as error:
            answers.append(str(error))
    assert answers[0] == answers[1]
    if isinstance(answers[0], LoggedRun):
        assert all(0 < step_time_s <= 1e6 for step_time_s in answers[0].step_s)
        assert answers[0].interval_s[0] <= answers[0].median_s <= answers[0].interval_s[1]


def mlperf(key: str, time_ms: int, value: object = None, **metadata: object) -> str:
    event = {"namespace": "", "time_ms": time_ms, "event_type": "INTERVAL_END", "key": key, "value": value}
    return f"0: :::MLLOG {json.dumps(event | {'metadata': {'file': 'callbacks.py', 'lineno': 112} | metadata})}"


def test_blocks_of_mlperf_are_read_without_the_evaluations_between() -> None:
    """After the block that warms up 2 steps of 8 sequences in 4 s, then 4 in 8 s, with a loss half-way."""
    lines = [mlperf("global_batch_size", 1_000, 8), mlperf("block_start", 1_000, samples_count=0)]
    lines += [mlperf("block_stop", 60_000, samples_count=80), mlperf("eval_start", 60_000, samples_count=80)]
    lines += [mlperf("block_start", 90_000, samples_count=80), mlperf("tracked_stats", 94_000, {"throughput": 4.0})]
    lines += [mlperf("block_stop", 94_000, samples_count=96), mlperf("block_start", 150_000, samples_count=96)]
    lines += [mlperf("train_loss", 154_000, 2.5, samples_count=112), mlperf("block_stop", 158_000, samples_count=128)]
    broken = [":::MLLOG {cut", ":::MLLOG " + '{"a":' * 10**5]
    run = read([*lines, *broken, mlperf("run_stop", 158_000, status="success")], batch=None)
    assert (run.framework, run.source, run.step_s, run.num_steps) == ("MLPerf", "stated", (2.0, 2.0, 2.0), 6)
    assert run.losses == (2.5,)


def test_samples_of_mlperf_may_be_tokens() -> None:
    """As in its logs of GPT-3, where a block's length is its `epoch_count`."""
    lines = [mlperf("global_batch_size", 1, 8), mlperf("max_sequence_length", 1, 2048)]
    for at, (start_ms, stop_ms) in enumerate([(1_000, 9_000), (20_000, 26_000)]):
        counts = {"first_epoch_num": at * 3 * 8 * 2048, "epoch_count": 3 * 8 * 2048}
        lines += [mlperf("block_start", start_ms, **counts), mlperf("block_stop", stop_ms, **counts)]
    run = read(lines, batch=Batch(num_sequences=8, seq_len=2048, num_devices=8))
    assert (run.step_s, run.num_steps) == ((2.0,), 3)


def test_step_times_that_mlperf_states_count_alone() -> None:
    # Of Cisco's llama31_8b on 64 devices (training_results_v5.1): the batch is 64, `step` is the number of samples.
    lines = [mlperf("global_batch_size", 1_000, 64), mlperf("max_sequence_length", 1_000, 8192)]
    lines += [mlperf("block_start", 1_000, samples_count=0)]
    for step, step_s in enumerate((4.069, 1.223, 0.712, 0.710, 0.714), start=1):
        stats = {"train_step_time": step_s, "reduced_train_loss": 12.5 - step}
        lines.append(mlperf("tracked_stats", 1_000, stats, step=64.0 * step))
    lines += [mlperf("tracked_stats", 9_000, {"throughput": 86.3}, step=320)]
    lines += [mlperf("block_stop", 90_000, samples_count=320)]
    run = read(lines, batch=Batch(num_sequences=64, seq_len=8192, num_devices=64))
    assert (run.step_s, run.num_steps, run.losses[-1]) == ((0.712, 0.710, 0.714), 3, 7.5)


@pytest.mark.parametrize("form", ["{slowest:.2f}", "({fastest:.2f}, {slowest:.2f})"])
def test_timers_of_megatron_tell_parts_of_a_step(form: str) -> None:
    parts = {"forward-backward": 1.5, "all-grads-sync": 0.25, "optimizer": 0.5}
    lines = [f"    {'model-and-optimizer-setup '.ljust(48, '.')}: (1020.90, 1022.97)"]
    for at in range(1, 6):
        lines += [megatron(at, 2.1), "(min, max) time across ranks (ms):"]
        for name, seconds in parts.items():
            times = form.format(fastest=900 * seconds, slowest=1000 * seconds + (at == 1) * 700)
            lines.append(f"    {(name + ' ').ljust(48, '.')}: {times}")
    run = read(lines)
    assert run.step_s == (2.1, 2.1, 2.1)
    assert {name: times_s["most"] for name, times_s in run.timers_s.items()} == pytest.approx(parts)
    leasts = {name: times_s["least"] for name, times_s in run.timers_s.items() if "least" in times_s}
    assert leasts == pytest.approx({name: 0.9 * seconds for name, seconds in parts.items()} if "(" in form else {})


def test_argonnes_fields_of_megatron_deepspeed_are_read_and_timers_of_steps_that_warm_up_are_not() -> None:
    """Lines as in the notes of argonne-lcf/Megatron-DeepSpeed: 30 and 8 s of warm-up, then 7.1 s."""
    lines = []
    for step, (step_ms, work_ms) in enumerate(
        [(29570.0, 26095.09), (8457.2, 8385.57), (7136.5, 7079.28), (7147.0, 7092.56)]
    ):
        lines += [
            f"[2024-09-16 22:59:19.287338][INFO][training_log:661] -  iteration={step + 1:8d}/  635782 | "
            f"consumed_samples={768 * (step + 1):12d} | elapsed_time_per_iteration_ms={step_ms} | "
            "global_batch_size=768 | lm loss=11.167250 | actual_seqlen= 4096 | samples_per_second=25.972 |",
            "(min, max) time across ranks (ms):",
            f"  forward-backward ...............................: ({work_ms - 1}, {work_ms})",
        ]
    run = read(lines, Batch(num_sequences=768, seq_len=4096, num_devices=24))
    assert (run.framework, run.step_s) == ("Megatron-LM", pytest.approx((7.1365, 7.147)))
    assert run.losses[-1] == 11.16725
    assert run.timers_s["forward-backward"]["most"] == pytest.approx(7.08592)


def test_timers_of_megatron_tell_every_rank_its_own() -> None:
    lines = []
    for at in range(1, 6):
        lines += [megatron(at, 2.1), "times across ranks (ms):", "  model-and-optimizer-setup:", "     rank  0: 900.00"]
        lines += ["  forward-backward:", "     rank  0: 1500.00", f"     rank  1: {1600 + at}.00", "  optimizer:"]
        lines += ["     rank  0: 20.50", "     rank  1: 20.25", "iteration", "     rank  2: 1.00"]
    assert read(lines).timers_s == {
        "forward-backward": {"rank 0": 1.5, "rank 1": pytest.approx(1.604)},
        "optimizer": {"rank 0": pytest.approx(0.0205), "rank 1": pytest.approx(0.02025)},
    }


def test_parts_that_timers_tell_stand_beside_the_prediction_and_add_up(tmp_path: Path) -> None:
    training = ("--global-batch", "64", "--seq-len", "4096", "--tp", "2", "--out", "plan.json")
    assert run(tmp_path, "estimate", "llama3-8b", "--cluster", "h100-sxm:1x8", *training).returncode == 0
    parts = {"forward-backward": 1.5, "all-grads-sync": 0.25, "optimizer": 0.5}
    lines = [f"    {(name + ' ').ljust(48, '.')}: {1000 * seconds:.2f}" for name, seconds in parts.items()]
    (tmp_path / "run.txt").write_text("\n".join([*(megatron(at, 2.1) for at in range(1, 6)), *lines]))
    shown = run(tmp_path, "read", "run.txt", "--plan", "plan.json", "--json")
    result = json.loads(shown.stdout)
    assert [term["measured_s"] for term in result["terms"]] == pytest.approx([1.25, 0.25, 0.5, 0.1])
    assert sum(term["predicted_s"] for term in result["terms"]) == pytest.approx(result["predicted_step_s"])
    assert "all-grads-sync           250.0 ms   11.9 %" in run(tmp_path, "read", "run.txt").stdout
    assert "No such file" in run(tmp_path, "read", "missing", "--plan", "plan.json").stderr
    ranks = ["times across ranks (ms):", "  optimizer:", "     rank  0: 510.00", "     rank  1: 490.00"]
    (tmp_path / "ranks.txt").write_text("\n".join([*(megatron(at, 2.1) for at in range(1, 6)), *ranks]))
    assert "optimizer  490.0 ms  510.0 ms   24.3 %  rank 0" in run(tmp_path, "read", "ranks.txt").stdout
