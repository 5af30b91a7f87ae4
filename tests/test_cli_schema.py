"""Does every command print JSON, and as its schema says?"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jsonschema
import pytest
import typer

from autoplan.api import doctor
from autoplan.api.outputs import Profiled
from autoplan.api.schemas import FILES, KINDS, PRINTED
from autoplan.base.files import encode
from autoplan.cli import COMMANDS, make_app
from autoplan.profiler.store import open_store
from autoplan.spec.calibration import Calibration
from autoplan.spec.plan import ParallelPlan
from autoplan.trainer.task import Command, PredictedRun, RunFile, Task, TrainingReport
from commands import run
from search_cases import DENSE
from stores import GEMM, some_records
from test_calibration import measured_under, table_of

PLACE = ("llama3-8b", "--cluster", "h100-sxm:2x8", "--global-batch", "32", "--seq-len", "4096")
PLAIN = {"new", "schema", "report"}  # one prints a schema, which is JSON, the other writes a page


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("printed")
    assert run(path, "search", *PLACE, "--quiet").returncode == 0
    assert run(path, "export", "plan.json", "--to", "megatron-lm", "--out", "launch").returncode == 0
    table_of(path / "runs.csv", measured_under(Calibration(overall=1.5))[::6])
    with open_store(str(path / "a.db")) as store:
        store.add([GEMM, *some_records(1, 2)])
    return path


def validate(folder: Path, kind: str, text: str) -> Any:
    value = json.loads(text)
    printed = run(folder, "schema", kind)
    assert printed.returncode == 0
    schema = json.loads(printed.stdout)
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(value, schema)
    return value


@pytest.mark.parametrize(
    ("command", "rest"),
    [
        ("estimate", (*PLACE, "--tp", "2")),
        ("explain", ("plan.json", "--versus", "tp=2,recompute=full")),
        ("explain", ("plan.json", "--timings")),
        ("compare", (*PLACE, "--cluster", "a100-sxm:2x8")),
        ("export", ("plan.json", "--to", "megatron-lm")),
        ("export", ("plan.json", "--to", "megatron-lm", "--out", "again")),
        ("read", ("launch/launch.sh",)),
        ("predict", ("--runs", "runs.csv", "--out", "said.csv")),
        ("score", ("--runs", "runs.csv")),
        ("calibrate", ("--runs", "runs.csv", "--out", "mine.toml")),
        ("discover", ()),
        ("topo", ("h100-sxm:2x8", "--plan", "plan.json")),
        ("topo", ("h100-sxm:2x8+a100-sxm:4x8",)),
        ("db info", ("--db", "a.db")),
        ("db list", ("--db", "a.db")),
        ("db list", ("--db", "a.db", "--runs")),
        ("db show", (GEMM.key[:12], "--db", "a.db")),
        ("db push", ("b.db", "--db", "a.db")),
        ("db pull", ("a.db", "--db", "c.db")),
        ("db export", ("a.jsonl.gz", "--db", "a.db")),
        ("db check", ("--db", "a.db")),
        ("db report", ("--db", "a.db", "--for", "plan.json")),
        ("db hide", (GEMM.key[:12], "--reason", "hot", "--db", "a.db")),
        ("db approve", (GEMM.key[:12], "--reason", "cool", "--db", "a.db")),
        ("db import", ("a.jsonl.gz", "--db", "d.db")),
    ],
)
def test_what_is_printed_obeys_its_schema(folder: Path, command: str, rest: tuple[str, ...]) -> None:
    if command == "db import":
        assert run(folder, "db", "export", "a.jsonl.gz", "--db", "a.db", "--force").returncode == 0
    done = run(folder, *command.split(), *rest, "--json")
    assert done.returncode == 0, done.stderr
    validate(folder, PRINTED[command], done.stdout)


def test_a_search_prints_its_plan_file(folder: Path) -> None:
    done = run(folder, "search", *PLACE, "--json", "--out", "again.json")
    validate(folder, "plan", done.stdout)
    assert done.stdout == (folder / "again.json").read_text()


@pytest.mark.parametrize("kind", ["models", "clusters", "devices", "frameworks", "targets"])
def test_a_list_obeys_its_schema(folder: Path, kind: str) -> None:
    printed = run(folder, "list", kind, "--json").stdout
    validate(folder, "list", printed)
    assert len(json.loads(printed)) > 8


def test_a_checkup_obeys_its_schema(folder: Path) -> None:
    with mock.patch.object(doctor, "_version", return_value=""):  # torch takes long to answer
        validate(folder, "doctor", run(folder, "doctor", "--json").stdout)


def test_a_run_and_a_profile_obey_theirs(folder: Path) -> None:
    plan = ParallelPlan(global_batch=4, dp_shard=2)
    predicted = PredictedRun(device="cpu", step_s=1.0, low_s=0.9, high_s=1.1, terms_s={"gemm": 1.0}, peak_bytes=1e9)
    measured = TrainingReport(losses=(1.0, 0.5), step_s=(1.0, 1.1), device="cpu")
    task = Task(model=DENSE, plan=plan, seq_len=128, dtype="fp32")
    command = Command(
        model=DENSE, plan=plan, seq_len=128, arguments=("a",), log_of="nemo", times_from="step", num_steps=3
    )
    for kind in (task, command):
        validate(folder, "run", encode(RunFile(task=kind, predicted=predicted, measured=measured)))
    profiled = Profiled(planned=3, outcomes={"gemm": {"ok": 2}}, elapsed_s=1.0, left=1)
    validate(folder, "profile", encode(profiled))


def test_what_breaks_a_schema_is_found(folder: Path) -> None:
    value = json.loads(run(folder, "explain", "plan.json", "--json").stdout)
    for broken in (value | {"plan": 3}, value | {"colour": "red"}, {"binds": []}):
        with pytest.raises(jsonschema.ValidationError):
            validate(folder, "explain", json.dumps(broken))


def commands(app: typer.Typer, above: str = "") -> Iterator[tuple[str, set[str]]]:
    """(name, options) of every command."""
    click = typer.main.get_command(app)
    for name, command in sorted(getattr(click, "commands", {}).items()):
        if inner := getattr(command, "commands", None):
            for below, subcommand in sorted(inner.items()):
                yield f"{above}{name} {below}", {option for param in subcommand.params for option in param.opts}
        else:
            yield f"{above}{name}", {option for param in command.params for option in param.opts}


def test_every_command_prints_json_and_has_a_schema() -> None:
    named = dict(commands(make_app(COMMANDS)))
    assert set(PRINTED) == set(named) - PLAIN
    for name in PRINTED:
        assert "--json" in named[name], name
    assert set(KINDS) == set(FILES) | set(PRINTED.values())
