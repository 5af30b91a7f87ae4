"""Do the schedulers themselves take what is exported?  Slurm's own controller, Open MPI, the schemas of Kubernetes."""

from __future__ import annotations

import copy
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from test_launcher import CASES, TWO, documents, files_of

# -- Slurm ------------------------------------------------------------------------------------------------------------

SLURM_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdSpoolDir={folder}
SwitchType=switch/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
GresTypes=gpu
SuspendTime=-1
SuspendProgram=/bin/true
ResumeProgram=/bin/true
NodeName=node[1-9] CPUs=128 RealMemory=1000000 Gres=gpu:8 State=CLOUD
PartitionName=batch Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of a controller of nine nodes that do not exist, which is asked and runs nothing."""
    for tool in ("sbatch", "slurmctld", "munged"):
        if not shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin"):
            pytest.skip(f"{tool} is not installed (Debian: slurm-wlm, munge)")
    if os.geteuid() != 0:
        pytest.skip("a controller of Slurm and munged of one's own need root")
    folder = tmp_path_factory.mktemp("slurm")
    for above in (folder, *folder.parents[:2]):
        above.chmod(0o755)  # as munged demands
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    host = socket.gethostname().split(".")[0]
    (folder / "slurm.conf").write_text(SLURM_CONF.format(host=host, port=port, folder=folder))
    (folder / "gres.conf").write_text("NodeName=node[1-9] Name=gpu Count=8\n")
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": f"{os.environ['PATH']}:/usr/sbin"}
    munge = {"key-file": "munge.key", "socket": "munge.sock", "pid-file": "m.pid", "log-file": "m.log"}
    options = [f"--{name}={folder / file}" for name, file in {**munge, "seed-file": "m.seed"}.items()]
    with (folder / "log").open("w") as log:
        daemons = [
            subprocess.Popen(command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
            for command in (["munged", "-F", "--force", *options], ["slurmctld", "-D", "-i"])
        ]
        try:
            for _ in range(40):
                ping = subprocess.run(
                    ["scontrol", "ping"], env=environment, capture_output=True, text=True, check=False
                )
                if " is UP" in ping.stdout:
                    break
                time.sleep(0.25)
            else:
                pytest.skip(f"no controller of Slurm starts here: {(folder / 'log').read_text()[-300:]}")
            yield environment
        finally:
            for daemon in reversed(daemons):
                daemon.terminate()
                daemon.wait(10)


def asked(slurm: dict[str, str], folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    (folder / "launch.sbatch").write_text(text)
    command = ["sbatch", "--test-only", "launch.sbatch", "--lr", "a b"]
    return subprocess.run(command, env=slurm, cwd=folder, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("name", ["one.slurm", "two.slurm", "placed.slurm"])
def test_slurm_would_place_the_job(slurm: dict[str, str], tmp_path: Path, name: str) -> None:
    result = asked(slurm, tmp_path, files_of(*CASES[name])[0].text)
    assert result.returncode == 0, result.stderr
    assert name != "placed.slurm" or "nodes node[6-9]" in result.stderr


def test_slurm_refuses_more_nodes_than_it_has(slurm: dict[str, str], tmp_path: Path) -> None:
    text = files_of(TWO, "slurm")[0].text.replace("--nodes=2", "--nodes=10")
    assert asked(slurm, tmp_path, text).returncode != 0


# -- Open MPI ---------------------------------------------------------------------------------------------------------


def test_open_mpi_starts_every_node_once_in_the_order_of_the_ranks(tmp_path: Path) -> None:
    mpirun = shutil.which("mpirun")
    said = subprocess.run([mpirun or "true", "--version"], capture_output=True, text=True, check=False).stdout
    if "Open MPI" not in said:
        pytest.skip("Open MPI is not installed")
    for file in files_of(TWO, "mpirun"):
        (tmp_path / file.name).write_text(file.text)
    (tmp_path / "hosts").write_text("# ours\nnodea slots=8\nnodeb slots=8\n")
    (tmp_path / "agent").write_text(
        '#!/bin/bash\nshift\nexec bash -c "$*"\n'
    )  # in the place of ssh: all nodes are this one
    (tmp_path / "torchrun").write_text('#!/bin/bash\necho "$@" "$STEPS" >"$0.$OMPI_COMM_WORLD_RANK"\n')
    for name in ("agent", "torchrun"):
        (tmp_path / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_plm_rsh_agent": str(tmp_path / "agent"),
        "HOSTFILE": "hosts",
        "PREFLIGHT": "0",
        "STEPS": "7",
    }
    command = ["bash", "mpirun.sh", "--lr", "3"]
    result = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
    )
    assert result.returncode == 0, result.stderr
    for rank in ("0", "1"):
        words = (tmp_path / f"torchrun.{rank}").read_text().split()
        expected = f"--nnodes 2 --nproc-per-node 8 --node-rank {rank} --master-addr nodea --master-port 29500"
        assert words[:10] == expected.split()
        assert words[-5:] == ["--steps", "7", "--lr", "3", "7"]


# -- Kubernetes -------------------------------------------------------------------------------------------------------

POD = {"restartPolicy", "containers", "volumes", "nodeSelector"}
CONTAINER = {"name", "image", "command", "env", "resources", "volumeMounts"}
MANIFESTS = [name for name, (_, launcher) in CASES.items() if launcher in ("trainjob", "jobset", "pytorchjob")]


def tables(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the tables inside."""
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from tables(part)


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_is_one_that_kubernetes_can_read(name: str) -> None:
    config, job = documents(files_of(*CASES[name]))
    assert (config["apiVersion"], config["kind"]) == ("v1", "ConfigMap")
    assert config["metadata"]["name"] == job["metadata"]["name"]
    volumes = {volume["name"] for table in tables(job) for volume in table.get("volumes", ())}
    for table in tables(job):
        for container in table.get("containers", ()):
            assert set(container) <= CONTAINER
            assert {mount["name"] for mount in container["volumeMounts"]} == volumes == {"job", "shm"}
            for variable in container.get("env", ()):
                assert isinstance(variable.get("value", ""), str)
        if "restartPolicy" in table and "containers" in table:
            assert set(table) <= POD
    limits = [table["limits"] for table in tables(job) if "limits" in table]
    assert limits
    assert all(limit == {"nvidia.com/gpu": 8} for limit in limits)


