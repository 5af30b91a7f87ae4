"""Does every launcher start the same job, look first, and stay inert whatever the names?  Do schedulers take it?"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.base.errors import InputError
from autoplan.base.files import encode
from autoplan.base.units import GIB
from autoplan.frameworks.common.header import comment
from autoplan.frameworks.common.job import EnvironmentVariable, File, Job, LaunchVariable, OptionGroup, safe_name
from autoplan.frameworks.presets import load_framework
from autoplan.frameworks.registry import TARGETS
from autoplan.launch.launcher import launch_files
from autoplan.launch.names import LAUNCHERS, Launcher
from autoplan.launch.start import Start, dns_name, node_shape
from autoplan.launch.targets import exported, job_of
from autoplan.spec.plan_file import PlanFile
from autoplan.topology.cluster import MachineSpec, NodeGroup
from commands import run
from launched import launched, run_files
from test_megatron_lm_export import LISTED, LLAMA_8B, PLACED, cluster_of, plan_file_of

GOLDEN = Path(__file__).parent / "golden" / "launchers"
IMAGE = "nvcr.io/nvidia/pytorch:25.06-py3"
SHELLS: tuple[Launcher, ...] = ("torchrun", "slurm", "mpirun")
MANIFESTS: tuple[Launcher, ...] = ("trainjob", "jobset", "pytorchjob", "skypilot")

JOB = Job(
    framework="A trainer",
    environment=(EnvironmentVariable(name="CUDA_DEVICE_MAX_CONNECTIONS", value="1", note="demanded"),),
    variables=(
        LaunchVariable(name="TRAINER_DIR", default=".", note="a checkout"),
        LaunchVariable(name="STEPS", default="100", note="steps"),
    ),
    program='-m trainer --config "$HERE/config.toml"',
    groups=(OptionGroup(name="PLAN", note="The plan.", lines=(["--tp", "2"], ["--window", "127,0", "--name", "a b"])),),
    replaceable=OptionGroup(name="DATA", note="Mock data.", lines=(["--mock"],)),
    trailing=('--steps "$STEPS"',),
    files=(File(name="config.toml", text='[model]\nname = "a"\n'),),
)
ONE = plan_file_of(LLAMA_8B, tp=2, sp=True, dp_shard=4)
TWO = plan_file_of(LLAMA_8B, tp=2, sp=True, dp_shard=8)


def files_of(plan_file: PlanFile, launcher: Launcher, job: Job = JOB) -> tuple[File, ...]:
    return launch_files(Start.of(plan_file, job, launcher, None if launcher in SHELLS else IMAGE))


def documents(files: tuple[File, ...]) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(files[0].text))


CASES: dict[str, tuple[PlanFile, Launcher]] = {
    **{f"two.{launcher}": (TWO, launcher) for launcher in LAUNCHERS},
    **{f"one.{launcher}": (ONE, launcher) for launcher in LAUNCHERS},
    **{f"placed.{launcher}": (PLACED, launcher) for launcher in (*SHELLS, "jobset")},
}
KEPT = (*(f"two.{launcher}" for launcher in LAUNCHERS), "placed.torchrun", "placed.slurm", "placed.mpirun")


@pytest.mark.parametrize("name", KEPT)
def test_the_first_file_is_the_golden_one(name: str) -> None:
    file = files_of(*CASES[name])[0]
    golden = GOLDEN / f"{name}{Path(file.name).suffix}"
    if not golden.exists():
        golden.parent.mkdir(parents=True, exist_ok=True)
        golden.write_text(file.text)
        pytest.fail(f"{golden.name} was missing and is written now: read it before it is kept")
    assert file.text == golden.read_text()


def scripts(files: tuple[File, ...]) -> list[str]:
    return [file.text for file in files if file.text.startswith("#!/bin/bash\n")] or [
        documents(files)[0]["data"]["launch.sh"]
    ]


@pytest.mark.parametrize("name", CASES)
def test_all_scripts_pass_shellcheck(name: str) -> None:
    checker = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    for text in scripts(files_of(*CASES[name])):
        result = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
        assert (result.returncode, result.stderr) == (0, "")
        if checker is None:
            pytest.skip("shellcheck is not installed")
        checked = subprocess.run([checker, "-"], input=text, capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stdout


# -- what every launcher starts ---------------------------------------------------------------------------------------


def by_shell(files: tuple[File, ...], folder: Path, **variables: str) -> list[str]:
    return launched(folder, files, **variables)


def by_manifest(files: tuple[File, ...], folder: Path, container: dict[str, Any], **variables: str) -> list[str]:
    """As a container with the job's ConfigMap runs; `variables` are those of its operator."""
    config = documents(files)[0]
    assert container["command"] == ["bash", "/etc/autoplan/launch.sh"]
    inside = tuple(File(name=name, text=text) for name, text in config["data"].items())
    assert {file.name for file in inside} == {"launch.sh", "config.toml"}
    env = {variable["name"]: variable.get("value", "1") for variable in container["env"]}  # from a field: the rank
    return launched(folder, inside, **{**env, **variables})


