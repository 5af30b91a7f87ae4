from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from autoplan.api.training_run import parse_sizes
from autoplan.base.errors import AutoplanError, InputError
from autoplan.base.files import decode
from autoplan.base.values import parse_tokens
from autoplan.cli import make_app
from autoplan.spec.plan_file import PlanFile
from model_specs import LLAMA_CONFIG

SEARCH = ("--cluster", "h100-sxm:2x4", "--global-batch", "16", "--seq-len", "4096", "--force", "--quiet")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "llama.json").write_text(json.dumps(LLAMA_CONFIG))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def run(*arguments: str) -> None:
    make_app()([arguments[0], "llama.json", *arguments[1:]], standalone_mode=False, obj={})


def plan_file() -> PlanFile:
    return decode(PlanFile, json.loads(Path("plan.json").read_text()), "plan.json")


def test_tokens_and_sizes_are_read() -> None:
    assert [parse_tokens(text) for text in ("15T", "300b", "2e12", "1.5M", "7")] == [15e12, 3e11, 2e12, 1.5e6, 7]
    for text in ("", "T", "-1T", "0", "15 T", "nan"):
        with pytest.raises(InputError, match="--tokens"):
            parse_tokens(text)
    assert parse_sizes("4,8") == (4, 8)
    assert parse_sizes("8:12") == (8, 10, 12)
    for text in ("8:4", "0:4", "a:b", "1:2:3", ":"):
        with pytest.raises(InputError, match="--nodes"):
            parse_sizes(text)


def test_the_cheapest_size_for_a_deadline(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("search", *SEARCH, "--objective", "cost-per-token", "--price", "2.5", "--tokens", "10B", "--nodes", "1:2")
    shown = capsys.readouterr().out
    for words in (
        "goodput",
        "per million tokens",
        "J per token",
        "device hours, failures included",
        "node counts",
    ):
        assert words in shown
    file = plan_file()
    assert file.run is not None
    assert file.run.objectives == ("cost-per-token",)
    assert file.run.best.plan == file.best
    assert file.cluster.price_per_device_hour == 2.5
    assert file.cluster.num_nodes == file.run.best.num_nodes
    figures = file.run.best.figures
    assert figures.cost == pytest.approx(2.5 * (figures.device_hours or 0))
    make_app()(["estimate", "plan.json", "--json"], standalone_mode=False, obj={})
    assert json.loads(capsys.readouterr().out)["best"]["step_s"] == pytest.approx(file.best.step_s)


def test_a_front_is_shown_and_kept(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("search", *SEARCH, "--objective", "step-time", "--objective", "memory-headroom")
    shown = capsys.readouterr().out
    assert "plans is better in time and memory, under this model" in " ".join(shown.split())
    assert "Pareto front of step-time, memory-headroom" in shown
    front = plan_file().run.front  # type: ignore[union-attr]
    assert len(front) > 3
    times, memory = [point.plan.step_s for point in front], [point.plan.memory_bytes for point in front]
    assert times == sorted(times)
    assert memory == sorted(memory, reverse=True)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--objective", "cost-per-token"), "price_per_device_hour"),
        (("--objective", "time-to-tokens"), "--tokens"),
        (("--objective", "tokens"), "--gpu-hours"),
        (("--objective", "speed"), "unknown"),
        (("--deadline", "30d"), "tokens"),
        (("--price", "-1"), "--price"),
        (("--nodes", "1", "--max-nodes", "2"), "leave one of them out"),
        (("--tokens", "15T", "--deadline", "1h"), "the deadline is 1.00 h"),
        (("--gpu-hours", "x"), "--gpu-hours"),
    ],
)
def test_what_is_missing_or_wrong_is_one_line(folder: Path, flags: tuple[str, ...], says: str) -> None:
    with pytest.raises(AutoplanError, match=says) as caught:
        run("search", *SEARCH, *flags)
    assert "\n" not in str(caught.value)
    assert not Path("plan.json").exists()


def test_listed_nodes_have_no_other_sizes_and_missing_power_is_named(folder: Path) -> None:
    text = 'name = "lab"\ndevice = "a100-sxm"\nnum_nodes = 2\ndevices_per_node = 4\n'
    levels = '[[levels]]\nname = "n"\nkind = "nvlink"\nnum_devices = 4\nbandwidth_gb_per_s = 300\nlatency_us = 1.6\n'
    network = '[network]\nkind = "infiniband"\nnic_gb_per_s = 25\n'
    Path("lab.toml").write_text(text + levels + network)
    flags = ("--cluster", "lab.toml", *SEARCH[2:])
    with pytest.raises(InputError, match=r"power_w.*\[host\]"):
        run("search", *flags, "--objective", "energy-per-token")
    Path("lab.toml").write_text(text + levels + network + '[[faults]]\nnode = 0\npart = "nic"\nrate_share = 0.5\n')
    with pytest.raises(InputError, match="a cluster file for each size"):
        run("search", *flags, "--nodes", "1,2")
    with pytest.raises(InputError, match="write how many there are of each part"):
        run("search", "--cluster", "h100-sxm:1x4+a100-sxm:1x4", *SEARCH[2:], "--tokens", "1T", "--nodes", "1")


def test_a_run_on_unlike_nodes_has_the_figures_of_all_sets_of_parts(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--cluster", "h100-sxm:1x2+a100-sxm:1x2", *SEARCH[2:])
    run("search", *flags, "--tokens", "1T", "--price", "h100-sxm=1,a100-sxm=9", "--objective", "cost-per-token")
    shown = " ".join(capsys.readouterr().out.split())
    for words in ("goodput", "cost ", "per million tokens", "parts ", "1 x 2 h100-sxm + 1 x 2 a100-sxm"):
        assert words in shown
    report = json.loads(Path("plan.json").read_text())["run"]
    assert report["best"]["parts"] == "1 x 2 h100-sxm"
    assert len(report["outcomes"]) == 3


def test_clusters_side_by_side(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--cluster", "h100-sxm:1x4", "--cluster", "a100-sxm:1x4", "--global-batch", "16", "--seq-len", "4096")
    prices = ("--price", "2", "--price", "a100-sxm:1x4=1")
    run("compare", *flags, *prices, "--nodes", "1,2", "--tokens", "10B", "--svg", "rates.svg")
    shown = capsys.readouterr().out
    for words in ("cluster", "cost/M tokens", "fastest", "cheapest", "least energy", "done first"):
        assert words in shown
    root = ElementTree.fromstring(Path("rates.svg").read_text())
    assert len([element for element in root.iter() if element.tag.endswith("circle")]) == 4
    run("compare", *flags, *prices, "--json")
    rows = json.loads(capsys.readouterr().out)
    assert [row["cluster"] for row in rows] == ["h100-sxm:1x4", "a100-sxm:1x4"]
    rate = [row["outcome"]["best"]["figures"]["tokens_per_s"] for row in rows]
    cost = [row["outcome"]["best"]["figures"]["cost_per_token"] for row in rows]
    assert rate[0] > rate[1]
    assert cost[0] / cost[1] == pytest.approx(2 * rate[1] / rate[0])
    listed = ",".join(prices[1::2])
    run("compare", *flags, "--price", listed, "--json")
    assert json.loads(capsys.readouterr().out) == rows
    with pytest.raises(InputError, match="b200 is not one of the clusters"):
        run("compare", *flags, "--price", f"{listed},b200=3")
    with pytest.raises(InputError, match="given twice"):
        run("compare", *flags, "--price", "3", "--price", "4")