def schemas() -> dict[tuple[str, str], dict[str, Any]]:
    """By apiVersion and kind, of the custom resources in the folders or files that K8S_CRDS names."""
    found = {}
    for place in filter(None, os.environ.get("K8S_CRDS", "").split(":")):
        for path in sorted(Path(place).rglob("*.yaml")) if Path(place).is_dir() else [Path(place)]:
            text = path.read_text()
            if "kind: CustomResourceDefinition" not in text or "{{" in text:
                continue
            for document in yaml.load_all(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
                if document and document["kind"] == "CustomResourceDefinition" and "group" in document["spec"]:
                    for version in document["spec"]["versions"]:
                        key = (f"{document['spec']['group']}/{version['name']}", document["spec"]["names"]["kind"])
                        found[key] = version["schema"]["openAPIV3Schema"]
    return found


def strict(node: Any) -> Any:
    """A schema that knows no other fields, as the API server reads it by `kubectl apply`."""
    if isinstance(node, list):
        return [strict(part) for part in node]
    if not isinstance(node, dict):
        return node
    closed = {key: strict(part) for key, part in node.items()}
    if isinstance(node.get("properties"), dict) and not node.get("x-kubernetes-preserve-unknown-fields"):
        closed.setdefault("additionalProperties", False)
    if node.get("x-kubernetes-int-or-string"):
        closed = {key: part for key, part in closed.items() if key != "anyOf"} | {"type": ["integer", "string"]}
    return closed


def test_manifests_have_the_fields_of_their_resources_and_no_others() -> None:
    known = schemas()
    if not known:
        pytest.skip("K8S_CRDS names no custom resource definitions")
    jsonschema = pytest.importorskip("jsonschema")
    checkers: dict[tuple[str, str], Any] = {}
    for name in MANIFESTS:
        job = documents(files_of(*CASES[name]))[1]
        key = (job["apiVersion"], job["kind"])
        assert key in known, f"K8S_CRDS has no {key}"
        if key not in checkers:
            schema = strict(known[key])
            schema["properties"]["metadata"] = {"type": "object"}
            checkers[key] = jsonschema.Draft202012Validator(schema)
        checkers[key].validate(job)
        wrong = copy.deepcopy(job)
        wrong["spec"]["numNode"] = 2
        assert not checkers[key].is_valid(wrong)