def of_trainjob(files: tuple[File, ...], folder: Path) -> list[str]:
    spec = documents(files)[1]["spec"]
    assert (spec["trainer"]["numNodes"], spec["trainer"]["numProcPerNode"]) == (2, 8)
    pet = {"PET_NODE_RANK": "1", "PET_MASTER_ADDR": "node7", "PET_NNODES": "2"}
    return by_manifest(files, folder, spec["trainer"], **pet)


def of_jobset(files: tuple[File, ...], folder: Path) -> list[str]:
    (job,) = documents(files)[1]["spec"]["replicatedJobs"]
    assert (job["template"]["spec"]["parallelism"], job["template"]["spec"]["completionMode"]) == (2, "Indexed")
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    master = {"MASTER_ADDR": "node7"}
    name = documents(files)[1]["metadata"]["name"]
    assert container["env"][-1] == {"name": "MASTER_ADDR", "value": f"{name}-node-0-0.{name}"}
    return by_manifest(files, folder, container, **master)


def of_pytorchjob(files: tuple[File, ...], folder: Path) -> list[str]:
    replicas = documents(files)[1]["spec"]["pytorchReplicaSpecs"]
    assert {kind: replica["replicas"] for kind, replica in replicas.items()} == {"Master": 1, "Worker": 1}
    (container,) = replicas["Worker"]["template"]["spec"]["containers"]
    operator = {
        "NODE_RANK": "5",
        "PET_NODE_RANK": "1",
        "MASTER_ADDR": "node7",
        "MASTER_PORT": "29500",
        "PET_NNODES": "2",
    }
    return by_manifest(files, folder, container, **operator)


def of_skypilot(files: tuple[File, ...], folder: Path) -> list[str]:
    (task,) = documents(files)
    assert (task["num_nodes"], task["workdir"], task["run"]) == (2, ".", "bash launch.sh")
    assert task["envs"] == {"TRAINER_DIR": None, "STEPS": "100"}
    sky = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "node7\nnode8", "SKYPILOT_NUM_NODES": "2"}
    return by_shell(files[1:], folder, **sky)


def of_mpirun(files: tuple[File, ...], folder: Path) -> list[str]:
    folder.mkdir(exist_ok=True)
    (folder / "hosts").write_text("# ours\n\n  node7 slots=8\nnode8 slots=8\n")
    rank = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    return by_shell(files, folder, HOSTFILE=str(folder / "hosts"), **rank)


