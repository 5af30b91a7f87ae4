"""Do trials reach a cluster's scheduler once each, whatever happens to it, and is every end told with its reason?"""

from __future__ import annotations

import getpass
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import convert

from autoplan.base.errors import AutoplanError, InputError
from autoplan.base.files import encode
from autoplan.jobs import scheduler as scheduler_jobs
from autoplan.jobs.job import JobStatus
from autoplan.jobs.scheduler import SchedulerJobs
from autoplan.jobs.template import JobTemplate, load_job_template
from autoplan.profiler.store import open_store
from autoplan.spec.plan import ParallelPlan
from commands import run
from logged import read_log
from slurms import RealSlurm, StandIn, slurms, write_program
from test_megatron_lm_export import LLAMA_8B, plan_file_of

BEGINS = """\
echo run >>"$1/ran"
steps() { for i in $(seq "$1"); do echo " iteration $i/ 99 | elapsed time per iteration (ms): 2000.0 |"; done; }
wait_for() { while [[ ! -e $1 ]]; do sleep 0.05; done; }
"""


@pytest.fixture(scope="module", params=["stand-in", "Slurm"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandIn | RealSlurm]:
    yield from slurms(request.param, tmp_path_factory.mktemp("slurm"))


@pytest.fixture
def slurm(both: StandIn | RealSlurm, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn | RealSlurm]:
    for name, value in both.environment.items():
        monkeypatch.setenv(name, value)
    yield both
    both.clear()


@pytest.fixture
def stand_in(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    made = StandIn(tmp_path_factory.mktemp("stand-in"))
    monkeypatch.setenv("PATH", made.environment["PATH"])
    yield made
    made.clear()


@pytest.fixture
def template(tmp_path: Path) -> JobTemplate:
    write_program(tmp_path / "trial.sh", f'{BEGINS}. "$1/what"')
    return of_trial(load_job_template("slurm"), tmp_path / "trial.sh")


def of_trial(template: JobTemplate, script: Path) -> JobTemplate:
    """The template, with one core for each job and a script of the test's own."""
    submit = tuple(word for word in template.submit if word not in ("{script}", "{options}"))
    return replace(
        template,
        launcher="",
        submit=(*submit, "--ntasks=1", str(script), "{folder}"),
        poll_every_s=0.1,
        patience_s=60.0,
    )


def jobs_of(template: JobTemplate, time_limit_s: float = 600.0) -> SchedulerJobs:
    return SchedulerJobs(template, time_limit_s=time_limit_s, num_steps=5)


def trial(tmp_path: Path, name: str, what: str) -> Path:
    folder = tmp_path / f"trial {name}"  # a name that a shell would take for two
    folder.mkdir()
    (folder / "what").write_text(what)
    (folder / "plan.json").write_text(encode(plan_file_of(LLAMA_8B, tp=2, sp=True, dp_shard=8)))
    return folder


def until(jobs: SchedulerJobs, names: list[str], holds: Callable[[list[JobStatus]], bool]) -> list[JobStatus]:
    for _ in range(600):
        found = list(jobs.poll(names).values())
        if holds(found):
            return found
        time.sleep(0.05)
    raise AssertionError(f"still {found}")


def are(state: str) -> Callable[[list[JobStatus]], bool]:
    return lambda found: all(finding.state == state for finding in found)


def num_runs(folder: str) -> int:
    return len((Path(folder) / "ran").read_text().splitlines())


def test_trials_run_side_by_side_and_every_end_has_its_reason(
    slurm: StandIn | RealSlurm, template: JobTemplate, tmp_path: Path
) -> None:
    jobs = jobs_of(template)
    good = jobs.start(trial(tmp_path, "good", 'steps 5; wait_for "$1/go"'))
    other = jobs.start(trial(tmp_path, "other", "sleep 600"))
    until(jobs, [good, other], are("running"))
    crash = jobs.start(trial(tmp_path, "crash", "steps 1; echo ValueError: no; exit 3"))
    corrupt = jobs.start(trial(tmp_path, "corrupt", "head -c 5000 /dev/urandom; exit 1"))
    full = trial(tmp_path, "full", "set -e; steps 5")
    (full / "log.txt").symlink_to("/dev/full")
    disk = jobs.start(full)
    until(jobs, [crash], lambda found: found[0].reason.startswith("Slurm: PENDING"))
    (Path(good) / "go").touch()
    assert until(jobs, [good], are("ended")) == [JobStatus(state="ended", status=0)]
    assert read_log(Path(good) / "log.txt").median_s == 2.0
    assert "failed (Slurm: FAILED" in until(jobs, [crash], are("ended"))[0].reason
    assert "ValueError: no" in (Path(crash) / "log.txt").read_text()
    assert "failed (Slurm: FAILED" in until(jobs, [corrupt], are("ended"))[0].reason
    assert "failed (Slurm: FAILED" in until(jobs, [disk], are("ended"))[0].reason
    job = scheduler_jobs._read(Path(other))
    subprocess.run(["scancel", f"--user={getpass.getuser()}", f"--name={job.job}"], check=True)
    assert until(jobs, [other], are("ended"))[0].reason == "cancelled (Slurm: CANCELLED)"
    assert [num_runs(name) for name in (good, other, crash, corrupt)] == [1, 1, 1, 1]


def test_the_controller_is_killed_in_the_middle_and_nothing_runs_twice(
    slurm: StandIn | RealSlurm, template: JobTemplate, tmp_path: Path
) -> None:
    jobs = jobs_of(template)
    names = [jobs.start(trial(tmp_path, str(number), 'steps 5; wait_for "$1/go"')) for number in range(2)]
    until(jobs, names, are("running"))
    slurm.stop()
    late = jobs.start(trial(tmp_path, "late", "steps 5"))
    assert "connect failure" in until(jobs, [late], are("waiting"))[0].reason
    found = until(jobs, names, lambda found: "does not answer" in found[0].reason)
    assert [finding.state for finding in found] == ["running", "running"]
    (Path(names[0]) / "go").touch()  # ends while nobody can tell
    following = jobs_of(template)  # and the login node dies too
    slurm.go_on()
    assert following.find(Path(names[0])) == names[0]
    until(following, names[:1], are("ended"))
    (Path(names[1]) / "go").touch()
    names.append(late)
    assert until(following, names, are("ended")) == [JobStatus(state="ended", status=0)] * 3
    assert [num_runs(name) for name in names] == [1, 1, 1]


def test_a_submission_whose_answer_was_lost_is_found_again(
    slurm: StandIn | RealSlurm, template: JobTemplate, tmp_path: Path
) -> None:
    write_program(
        tmp_path / "sbatch", 'sbatch "$@"; echo "sbatch: error: Socket timed out on send/recv operation" >&2; exit 1'
    )
    jobs = jobs_of(replace(template, submit=(str(tmp_path / "sbatch"), *template.submit[1:])))
    name = jobs.start(trial(tmp_path, "lost", 'wait_for "$1/go"'))
    until(jobs, [name], are("running"))
    assert scheduler_jobs._read(Path(name)).id
    (Path(name) / "go").touch()
    until(jobs, [name], are("ended"))
    assert num_runs(name) == 1


def test_cancelled_jobs_end_for_this_program_and_the_next(
    slurm: StandIn | RealSlurm, template: JobTemplate, tmp_path: Path
) -> None:
    jobs = jobs_of(template)
    names = [jobs.start(trial(tmp_path, str(number), "sleep 600")) for number in range(3)]
    until(jobs, names[:2], are("running"))
    jobs.cancel(names)
    reasons = [job.reason for job in until(jobs, names, are("ended"))]
    assert all(reason.startswith("cancelled (Slurm: CANCELLED") for reason in reasons), reasons
    assert {job.state for job in until(jobs_of(template), names, are("ended"))} == {"ended"}
    assert not (Path(names[2]) / "ran").exists()


def test_a_trial_that_hangs_is_ended_by_its_time_limit(
    stand_in: StandIn, template: JobTemplate, tmp_path: Path
) -> None:
    jobs = jobs_of(template, time_limit_s=0.5)  # a Slurm of its own waits for a minute at least
    name = jobs.start(trial(tmp_path, "hangs", "sleep 600"))
    ended = JobStatus(state="ended", reason="time limit (Slurm: TIMEOUT)", cause="time limit")
    assert until(jobs, [name], are("ended")) == [ended]


def test_a_job_that_was_forgotten_before_its_start_is_submitted_again_and_one_that_ran_is_lost(
    stand_in: StandIn, template: JobTemplate, tmp_path: Path
) -> None:
    jobs = jobs_of(template)
    ran = [jobs.start(trial(tmp_path, str(number), "sleep 600")) for number in range(2)]
    until(jobs, ran, are("running"))
    waits = jobs.start(trial(tmp_path, "waits", "steps 5"))
    until(jobs, [waits], are("waiting"))
    stand_in.clear()
    (Path(ran[1]) / "outcome.json").write_text("{}")
    lost, done, again = until(
        jobs, [*ran, waits], lambda found: all(finding.state in ("ended", "lost") for finding in found)
    )
    assert lost.state == "lost"
    assert "does not know job" in lost.reason
    assert done == again == JobStatus(state="ended", status=0)
    assert num_runs(waits) == 1


@pytest.fixture
def forgotten(stand_in: StandIn, template: JobTemplate, tmp_path: Path) -> tuple[SchedulerJobs, str, Path]:
    """Jobs, the one of them that ran and that the controller knows no more, and the file of its accounting."""
    jobs = jobs_of(template)
    name = jobs.start(trial(tmp_path, "forgotten", "sleep 600"))
    until(jobs, [name], are("running"))
    stand_in.clear()
    return jobs, name, stand_in.state / "accounting"


def polled(jobs: SchedulerJobs, name: str) -> JobStatus:
    """State of a job by the next answer."""
    time.sleep(0.15)
    return jobs.poll([name])[name]


def test_an_accounting_that_is_late_or_down_for_a_while_loses_no_job(
    forgotten: tuple[SchedulerJobs, str, Path],
) -> None:
    jobs, name, accounting = forgotten
    job = scheduler_jobs._read(Path(name))
    for says in ("\n", "", "\n"):  # nothing yet, no answer, nothing
        accounting.write_text(says)
        assert polled(jobs, name).state == "running"
    accounting.write_text(f"{job.job}|{job.id}|CANCELLED by 54321\nbatch|{job.id}.batch|CANCELLED\n")
    assert polled(jobs, name) == JobStatus(state="ended", reason="cancelled (Slurm: CANCELLED)", cause="cancelled")


def test_a_job_that_the_accounting_does_not_learn_of_is_lost(
    forgotten: tuple[SchedulerJobs, str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs, name, accounting = forgotten
    monkeypatch.setattr(scheduler_jobs, "HISTORY_S", 0.2)
    accounting.write_text("\n")
    assert polled(jobs, name).state == "running"
    assert "does not know job 1 any more" in until(jobs, [name], are("lost"))[0].reason


def test_an_accounting_that_cannot_be_read_is_told_at_once(forgotten: tuple[SchedulerJobs, str, Path]) -> None:
    jobs, name, accounting = forgotten
    accounting.write_text("JobName    State\n")
    with pytest.raises(InputError, match="sacct wrote 'JobName    State', in which rows"):
        polled(jobs, name)


def test_what_the_scheduler_refuses_is_told_and_starts_nothing(
    stand_in: StandIn, template: JobTemplate, tmp_path: Path
) -> None:
    wrong = replace(template, submit=(*template.submit[:2], "--partition=none", *template.submit[2:]))
    folder = trial(tmp_path, "refused", "steps 5")
    with pytest.raises(InputError, match=r"sbatch failed \(1\): .*Invalid partition name"):
        jobs_of(wrong).start(folder)
    name = jobs_of(template).start(folder)  # nothing of the first try is left
    assert until(jobs_of(template), [name], are("ended"))[0].status == 0
    mute = replace(template, answer="Submitted batch job (?P<id>.*)")
    with pytest.raises(InputError, match=r"sbatch wrote '\d+', in which answer .* finds no id"):
        jobs_of(mute).start(trial(tmp_path, "mute", "sleep 600"))
    assert "RUNNING" not in "".join(path.read_text() for path in stand_in.state.glob("*.job"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rows": "^(?P<job>a)(?P<state>b)"}, "squeue wrote .* in which rows .* finds nothing"),
        (
            {"states": {"PENDING": "waiting"}},
            "Slurm says 'RUNNING', which is not in states; known are PENDING",
        ),
        ({"poll": ("squeue", "--jobs={jobs}")}, r"squeue failed \(1\): .*option --jobs not recognized"),
        ({"poll": ("/no/such", "{jobs}")}, "'/no/such' is not installed here"),
    ],
)
def test_an_answer_that_cannot_be_read_is_told_at_once(
    stand_in: StandIn, template: JobTemplate, tmp_path: Path, change: dict[str, object], says: str
) -> None:
    def follow() -> None:
        jobs = jobs_of(replace(template, **change))
        names.append(jobs.start(trial(tmp_path, "unread", 'wait_for "$1/go"')))
        until(jobs, names, are("ended"))

    names: list[str] = []
    with pytest.raises(InputError, match=says):
        follow()
    jobs_of(template).cancel(names)


def test_a_scheduler_that_stays_silent_ends_the_study_with_a_way_out(
    stand_in: StandIn, template: JobTemplate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_jobs, "CANCEL_S", 0.1)
    jobs = jobs_of(replace(template, patience_s=0.3))
    name = jobs.start(trial(tmp_path, "silent", "sleep 600"))
    until(jobs, [name], are("running"))
    stand_in.stop()
    with pytest.raises(AutoplanError, match=r"Slurm has not answered for \d+ s .*its jobs were left"):
        until(jobs, [name], are("ended"))
    with pytest.raises(AutoplanError, match=r"may still run; to end them: scancel --user=.* --name=autoplan-"):
        jobs.cancel([name])
    stand_in.go_on()
    jobs.cancel([name])
    assert until(jobs_of(template), [name], are("ended"))[0].reason == "cancelled (Slurm: CANCELLED)"


def test_jobs_may_go_by_the_schedulers_own_names(stand_in: StandIn, template: JobTemplate, tmp_path: Path) -> None:
    write_program(tmp_path / "qstat", 'squeue --name="$(basename "$1")" | sed -n "s/^[^|]*|$2|/$2 /p"')
    by_id = replace(
        template, poll=(str(tmp_path / "qstat"), "{job}", "{id}"), rows=r"^(?P<id>\d+) (?P<state>[A-Z]+)", history=()
    )
    jobs = jobs_of(by_id)
    name = jobs.start(trial(tmp_path, "by id", "steps 5"))
    assert until(jobs, [name], are("ended")) == [JobStatus(state="ended", status=0)]


def test_a_study_goes_on_while_the_controller_is_killed(
    slurm: StandIn | RealSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autoplan.search.trials.POLL_S", 0.1)
    write_program(tmp_path / "trial.sh", f'{BEGINS}steps 3; wait_for "{tmp_path}/go"; steps 5')
    template = of_trial(load_job_template("slurm"), tmp_path / "trial.sh")
    submit = json.dumps(template.submit)
    (tmp_path / "own.toml").write_text(f'extends = "slurm"\nlauncher = ""\nsubmit = {submit}\npoll_every_s = 0.1\n')

    def fail() -> None:
        for _ in range(600):
            if len(list(tmp_path.glob("tune/*/ran"))) == 2:
                break
            time.sleep(0.05)
        slurm.stop()
        time.sleep(1)
        slurm.go_on()
        (tmp_path / "go").touch()

    with ThreadPoolExecutor() as pool:
        failing = pool.submit(fail)
        done = run(
            tmp_path, "tune", "llama3-8b", "--cluster", "h100-sxm:1x8", "--global-batch", "16", "--seq-len", "4096",
            "--framework", "megatron-core", "--trials", "3", "--parallel", "2", "--steps", "4", "--quiet", "--json",
            "--template", "own.toml",
        )  # fmt: skip
        failing.result()
    assert done.returncode == 0, done.stderr
    tried = json.loads(done.stdout)["trials"]
    assert [(trial["end"], trial["measured_s"]) for trial in tried] == [("measured", 2.0)] * 3
    assert [num_runs(str(folder)) for folder in sorted((tmp_path / "tune").glob("0*"))] == [1, 1, 1]


def test_what_is_exported_is_submitted_and_its_log_is_read(
    slurm: StandIn | RealSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Megatron-LM's torchrun in the place of which there is one that only says what was asked of it."""
    monkeypatch.setattr("autoplan.search.trials.POLL_S", 0.1)
    torchrun = f'{BEGINS}for word in "$@"; do last=$word; done; echo "$@"; steps "$last"'
    write_program(tmp_path / "torchrun", torchrun.replace('"$1/ran"', f'"{tmp_path}/ran"'))
    (tmp_path / "own.toml").write_text('extends = "slurm"\npoll_every_s = 0.1\n')
    done = run(
        tmp_path, "tune", "llama3-8b", "--cluster", "h100-sxm:1x8", "--global-batch", "16", "--seq-len", "4096",
        "--framework", "megatron-core", "--trials", "3", "--steps", "4", "--warmup", "3", "--quiet", "--json",
        "--template", "own.toml", "--to", "megatron-lm", "--db", "runs.db",
        PATH=f"{tmp_path}:{os.environ['PATH']}", PREFLIGHT="0",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    trials = json.loads(done.stdout)["trials"]
    assert [(trial["end"], trial["measured_s"]) for trial in trials] == [("measured", 2.0)] * 3
    words = (tmp_path / "tune" / "0000" / "log.txt").read_text().splitlines()[-8].split()
    assert words[-2:] == ["--train-iters", "7"]
    assert "--tensor-model-parallel-size" in words
    assert num_runs(str(tmp_path)) == 3
    # What was learned is there for the next search, from the database and from the folder.
    with open_store(str(tmp_path / "runs.db")) as store:
        kept = [(run.plan, run.step_s, run.predicted_s) for run in store.runs()]
    assert kept == [(convert(trial["plan"], ParallelPlan), (2.0,), trial["predicted_s"]) for trial in trials]
    place = ("--cluster", "h100-sxm:1x8")
    learned = run(tmp_path, "calibrate", "--from-logs", "tune", *place, "--db", "logs.db")
    assert "3 runs: 3 new in the database, 0 already there; 0 files skipped" in learned.stdout, learned.stderr
    for db in ("runs.db", "logs.db"):
        found = run(
            tmp_path, "search", "llama3-8b", *place, "--global-batch", "16", "--seq-len", "4096", "--force", "--json",
            "--framework", "megatron-core", "--calibration", "db", "--db", db,
        )  # fmt: skip
        assert (
            json.loads(found.stdout)["calibration"]["name"] == "megatron-core on h100-sxm, from 3 runs in the database"
        )


# -- Kubernetes --------------------------------------------------------------------------------------------------------

KUBECTL = """\
case $1 in
apply) cp "${2#--filename=}" manifest ;;
get) [[ ! -e manifest ]] || cat rows ;;
logs) echo " iteration 3/ 99 | elapsed time per iteration (ms): 1500.0 |" ;;
delete) echo "$2 $3" >deleted ;;
esac
"""


def test_a_jobset_is_applied_followed_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    write_program(tmp_path / "bin" / "kubectl", f'cd "{tmp_path}"\n{KUBECTL}')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    template = replace(load_job_template("kubernetes"), poll_every_s=0.01)
    jobs = SchedulerJobs(template, time_limit_s=60, num_steps=7, to="megatron-lm", image="nvcr.io/nvidia/pytorch:25.06")
    name = jobs.start(trial(tmp_path, "k", ""))
    job = scheduler_jobs._read(Path(name)).job
    manifest = (tmp_path / "manifest").read_text()
    assert f"app.kubernetes.io/instance: {job}" in manifest
    assert "value: '7'" in manifest
    rows = tmp_path / "rows"
    rows.write_text(f"{job} <none> <none> <none> <none> <none> <none>\nother <none> Odd <none> <none> <none> <none>\n")
    assert until(jobs, [name], are("waiting"))[0].reason in ("", "Kubernetes")
    rows.write_text(
        f"{job} <none> <none>  <none> <none> <none> <none>\n{job} <none> Running <none> <none> <none> <none>\n"
    )
    until(jobs, [name], are("running"))
    assert read_log(Path(name) / "log.txt", warmup=0).median_s == 1.5
    rows.write_text(
        f"{job} Failed <none> <none> <none> <none> <none>\n{job} <none> Failed OOMKilled,Error <none> <none> <none>\n"
    )
    ended = until(jobs, [name], are("ended"))[0]
    assert ended.reason == "out of memory (Kubernetes: Failed OOMKilled,Error)"
    assert job in (tmp_path / "deleted").read_text()


def test_the_built_in_trainer_needs_somewhere_to_put_its_outcome() -> None:
    with pytest.raises(InputError, match=r"submit of Kubernetes has no \{options\}, which tell"):
        SchedulerJobs(load_job_template("kubernetes"), time_limit_s=60, num_steps=5)
