"""Are templates read strictly, filled word by word, and are answers of schedulers understood?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoplan.base.errors import InputError
from autoplan.base.files import read_table
from autoplan.jobs.template import MEANINGS, PLACEHOLDERS, JobTemplate, _pattern, job_template_schema, load_job_template

FOLDER = Path(__file__).parent.parent / "autoplan" / "presets" / "jobs"
SLURM = load_job_template("slurm")
KUBERNETES = load_job_template("kubernetes")
VALUES = dict.fromkeys(PLACEHOLDERS, "x")


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.toml")), ids=lambda path: path.stem)
def test_shipped_templates_are_whole_and_as_their_schema_says(path: Path) -> None:
    template = load_job_template(path.stem)
    assert template.launcher
    assert template.submission(VALUES)
    assert not [word for word in template.submission(VALUES) if "{" in word]
    jsonschema.validate(read_table(path), job_template_schema())


@pytest.mark.parametrize(
    ("line", "meaning"),
    [
        ("j|7|PENDING|Resources", "waiting"),
        ("j|7|PENDING|Nodes required for job are DOWN, DRAINED or reserved", "waiting"),
        ("j|7|RUNNING|None", "running"),
        ("j|7|COMPLETED|None", "done"),
        ("j|7|COMPLETED", "done"),
        ("j|7|FAILED|NonZeroExitCode", "failed"),
        ("j|7|CANCELLED by 1000", "cancelled"),
        ("j|7|TIMEOUT|TimeLimit", "time limit"),
        ("j|7|OUT_OF_MEMORY|OutOfMemory", "out of memory"),
        ("j|7|PREEMPTED|None", "preempted"),
        ("j|7|NODE_FAIL|NodeDown", "node failure"),
    ],
)
def test_answers_of_slurm(line: str, meaning: str) -> None:
    rows = SLURM.read_rows("squeue", line + "\n")
    assert [(row.job, row.id) for row in rows] == [("j", "7")]
    assert SLURM.meaning(rows)[0] == meaning


# Of Slurm 23.11 and 24.05, as `history` asks, with our names for the jobs.
ACCOUNTING = """\
autoplan-1|239023|COMPLETED
autoplan-2|239024|CANCELLED by 54321
autoplan-3|239025|OUT_OF_MEMORY
autoplan-4|239026|REQUEUED
autoplan-5|239027|RUNNING
autoplan-6|239028|CANCELLED
"""
# As a template without --allocations is answered.
STEPS = """\
autoplan-1|239023|FAILED
batch|239023.batch|FAILED
extern|239023.extern|COMPLETED
bash|239023.0|CANCELLED by 54321
"""


def test_what_the_accounting_of_slurm_says() -> None:
    rows = SLURM.read_rows("sacct", ACCOUNTING)
    assert [row.id for row in rows] == [str(id_) for id_ in range(239023, 239029)]
    means = [SLURM.meaning([row])[0] for row in rows]
    assert means == ["done", "cancelled", "out of memory", "waiting", "running", "cancelled"]
    assert [(row.job, row.state) for row in SLURM.read_rows("sacct", STEPS)] == [("autoplan-1", "FAILED")]
    assert SLURM.read_rows("sacct", "") == []
    assert SLURM.is_busy("sacct: error: Problem talking to the database: Connection refused")
    assert not SLURM.is_busy("Slurm accounting storage is disabled")


@pytest.mark.parametrize(
    ("pods", "meaning"),
    [
        ([], "waiting"),
        (["<none> Pending <none> ContainerCreating <none> <none>"], "waiting"),
        (["<none> Pending <none> <none> <none> <none>", "<none> Running <none> <none> <none> <none>"], "running"),
        (["<none> Failed Error <none> <none> <none>"], "failed"),
        (["<none> Failed Error <none> <none> <none>", "<none> Failed OOMKilled <none> <none> <none>"], "out of memory"),
        (["<none> Failed Error <none> PreemptionByScheduler <none>"], "preempted"),
        (["<none> Failed <none> <none> DeletionByTaintManager NodeLost"], "node failure"),
        (["<none> Failed <none> <none> <none> DeadlineExceeded"], "time limit"),
    ],
)
def test_answers_of_kubernetes(pods: list[str], meaning: str) -> None:
    lines = [
        "autoplan-1   <none>   <none>   <none>   <none>   <none>   <none>",
        *(f"autoplan-1   {pod}" for pod in pods),
    ]
    rows = KUBERNETES.read_rows("kubectl", "\n".join(lines))
    assert {row.job for row in rows} == {"autoplan-1"}
    assert KUBERNETES.meaning(rows)[0] == meaning
    ended = KUBERNETES.read_rows("kubectl", "autoplan-1 Completed <none> <none> <none> <none> <none>")
    assert KUBERNETES.meaning(ended) == ("done", "Kubernetes: Completed")


@given(values=st.fixed_dictionaries(dict.fromkeys(PLACEHOLDERS, st.text())), options=st.lists(st.text()))
def test_what_is_filled_in_stays_one_word_whatever_it_is(values: dict[str, str], options: list[str]) -> None:
    template = replace(SLURM, submit=("sbatch", "{folder}", "--x={job},{log}", "{options}", "{.items[*]} {}"))
    filled = [values["folder"], f"--x={values['job']},{values['log']}", *options, "{.items[*]} {}"]
    assert template.submission(values, options) == ["sbatch", *filled]


def test_one_question_is_for_all_jobs_or_for_each() -> None:
    jobs = [{**VALUES, "job": "a", "id": "1"}, {**VALUES, "job": "b", "id": "2"}]
    assert [words[2] for words in SLURM.questions("poll", jobs)] == ["--name=a,b"]
    each = replace(SLURM, poll=("qstat", "{id}"))
    assert list(each.questions("poll", jobs)) == [["qstat", "1"], ["qstat", "2"]]
    assert list(SLURM.questions("poll", [])) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"submit": ["sbatch", "{nodez}"]}, r"submit: no placeholder \{nodez\}; known: folder, gpus"),
        ({"submit": ["sbatch", "{id}"]}, r"submit: no placeholder \{id\}"),
        ({"cancel": ["scancel", "{options}"]}, r"cancel: no placeholder \{options\}"),
        ({"submit": ["sbatch", "x{options}"]}, "must be a separate argument"),
        ({"launcher": ""}, r"no placeholder \{script\}"),
        ({"answer": ""}, None),
        ({"answer": "(?P<job>.*)"}, r"answer must name \(\?P<id>...\)"),
        ({"answer": "("}, "answer is not a valid pattern"),
        ({"busy": "(?\n"}, r"^[^\n]*busy is not a valid pattern[^\n]*$"),
        ({"rows": "(?P<state>.*)"}, r"rows must name \(\?P<job>...\), \(\?P<id>...\) or both"),
        ({"rows": "(?P<job>.*)"}, r"rows must name \(\?P<state>...\)"),
        ({"states": {"PENDING": "queued"}}, "Invalid enum value 'queued'"),
        ({"poll": []}, "poll must be a list of words"),
        ({"poll": ["{job}"]}, "poll must begin with the name of a program"),
        ({"cancel": "scancel {job}"}, "Expected `array`"),
        ({"launcher": "lsf"}, "no launcher 'lsf': known are torchrun, slurm"),
        ({"patience_s": 0.0}, "patience_s must be a positive finite number"),
        ({"shell": "bash"}, "unknown key 'shell'"),
        ({"extends": "pbs"}, "extends 'pbs', which must be one of kubernetes, slurm"),
    ],
)
def test_a_template_of_ones_own_extends_a_shipped_one_and_is_checked(
    tmp_path: Path, change: dict[str, Any], says: str | None
) -> None:
    path = tmp_path / "own.toml"
    table = {"extends": "slurm", **change}
    states = table.pop("states", {})
    lines = [f"{key} = {value!r}" for key, value in table.items()]
    path.write_text("\n".join([*lines, "[states]", *(f"{key} = {value!r}" for key, value in states.items())]))
    if says is None:
        assert load_job_template(str(path)).poll == SLURM.poll
        return
    with pytest.raises(InputError, match=says) as refused:
        load_job_template(str(path))
    assert str(refused.value).startswith(f"{path}: ")


def test_states_of_ones_own_are_added(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text('extends = "slurm"\n[states]\nDREAMING = "running"\n')
    states = load_job_template(str(path)).states
    assert states == {**SLURM.states, "DREAMING": "running"}
    assert set(states.values()) <= set(MEANINGS)


def test_an_unknown_template_is_refused() -> None:
    with pytest.raises(InputError, match="unknown template 'pbs': known: kubernetes, slurm, or give a TOML file"):
        load_job_template("pbs")


def test_what_slurm_says_when_it_is_busy() -> None:
    for said in (
        "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
        "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation",
        "sbatch: error: Batch job submission failed: Zero Bytes were transmitted or received",
        "sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying",
    ):
        assert SLURM.is_busy(said)
    assert not SLURM.is_busy("sbatch: error: Batch job submission failed: Invalid partition name specified")
    assert isinstance(SLURM, JobTemplate)


def test_a_pattern_with_a_bracket_in_a_set_is_taken_without_a_warning() -> None:
    assert _pattern("submitted", r"job (?P<id>[[\d]+)", ("id",)).search("job [12")