START: dict[Launcher, Callable[[tuple[File, ...], Path], list[str]]] = {
    "torchrun": lambda files, folder: by_shell(files, folder, MASTER_ADDR="node7", NODE_RANK="1"),
    "slurm": lambda files, folder: by_shell(files, folder, SLURM_NNODES="2", NODE_RANK="5", MASTER_ADDR="stale"),
    "mpirun": of_mpirun,
    "trainjob": of_trainjob,
    "jobset": of_jobset,
    "pytorchjob": of_pytorchjob,
    "skypilot": of_skypilot,
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_launcher_gives_torchrun_the_same_words_on_the_second_node(tmp_path: Path, launcher: Launcher) -> None:
    one_queue, *words = START[launcher](files_of(TWO, launcher), tmp_path)
    assert one_queue == "1"
    expected = "--nnodes 2 --nproc-per-node 8 --node-rank 1 --master-addr node7 --master-port 29500 -m trainer --config"
    config = str(tmp_path / "launch folder" / "config.toml")
    plan = ["--tp", "2", "--window", "127,0", "--name", "a b", "--mock", "--steps", "100"]
    assert words == [*expected.split(), config, *plan]


def test_words_of_the_person_come_last_under_every_shell(tmp_path: Path) -> None:
    for launcher in SHELLS:
        words = launched(tmp_path / launcher, files_of(ONE, launcher), "--lr", "a b", OMPI_COMM_WORLD_RANK="0")
        assert words[-2:] == ["--lr", "a b"]


def test_mpirun_hands_on_what_the_person_set_and_nothing_else(tmp_path: Path) -> None:
    launched(tmp_path, files_of(ONE, "mpirun"), STEPS="7", NCCL_DEBUG="INFO")
    words = (tmp_path / "recorded.mpirun").read_text().split("\0")
    handed = [words[at + 1] for at, word in enumerate(words) if word == "-x"]
    assert handed == ["PATH", "PREFLIGHT", "STEPS", "NCCL_DEBUG"]
    assert words[:6] == ["-np", "1", "--map-by", "ppr:1:node", "--bind-to", "none"]


def test_slurm_finds_the_folder_that_it_was_submitted_from(tmp_path: Path) -> None:
    files = files_of(ONE, "slurm")
    elsewhere = tmp_path / "elsewhere"
    for case, variables in enumerate(
        (
            {},  # by the path of the script, words of the person behind it
            {"COMMAND": "(null)", "SLURM_SUBMIT_DIR": str(tmp_path / "1" / "launch folder")},
            {"COMMAND": "(null)", "HERE": str(tmp_path / "2" / "launch folder")},
        )
    ):
        assert "-m" in launched(tmp_path / str(case), files, **variables)
    result = run_files(elsewhere, files, COMMAND="(null)")
    assert result.returncode == 1
    assert f"launch.sh is not in {elsewhere / 'work'}: set HERE" in result.stderr


@pytest.mark.parametrize("launcher", SHELLS)
def test_a_placed_plan_numbers_the_nodes_in_its_order(tmp_path: Path, launcher: Launcher) -> None:
    files = files_of(PLACED, launcher)
    words = launched(tmp_path, files, SLURM_NODEID="0", OMPI_COMM_WORLD_RANK="0")
    at = words.index("--node-rank")
    assert words[at : at + 6] == [
        "--node-rank",
        "2",
        "--master-addr",
        "node8",
        "--master-port",
        "29500",
    ]  # node7 is the third
    assert launcher != "slurm" or "#SBATCH --nodelist=node8,node6,node7,node9\n" in files[0].text
    assert launcher != "mpirun" or "--host node8,node6,node7,node9 " in files[0].text


def test_a_placed_plan_is_pinned_to_its_nodes_by_a_jobset() -> None:
    jobs = documents(files_of(PLACED, "jobset"))[1]["spec"]["replicatedJobs"]
    pods = [job["template"]["spec"]["template"]["spec"] for job in jobs]
    assert [pod["nodeSelector"]["kubernetes.io/hostname"] for pod in pods] == ["node8", "node6", "node7", "node9"]
    envs = [{variable["name"]: variable["value"] for variable in pod["containers"][0]["env"]} for pod in pods]
    assert [env["NODE_RANK"] for env in envs] == ["0", "1", "2", "3"]
    assert {env["MASTER_ADDR"] for env in envs} == {"llama3-8b-rank-0-0-0.llama3-8b"}
    for launcher in ("trainjob", "pytorchjob", "skypilot"):
        with pytest.raises(InputError, match="lists its nodes"):
            files_of(PLACED, launcher)


def test_a_plan_on_part_of_the_listed_nodes_takes_the_first() -> None:
    listed = replace(LISTED, nodes=(NodeGroup(names=("node6", "node7", "node8", "node9"), switches=("a",)),))
    text = files_of(plan_file_of(LLAMA_8B, cluster=listed, tp=8, sp=True, dp_shard=2), "slurm")[0].text
    assert "#SBATCH --nodes=2\n" in text
    assert "#SBATCH --nodelist=node6,node7\n" in text


def test_a_node_that_is_not_of_the_plan_has_no_rank(tmp_path: Path) -> None:
    result = run_files(tmp_path, files_of(PLACED, "torchrun"), stand_ins={"hostname": "#!/bin/bash\necho node5\n"})
    assert result.returncode != 0
    assert "NODE_RANK: this node is not in the list of hosts" in result.stderr


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "NODE_RANK"])
def test_several_nodes_must_be_told_apart(tmp_path: Path, missing: str) -> None:
    given = {"MASTER_ADDR": "node7", "NODE_RANK": "0"}
    del given[missing]
    result = run_files(tmp_path, files_of(TWO, "torchrun"), **given)
    assert result.returncode != 0
    assert f"{missing}: must be set" in result.stderr


