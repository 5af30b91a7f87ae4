"""Manifests that start a job on Kubernetes: a ConfigMap with its files, and the objects that run them on every node.

Fields are those of kubeflow/trainer 8c0f505 (2.3), kubernetes-sigs/jobset 08dfbdf and the last training-operator with
PyTorchJob, kubeflow/training-operator 7858371^.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autoplan.base.errors import InputError
from autoplan.frameworks.common.header import comment
from autoplan.frameworks.common.job import File
from autoplan.launch.manifest import manifest
from autoplan.launch.node_script import NODE_SCRIPT, node_files
from autoplan.launch.start import Start, dns_name, header

Table = dict[str, Any]

_FOLDER = "/etc/autoplan"
_MAX_BYTES = 2**20  # limit of a ConfigMap
# Resource names of the vendors' device plugins.
_RESOURCES = {"nvidia": "nvidia.com/gpu", "amd": "amd.com/gpu", "intel": "habana.ai/gaudi"}
_RANK_FIELD = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def trainjob_files(start: Start) -> tuple[File, ...]:
    """Return a TrainJob of Kubeflow Trainer, with its runtime for torch."""
    _check_unlisted(start)
    trainer: Table = {
        "command": _command(),
        "numNodes": start.num_nodes,
        "numProcPerNode": start.num_devices,
        "env": _variables(start),
    }
    if start.image is not None:
        trainer["image"] = start.image
    if resources := _resources(start):
        trainer["resourcesPerNode"] = resources
    pod = {"volumes": _volumes(start), "containers": [{"name": "node", "volumeMounts": _mounts()}]}
    patch = {"replicatedJobs": [{"name": "node", "template": {"spec": {"template": {"spec": pod}}}}]}
    spec = {
        "runtimeRef": {"name": "torch-distributed"},
        "trainer": trainer,
        "runtimePatches": [{"manager": "autoplan", "trainingRuntimeSpec": {"template": {"spec": patch}}}],
    }
    notes = ["Needs Kubeflow Trainer 2.2 or later and its runtime torch-distributed."]
    return (_manifest(start, "trainer.kubeflow.org/v1alpha1", "TrainJob", spec, notes),)


def jobset_files(start: Start) -> tuple[File, ...]:
    """Return a JobSet with one indexed Job, or with one Job per listed node, in the order of ranks."""
    name = dns_name(start.name)
    if start.hosts:
        jobs = [
            _replicated(start, f"rank-{rank}", 1, {"value": str(rank)}, f"{name}-rank-0-0-0.{name}", host)
            for rank, host in enumerate(start.hosts)
        ]
    else:
        index = {"valueFrom": {"fieldRef": {"fieldPath": _RANK_FIELD}}}
        jobs = [_replicated(start, "node", start.num_nodes, index, f"{name}-node-0-0.{name}", None)]
    spec = {"replicatedJobs": jobs}
    return (_manifest(start, "jobset.x-k8s.io/v1alpha2", "JobSet", spec),)


def pytorchjob_files(start: Start) -> tuple[File, ...]:
    """Return a PyTorchJob of the older training operator: a master, and the other nodes as workers."""
    _check_unlisted(start)

    def replica(count: int) -> Table:
        pod = _pod(start, "pytorch", _variables(start))
        return {"replicas": count, "restartPolicy": "Never", "template": {"spec": pod}}

    replicas = {"Master": replica(1)}
    if start.num_nodes > 1:
        replicas["Worker"] = replica(start.num_nodes - 1)
    spec = {
        "nprocPerNode": str(start.num_devices),
        "runPolicy": {"backoffLimit": 0, "cleanPodPolicy": "Running"},
        "pytorchReplicaSpecs": replicas,
    }
    return (_manifest(start, "kubeflow.org/v1", "PyTorchJob", spec),)


def _check_unlisted(start: Start) -> None:
    if start.hosts and start.num_nodes > 1:
        raise InputError(
            f"the plan lists its nodes in the order of the ranks, and a {start.launcher} cannot pin pods "
            "to nodes: use --launcher jobset, or a cluster without [[nodes]]"
        )


def _replicated(start: Start, name: str, count: int, rank: Table, master: str, host: str | None) -> Table:
    env = [*_variables(start), {"name": "NODE_RANK", **rank}, {"name": "MASTER_ADDR", "value": master}]
    pod = _pod(start, "node", env)
    if host is not None:
        pod = {"nodeSelector": {"kubernetes.io/hostname": host}, **pod}
    job = {
        "parallelism": count,
        "completions": count,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": {"metadata": {"labels": _labels(start)}, "spec": pod},
    }
    return {"name": name, "replicas": 1, "template": {"spec": job}}


def _pod(start: Start, container: str, env: Sequence[Table]) -> Table:
    if start.image is None:
        raise InputError(f"a {start.launcher} runs in an image: pass --image, such as nvcr.io/nvidia/pytorch:25.06-py3")
    runs: Table = {"name": container, "image": start.image, "command": _command(), "env": list(env)}
    if resources := _resources(start):
        runs["resources"] = resources
    runs["volumeMounts"] = _mounts()
    return {"restartPolicy": "Never", "containers": [runs], "volumes": _volumes(start)}


def _command() -> list[str]:
    return ["bash", f"{_FOLDER}/{NODE_SCRIPT}"]


def _variables(start: Start) -> list[Table]:
    """Return the variables that the user may set, with their plain-text defaults."""
    return [
        {"name": variable.name, "value": variable.default}
        for variable in start.job.variables
        if variable.default is not None and "$" not in variable.default
    ]


def _metadata(start: Start) -> Table:
    return {"name": dns_name(start.name), "labels": _labels(start)}


def _labels(start: Start) -> Table:
    """Return the labels of all objects of the job (kubernetes.io/docs/concepts: common labels)."""
    return {"app.kubernetes.io/managed-by": "autoplan", "app.kubernetes.io/instance": dns_name(start.name)}


def _resources(start: Start) -> Table:
    name = _RESOURCES.get(start.plan_file.cluster.device.vendor)
    return {"limits": {name: start.num_devices}} if name else {}


def _mounts() -> list[Table]:
    return [{"name": "job", "mountPath": _FOLDER}, {"name": "shm", "mountPath": "/dev/shm"}]


def _volumes(start: Start) -> list[Table]:
    """Return the volumes: the job's files, and shared memory for NCCL and data loaders (by default only 64 MiB)."""
    name = dns_name(start.name)
    return [{"name": "job", "configMap": {"name": name}}, {"name": "shm", "emptyDir": {"medium": "Memory"}}]


def _manifest(start: Start, version: str, kind: str, spec: Table, notes: Sequence[str] = ()) -> File:
    file_name = f"{start.launcher}.yaml"
    files = node_files(start, f"by {file_name}")
    size = sum(len(file.text.encode()) for file in files)
    if size > _MAX_BYTES:
        raise InputError(f"the files of the job hold {size:,} bytes, a ConfigMap at most {_MAX_BYTES:,}: use a shell")
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(start),
        "data": {file.name: file.text for file in files},
    }
    job = {"apiVersion": version, "kind": kind, "metadata": _metadata(start), "spec": spec}
    lines = header(start, f"kubectl apply -f {file_name}, with -n NAMESPACE for another one than yours")
    lines += [comment(note) for note in notes]
    kind_of_network = start.plan_file.cluster.network.kind
    if start.num_nodes > 1 and kind_of_network != "ethernet":
        note = f"The plan counts on {kind_of_network}: add what your cluster asks for it (a resource, IPC_LOCK)."
        lines.append(comment(note))
    return File(name=file_name, text=manifest(lines, [config, job]))
