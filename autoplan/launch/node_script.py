"""Bash script for every node of a job; only the numbering of nodes depends on the launcher."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from autoplan.frameworks.common.header import comment
from autoplan.frameworks.common.job import EnvironmentVariable, File, LaunchVariable, OptionGroup
from autoplan.launch.names import Launcher
from autoplan.launch.preflight import preflight
from autoplan.launch.start import Start, header, on_nodes, script

NODE_SCRIPT = "launch.sh"


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbering:
    """Shell expansions with which a launcher numbers its nodes; None if the user or a manifest does so."""

    rank: str | None = None
    master: str | None = None  # address of rank 0
    num_nodes: str | None = None  # name of a variable
    looks_up_hosts: bool = False  # if the plan lists the nodes, each node finds itself in the list


# Kubeflow's operators set PET_* for torchrun: trainer 8c0f505 pkg/runtime/framework/plugins/torch/torch.go,
# training-operator 7858371^ pkg/controller.v1/pytorch/envvar.go; the latter sets MASTER_ADDR and MASTER_PORT too.
NUMBERING: dict[Launcher, Numbering] = {
    "torchrun": Numbering(looks_up_hosts=True),
    "slurm": Numbering(rank="$SLURM_NODEID", num_nodes="SLURM_NNODES", looks_up_hosts=True),
    "mpirun": Numbering(rank="$OMPI_COMM_WORLD_RANK", num_nodes="OMPI_COMM_WORLD_SIZE", looks_up_hosts=True),
    "trainjob": Numbering(rank="$PET_NODE_RANK", master="$PET_MASTER_ADDR", num_nodes="PET_NNODES"),
    "jobset": Numbering(),
    "pytorchjob": Numbering(rank="$PET_NODE_RANK", num_nodes="PET_NNODES"),
    "skypilot": Numbering(
        rank="$SKYPILOT_NODE_RANK", master="${SKYPILOT_NODE_IPS%%$'\\n'*}", num_nodes="SKYPILOT_NUM_NODES"
    ),
}


def node_files(start: Start, how: str) -> tuple[File, ...]:
    """Return the node script and the job's files; `how` says how to start it; its arguments go to the program."""
    job, numbering = start.job, NUMBERING[start.launcher]
    lines = ["#!/bin/bash", *header(start, how), "set -euo pipefail", ""]
    if job.files:
        lines += ['HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)  # the files of the job lie beside this one', ""]
    lines += _variables(start, numbering)
    if start.environment:
        lines += [*(_environment(setting) for setting in start.environment), ""]
    for group in job.groups:
        lines += [*_array(group), ""]
    if job.replaceable:
        lines += [*_replaceable(job.replaceable), ""]
    lines += preflight(start, numbering.num_nodes)
    return (script(NODE_SCRIPT, [*lines, *_start(start)]), *job.files)


def assignments(variables: list[LaunchVariable]) -> list[str]:
    """Return lines that take variables from the environment, with comments on their purpose."""
    assigned = []
    for variable in variables:
        expansion = ":?must be set" if variable.default is None else f":-{variable.default}"
        assigned.append(f"{variable.name}=${{{variable.name}{expansion}}}")
    width = max(map(len, assigned))
    return [f"{line:<{width}}  # {variable.note}" for line, variable in zip(assigned, variables, strict=True)]


def _variables(start: Start, numbering: Numbering) -> list[str]:
    """Return the variables that the user may set; those known to the launcher are taken from it instead."""
    alone = start.num_nodes == 1
    is_listed = bool(start.hosts) and numbering.looks_up_hosts
    rank_range = f"of this node, 0 to {start.num_nodes - 1}"
    variables, host_lines = list(start.job.variables), []
    if is_listed:
        host_lines = ["", *_host_lines(start.hosts)]
    elif alone:
        variables.append(LaunchVariable(name="MASTER_ADDR", default="127.0.0.1", note="this node"))
        variables.append(LaunchVariable(name="NODE_RANK", default="0", note="of this node"))
    else:
        if numbering.master is None:
            variables.append(LaunchVariable(name="MASTER_ADDR", default=None, note="the node of rank 0"))
        else:
            host_lines.append(f"MASTER_ADDR={numbering.master}  # the node of rank 0")
        if numbering.rank is None:
            variables.append(LaunchVariable(name="NODE_RANK", default=None, note=rank_range))
        else:
            host_lines.append(f"NODE_RANK={numbering.rank}  # {rank_range}")
    variables.append(LaunchVariable(name="MASTER_PORT", default="29500", note="a free port on the node of rank 0"))
    return ["# Override these in the environment.", *assignments(variables), *host_lines, ""]


def _host_lines(hosts: tuple[str, ...]) -> list[str]:
    """Return lines with the plan's nodes in the order of their ranks, and the lookup of this node."""
    return [
        "# In the order of the ranks.",
        "hosts=(",
        *(f"    {host}" for host in hosts),
        ")",
        "MASTER_ADDR=${MASTER_ADDR:-${hosts[0]}}",
        "if [[ -z ${NODE_RANK:-} ]]; then",
        "    this=${SLURMD_NODENAME:-$(hostname -s)}",
        '    for rank in "${!hosts[@]}"; do',
        '        if [[ ${hosts[rank]%%.*} == "${this%%.*}" ]]; then NODE_RANK=$rank; fi',
        "    done",
        "fi",
        ': "${NODE_RANK:?this node is not in the list of hosts: set NODE_RANK}"',
    ]


def _environment(variable: EnvironmentVariable) -> str:
    command = (
        f"unset {variable.name}" if variable.value is None else f"export {variable.name}={shlex.quote(variable.value)}"
    )
    return f"{command}  {comment(variable.note)}"


def _array(group: OptionGroup) -> list[str]:
    lines = (" ".join(_word(word) for word in line) for line in group.lines)
    return [f"# {group.note}", f"{group.name}=(", *(f"    {line}" for line in lines), ")"]


def _word(text: str) -> str:
    """Return `text` quoted for an array, including commas, which look like separators to readers and shellcheck."""
    return f"'{text}'" if shlex.quote(text) == text and "," in text else shlex.quote(text)


def _replaceable(group: OptionGroup) -> list[str]:
    variable = f"{group.name}_ARGS"
    return [*_array(group), f'if [[ -n ${{{variable}:-}} ]]; then read -ra {group.name} <<<"${variable}"; fi']


def _start(start: Start) -> list[str]:
    job = start.job
    arrays = [group.name for group in (*job.groups, job.replaceable) if group]
    size, sizes = str(start.num_devices), list[str]()
    if not start.has_equal_nodes:
        size = '"$NUM_DEVICES"'
        sizes = [f"if {on_nodes(nodes)}; then NUM_DEVICES={nodes.num_devices}; fi" for nodes in start.node_ranges]
    parts = [
        f'exec torchrun --nnodes {start.num_nodes} --nproc-per-node {size} --node-rank "$NODE_RANK"',
        '--master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT"',
        job.program,
        *([" ".join(f'"${{{name}[@]}}"' for name in arrays)] if arrays else []),
        " ".join((*job.trailing, '"$@"')),
    ]
    return [*sizes, " \\\n    ".join(parts)]