def test_sums_in_switches_are_asked_of_nccl() -> None:
    sharp = replace(TWO.cluster, network=replace(TWO.cluster.network, sharp=True))
    assert "export NCCL_COLLNET_ENABLE=1" in files_of(replace(TWO, cluster=sharp), "torchrun")[0].text
    assert "NCCL_COLLNET_ENABLE" not in files_of(replace(ONE, cluster=replace(sharp, num_nodes=1)), "torchrun")[0].text


# -- preflight --------------------------------------------------------------------------------------------------------

FREE = {8: "80000\n" * 8, 7: "80000\n" * 7, 0: "80000\n" * 7 + "71999\n"}


def preflight(
    folder: Path, plan_file: PlanFile, stand_ins: dict[str, str], launcher: Launcher = "torchrun", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Words of the script whose tools are these alone."""
    tools = {"torchrun": "#!/bin/bash\n", **{name: f"#!/bin/bash\n{text}" for name, text in stand_ins.items()}}
    given = {"MASTER_ADDR": "a", "NODE_RANK": "0", "PREFLIGHT": "1", **variables}
    return run_files(folder, files_of(plan_file, launcher)[-2:], stand_ins=tools, **given)


HAS_DRIVER = any(Path(name).exists() for name in ("/dev/nvidiactl", "/dev/dxg"))


def smi(text: str, status: int = 0) -> dict[str, str]:
    return {"nvidia-smi": f"printf '{text}'; exit {status}\n"}


@pytest.mark.parametrize(
    ("tools", "status", "says"),
    [
        (smi(FREE[8]), 0, ""),
        (smi("[N/A]\n" * 8), 0, ""),
        (smi(FREE[7]), 1, "8 devices are needed, nvidia-smi lists 7: PREFLIGHT=0 starts anyway"),
        (smi(FREE[0]), 1, "device 7 has 71999 MiB free, the plan needs 73012 MiB: PREFLIGHT=0 starts anyway"),
        (smi("No devices were found", 6), 1, "nvidia-smi fails: No devices were found"),
        pytest.param(
            {},
            0,
            "there is no nvidia-smi: devices and their free memory are not checked",
            marks=pytest.mark.skipif(not HAS_DRIVER, reason="there is no NVIDIA driver"),
        ),
        pytest.param(
            {},
            1,
            "there is neither nvidia-smi nor /dev/nvidiactl: no device of nvidia is here: PREFLIGHT=0 starts",
            marks=pytest.mark.skipif(HAS_DRIVER, reason="there is an NVIDIA driver"),
        ),
    ],
)
def test_a_node_must_have_the_devices_and_their_memory(
    tmp_path: Path, tools: dict[str, str], status: int, says: str
) -> None:
    result = preflight(tmp_path, ONE, tools)
    assert result.returncode == status
    assert len(result.stderr.splitlines()) == bool(says)
    assert says in result.stderr
    if status:
        assert preflight(tmp_path, ONE, tools, PREFLIGHT="0").returncode == 0


def test_only_the_devices_that_the_job_may_use_are_asked(tmp_path: Path) -> None:
    tools = {"nvidia-smi": 'for word; do if [[ $word == --id=0,2 ]]; then printf "80000\\n80000\\n"; fi; done\n'}
    two = plan_file_of(LLAMA_8B, tp=2, sp=True)
    assert preflight(tmp_path, two, tools, CUDA_VISIBLE_DEVICES="0,2").returncode == 0
    assert "2 devices are needed, nvidia-smi lists 1" in preflight(tmp_path, two, tools).stderr


def amd(free_gib: float) -> dict[str, str]:
    lines = [f"card{at},{192 * GIB},{192 * GIB - round(free_gib * GIB)}\\n" for at in range(8)]
    table = "\\nWARNING: no power\\ndevice,VRAM Total Memory (B),VRAM Total Used Memory (B)\\n" + "".join(lines)
    return {"rocm-smi": f"printf '{table}'\n"}


def test_rocm_smi_answers_for_devices_of_amd(tmp_path: Path) -> None:
    cluster = cluster_of(1, "cdna3")
    device = replace(cluster.device, vendor="amd")
    plan_file = replace(ONE, cluster=replace(cluster, device=device))
    assert preflight(tmp_path, plan_file, amd(190.0)).stderr == ""
    says = "device 0 has 61440 MiB free, the plan needs 73012 MiB"
    assert says in preflight(tmp_path, plan_file, amd(60.0)).stderr
    missing = "there is no rocm-smi" if Path("/dev/kfd").exists() else "there is neither rocm-smi nor /dev/kfd"
    assert missing in preflight(tmp_path / "other", plan_file, {}).stderr


def test_hl_smi_answers_for_devices_of_intel(tmp_path: Path) -> None:
    cluster = cluster_of(1, "cdna3")
    plan_file = replace(ONE, cluster=replace(cluster, device=replace(cluster.device, vendor="intel")))
    for free_mib, says in ((90000, ""), (60000, "device 0 has 60000 MiB free, the plan needs 73012 MiB")):
        table = 8 * f"{free_mib}\\n"
        tools = {"hl-smi": f"[[ $1 == --query-aip=memory.free ]] && printf '{table}'\n"}
        assert says in (found := preflight(tmp_path, plan_file, tools).stderr)
        assert bool(found) == bool(says)


def test_a_program_that_is_not_there_is_one_clear_line(tmp_path: Path) -> None:
    megatron, own = (
        preflight_of(tmp_path / name, plan_file_of(LLAMA_8B, tp=2, sp=True), target, variables)
        for name, target, variables in (
            ("megatron", "megatron-lm", {"MEGATRON_LM_DIR": "/nowhere"}),
            ("primus", "primus", {"PRIMUS_DIR": "/nowhere"}),
        )
    )
    assert (megatron.returncode, len(megatron.stderr.splitlines())) == (1, 1)
    assert "there is no /nowhere/pretrain_gpt.py: set MEGATRON_LM_DIR: PREFLIGHT=0 starts anyway" in megatron.stderr
    assert "there is no /nowhere/primus/cli/main.py: set PRIMUS_DIR" in own.stderr


def preflight_of(
    folder: Path, plan_file: PlanFile, target: str, variables: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    return run_files(folder, exported(plan_file, target, "torchrun"), PREFLIGHT="1", **variables)


def test_the_scheduler_must_give_as_many_nodes_as_the_plan_has(tmp_path: Path) -> None:
    ethernet = replace(TWO, cluster=replace(TWO.cluster, network=replace(TWO.cluster.network, kind="ethernet")))
    tools = smi(FREE[8])
    assert preflight(tmp_path, ethernet, tools, "slurm", SLURM_NNODES="2").stderr == ""
    result = preflight(tmp_path, ethernet, tools, "slurm", SLURM_NNODES="3")
    assert result.returncode == 1
    assert "the plan is for 2 nodes of 8 devices, 3 nodes were given" in result.stderr


def test_a_network_that_is_not_there_is_warned_of(tmp_path: Path) -> None:
    result = preflight(tmp_path, TWO, smi(FREE[8]))
    assert result.returncode == 0
    missing = "the plan assumes infiniband, but there is no /dev/infiniband"
    assert (missing in result.stderr) is not Path("/dev/infiniband").exists()


@pytest.mark.parametrize(
    ("has", "rank", "warned"),
    [
        ("cuda 13.0, torch 2.13.0, nccl 2.28.3", "0", False),
        ("cuda 12.8, torch 2.13.0, nccl 2.28.3", "0", True),
        ("cuda 12.8, torch 2.13.0, nccl 2.28.3", "1", False),
        (None, "0", True),
    ],
)
def test_other_versions_than_were_measured_are_warned_of_on_rank_0(
    tmp_path: Path, has: str | None, rank: str, warned: bool
) -> None:
    machine = MachineSpec(runtime="cuda 13.0", torch="2.13.0", collectives="nccl 2.28.3")
    plan_file = replace(ONE, timings="db", cluster=replace(ONE.cluster, machine=machine))
    python = {"python3": f"echo '{has}'\n" if has else "exit 1\n"}
    result = preflight(tmp_path, plan_file, {**smi(FREE[8]), **python}, NODE_RANK=rank)
    assert result.returncode == 0
    expected = f"is based on cuda 13.0, torch 2.13.0, nccl 2.28.3, but python3 has {has or 'no such torch'}"
    assert (expected in result.stderr) is warned
    assert bool(result.stderr) is warned
    assert "import torch" not in files_of(ONE, "torchrun")[0].text  # nothing measured, nothing to compare


def test_python_says_the_versions_as_the_profiler_does() -> None:
    torch = pytest.importorskip("torch")
    machine = MachineSpec(runtime="cuda 13.0", torch="2.13.0")
    plan_file = replace(ONE, timings="db", cluster=replace(ONE.cluster, machine=machine))
    (line,) = (line for line in files_of(plan_file, "torchrun")[0].text.splitlines() if "python3 -c" in line)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(line.split("'")[1])  # the program between the quotes, in this process: importing torch takes seconds
    assert said.getvalue() == f"cuda {torch.version.cuda}, torch {torch.__version__}\n"


# -- names ------------------------------------------------------------------------------------------------------------

HOSTILE = "x'\"; touch pwned $(touch pwned) `touch pwned` \\ {{a}} ${HOME}: - #"
LINE = f"{HOSTILE}\ntouch pwned\r\n#SBATCH --uid=0\u2028touch pwned\n---\nkind: Pod"


def named(plan_file: PlanFile, name: str, line: str) -> PlanFile:
    device = replace(plan_file.cluster.device, name=name)  # a name of several lines is refused
    return replace(
        plan_file,
        command=line,
        versions={line: line},
        model=replace(plan_file.model, name=name),
        cluster=replace(plan_file.cluster, name=name, device=device),
        framework=replace(plan_file.framework, name=line),
        calibration=replace(plan_file.calibration, name=line),
    )


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_hostile_names_stay_inert(tmp_path: Path, launcher: Launcher) -> None:
    tame, hostile = files_of(TWO, launcher), files_of(named(TWO, HOSTILE, LINE), launcher)
    assert [len(file.text.splitlines()) for file in hostile] == [len(file.text.splitlines()) for file in tame]
    expected = START[launcher](tame, tmp_path / "tame")
    words = START[launcher](hostile, tmp_path / "evil")
    assert [word.replace(str(tmp_path / "evil"), str(tmp_path / "tame")) for word in words] == expected
    batch = [line for line in hostile[0].text.splitlines() if line.startswith("#SBATCH")]
    assert batch == (SBATCH if launcher == "slurm" else [])


SBATCH = [
    "#SBATCH --job-name=x-touch-pwned-touch-pwned-touch-pwned-a-HOME",
    "#SBATCH --nodes=2",
    "#SBATCH --ntasks-per-node=1",
    "#SBATCH --gpus-per-node=8",
    "#SBATCH --exclusive",
    "#SBATCH --distribution=block",
]

printable = st.text(min_size=1).filter(lambda text: text.isprintable() and bool(text.strip()))


@settings(max_examples=10, deadline=None)
@given(printable, st.text(), st.text(), st.sampled_from(MANIFESTS))
def test_a_manifest_holds_no_more_than_was_put_there(name: str, line: str, option: str, launcher: Launcher) -> None:
    job = replace(JOB, files=(File(name="config.toml", text=option),))
    files = files_of(named(TWO, name, line), launcher, job)
    tame = files_of(TWO, launcher, job)
    read, expected = documents(files), documents(tame)

    def shape(value: Any) -> Any:
        return {key: shape(part) for key, part in value.items()} if isinstance(value, dict) else type(value)

    assert [shape(manifest) for manifest in read] == [shape(manifest) for manifest in expected]
    if launcher == "skypilot":
        assert read[0]["run"] == expected[0]["run"]
        assert files[-1].text == option
    else:
        assert read[0]["data"]["config.toml"] == option
        assert read[1]["metadata"]["name"] == dns_name(name)


@given(st.text())
def test_no_text_leaves_its_comment(text: str) -> None:
    assert len(comment(text).splitlines()) == 1
    assert comment(text).startswith("# ")


@given(st.text())
def test_the_name_of_a_job_is_harmless(text: str) -> None:
    name, label = safe_name(text), dns_name(text)
    assert 0 < len(name) <= 48
    assert all(character.isascii() and (character.isalnum() or character in "._-") for character in name)
    assert not name.startswith(("-", "."))
    assert 0 < len(label) <= 40  # RFC 1035: a letter, then letters, digits and hyphens, none at the end
    assert label[0].isalpha()
    assert label[-1] != "-"
    assert all(character.isascii() and (character.islower() or character in "0123456789-") for character in label)


def test_what_no_launcher_can_start_is_refused() -> None:
    unnamed = replace(LISTED, nodes=(NodeGroup(names=("a;b", "c", "d", "e"), switches=("a",)),))
    plan = replace(PLACED.best.plan, placement=None)
    with pytest.raises(InputError, match="'a;b' is not a host name"):
        files_of(replace(PLACED, cluster=unnamed, best=replace(PLACED.best, plan=plan)), "slurm")
    for image in ("", "a b", "a;b", "$(touch pwned)", "-x"):
        with pytest.raises(InputError, match="not an image name"):
            launch_files(Start.of(TWO, JOB, "jobset", image))
    for launcher in ("jobset", "pytorchjob"):
        with pytest.raises(InputError, match="pass --image"):
            launch_files(Start.of(TWO, JOB, launcher))
    large = replace(JOB, files=(File(name="large.json", text="x" * 2**20),))
    with pytest.raises(InputError, match="a ConfigMap"):
        files_of(TWO, "trainjob", large)


def test_a_plan_smaller_than_a_node_uses_part_of_it() -> None:
    assert node_shape(cluster_of(4), 2) == (1, 2)
    assert node_shape(cluster_of(4), 32) == (4, 8)
    for num_devices in (12, 40):
        with pytest.raises(InputError):
            node_shape(cluster_of(4), num_devices)


@pytest.mark.parametrize("target", TARGETS)
def test_a_plan_of_another_framework_is_refused_with_the_search_to_make(target: str) -> None:
    frameworks = (load_framework(name) for name in ("torchtitan", "nanotron"))
    other = next(framework for framework in frameworks if framework.rules not in TARGETS[target].rules)
    with pytest.raises(InputError, match=f"search with --framework {target} for a plan that it can run"):
        job_of(replace(TWO, framework=other), target)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_an_image_is_used_or_refused(launcher: Launcher) -> None:
    if launcher in SHELLS:
        with pytest.raises(
            InputError, match="leave it out, or use --launcher trainjob, jobset, pytorchjob or skypilot"
        ):
            launch_files(Start.of(TWO, JOB, launcher, IMAGE))
    else:
        assert IMAGE in launch_files(Start.of(TWO, JOB, launcher, IMAGE))[0].text


def test_the_help_of_export_lists_what_there_is(tmp_path: Path) -> None:
    said = " ".join(run(tmp_path, "export", "--help", COLUMNS="500").stdout.split()).replace("- ", "-")
    assert ", ".join(TARGETS) in said
    assert ", ".join(LAUNCHERS) in said


def test_the_command_line_writes_what_a_launcher_needs(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(encode(TWO))
    export = ("export", "plan.json", "--to", "megatron-lm", "--launcher")
    assert run(tmp_path, *export, "slurm", "--out", "launch").returncode == 0
    assert sorted(path.name for path in (tmp_path / "launch").iterdir()) == ["launch.sbatch", "launch.sh"]
    assert "this plan needs 2 launch files: pass --out FOLDER" in run(tmp_path, *export, "slurm").stderr
    shown = run(tmp_path, *export, "jobset", "--image", IMAGE)
    assert [manifest["kind"] for manifest in yaml.safe_load_all(shown.stdout)] == ["ConfigMap", "JobSet"]
