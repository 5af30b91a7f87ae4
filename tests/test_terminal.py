"""Do the answers read well on terminals of any width, and plainly where there is none?"""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from autoplan.base.files import decode
from autoplan.base.units import format_seconds
from autoplan.readers.cluster import load_cluster
from autoplan.report.answer import _beside, mfu_convention, next_best_line, print_search
from autoplan.report.estimate import print_estimate, print_memory
from autoplan.report.terminal import make_console, print_next_steps
from autoplan.spec.plan_file import PlanFile
from commands import run

WIDTHS = (60, 80, 120, 200)
PLACE = ("deepseek-v3", "--cluster", "h100-sxm:32x8", "--global-batch", "1024", "--seq-len", "4096")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> PlanFile:
    folder = tmp_path_factory.mktemp("wide")
    done = run(folder, "search", *PLACE, "--quiet", "--json")
    assert done.returncode == 0, done.stderr
    return decode(PlanFile, json.loads(done.stdout), "plan.json")


def shown(show: Any, file: PlanFile, width: int, **terminal: Any) -> str:
    stream = io.StringIO()
    show(Console(file=stream, width=width, highlight=False, emoji=False, **terminal), file)
    return stream.getvalue()


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("show", [print_search, print_estimate, print_memory])
@pytest.mark.parametrize("is_terminal", [True, False])
def test_no_line_is_too_long_and_nothing_is_cut(file: PlanFile, show: Any, width: int, is_terminal: bool) -> None:
    text = plain(shown(show, file, width, force_terminal=is_terminal))
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    words = " ".join(line.strip("│ ") for line in text.splitlines())
    assert re.search(rf"time +{format_seconds(file.best.step_s)} per step; 90 % interval ", words)
    for says in ("tokens/s per device", "MFU", "on the fullest device"):
        assert says in re.sub(r"\s+", " ", words)
    assert re.search(
        r"none of [\d,]+ plans is (more than [\d.]+ % )?faster, under this model", re.sub(r"\s+", " ", words)
    )


def test_the_peak_of_a_core_is_told_as_it_is(file: PlanFile) -> None:
    core = replace(file, cluster=load_cluster("cpu:1x2"))
    for plan_file, says in ((file, "the bf16 datasheet peak, 989 TFLOP/s"), (core, "the bf16 peak, 160 GFLOP/s")):
        assert says in mfu_convention(plan_file)


def test_the_next_best_of_other_degrees_is_shown_by_them(file: PlanFile) -> None:
    plan = replace(file.best.plan, pp=4, dp_shard=16, layers_per_chunk=None)
    assert file.choice is not None
    close = replace(file.choice, runner_up=replace(file.best, plan=plan), ratio=1.03)
    line = next_best_line(close, file.certificate, replace(file.best.plan, layers_per_chunk=None))
    assert re.fullmatch(r"tp 4 pp 4 .*, micro-batch 1: 3.0 % slower, too close to call .*", line)


def test_a_next_best_that_is_faster_lost_to_a_simpler_plan(file: PlanFile) -> None:
    assert file.choice is not None
    assert file.certificate is not None
    close = replace(file.choice, runner_up=file.best, ratio=0.998)
    line = next_best_line(close, replace(file.certificate, slower_than_fastest=0.002), file.best.plan)
    assert ": 0.2 % faster, but less simple, too close to call" in line


def test_plans_between_the_margin_and_the_next_that_was_priced_are_known_by_their_bounds(file: PlanFile) -> None:
    assert file.choice is not None
    assert file.certificate is not None
    far = replace(file.choice, runner_up=file.best, ratio=1.3, width=1.16)
    line = next_best_line(far, replace(file.certificate, least_left=1.05), file.best.plan)
    assert line.startswith("at least 5.0 % slower: it may be too close to call")


@pytest.mark.parametrize("width", WIDTHS)
def test_numbers_of_the_ranking_are_never_folded(file: PlanFile, width: int) -> None:
    text = plain(shown(partial(print_search, details=True), file, width, force_terminal=True))
    for ranked_plan in (file.best, *file.alternatives[:9]):
        assert re.search(rf" {re.escape(format_seconds(ranked_plan.step_s))}  ", text)


def test_an_answer_is_short_and_its_details_are_there(file: PlanFile) -> None:
    """The longest plan of all presets in four lines of 80 columns, experts in one, all without next steps in 17."""
    lines = shown(print_search, file, 80).splitlines()
    assert lines[2].startswith("plan ")
    assert any(line.startswith("time ") for line in lines[3:8])
    assert len(lines) <= 17
    assert any(line.startswith("next best ") for line in lines)
    text = " ".join(shown(partial(print_search, details=True), file, 80).split())
    for says in (
        "Megatron model FLOPs",
        "GiB on the stages",
        "combinations of degrees",
        "why the next best priced plan is",
        "space",
    ):
        assert says in text
    for jargon in (" cells", " bounds,", "rests on", "runner-up", "interleave "):
        assert jargon not in text


def test_commands_stay_on_a_line_and_words_are_folded() -> None:
    out = io.StringIO()
    command = f"autoplan export {'p' * 90} --to x"
    print_next_steps(Console(file=out, width=60), ("next", command), ("no launch script", "word-s " * 30))
    lines = out.getvalue().splitlines()
    assert f"next:              {command}" in lines
    assert len(lines) > 4
    assert all(len(line) <= 60 for line in lines if command not in line)


def test_colours_are_for_terminals_that_want_them(file: PlanFile, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b[1;32m" in shown(print_search, file, 80, force_terminal=True, color_system="standard")
    monkeypatch.setenv("NO_COLOR", "1")
    no_colour = shown(print_search, file, 80, force_terminal=True)
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", no_colour)
    stream = io.StringIO()
    print_search(make_console(stream), file)
    assert "\x1b" not in stream.getvalue()


def test_stdout_holds_the_answer_and_stderr_nothing_but_remarks(tmp_path: Path) -> None:
    asked = ("llama3-8b", "--cluster", "h100-sxm:2x8", "--global-batch", "32", "--seq-len", "4096")
    done = run(tmp_path, "search", *asked)
    assert done.stderr == "wrote plan.json\n"
    following, measure, why, more = done.stdout.rstrip().splitlines()[-4:]
    assert following.startswith("next:     autoplan export plan.json --to megatron-lm")
    assert measure == "measure:  autoplan tune plan.json --command -- PROGRAM"
    assert why == "why:      autoplan explain plan.json"
    assert more.startswith("more:     --details")
    quiet = run(tmp_path, "search", *asked, "--force", "--quiet")
    assert quiet.stderr == ""
    assert quiet.stdout == done.stdout


def test_a_next_best_plan_of_the_same_degrees_is_shown_by_what_differs() -> None:
    def beside(best: str, other: str) -> str:
        plans = (SimpleNamespace(describe=lambda: other), SimpleNamespace(describe=lambda: best))
        return _beside(*plans)  # type: ignore[arg-type]

    best = "tp 2 dp 8, micro-batch 1, EP overlap, ZeRO-1, DeepEP, recompute moe_act, native cross entropy"
    assert beside(best, best.replace("moe_act", "mlp")) == "recompute mlp instead"
    assert beside(best, f"{best}, bf16 gradients") == "the same with bf16 gradients"
    assert beside(best, best.replace(", recompute moe_act", "")) == "the same without recompute moe_act"
    changed = best.replace("recompute moe_act", "recompute mlp") + ", bf16 gradients"
    assert beside(best, changed) == "recompute mlp, bf16 gradients instead of recompute moe_act"
