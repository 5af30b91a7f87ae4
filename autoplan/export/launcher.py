"""How does a plan's command start on every node?  Readable bash scripts for torchrun, by hand or under Slurm."""

from __future__ import annotations

import re
import shlex
from typing import Literal, get_args

from autoplan.cluster import ClusterSpec
from autoplan.errors import InputError
from autoplan.export.job import File, Group, Job, Setting, Variable
from autoplan.ranks import host_order
from autoplan.result import PlanFile
from autoplan.units import format_bytes, format_percent, format_seconds

Launcher = Literal["torchrun", "slurm"]
LAUNCHERS: tuple[Launcher, ...] = get_args(Launcher)


def launch_script(plan_file: PlanFile, job: Job, launcher: Launcher) -> str:
    """The script that starts `job` on the devices of the plan; words given to the script end up on the command line."""
    nodes, devices = node_shape(plan_file.cluster, plan_file.best.plan.num_devices)
    hosts = host_order(plan_file.cluster, plan_file.best.plan)
    parts = ["#!/bin/bash"]
    if launcher == "slurm":
        parts += _sbatch_lines(plan_file, nodes, devices, hosts)
    parts += [*_header(plan_file, job, launcher), "set -euo pipefail", ""]
    parts += _variables(job, launcher, nodes, hosts)
    if job.environment:
        parts += [*(_environment(setting) for setting in job.environment), ""]
    for group in job.groups:
        parts += [*_array(group), ""]
    if job.replaceable:
        parts += [*_replaceable(job.replaceable), ""]
    parts += _start(job, launcher, nodes, devices, hosts)
    return "\n".join(parts) + "\n"


def launch_files(plan_file: PlanFile, job: Job, launcher: Launcher) -> tuple[File, ...]:
    """What starts `job`: the script, before the files that the job reads."""
    return (File(name="launch.sh", text=launch_script(plan_file, job, launcher), executable=True), *job.files)


def node_shape(cluster: ClusterSpec, num_devices: int) -> tuple[int, int]:
    """(nodes, devices of each) that hold `num_devices`; part of a node is used only where one node is enough."""
    per_node = cluster.devices_per_node
    if num_devices <= per_node:
        return 1, num_devices
    nodes, rest = divmod(num_devices, per_node)
    if rest:
        raise InputError(f"the plan's {num_devices} devices do not fill nodes of {per_node}: plan for whole nodes")
    if nodes > cluster.num_nodes:
        raise InputError(f"the plan needs {nodes} nodes, cluster {cluster.name!r} has {cluster.num_nodes}")
    return nodes, per_node


def comment(text: str) -> str:
    """`text` as one line that cannot leave its comment: anything that is not printable becomes a question mark."""
    return "# " + "".join(character if character.isprintable() else "?" for character in text)


