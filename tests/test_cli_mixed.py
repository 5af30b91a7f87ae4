"""What does the command line answer where a cluster has different parts?"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from autoplan.base.files import decode, read_table
from autoplan.base.units import format_bytes
from autoplan.spec.explanation import MixedExplanation
from autoplan.spec.plan_file import MixedPlanFile
from commands import run
from model_specs import LLAMA_CONFIG

MIXED = ("--cluster", "h100-sxm:1x4+a100-sxm:1x4", "--global-batch", "16", "--seq-len", "4096")


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which one search on a mixed cluster has run."""
    folder = tmp_path_factory.mktemp("searched")
    (folder / "llama.json").write_text(json.dumps(LLAMA_CONFIG))
    done = run(folder, "search", "llama.json", *MIXED)
    assert done.returncode == 0, done.stderr
    (folder / "stdout").write_text(done.stdout)
    (folder / "stderr").write_text(done.stderr)
    return folder


def test_a_mixed_search_shows_stages_on_their_parts_and_how_sure_it_is(searched: Path) -> None:
    shown = " ".join((searched / "stdout").read_text().split())
    assert shown.startswith("llama on 1 x 4 h100-sxm + 1 x 4 a100-sxm, bf16, 4,096 tokens, global batch 16")
    for word in ("plan ", "time ", "90 % interval", "h100-sxm tp", "a100-sxm", "micro-batch", "each part", "proven"):
        assert word in shown
    assert "wrote plan.json" in (searched / "stderr").read_text()


def test_clusters_that_a_comma_joins_are_refused_with_the_way_out(searched: Path) -> None:
    done = run(
        searched, "search", "llama.json", "--cluster", "h100-sxm:1x4,a100-sxm:1x2", *MIXED[2:], "--out", "x.json"
    )
    assert done.returncode == 1
    assert done.stderr.endswith("clusters are joined by +, as in h100-sxm:1x4+a100-sxm:1x2\n")


