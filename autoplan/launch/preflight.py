"""Bash checks on every node before the job starts that the node matches the plan's cluster."""

from __future__ import annotations

import math
import re
import shlex

from autoplan.base.units import MIB
from autoplan.frameworks.common.header import comment
from autoplan.launch.start import NodeRange, Start, on_nodes

_RDMA = ("infiniband", "roce", "efa")  # networks with adapters under /dev/infiniband

# Commands that fill the array `free` with the free MiB of each device, by vendor tool.
_NVIDIA = (
    'query=(nvidia-smi --query-gpu=memory.free --format="csv,noheader,nounits")',
    'if [[ -n ${CUDA_VISIBLE_DEVICES:-} ]]; then query+=(--id="$CUDA_VISIBLE_DEVICES"); fi',
    'said=$("${query[@]}") || stop "nvidia-smi fails: $said"',
    'mapfile -t free <<<"$said"',
)
_AMD = (
    "query=(rocm-smi --showmeminfo vram --csv) chosen=() free=()",
    'if [[ -n ${HIP_VISIBLE_DEVICES:-} ]]; then query+=(-d); IFS=, read -ra chosen <<<"$HIP_VISIBLE_DEVICES"; fi',
    'said=$("${query[@]}" "${chosen[@]}") || stop "rocm-smi fails: $said"',
    "while IFS=, read -r card total used; do",
    "    if [[ $card == card* ]]; then free+=($(((total - used) / 1048576))); fi",
    'done <<<"$said"',
)

_INTEL = (
    'said=$(hl-smi --query-aip=memory.free --format="csv,noheader,nounits") || stop "hl-smi fails: $said"',
    'mapfile -t free <<<"$said"',
)

# Tool, query and device files of a vendor's driver; /dev/dxg is used in virtual machines on Windows.
_VENDORS = {
    "nvidia": ("nvidia-smi", _NVIDIA, ("/dev/nvidiactl", "/dev/dxg")),
    "amd": ("rocm-smi", _AMD, ("/dev/kfd", "/dev/dxg")),
    "intel": ("hl-smi", _INTEL, ("/dev/accel/accel0",)),
}

# Versions in Python, in the format of profiler/machine/environment.py.
_VERSIONS = {
    "runtime": 'f"rocm {torch.version.hip}" if torch.version.hip else f"cuda {torch.version.cuda}"',
    "torch": 'f"torch {torch.__version__}"',
    "collectives": '("rccl " if torch.version.hip else "nccl ") + ".".join(map(str, torch.cuda.nccl.version()))',
}


def preflight(start: Start, given_nodes: str | None) -> list[str]:
    """Return the lines of the check; `given_nodes` is the scheduler's variable with the number of nodes.

    A missing program, too few nodes, too few devices or too little memory stop the job; library versions that differ
    from the measured ones and a missing network only give a warning.
    """
    checks = [
        *_program(start),
        *_nodes(start, given_nodes),
        *_devices(start),
        *_network(start),
        *_versions(start),
    ]
    if not checks:
        return []
    return [
        "# Check that this machine matches the plan.  PREFLIGHT=0 skips the checks.",
        "if [[ ${PREFLIGHT:-1} != 0 ]]; then",
        '    warn() { printf \'preflight on %s: %s\\n\' "${HOSTNAME:-this node}" "$1" >&2; }',
        '    stop() { warn "$1: PREFLIGHT=0 starts anyway" && exit 1; }',
        *checks,
        "fi",
        "",
    ]


def _program(start: Start) -> list[str]:
    """Return the check that the started file exists, if the user sets its folder or its name."""
    program = start.job.program
    variable = re.match(r'"\$(\w+)', program)
    if variable is None or variable[1] == "HERE":
        return []
    return [f'    [[ -f {program} ]] || stop "there is no {program[1:-1]}: set {variable[1]}"']


def _nodes(start: Start, variable: str | None) -> list[str]:
    if variable is None:
        return []
    count = start.num_nodes
    sizes = f" of {start.num_devices} devices" if start.has_equal_nodes else ""
    return [
        f"    if [[ ${{{variable}:-{count}}} != {count} ]]; then",
        f'        stop "the plan is for {count} nodes{sizes}, ${variable} nodes were given"',
        "    fi",
    ]


def _devices(start: Start) -> list[str]:
    """Return the check of the devices and the free memory of each, by the cluster part of the node."""
    lines = []
    for nodes in start.node_ranges:
        of_part = _devices_of(nodes)
        if of_part and len(start.node_ranges) > 1:
            inner = (f"    {line}" for line in of_part)
            of_part = [f"    if {on_nodes(nodes)}; then", *inner, "    fi"]
        lines += of_part
    return lines


def _devices_of(nodes: NodeRange) -> list[str]:
    count, vendor = nodes.num_devices, nodes.plan_file.cluster.device.vendor
    if vendor == "cpu":
        return []
    tool, ask, files = _VENDORS[vendor]
    exists = " || ".join(f"-e {file}" for file in files)
    need_mib = math.ceil(nodes.memory_bytes / MIB)
    return [
        f"    if command -v {tool} >/dev/null; then",
        *(f"        {line}" for line in ask),
        f"        if ((${{#free[@]}} < {count})); then",
        f'            stop "{count} devices are needed, {tool} lists ${{#free[@]}}"',
        "        fi",
        f"        for at in {{0..{count - 1}}}; do",
        f"            if [[ ${{free[at]}} =~ ^[0-9]+$ ]] && ((free[at] < {need_mib})); then",
        f'                stop "device $at has ${{free[at]}} MiB free, the plan needs {need_mib} MiB"',
        "            fi",
        "        done",
        "    else",
        f'        [[ {exists} ]] || stop "there is neither {tool} nor {files[0]}: no device of {vendor} is here"',
        f'        warn "there is no {tool}: devices and their free memory are not checked"',
        "    fi",
    ]


def _network(start: Start) -> list[str]:
    kind = start.plan_file.cluster.network.kind
    if start.num_nodes == 1 or kind not in _RDMA:
        return []
    return [
        "    if [[ ! -d /dev/infiniband ]]; then",
        f'        warn "the plan assumes {kind}, but there is no /dev/infiniband: collectives will be far slower"',
        "    fi",
    ]


def _versions(start: Start) -> list[str]:
    """Return the check of library versions against the timings', on rank 0 only, as importing torch takes seconds."""
    machine = start.plan_file.cluster.machine
    if not start.plan_file.timings or machine is None or machine.runtime == "cpu":
        return []
    versions = {"runtime": machine.runtime, "torch": machine.torch and f"torch {machine.torch}"}
    versions |= {"collectives": machine.collectives}
    versions = {name: comment(text)[2:] for name, text in versions.items() if text}
    if not versions:
        return []
    parts = ", ".join(_VERSIONS[name] for name in versions)
    return [
        "    if ((NODE_RANK == 0)); then",
        f"        measured={shlex.quote(', '.join(versions.values()))}",
        f"        here=$(python3 -c 'import torch; print({parts}, sep=\", \")' 2>/dev/null) || here='no such torch'",
        '        if [[ $here != "$measured" ]]; then',
        '            warn "the prediction is based on $measured, but python3 has $here: expect other times"',
        "        fi",
        "    fi",
    ]