def safe_name(text: str) -> str:
    """`text` cut down to a name that every scheduler takes."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")[:48] or "autoplan"


def _header(plan_file: PlanFile, job: Job, launcher: Launcher) -> list[str]:
    best, cluster = plan_file.best, plan_file.cluster
    made_by = " ".join(f"{name} {version}" for name, version in plan_file.versions.items())
    start = "sbatch THIS_FILE" if launcher == "slurm" else "bash THIS_FILE"
    lines = [
        f"{plan_file.model.name} with {job.framework} on {best.plan.num_devices} x {cluster.device.name}"
        f" (cluster {cluster.name}), sequences of {plan_file.training.seq_len} tokens, {best.plan.global_batch} a step",
        f"Plan: {best.plan.describe()}",
        f"Predicted: {format_seconds(best.step_s)} a step (90 % interval {format_seconds(best.low_s)} to"
        f" {format_seconds(best.high_s)}), {best.tokens_per_s_per_device:,.0f} tokens/s per device,"
        f" MFU {format_percent(best.mfu)}",
        f"Memory: {format_bytes(best.memory_bytes)} on the fullest device, headroom"
        f" {format_bytes(best.memory_headroom_bytes)}, risk of running out {format_percent(best.oom_probability)}",
        f"Priced as {plan_file.framework.name}, calibration {plan_file.calibration.name}, by {made_by}",
        f"Made from: {plan_file.command}",
        f"Start: {start} [OPTION ...]; options given there come last and win over those below",
    ]
    return [*(comment(line) for line in lines)]


def _sbatch_lines(plan_file: PlanFile, nodes: int, devices: int, hosts: tuple[str, ...]) -> list[str]:
    return [
        f"#SBATCH --job-name={safe_name(plan_file.model.name)}",
        f"#SBATCH --nodes={nodes}",
        "#SBATCH --ntasks-per-node=1",
        f"#SBATCH --gpus-per-node={devices}",
        "#SBATCH --exclusive",
        # Node order is rank order: Slurm's own, or that of the list in the script.
        f"#SBATCH --nodelist={','.join(_host(host) for host in hosts)}" if hosts else "#SBATCH --distribution=block",
    ]


def _host(name: str) -> str:
    """The name of a node, refused where a shell or Slurm would read more than a name in it."""
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", name):
        raise InputError(f"node {name!r} is no host name: correct [[nodes]] of the cluster")
    return name


def _host_lines(launcher: Launcher, hosts: tuple[str, ...]) -> list[str]:
    """The nodes of the plan in the order of their ranks, and which of them this one is."""
    lines = ["# In the order of the ranks.", "hosts=(", *(f"    {_host(host)}" for host in hosts), ")"]
    if launcher == "slurm":
        return [
            *lines,
            "MASTER_ADDR=${hosts[0]}",
            "SLURM_HOSTFILE=$(mktemp)",
            "export SLURM_HOSTFILE",
            'printf \'%s\\n\' "${hosts[@]}" >"$SLURM_HOSTFILE"',
        ]
    return [
        *lines,
        "MASTER_ADDR=${MASTER_ADDR:-${hosts[0]}}",
        "if [[ -z ${NODE_RANK:-} ]]; then",
        '    for rank in "${!hosts[@]}"; do',
        '        if [[ ${hosts[rank]%%.*} == "$(hostname -s)" ]]; then NODE_RANK=$rank; fi',
        "    done",
        "fi",
        ': "${NODE_RANK:?this node is not in the list of hosts: set NODE_RANK}"',
    ]


def _variables(job: Job, launcher: Launcher, nodes: int, hosts: tuple[str, ...]) -> list[str]:
    variables = list(job.variables)
    port = Variable(name="MASTER_PORT", default="29500", says="a free port there")
    lines = ["# Set in the environment what should differ."]
    if launcher == "slurm":
        variables.append(port)
        lines[0] += "  Partition, account and time limit are options of sbatch."
    elif hosts:
        lines[0] += "  Start this script on every node."
        variables.append(port)
    elif nodes == 1:
        variables += [Variable(name="MASTER_ADDR", default="127.0.0.1", says="this node"), port]
        variables += [Variable(name="NODE_RANK", default="0", says="of this node")]
    else:
        lines[0] += "  Start this script on every node, each with its NODE_RANK."
        variables += [Variable(name="MASTER_ADDR", default=None, says="the node of rank 0"), port]
        variables += [Variable(name="NODE_RANK", default="0", says=f"of this node, 0 to {nodes - 1}")]
    assigned = [_assignment(variable) for variable in variables]
    width = max(len(line) for line in assigned)
    lines += [f"{line:<{width}}  # {one.says}" for line, one in zip(assigned, variables, strict=True)]
    if hosts:
        lines += ["", *_host_lines(launcher, hosts)]
    elif launcher == "slurm":
        lines += ['hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")', "MASTER_ADDR=${hosts%%$'\\n'*}"]
    return [*lines, ""]


def _assignment(variable: Variable) -> str:
    rest = ":?must be set" if variable.default is None else f":-{variable.default}"
    return f"{variable.name}=${{{variable.name}{rest}}}"


def _environment(setting: Setting) -> str:
    command = (
        f"unset {setting.name}" if setting.value is None else f"export {setting.name}={shlex.quote(setting.value)}"
    )
    return f"{command}  {comment(setting.says)}"


def _array(group: Group) -> list[str]:
    return [f"# {group.says}", f"{group.name}=(", *(f"    {shlex.join(line)}" for line in group.lines), ")"]


def _replaceable(group: Group) -> list[str]:
    variable = f"{group.name}_ARGS"
    return [*_array(group), f'if [[ -n ${{{variable}:-}} ]]; then read -ra {group.name} <<<"${variable}"; fi']


def _start(job: Job, launcher: Launcher, nodes: int, devices: int, hosts: tuple[str, ...]) -> list[str]:
    arrays = [group.name for group in (*job.groups, job.replaceable) if group]
    # Tasks are numbered as the host file lists them, nodes by Slurm.
    of_slurm = '"$SLURM_PROCID"' if hosts else '"$SLURM_NODEID"'
    rank = of_slurm if launcher == "slurm" else '"$NODE_RANK"'
    meet = '--master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT"'
    rest = [job.program, " ".join(f'"${{{name}[@]}}"' for name in arrays), " ".join((*job.trailing, '"$@"'))]
    if launcher == "torchrun":
        first = [f"exec torchrun --nnodes {nodes} --nproc-per-node {devices} --node-rank {rank}", meet]
    else:
        # Every node expands its own number: static ranks, so that the order of the nodes is the plan's.  Without
        # cpu-bind=none the processes of a node may share the one core that Slurm gives to its one task.
        tasks = f"--ntasks={nodes} --distribution=arbitrary" if hosts else "--ntasks-per-node=1"
        first = [
            f"exec srun {tasks} --cpu-bind=none --kill-on-bad-exit=1",
            f"bash -c 'exec torchrun --node-rank {rank} \"$@\"' node --nnodes {nodes} --nproc-per-node {devices}",
            meet,
        ]
    return [" \\\n    ".join((*first, *rest))]