def test_a_mixed_plan_file_is_priced_again_to_the_same_step(searched: Path) -> None:
    file = decode(MixedPlanFile, read_table(searched / "plan.json"), "plan.json")
    assert file.best.plan.global_batch == 16
    again = run(searched, "estimate", "plan.json", "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["best"] == json.loads((searched / "plan.json").read_text())["best"]


NODES = ("--cluster", "h100-sxm:1x8+a100-sxm:1x8", "--global-batch", "128", "--seq-len", "4096")


def test_a_search_without_a_target_answers_with_what_the_usual_one_starts(searched: Path) -> None:
    """FlagScale starts unlike tensor-parallel degrees, which Megatron-LM does not: its plan is not the answer."""
    more = ("--cluster", "h100-sxm:1x8+a100-sxm:2x8", *NODES[2:], "--to", "megatron-lm@flagscale", "--fix", "pp=2")
    usual, other = (
        run(searched, "search", "llama.json", *words, "--out", f"{name}.json")
        for name, words in (("usual", NODES), ("other", more))
    )
    assert (usual.returncode, other.returncode) == (0, 0), usual.stderr + other.stderr
    assert "next:  autoplan export usual.json --to megatron-lm --out launch" in usual.stdout
    assert run(searched, "export", "usual.json", "--to", "megatron-lm").returncode == 0
    done = run(searched, "export", "other.json", "--to", "megatron-lm")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert re.search("Megatron-LM cannot start the plan: its .*; search with --to megatron-lm", done.stderr)


def test_a_launch_file_supplies_the_problem_and_is_compared(searched: Path) -> None:
    """Half of the ranks of a plan for 16 H100 are on A100 today, which pace it."""
    words = ("--cluster", "h100-sxm:2x8", *NODES[2:], "--fix", "pp=2", "--fix", "tp=2", "--to", "megatron-lm")
    assert run(searched, "search", "llama.json", *words, "--out", "equal.json").returncode == 0
    assert run(searched, "export", "equal.json", "--to", "megatron-lm", "--out", "today").returncode == 0
    done = run(searched, "search", "--from", "today/launch.sh", *NODES[:2], "--out", "from.json")
    assert done.returncode == 0, done.stderr
    assert "global batch 128" in " ".join(done.stdout.split())
    file = decode(MixedPlanFile, read_table(searched / "from.json"), "from.json")
    assert file.today is not None
    assert file.today.cost is not None
    stages = [stage for kind in file.today.cost.plan.kinds for stage in kind.stages]
    assert ({stage.part for stage in stages}, {stage.tp for stage in stages}) == ({0, 1}, {2})
    assert file.today.cost.plan.num_devices == 16
    times = file.best.sequences_per_s / file.today.cost.sequences_per_s
    assert times > 1
    assert f"the plan is {times:.2f} times as fast" in " ".join(done.stdout.split())
    unlike = ("--cluster", "h100-sxm:1x8+a100-sxm:1x4", "--out", "x.json")
    done = run(searched, "search", "--from", "today/launch.sh", *unlike)
    assert done.returncode == 1
    assert "unlike numbers of devices, which a launch file does not tell" in done.stderr


def test_a_range_of_batches_has_the_one_with_the_highest_rate(searched: Path) -> None:
    """12 replicas of equal batches do not share 16 sequences, so a target that needs that idles nodes at 16."""
    words = ("--cluster", "h100-sxm:1x4+a100-sxm:1x8", "--seq-len", "4096", "--to", "deepspeed", "--force", "--quiet")
    rates = {}
    for batch in ("16", "12", "12:16"):
        done = run(searched, "search", "llama.json", *words, "--global-batch", batch, "--out", "range.json")
        assert done.returncode == 0, done.stderr
        best = decode(MixedPlanFile, read_table(searched / "range.json"), "range.json").best
        rates[batch] = best.sequences_per_s
    assert rates["12:16"] == max(rates.values())


def test_a_search_for_a_target_finds_a_plan_that_it_starts(searched: Path) -> None:
    done = run(searched, "search", "llama.json", *NODES, "--to", "megatron-lm", "--out", "even.json")
    assert done.returncode == 0, done.stderr
    assert "next:  autoplan export even.json --to megatron-lm" in done.stdout
    done = run(searched, "export", "even.json", "--to", "megatron-lm", "--out", "launch")
    assert done.returncode == 0, done.stderr
    assert "--pipeline-model-parallel-layout" in (searched / "launch/launch.sh").read_text()


def test_a_plan_of_adapters_says_so_and_is_exported_to_what_was_searched_for(tmp_path: Path) -> None:
    words = ("--cluster", "h100-sxm:1x2+a100-sxm:1x2", "--global-batch", "8", "--seq-len", "1024", "--lora-rank", "8")
    done = run(tmp_path, "search", "llama3.2-1b", *words, "--to", "axolotl")
    assert done.returncode == 0, done.stderr
    assert "trains    LoRA of rank 8" in done.stdout
    assert "next:  autoplan export plan.json --to axolotl" in done.stdout
    assert run(tmp_path, "report", "plan.json", "--out", "plan.html").returncode == 0
    assert "LoRA of rank 8" in (tmp_path / "plan.html").read_text()


@pytest.mark.parametrize("columns", [60, 80, 140])
def test_an_explanation_tells_every_stage_on_its_own_devices(searched: Path, columns: int) -> None:
    done = run(searched, "explain", "plan.json", COLUMNS=str(columns))
    assert done.returncode == 0, done.stderr
    assert max(len(line) for line in done.stdout.splitlines()) <= columns
    for words in (
        "matrix products",
        "all",
        "memory",
        "free",
        "fullest",
        "searched",
        "one change",
        "why the next best lost",
    ):
        assert words in done.stdout
    file = decode(MixedPlanFile, read_table(searched / "plan.json"), "plan.json")
    if columns == 140:
        for kind in file.best.kinds:
            assert all(format_bytes(stage.memory_bytes) in done.stdout for stage in kind.stages)


def test_an_explanation_as_json_holds_stages_with_their_places(searched: Path) -> None:
    done = run(searched, "explain", "plan.json", "--json", "--trace", "explained.json", "--quiet")
    assert done.returncode == 0, done.stderr
    found = decode(MixedExplanation, json.loads(done.stdout), "explanation")
    file = decode(MixedPlanFile, read_table(searched / "plan.json"), "plan.json")
    assert found.plan == file.best
    priced = [stage for kind in file.best.kinds for stage in kind.stages]
    assert [stage.cost.memory_bytes for stage in found.stages] == [stage.memory_bytes for stage in priced]
    assert [stage.place.capacity_bytes for stage in found.stages] == [stage.capacity_bytes for stage in priced]
    assert json.loads((searched / "explained.json").read_text())["otherData"]["step_s"] == pytest.approx(
        file.best.step_s
    )


def test_estimate_writes_the_trace_and_the_memory_of_a_mixed_plan(searched: Path) -> None:
    done = run(searched, "estimate", "plan.json", "--trace", "step.json", "--out", "again.json", "--memory")
    assert done.returncode == 0, done.stderr
    assert "wrote step.json: open it in ui.perfetto.dev" in done.stderr
    assert "optimizer states" in done.stdout
    trace = json.loads((searched / "step.json").read_text())
    assert trace["otherData"]["plan"].startswith(tuple("123456789"))
    first, again = (json.loads((searched / name).read_text())["best"] for name in ("plan.json", "again.json"))
    assert first == again


def test_a_mixed_plan_has_a_page(searched: Path) -> None:
    done = run(searched, "report", "plan.json")
    assert done.returncode == 0, done.stderr
    page = (searched / "report.html").read_text()
    sections = re.findall(r'<section[^>]* id="(\w+)"', page)
    assert sections == ["answer", "time", "schedule", "memory", "plans", "parts", "sources", "next"]
    file = decode(MixedPlanFile, read_table(searched / "plan.json"), "plan.json")
    content = json.loads(
        page.partition('<figure class="chart gantt">')[2].partition('class="content">')[2].partition("</")[0]
    )
    assert content["step_s"] == pytest.approx(file.best.step_s)
    assert len(content["rows"]) == sum(len(kind.stages) for kind in file.best.kinds)
    for part in file.cluster.parts:
        assert f"Drawing of {part.name}" in page


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("explain", "plan.json", "--versus", "tp=2"), "--versus does not support mixed clusters"),
        (("replan", "plan.json", "--nodes", "1"), "name lost nodes with --without PART:NUMBER"),
        (("estimate", "plan.json", "--verify-memory"), "--verify-memory does not support mixed clusters"),
        (
            ("search", "llama.json", *MIXED, "--sampler", "tpe", "--force"),
            "--sampler tpe tries degrees on equal nodes",
        ),
        (
            ("search", "llama.json", *MIXED, "--workers", "2", "--study", "one"),
            "--workers and --study: a mixed cluster is searched by one process",
        ),
        (("search", "llama.json", *MIXED, "--forbid", "zero2", "--force"), "unknown; did you mean sharding=zero2"),
        (("search", "llama.json", *MIXED, "--forbid", "a plan", "--force"), "unknown; known: partial_recompute"),
        (("search", "llama.json", *MIXED[:3], "16:8", *MIXED[4:], "--force"), "LOW must not exceed HIGH"),
        (("search", "llama.json", *MIXED, "--why", "--tokens", "1T", "--force"), "without --from, --robust and --why"),
        (("estimate", "llama.json", *MIXED), "a mixed cluster, which only autoplan search supports"),
        (("estimate", "plan.json", "--tp", "2"), "a plan file is priced unchanged, without --tp"),
        (("search", "llama.json", "--cluster", "h100-sxm:1x4+", *MIXED[2:], "--force"), "cluster '' is neither"),
    ],
)
def test_what_a_mixed_cluster_does_not_take_is_one_line(searched: Path, arguments: tuple[str, ...], says: str) -> None:
    done = run(searched, *arguments)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert says in done.stderr


def test_schemas_of_mixed_files_are_printed(searched: Path) -> None:
    for kind in ("mixed-cluster", "mixed-plan"):
        assert "properties" in run(searched, "schema", kind).stdout
