from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from autoplan.api.plan_run import plan_to_run
from autoplan.base.files import decode, encode, read_table
from autoplan.cli import COMMANDS
from autoplan.profiler.record import Fingerprint, Record
from autoplan.profiler.store import open_store
from autoplan.report.answer import print_search
from autoplan.report.estimate import print_estimate
from autoplan.report.ranking import why_first
from autoplan.report.terminal import make_console
from autoplan.spec.plan_file import PlanFile
from autoplan.spec.search_result import RankedPlan
from autoplan.spec.timing import NO_TIMINGS
from commands import run
from model_specs import LLAMA_CONFIG

AUTOPLAN = [sys.executable, "-c", "from autoplan.cli import main; main()"]
PLACE = ("--cluster", "h100-sxm:1x8", "--global-batch", "16", "--seq-len", "4096")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "llama.json").write_text(json.dumps(LLAMA_CONFIG))
    return tmp_path


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which one search has run."""
    folder = tmp_path_factory.mktemp("searched")
    (folder / "llama.json").write_text(json.dumps(LLAMA_CONFIG))
    done = run(folder, "search", "llama.json", *PLACE)
    assert done.returncode == 0, done.stderr
    (folder / "stdout").write_text(done.stdout)
    return folder


def test_a_search_answers_first_and_says_how_sure_it_is(searched: Path) -> None:
    shown = (searched / "stdout").read_text()
    head, answer = shown.split("\n\n")[:2]
    assert head == "llama on 1 x 8 h100-sxm, bf16, 4,096 tokens, global batch 16"
    for word in ("plan ", "time ", "90 % interval", "tokens/s", "MFU", "bf16", "GiB", "OOM risk", "proof "):
        assert word in answer
    assert re.search(
        r"none of [0-9,]+ plans is (more than [0-9.]+ % )?faster, under this model "
        r"next best .*: (as fast|[0-9.]+ % (slower|faster)), too close to call \(under [0-9.]+ %\)"
        r"(: measure both|, like (at least )?\d+ more: measure them)",
        " ".join(shown.split()),
    )
    assert len(shown.splitlines()) <= 20
    assert "measure:  autoplan tune plan.json --command -- PROGRAM" in shown
    assert "autoplan export plan.json --to megatron-lm --out launch" in shown
    assert "\x1b" not in shown
    assert all(line == line.rstrip() for line in shown.splitlines())


def test_a_plan_file_survives_reading_and_writing(searched: Path) -> None:
    text = (searched / "plan.json").read_text()
    file = decode(PlanFile, read_table(searched / "plan.json"), "plan.json")
    assert encode(file) == text
    assert 1 <= len(file.alternatives) <= 19
    assert file.certificate is not None
    assert file.certificate.plans > 100
    assert file.command.startswith("autoplan ")
    assert sum(stage.layers for stage in file.stages) == 16
    # The simplest of those about as fast stands in front.
    steps = [choice.step_s for choice in file.alternatives]
    assert steps == sorted(steps)
    assert file.best.step_s <= 1.01 * steps[0]


def test_the_same_search_writes_the_same_file(searched: Path) -> None:
    done = run(searched, "search", "llama.json", *PLACE, "--out", "again.json", "--quiet", "--json")
    assert done.returncode == 0
    assert done.stderr == ""
    first, again = (json.loads((searched / name).read_text()) for name in ("plan.json", "again.json"))
    assert json.loads(done.stdout) == again
    del first["command"], again["command"]
    assert first == again


def test_estimate_and_export_read_the_plan_file(searched: Path) -> None:
    plan = json.loads((searched / "plan.json").read_text())
    priced = run(searched, "estimate", "plan.json", "--json")
    assert priced.returncode == 0, priced.stderr
    assert json.loads(priced.stdout)["best"] == plan["best"]
    assert json.loads(priced.stdout)["certificate"] is None
    shown = run(searched, "estimate", "plan.json")
    for word in ("matrix products", "head and loss", "stage", "activations", "all"):
        assert word in shown.stdout
    by_term = run(searched, "estimate", "plan.json", "--memory")
    for word in ("optimizer states", "fragmentation", "free", "changes that free memory", "recompute all layers"):
        assert word in by_term.stdout
    knobs = json.loads(run(searched, "estimate", "plan.json", "--memory", "--json").stdout)["memory_knobs"]
    assert [knob["freed_bytes"] for knob in knobs] == sorted((knob["freed_bytes"] for knob in knobs), reverse=True)
    for launcher in ("torchrun", "slurm"):
        script = run(searched, "export", "plan.json", "--to", "megatron-lm", "--launcher", launcher, "--out", launcher)
        assert script.returncode == 0, script.stderr
        assert (searched / launcher / "launch.sh").read_text().startswith("#!/bin/bash")
    assert run(searched, "export", "plan.json", "--to", "megatron-lm").stdout.startswith("#!/bin/bash")
    written = run(searched, "export", "plan.json", "--to", "megatron-lm", "--out", "run")
    assert written.returncode == 0
    assert written.stdout == ""
    assert os.access(searched / "run" / "launch.sh", os.X_OK)


@pytest.mark.parametrize(
    "flags", [("--tp", "1"), ("--no-sp",), ("--cluster", "h100-sxm:2x8"), ("--reserve-memory", "1GiB")]
)
def test_a_plan_file_takes_no_flags_that_would_be_ignored(searched: Path, flags: tuple[str, ...]) -> None:
    says = "without --" + flags[0].removeprefix("--no-").removeprefix("--")
    assert_refused(searched, "estimate", "plan.json", *flags, says=says)


def test_a_plan_that_cannot_be_exported_gets_no_export_command(folder: Path) -> None:
    (folder / "other.json").write_text(json.dumps(LLAMA_CONFIG | {"rope_theta": 10000.5}))
    done = run(folder, "search", "other.json", *PLACE)
    assert done.returncode == 0, done.stderr
    assert "autoplan export" not in done.stdout
    assert re.search(r"no launch script: [^:]*rope_base 10000.5", " ".join(done.stdout.split()))


def test_a_search_says_what_would_change_its_answer_and_why_others_lost(folder: Path) -> None:
    done = run(folder, "search", "llama.json", *PLACE, "--why", "--robust", "0.9", "--json", "--quiet")
    assert done.returncode == 0, done.stderr
    file = decode(PlanFile, json.loads(done.stdout), "plan.json")
    assert file.certificate is not None
    assert file.certificate.quantile == 0.9
    assert file.choice is not None
    assert file.choice.sensitivity is not None
    assert file.choice.sensitivity.elasticities["matrix-product rate"] < 0
    assert "FSDP alone" in [rival.family for rival in file.choice.obvious]
    text = io.StringIO()
    print_search(make_console(text), file)
    shown = " ".join(text.getvalue().split())
    assert "lowest 0.9 quantile of the step time" in shown or "has a lower 0.9 quantile of the step time" in shown
    assert re.search(r"unless [\w -]+ [0-9.]+ % (higher|lower)( at the latest)?: then ", shown)
    assert re.search(r"FSDP alone: [0-9.]+ % slower \(dp 8, .*\): .* more ", shown)
    shown = run(folder, "search", "llama.json", *PLACE, "--robust", "0.9", "--force", "--details", COLUMNS="120").stdout
    cells = [re.findall(r"[\d.]+ m?s", line) for line in shown.splitlines() if re.match(r" ?\d+  \w", line)]
    assert "0.9 quantile" in shown
    assert len(cells) >= 5
    quantiles = [float(cell[1].split()[0]) * (1e-3 if cell[1].endswith("ms") else 1) for cell in cells]
    assert quantiles == sorted(quantiles)
    assert_refused(folder, "search", "llama.json", *PLACE, "--force", "--robust", "1.5", says="--robust 1.5")


@pytest.mark.parametrize(
    ("framework", "wishes", "sharding"),
    [
        ("torchtitan", ("--fix", "schedule=zb-v"), {"none", "zero2", "zero3"}),
        ("nanotron", ("--fix", "pp=4", "--forbid", "recompute=full"), {"none", "zero1"}),
    ],
)
def test_a_search_finds_a_plan_of_another_framework(
    folder: Path, framework: str, wishes: tuple[str, ...], sharding: set[str]
) -> None:
    done = run(folder, "search", "llama.json", *PLACE, "--framework", framework, *wishes, "--out", "other.json")
    assert done.returncode == 0, done.stderr
    assert f"export other.json --to {framework} --out launch\n" in done.stdout
    best = json.loads((folder / "other.json").read_text())["best"]["plan"]
    assert best["sharding"] in sharding
    if framework == "torchtitan":
        assert best["schedule"] == "zb-v"
        assert "ZB-V" in done.stdout
    again = run(folder, "estimate", "other.json")
    assert again.returncode == 0, again.stderr


def test_a_file_is_replaced_with_force_only(searched: Path) -> None:
    before = (searched / "plan.json").read_text()
    for name, changes in (("plan.json", ("--max-tp", "4")), ("llama.json", ())):
        kept = run(searched, "search", "llama.json", *PLACE, *changes, "--out", name)
        assert kept.returncode == 1
        assert "time " in kept.stdout  # the answer comes first
        assert f"{name} contains something else and was kept: overwrite it with --force" in kept.stderr
        assert "autoplan export" not in kept.stdout
    assert_refused(searched, "export", "plan.json", "--to", "megatron-lm", "--out", "llama.json", says="exists")
    assert (searched / "plan.json").read_text() == before
    assert json.loads((searched / "llama.json").read_text()) == LLAMA_CONFIG
    assert run(searched, "search", "llama.json", *PLACE, "--force").returncode == 0


def test_the_same_search_again_leaves_its_plan_file_as_it_is(searched: Path) -> None:
    before = (searched / "plan.json").read_text()
    again = run(searched, "search", "llama.json", *PLACE, "--details")
    assert (again.returncode, again.stderr) == (0, "plan.json is unchanged\n")
    assert "combinations of degrees" in again.stdout
    assert (searched / "plan.json").read_text() == before
    table = json.loads(before)
    for text in (json.dumps(table | {"reserve_bytes": 1e9}), before[:99]):
        (searched / "plan.json").write_text(text)
        kept = run(searched, "search", "llama.json", *PLACE, "--out", "plan.json")
        assert (kept.returncode, "plan.json contains something else" in kept.stderr) == (1, True)
    (searched / "plan.json").write_text(before)


def test_another_search_writes_beside_the_plan_of_the_first(searched: Path) -> None:
    before = (searched / "plan.json").read_text()
    says = "wrote plan-2.json: plan.json holds something else, which --force overwrites\n"
    for last_line in (says, "plan-2.json is unchanged\n"):
        other = run(searched, "search", "llama.json", *PLACE, "--fix", "tp=2")
        assert (other.returncode, other.stderr) == (0, last_line)
        assert "autoplan export plan-2.json --to megatron-lm --out launch\n" in other.stdout
    assert json.loads((searched / "plan-2.json").read_text())["best"]["plan"]["tp"] == 2
    assert "wrote plan-3.json" in run(searched, "search", "llama.json", *PLACE, "--fix", "tp=4").stderr
    assert (searched / "plan.json").read_text() == before


def test_other_mistakes_are_told_before_that_a_plan_file_is_there(searched: Path) -> None:
    assert_refused(searched, "search", "no-such-model", *PLACE, says="unknown model 'no-such-model'")
    assert_refused(searched, "search", "llama.json", *PLACE, "--fix", "tp=3", says="tp")


def test_the_same_files_are_written_again_without_force(searched: Path) -> None:
    for _ in range(2):
        assert run(searched, "export", "plan.json", "--to", "megatron-lm", "--out", "same").returncode == 0
    assert run(searched, "export", "plan.json", "--to", "megatron-bridge", "--out", "same").returncode == 1


def test_numbers_are_typed_as_people_write_them(searched: Path) -> None:
    short = ("--cluster", "h100-sxm:1x8", "--global-batch", "16", "--seq-len", "4k", "--force", "--json", "--quiet")
    found = json.loads(run(searched, "search", "llama.json", *short, "--out", "short.json").stdout)
    assert (found["training"]["seq_len"], found["best"]["plan"]["global_batch"]) == (4096, 16)


def test_one_plan_is_priced_from_flags(folder: Path) -> None:
    flags = ("--tp", "2", "--pp", "2", "--vp", "2", "--layers", "3,4,5,4", "--recompute", "full", "--out", "one.json")
    done = run(folder, "estimate", "llama.json", *PLACE, *flags)
    assert done.returncode == 0, done.stderr
    assert "uneven virtual stages" in done.stdout  # 8 layers on either rank
    assert re.search(r"layers +2 x 8 on the stages; 3, 4, 5, 4 in the chunks", done.stdout)
    file = decode(PlanFile, read_table(folder / "one.json"), "one.json")
    assert file.best.plan.layers_per_chunk == (3, 4, 5, 4)
    assert file.best.plan.dp == 2
    assert file.certificate is None


def test_an_answer_says_what_it_rests_on(searched: Path) -> None:
    file = decode(PlanFile, read_table(searched / "plan.json"), "plan.json")
    assert sum(file.rests_on.values()) == pytest.approx(1.0)
    assert file.rests_on["measured"] == file.rests_on["interpolated"] == 0.0
    reference = 100 * file.rests_on["reference"]
    assert f"based on   {reference:.1f} % published measurements" in (searched / "stdout").read_text()


def test_published_timings_take_the_place_of_fitted_curves(searched: Path, tmp_path: Path) -> None:
    pytest.importorskip("aiconfigurator_core")
    pytest.importorskip("pyarrow")
    flags = ("llama.json", *PLACE, "--tp", "2", "--timings", "aiconfigurator", "--out", str(tmp_path / "timed.json"))
    shown = run(searched, "estimate", *flags)
    assert shown.returncode == 0, shown.stderr
    assert re.search(r"based on\s+[0-9.]+ % measurements, [0-9.]+ % interpolated measurements,", shown.stdout)
    timed = decode(PlanFile, read_table(tmp_path / "timed.json"), "timed.json")
    assert timed.timings == "aiconfigurator"
    assert timed.rests_on["measured"] + timed.rests_on["interpolated"] > 0.5
    # A plan that was priced with a table is priced with it again.
    again = json.loads(run(tmp_path, "estimate", "timed.json", "--json").stdout)
    assert again["best"] == json.loads((tmp_path / "timed.json").read_text())["best"]
    assert again["rests_on"] == timed.rests_on


def test_timings_of_the_database_take_the_place_of_fitted_curves(searched: Path, tmp_path: Path) -> None:
    machine = Fingerprint(device="h100-sxm", torch="2.13.0")
    sizes = [2**power for power in range(8, 16)]
    products = [
        Record(
            fingerprint=machine,
            operation="gemm",
            shape=(m, n, k),
            dtype="bf16",
            samples_s=(5e-6 + 2 * m * n * k / 600e12,),
        )
        for m in sizes
        for n in sizes
        for k in sizes
    ]
    with open_store(str(tmp_path / "lab.db")) as store:
        assert store.add(products).quarantined == 0
    flags = ("--tp", "2", "--timings", "db", "--db", str(tmp_path / "lab.db"), "--out", str(tmp_path / "timed.json"))
    shown = run(searched, "estimate", "llama.json", *PLACE, *flags)
    assert shown.returncode == 0, shown.stderr
    timed = decode(PlanFile, read_table(tmp_path / "timed.json"), "timed.json")
    assert timed.timings == "db"
    assert timed.rests_on["measured"] + timed.rests_on["interpolated"] > 0.3
    again = run(tmp_path, "estimate", "timed.json", "--json", "--db", "lab.db")
    assert json.loads(again.stdout)["rests_on"] == timed.rests_on
    # Files of before the times travelled with them want the database.
    old = json.loads((tmp_path / "timed.json").read_text()) | {"pinned": None}
    (tmp_path / "old.json").write_text(json.dumps(old))
    lost = run(tmp_path, "explain", "old.json", AUTOPLAN_DB="elsewhere.db")
    assert (lost.returncode, lost.stderr.count("\n")) == (1, 1)
    assert "name the database that it was made with: --db or AUTOPLAN_DB (elsewhere.db: no such file" in lost.stderr
    lab = str(tmp_path / "lab.db")
    for default, asked in ((lab, None), ("elsewhere.db", lab), (lab, str(tmp_path / "of_runs.db"))):
        with mock.patch.dict("os.environ", {"AUTOPLAN_DB": default}):
            assert plan_to_run(tmp_path / "old.json", asked)[1].timings != NO_TIMINGS
    place = ("--cluster", "mi300x:1x8", "--global-batch", "16", "--seq-len", "4096")
    there = ("--timings", "db", "--db", str(tmp_path / "lab.db"))
    assert_refused(searched, "estimate", "llama.json", *place, *there, says="db has no timings of mi300x")


def test_a_plan_keeps_its_times_whatever_becomes_of_the_database(searched: Path, tmp_path: Path) -> None:
    def add(seconds: float, moment: str, torch: str = "2.13.0") -> None:
        sizes = [2**power for power in range(9, 18, 2)]
        with open_store(str(tmp_path / "lab.db")) as store:
            store.add(
                Record(
                    fingerprint=Fingerprint(device="h100-sxm", torch=torch),
                    operation="gemm",
                    shape=(m, n, k),
                    dtype="bf16",
                    samples_s=(seconds * m * n * k,),
                    measured_at=moment,
                )
                for m in sizes
                for n in sizes
                for k in sizes
            )

    def step(*words: str) -> tuple[float, str]:
        shown = run(tmp_path, *words, "--json", AUTOPLAN_DB="elsewhere.db")
        assert shown.returncode == 0, shown.stderr
        said = json.loads(shown.stdout)
        return said["best" if "best" in said else "plan"]["step_s"], shown.stderr

    add(3e-15, "2026-11-20T12:00:00+00:00")
    place = ("--tp", "2", "--timings", "db", "--db", str(tmp_path / "lab.db"), "--out", str(tmp_path / "timed.json"))
    assert run(searched, "estimate", "llama.json", *PLACE, *place).returncode == 0
    header = json.loads((tmp_path / "timed.json").read_text())["best"]["step_s"]
    assert step("explain", "timed.json") == (header, "")
    add(6e-15, "2026-11-21T12:00:00+00:00", torch="2.14.0")  # a colleague has news
    moved = f"{tmp_path}/lab.db has other timings than the plan: 125 changed, of h100-sxm, torch 2.14.0 instead"
    for command in ("explain", "estimate"):
        step_s, said = step(command, "timed.json")
        assert step_s == header
        assert said.count("\n") == 1
        assert moved in said
    report = run(tmp_path, "report", "timed.json", "--out", "page.html")
    assert (report.returncode, moved in report.stderr) == (0, True)
    repriced, said = step("estimate", "timed.json", "--timings", "db", "--db", "lab.db", "--out", "new.json")
    assert repriced > 1.2 * header
    assert step("explain", "new.json") == (repriced, "")
    (tmp_path / "lab.db").unlink()
    assert step("explain", "timed.json") == (header, "")
    assert step("estimate", "timed.json")[0] == header


def test_a_device_without_published_timings_is_named(folder: Path) -> None:
    pytest.importorskip("aiconfigurator_core")
    place = ("--cluster", "mi300x:1x8", "--global-batch", "16", "--seq-len", "4096")
    assert_refused(folder, "estimate", "llama.json", *place, "--timings", "aiconfigurator", says="no timings of mi300x")


@pytest.mark.parametrize("width", [30, 40, 50, 60, 100, 200])
def test_output_keeps_to_the_width(searched: Path, width: int) -> None:
    for command in (("search", "llama.json", *PLACE, "--details", "--out", f"{width}.json"), ("estimate", "plan.json")):
        done = run(searched, *command, COLUMNS=str(width))
        assert done.returncode == 0
        labels = ("next: ", "measure: ", "why: ")
        lines = [line for line in done.stdout.splitlines() if not line.startswith(labels)]
        assert ("too narrow for" in " ".join(lines)) == (width <= 50)
        assert not re.search(r"^ *[#1] .* (m|u|G|Gi|tokens/)$", done.stdout, re.MULTILINE), "a unit is cut"
        assert max(map(len, lines)) <= width
        assert lines == [line.rstrip() for line in lines]
        assert "\u2026" not in done.stdout, "a number is cut"


def test_work_is_compared_as_a_whole_where_only_one_plan_is_busiest_at_the_head(searched: Path) -> None:
    best = decode(PlanFile, read_table(searched / "plan.json"), "plan.json").best
    with_head = {"gemm": 5.0, "attention": 1.0, "head": 2.0, "pipeline_bubble": 1.0, "optimizer": 0.5, "overhead": 0.5}
    without = {"gemm": 7.5, "attention": 1.5, "head": 0.0, "pipeline_bubble": 0.6, "optimizer": 0.5, "overhead": 0.9}

    def priced(terms: dict[str, float]) -> RankedPlan:
        step_s = sum(terms.values())
        return replace(best, terms_s=terms, step_s=step_s, low_s=step_s, high_s=step_s)

    why = why_first(priced(with_head), priced(without))
    assert "head" not in why
    assert "matrix products" not in why
    for part in ("1.00 s more work of the busiest stage", "400.0 ms less pipeline bubble", "400.0 ms more time after"):
        assert part in why
    both = why_first(priced(with_head), priced(without | {"head": 2.5}))
    assert "2.50 s more matrix products" in both


def test_a_term_of_nothing_is_not_shown(searched: Path) -> None:
    file = decode(PlanFile, read_table(searched / "plan.json"), "plan.json")
    terms = file.best.terms_s | {"pipeline_bubble": -1e-13, "pipeline_send": 1e-9}
    stream = io.StringIO()
    print_estimate(make_console(stream), replace(file, best=replace(file.best, terms_s=terms)))
    assert "-0.0" not in stream.getvalue()
    assert "pipeline" not in stream.getvalue()


def test_colour_is_for_terminals_and_obeys_no_color(searched: Path) -> None:
    colour = re.compile(r"\x1b\[[0-9;]*3[0-9]")
    assert colour.search(run(searched, "estimate", "plan.json", FORCE_COLOR="1").stdout)
    assert not colour.search(run(searched, "estimate", "plan.json", FORCE_COLOR="1", NO_COLOR="1").stdout)


def test_a_range_of_batches_takes_the_best_rate(folder: Path) -> None:
    done = run(folder, "search", "llama.json", *PLACE, "--global-batch", "16:64", "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert 16 <= plan["best"]["plan"]["global_batch"] <= 64
    rates = [choice["tokens_per_s_per_device"] for choice in plan["alternatives"]]
    assert rates == sorted(rates, reverse=True)
    assert plan["best"]["tokens_per_s_per_device"] >= rates[0] / 1.01


def test_limits_reach_the_search(folder: Path) -> None:
    wishes = ("--fix", "tp=2", "--max", "pp=2", "--fix", "sharding=zero1", "--max-tp", "4", "--forbid", "ep_overlap")
    done = run(folder, "search", "llama.json", *PLACE, *wishes, "--framework", "nemo", "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    for entry in (plan["best"], *plan["alternatives"]):
        assert entry["plan"]["tp"] == 2
        assert entry["plan"]["pp"] <= 2
    assert "tp = 2" in plan["certificate"]["limits"]


DUALPIPE = ("--fix", "schedule=dualpipe-v", "--fix", "pp=8")
BAD_CONFIGS = {
    "malformed.json": '{"model_type": "llama",\n "hidden_size": }',
    "malformed.toml": 'name = "x"\nnum_layers = = 3\n',
    "list.json": "[1, 2]",
    "huge.json": json.dumps(LLAMA_CONFIG).replace("128256", "1e30"),
    "negative.json": json.dumps(LLAMA_CONFIG).replace("128256", "-5"),
    "zero.json": json.dumps(LLAMA_CONFIG).replace("128256", "0"),
    "nan.json": json.dumps(LLAMA_CONFIG).replace("128256", "NaN"),
    "infinite.json": json.dumps(LLAMA_CONFIG).replace("128256", "Infinity"),
    "text.json": json.dumps(LLAMA_CONFIG).replace("128256", '"many"'),
    "unknown.json": json.dumps(LLAMA_CONFIG).replace('"llama"', '"perceiver"'),
    "heads.json": json.dumps(LLAMA_CONFIG).replace('"num_attention_heads": 32', '"num_attention_heads": 33'),
}


FRAGMENTED = """
name = "lab"
device = "h100-sxm"
num_nodes = 4
devices_per_node = 8
levels = [{name = "nvlink", kind = "nvlink", num_devices = 8, bandwidth_gb_per_s = 450, latency_us = 1.6}]
nodes = [
    {names = ["a"], switches = ["left"]}, {names = ["b"], switches = ["right"]},
    {names = ["c"], switches = ["left"]}, {names = ["d"], switches = ["right"]},
]
[network]
kind = "infiniband"
nic_gb_per_s = 50
tiers = [{name = "leaf", num_nodes = 2, oversubscription = 8}]
"""


def test_the_nodes_of_a_fragmented_allocation_are_ordered_and_shown(folder: Path) -> None:
    (folder / "lab.toml").write_text(FRAGMENTED)
    place = ("--cluster", "lab.toml", "--global-batch", "64", "--seq-len", "4096", "--fix", "tp=8", "--fix", "pp=1")
    done = run(folder, "search", "llama.json", *place)
    assert done.returncode == 0, done.stderr
    assert "faster than in the listed order of the nodes" in " ".join(done.stdout.split())
    plan = json.loads((folder / "plan.json").read_text())
    order = plan["best"]["plan"]["placement"]
    assert [host["node"] for host in plan["hosts"]] == order
    assert abs(order.index("a") - order.index("c")) == 1  # the ring leaves each leaf once
    assert plan["listed_step_s"] > plan["best"]["step_s"]
    again = run(folder, "estimate", "plan.json", "--json")
    assert json.loads(again.stdout)["best"] == plan["best"]
    shown = run(folder, "estimate", "plan.json").stdout
    assert re.search(r"ranks +node +below +stages +replicas", shown)


def assert_refused(folder: Path, *arguments: str, says: str) -> None:
    before = sorted(path.name for path in folder.iterdir())
    done = run(folder, *arguments)
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("autoplan: ")
    assert re.search(says, done.stderr), done.stderr
    assert sorted(path.name for path in folder.iterdir()) == before


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("malformed.json", r"malformed\.json: not valid JSON.*line 2, column 17"),
        ("malformed.toml", r"malformed\.toml: not valid TOML.*line 2"),
        ("list.json", "must contain one table"),
        ("huge.json", r"vocab_size.*1e\+30"),
        ("negative.json", "vocab_size.*-5"),
        ("zero.json", "vocab_size.* 0"),
        ("nan.json", "(?i)vocab_size.*nan"),
        ("infinite.json", "(?i)vocab_size.*inf"),
        ("text.json", "vocab_size"),
        ("unknown.json", "perceiver"),
        ("heads.json", "33"),
    ],
)
def test_a_bad_model_file_is_one_line(folder: Path, name: str, says: str) -> None:
    (folder / name).write_text(BAD_CONFIGS[name])
    assert_refused(folder, "search", name, *PLACE, says=says)


def test_a_file_of_ten_gigabytes_is_not_read(folder: Path) -> None:
    with (folder / "big.json").open("wb") as stream:
        stream.truncate(10 * 10**9)
    assert_refused(folder, "search", "big.json", *PLACE, says="too large")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("no-such-model", *PLACE), "unknown model 'no-such-model'"),
        (("missing.json", *PLACE), "missing.json"),
        (("llama.json", *PLACE, "--cluster", "no-such:1x8"), "unknown cluster"),
        (("llama.json", *PLACE, "--cluster", "h100-sxm:0x8"), "at least 1"),
        (("llama.json", *PLACE, "--cluster", "h100-sxm:9999999x8"), "1000000"),
        (("llama.json", *PLACE, "--seq-len", "0"), "seq_len"),
        (("llama.json", *PLACE, "--seq-len", "-4"), "seq_len"),
        (("llama.json", *PLACE, "--seq-len", "1e30"), "--seq-len '1e30': write a whole number"),
        (("llama.json", *PLACE, "--seq-len", "nan"), "--seq-len 'nan': write a whole number"),
        (("llama.json", *PLACE, "--seq-len", "9" * 30), "--seq-len '9+': write a whole number"),
        (("llama.json", *PLACE, "--global-batch", "0"), "global batch"),
        (("llama.json", *PLACE, "--global-batch", "1e9"), "global batch"),
        (("llama.json", *PLACE, "--global-batch", "9:3"), "LOW"),
        (("llama.json", *PLACE, "--cluster", "h100-sxm:64x8", "--global-batch", "7"), "7 is not divisible.*nearest"),
        (("llama.json", *PLACE, "--cluster", "l40s:3x8", "--global-batch", "24", "--fix", "tp=3"), "heads 32.*tp 3"),
        (("llama.json", *PLACE, "--fix", "tp=3"), "divide the 8 devices"),
        (("llama.json", *PLACE, "--fix", "luck=3"), "unknown axis"),
        (("llama.json", *PLACE, "--max", "tp"), "AXIS=VALUE"),
        (("llama.json", *PLACE, "--fix", "tp=2,pp=2"), "names several axes: write --fix tp=2 --fix pp=2"),
        (("llama.json", *PLACE, "--max-tp", "0"), "whole number"),
        (("llama.json", *PLACE, "--fix", "tp=8", "--max-tp", "4"), "tp=8 is above --max tp=4"),
        (("llama.json", *PLACE, "--fix", "tp_overlap=on"), "tp_overlap_share is 0.*nemo"),
        (("llama.json", *PLACE, "--fix", "precision=fp8"), "use --precision"),
        (("llama.json", *PLACE, "--forbid", "luck"), "unknown; known: partial_recompute"),
        (("llama.json", *PLACE, "--precision", "bf17"), "bf17.*bf16"),
        (("llama.json", *PLACE, "--attention", "slow"), "flash.*slow"),
        (("llama.json", *PLACE, "--framework", "hai-llm"), "not known yet"),
        (("llama.json", *PLACE, "--framework", "tensorfold"), "unknown framework"),
        (("llama.json", *PLACE, "--framework", "nanotron", "--fix", "sharding=zero3"), "has no sharding zero3"),
        (("llama.json", *PLACE, "--fix", "schedule=zb-v"), "no schedule zb-v: it has 1f1b, interleaved"),
        (("llama.json", *PLACE, "--forbid", "schedule=zbv"), "did you mean schedule=zb-v"),
        (("llama.json", *PLACE, "--forbid", "cuda_graphs=all"), "of cuda_graphs there are cuda_graphs=none, "),
        (("llama.json", *PLACE, "--fix", "offload=optimizer", "--forbid", "offload"), "no other value of offload"),
        (
            ("llama.json", *PLACE, "--framework", "torchtitan", *DUALPIPE, "--fix", "micro_batch=2"),
            "needs 2 pp = 16 micro-batches",
        ),
        (("llama.json", *PLACE, "--timings", "hearsay"), "'hearsay': use aiconfigurator or db"),
        (("llama.json", *PLACE, "--reserve-memory", "4"), "unit"),
        (("llama.json", *PLACE, "--reserve-memory", "900GiB"), "reserved memory"),
        (("llama3.1-405b", *PLACE), r"no plan fits: .* GiB of 79\.1 GiB; it fits on [0-9]+ nodes of 8 devices"),
        (("llama.json", *PLACE, "--reserve-memory", "\u0664GiB"), "with its unit"),
        (("llama.json", *PLACE, "--tokens", "1T", "--deadline", "\u0663d"), "write a number above 0"),
        (("llama.json", *PLACE, "--tokens", "\u0663T"), "--tokens '\u0663T'"),
        (("llama.json", *PLACE, "--price", "\u0663"), "--price '\u0663'"),
        (("llama.json", *PLACE, "--pue", "0.5"), "at least 1, got 0.5"),
        (("llama.json", *PLACE, "--max", "tp=2", "--max-tp", "4"), "--max tp is given twice"),
        (("llama.json", *PLACE, "--sampler", "tpe", "--seed", "-1"), "seed must be from 0 to 4294967295, got -1"),
        (("llama.json", *PLACE, "--seed", "3"), "--seed needs a --sampler"),
        (("llama.json", *PLACE, "--out", "nowhere/plan.json"), "cannot be written"),
        (("llama.json", *PLACE, "--out", "/proc/plan.json"), "cannot be written"),
        (("llama.json", *PLACE, "--out", "."), "folder"),
    ],
)  # fmt: skip
def test_a_search_that_cannot_be_is_one_line(folder: Path, arguments: tuple[str, ...], says: str) -> None:
    assert_refused(folder, "search", *arguments, says=says)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("estimate", "llama.json"), "needs --cluster"),
        (("estimate", "llama.json", *PLACE, "--tp", "3"), "divide the 8 devices"),
        (("estimate", "llama.json", *PLACE, "--tp", "0"), "at least 1"),
        (("estimate", "llama.json", *PLACE, "--tp", "2.5"), "--tp '2.5': write a whole number"),
        (("estimate", "llama.json", *PLACE, "--pp", "2", "--layers", "8,9"), "add up to 17"),
        (("estimate", "llama.json", *PLACE, "--layers", "a"), "--layers"),
        (("estimate", "llama.json", *PLACE, "--schedule", "zb-v"), "zb-v"),
        (
            ("estimate", "llama.json", *PLACE, "--sharding", "zero9"),
            "sharding must be one of none, zero1, zero2, zero3, got 'zero9'",
        ),
        (("estimate", "llama.json", *PLACE, "--as", "nanotron"), "give --from FILE"),
        (("estimate", "llama.json", *PLACE, "--global-batch", "15"), "15 must be divisible"),
        (("estimate", "llama.json", *PLACE, "--ep", "2"), "experts"),
        (("estimate", "llama.json", *PLACE, "--tp", "2", "--tp-overlap"), "tp_overlap_share is 0"),
        (
            ("estimate", "llama.json", *PLACE, "--framework", "nanotron", "--rank-order", "tp-cp-ep-pp-dp"),
            "nanotron has no rank_order 'tp-cp-ep-pp-dp'",
        ),
        (("estimate", "llama.json", *PLACE, "--rank-order", "dp-tp"), "rank_order"),
        (("estimate", "llama.json", *PLACE, "--placement", "a,b"), "lists none"),
        (
            (
                "estimate",
                "llama.json",
                *PLACE,
                "--framework",
                "nemo",
                "--tp",
                "2",
                "--recompute",
                "none",
                "--pp",
                "2",
                "--vp",
                "2",
                "--global-batch",
                "2",
            ),
            "nemo does not support",
        ),
        (("estimate", "llama.json", *PLACE, "--framework", "torchtitan", "--ep", "2"), "torchtitan.*experts"),
        (("estimate", "llama.json", *PLACE, "--framework", "pytorch-fsdp", "--global-batch", "4"), "4 must be divis"),
        (("estimate", "llama.json", *PLACE, "--framework", "nanotron", "--pp", "8", "--vp", "4"), "16 layers"),
        (("estimate", "x" * 300 + ".json", *PLACE), "x.json: cannot be read: File name too long"),
        (("read", "x" * 300), "x: cannot be read: File name too long"),
        (("db", "info", "--db", "~nobody-here/timings.db"), "there is no such home folder"),
        (("explain", "\x1b[31m.json"), r"autoplan: \\x1b\[31m\.json: cannot be read"),
        (("export", "llama.json", "--to", "megatron-lm"), "llama.json is no plan file"),
        (("export", "missing.json", "--to", "megatron-lm"), "missing.json"),
        (("export", "llama.json", "--to", "abacus"), "unknown target"),
        (("schema", "weather"), "no schema"),
    ],
)
def test_other_bad_input_is_one_line(folder: Path, arguments: tuple[str, ...], says: str) -> None:
    assert_refused(folder, *arguments, says=says)


def test_a_plan_is_read_from_a_pipe(searched: Path) -> None:
    reading, writing = os.pipe()

    def write() -> None:
        with os.fdopen(writing, "wb") as stream:
            stream.write((searched / "plan.json").read_bytes())

    threading.Thread(target=write, daemon=True).start()
    done = run(searched, "explain", f"/dev/fd/{reading}")
    os.close(reading)
    assert done.returncode == 0, done.stderr  # a second read would find nothing


def test_a_plan_is_written_to_a_name_that_is_no_text(folder: Path) -> None:
    name = os.fsdecode(b"plan\xff.json")
    assert run(folder, "estimate", "llama.json", *PLACE, "--out", name).returncode == 0
    assert json.loads((folder / name).read_text())["command"].endswith("--out 'plan\\udcff.json'")


def test_a_plan_file_of_another_version_is_refused(searched: Path, tmp_path: Path) -> None:
    table = json.loads((searched / "plan.json").read_text())
    (tmp_path / "new.json").write_text(json.dumps(table | {"schema_version": 99}))
    assert_refused(tmp_path, "export", "new.json", "--to", "megatron-lm", says="schema_version is 99")


@pytest.mark.parametrize(
    "arguments", [("search", "llama.json"), ("fly",), ("search", "llama.json", *PLACE, "--no-such-flag")]
)
def test_wrong_usage_exits_with_two(folder: Path, arguments: tuple[str, ...]) -> None:
    done = run(folder, *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Usage: autoplan" in done.stderr


@pytest.mark.parametrize("kind", ["model", "cluster", "framework", "training", "plan"])
def test_schemas_are_printed(folder: Path, kind: str) -> None:
    done = run(folder, "schema", kind)
    assert done.returncode == 0
    assert json.loads(done.stdout)["$defs"]


def test_an_interrupt_exits_with_130_and_writes_nothing(folder: Path) -> None:
    program = "import sys; from autoplan.cli import main; print('ready', file=sys.stderr, flush=True); main()"
    arguments = ("deepseek-v3", "--cluster", "h100-sxm:256x8", "--seq-len", "4096", "--global-batch", "1024:99999")
    process = subprocess.Popen(
        [sys.executable, "-c", program, "search", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "ready\n"
    time.sleep(0.5)  # of a search that takes many times as long
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert out == ""
    assert err == "autoplan: interrupted: files are whole or not there, what a database took is kept\n"
    assert not (folder / "plan.json").exists()


def modules_after(folder: Path, *arguments: str) -> set[str]:
    program = (
        "import sys\n"
        f"sys.argv = ['autoplan', *{list(arguments)!r}]\n"
        "from autoplan.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print('\\n' + ' '.join(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_a_search_loads_no_heavy_library(folder: Path) -> None:
    loaded = modules_after(folder, "search", "llama.json", *PLACE)
    assert "numpy" in loaded
    heavy = {"optuna", "torch", "scipy", "sqlalchemy", "plotly", "transformers", "pandas", "alembic", "networkx"}
    assert not heavy & loaded
    assert {f"autoplan.cli.{name}" for name in COMMANDS} & loaded == {"autoplan.cli.search"}


def test_help_loads_next_to_nothing(folder: Path) -> None:
    for arguments in (("--help",), ("search", "--help"), ("--version",)):
        assert not {"numpy", "optuna", "msgspec", "rich"} & modules_after(folder, *arguments)


def test_expert_traffic_beside_another_micro_batch_is_priced_and_exported(tmp_path: Path) -> None:
    asked = ("estimate", "mixtral-8x7b", "--cluster", "h100-sxm:4x8", "--global-batch", "64", "--seq-len", "4096")
    degrees = ("--pp", "4", "--vp", "2", "--ep", "8", "--quiet")
    steps = []
    for name, more in (("plain.json", ()), ("overlapped.json", ("--ep-overlap",))):
        done = run(tmp_path, *asked, *degrees, *more, "--out", name)
        assert done.returncode == 0, done.stderr
        steps.append(decode(PlanFile, read_table(tmp_path / name), name).best.step_s)
    assert steps[1] < steps[0]
    script = run(tmp_path, "export", "overlapped.json", "--to", "megatron-lm").stdout
    assert "--overlap-moe-expert-parallel-comm" in script
    refused = run(tmp_path, *asked, "--ep", "8", "--ep-overlap", "--framework", "torchtitan", "--sharding", "zero2")
    assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
    assert "ep_overlap is known of megatron-lm and primus only" in refused.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
@pytest.mark.parametrize("arguments", [("schema", "plan"), ("topo", "h100-sxm:2x8"), ("--version",)])
def test_a_full_disk_behind_standard_output_is_one_line(arguments: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*AUTOPLAN, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "autoplan: standard output cannot be written: No space left on device\n"


def test_of_level_plans_it_is_said_which_goes_first_and_why(searched: Path) -> None:
    best = decode(PlanFile, read_table(searched / "plan.json"), "plan.json").best
    assert why_first(best, best).endswith("the simpler plan wins")
    assert why_first(best, best, keeps_today=True).endswith("the plan with the fewest changes wins")


def test_a_page_of_a_priced_plan_says_nothing_of_other_plans(tmp_path: Path) -> None:
    asked = ("llama3-70b", "--cluster", "h100-sxm:1x8", "--global-batch", "8", "--seq-len", "4096", "--tp", "8")
    assert run(tmp_path, "estimate", *asked, "--out", "large.json", "--quiet").returncode == 0
    assert run(tmp_path, "report", "large.json", "--out", "large.html", "--quiet").returncode == 0
    page = (tmp_path / "large.html").read_text()
    assert "This plan does not fit (risk 100.0 %)" in page
    assert "No plan fits safely" not in page
