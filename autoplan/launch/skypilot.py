"""Task file that starts a job on machines provisioned by SkyPilot, in addition to the node script."""

from __future__ import annotations

from typing import Any

from autoplan.base.errors import InputError
from autoplan.frameworks.common.header import comment
from autoplan.frameworks.common.job import File, safe_name
from autoplan.launch.manifest import manifest
from autoplan.launch.node_script import NODE_SCRIPT, node_files
from autoplan.launch.start import Start, dns_name, header

TASK_FILE = "task.yaml"
# SkyPilot's names (0.14.1, utils/gpu_names.py) that differ from ours in upper case without the board type.
_NAMES = {"a100-sxm": "A100-80GB", "a100-pcie": "A100-80GB", "a100-sxm-40": "A100", "v100": "V100-32GB"}


def skypilot_files(start: Start) -> tuple[File, ...]:
    """Return a task and the files that it runs, for `sky launch` in their folder, which is copied to every node."""
    if start.hosts and start.num_nodes > 1:
        raise InputError("the plan lists its nodes, and SkyPilot takes others: use a cluster without [[nodes]]")
    device, network = start.plan_file.cluster.device, start.plan_file.cluster.network
    resources: dict[str, Any] = {}
    if device.vendor != "cpu":
        name = _NAMES.get(device.name) or safe_name(device.name.removesuffix("-sxm").removesuffix("-pcie")).upper()
        resources["accelerators"] = f"{name}:{start.num_devices}"
    if start.num_nodes > 1 and network.kind != "ethernet":
        resources["network_tier"] = "best"
    if start.image is not None:
        resources["image_id"] = f"docker:{start.image}"
    # SkyPilot requires a value for null: the user must set the checkout folder, since the job starts elsewhere.
    variables = {
        variable.name: None if variable.default == "." else variable.default
        for variable in start.job.variables
        if variable.default is None or "$" not in variable.default
    }
    task: dict[str, Any] = {
        "name": dns_name(start.name),
        "num_nodes": start.num_nodes,
        "workdir": ".",
        "resources": resources,
        "envs": variables,
        "run": f"bash {NODE_SCRIPT}",
    }
    how = f"sky launch {TASK_FILE}, in this folder, with --env NAME=VALUE for each of envs that is null"
    lines = header(start, how)
    lines.append(comment("Yours to add: setup, for what the image lacks, and infra, where it shall run."))
    return (File(name=TASK_FILE, text=manifest(lines, [task])), *node_files(start, f"by {TASK_FILE}"))
