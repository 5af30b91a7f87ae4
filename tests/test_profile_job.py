"""Does a profile that is submitted to a scheduler measure on its nodes, and is every end told?"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from autoplan.api.plan_files import load_plan_file
from autoplan.api.profile_job import ProfileJob, job_of, run_job
from autoplan.base.errors import AutoplanError, InputError
from autoplan.launch.launcher import launch_files
from autoplan.launch.start import Start
from commands import run
from model_specs import TINY_TOML
from slurms import StandIn, write_program
from stores import stored_records

pytest.importorskip("torch")

SEARCH = (
    "search tiny.toml --cluster cpu:1x2 --global-batch 8 --seq-len 32 --framework torch --precision fp32 --quiet "
    "--fix pp=1 --out plan.json"
)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The file of a plan for two ranks on a node of CPUs."""
    folder = tmp_path_factory.mktemp("plan")
    (folder / "tiny.toml").write_text(TINY_TOML)
    assert run(folder, *SEARCH.split()).returncode == 0
    return (folder / "plan.json").read_text()


@pytest.fixture
def folder(plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the plan, and a Slurm."""
    (tmp_path / "plan.json").write_text(plan)
    (tmp_path / "often.toml").write_text('extends = "slurm"\npoll_every_s = 1\n')
    (tmp_path / "slurm").mkdir()
    slurm = StandIn(tmp_path / "slurm")
    programs = Path(sys.executable).parent  # torchrun is there, whether or not the environment is active
    monkeypatch.setenv("PATH", f"{slurm.environment['PATH']}:{programs}")
    yield tmp_path
    slurm.end()


@pytest.fixture
def one_rank(folder: Path) -> None:
    """A torchrun that starts one rank, without importing torch: enough for a command that is refused."""
    write_program(folder / "slurm" / "bin" / "torchrun", 'while [[ $1 != -- ]]; do shift; done\nshift\nexec "$@"')


def test_a_job_measures_on_its_nodes_and_stores_where_the_login_node_reads(folder: Path) -> None:
    asked = "profile --for plan.json --template often.toml --budget 1s --allowance 0.02s --db times.db --work job"
    done = run(folder, *asked.split())
    assert done.returncode == 0, done.stderr
    records = stored_records(folder / "times.db")
    assert records
    assert {record.fingerprint.collectives for record in records} == {"gloo"}
    assert "measurements in" in done.stdout
    assert "% certain that the fastest is" in done.stderr
    assert not (folder / "job" / "job.json").exists()


@pytest.mark.usefixtures("one_rank")
def test_a_job_that_fails_says_why(folder: Path) -> None:
    heard: list[str] = []
    job = ProfileJob(
        plan_file=folder / "plan.json",
        template=str(folder / "often.toml"),
        options=("--mode", "never"),
        folder=folder / "profile-job",
    )
    with pytest.raises(AutoplanError, match=r"the job has failed: .*--mode 'never' is unknown"):
        run_job(job, heard.append)
    assert heard[-1].startswith("running")


@pytest.mark.usefixtures("one_rank")
def test_a_folder_goes_on_with_what_it_was_asked_alone(folder: Path) -> None:
    def leave(status: str) -> None:
        raise ConnectionError(status)

    job = ProfileJob(
        plan_file=folder / "plan.json",
        template=str(folder / "often.toml"),
        options=("--mode", "never"),
        folder=folder / "profile-job",
    )
    with pytest.raises(ConnectionError):
        run_job(job, leave)
    with pytest.raises(InputError, match="has a job with other options"):
        run_job(replace(job, options=("--mode", "burst")))
    with pytest.raises(AutoplanError, match="the job has failed"):
        run_job(job)


def test_bad_input_is_refused_before_a_job_waits(folder: Path) -> None:
    done = run(folder, "profile", "--for", "plan.json", "--template", "slurm", "--mode", "never")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert not (folder / "profile-job").exists()


def test_a_manifest_for_kubernetes_holds_the_same_command(folder: Path) -> None:
    plan_file = load_plan_file(folder / "plan.json")
    job = ProfileJob(
        plan_file=folder / "plan.json", template="kubernetes", options=("--visits", "2"), db="postgresql://ada@db.lab/t"
    )
    (manifest,) = launch_files(Start.of(plan_file, job_of(plan_file, job), "jobset", "ours:1", "autoplan-1"))
    assert "autoplan profile --for" in manifest.text
    assert "--budget 10m --db postgresql://ada@db.lab/t --visits 2 --quiet" in manifest.text


@pytest.mark.parametrize(
    ("template", "db", "says"),
    [
        ("slurm", "postgresql://ada:secret@db.lab/timings", "launch files would show the password"),
        ("kubernetes", "times.db", "give the URL of a server"),
        ("pbs", None, "unknown template 'pbs'"),
    ],
)
def test_what_cannot_be_submitted_is_refused_first(tmp_path: Path, template: str, db: str | None, says: str) -> None:
    job = ProfileJob(plan_file=tmp_path / "plan.json", template=template, options=(), db=db, folder=tmp_path / "job")
    with pytest.raises(InputError, match=says) as refused:
        run_job(job)
    assert "secret" not in str(refused.value)
    assert not (tmp_path / "job").exists()
