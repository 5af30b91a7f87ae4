"""Scripts that start the node script on all nodes at once, with sbatch and srun or with mpirun."""

from __future__ import annotations

from autoplan.frameworks.common.job import File, LaunchVariable, safe_name
from autoplan.launch.node_script import NODE_SCRIPT, assignments, node_files
from autoplan.launch.start import Start, header, script

SBATCH_FILE, MPIRUN_FILE = "launch.sbatch", "mpirun.sh"
_OPTIONS = "[OPTION ...]; options given there come last and take precedence over launch.sh"
_LOOK_UP = f"unset MASTER_ADDR NODE_RANK  # {NODE_SCRIPT} looks them up in the list of nodes"


def slurm_files(start: Start) -> tuple[File, ...]:
    """Return a batch script and the node script that it starts; all files must be on a shared file system."""
    has_gpus = start.plan_file.cluster.device.vendor != "cpu"
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={safe_name(start.name)}",
        f"#SBATCH --nodes={start.num_nodes}",
        "#SBATCH --ntasks-per-node=1",
        *([f"#SBATCH --gpus-per-node={start.num_devices}"] if has_gpus else []),
        "#SBATCH --exclusive",
        # Ranks follow Slurm's order of nodes, or the list in the node script.
        f"#SBATCH --nodelist={','.join(start.hosts)}" if start.hosts else "#SBATCH --distribution=block",
        *header(start, f"sbatch {SBATCH_FILE} {_OPTIONS}"),
        "# Partition, account and time limit are options of sbatch; launch.sh lists what the environment may set.",
        "set -euo pipefail",
        "",
        "# Slurm runs a copy of this file: HERE, where launch.sh is, is the folder that it was submitted from.",
        "if [[ -z ${HERE:-} ]]; then",
        "    command=$(scontrol show job \"$SLURM_JOB_ID\" | sed -n 's/^ *Command=//p')",
        f"    HERE=${{command%/{SBATCH_FILE}*}}",
        f"    if [[ ! -f $HERE/{NODE_SCRIPT} ]]; then HERE=$SLURM_SUBMIT_DIR; fi",
        "fi",
        f'if [[ ! -f $HERE/{NODE_SCRIPT} ]]; then echo "{NODE_SCRIPT} is not in $HERE: set HERE" >&2 && exit 1; fi',
        "",
    ]
    if start.hosts:
        lines.append(_LOOK_UP)
    elif start.num_nodes > 1:
        lines += [
            'nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")',
            "export MASTER_ADDR=${nodes%%$'\\n'*}",
        ]
    lines += [
        # Without cpu-bind=none the processes of a node may share the single core that Slurm assigns to its task.
        "exec srun --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1 \\",
        f'    bash "$HERE/{NODE_SCRIPT}" "$@"',
    ]
    return (script(SBATCH_FILE, lines), *node_files(start, f"by {SBATCH_FILE}"))


def mpirun_files(start: Start) -> tuple[File, ...]:
    """Return a script that starts the node script with Open MPI, once per node; paths are the same on all nodes."""
    names = [variable.name for variable in start.job.variables]
    if start.job.replaceable:
        names.append(f"{start.job.replaceable.name}_ARGS")
    lines = [
        "#!/bin/bash",
        *header(start, f"bash {MPIRUN_FILE} {_OPTIONS}"),
        "# launch.sh lists what the environment may set.",
        "set -euo pipefail",
        'HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)',
        "",
    ]
    if start.hosts:
        lines += [_LOOK_UP, ""]
        where = f"--host {','.join(start.hosts)}"
    elif start.num_nodes > 1:
        where = '--hostfile "$HOSTFILE"'
        note = "a line for each node, in the order of the ranks"
        lines += [
            *assignments([LaunchVariable(name="HOSTFILE", default=None, note=note)]),
            "read -r first _ < <(grep -m 1 '^[[:space:]]*[^#[:space:]]' \"$HOSTFILE\") || first=",
            "export MASTER_ADDR=$first",
            "",
        ]
    else:
        where = "--host localhost"
    lines += [
        "# Open MPI hands on nothing else of the environment.",
        "forwarded=()",
        f"for name in PATH LD_LIBRARY_PATH PYTHONPATH MASTER_ADDR MASTER_PORT PREFLIGHT {' '.join(names)} \\",
        '    "${!NCCL_@}"; do',
        '    if [[ -v $name ]]; then forwarded+=(-x "$name"); fi',
        "done",
        "",
        f"exec mpirun -np {start.num_nodes} --map-by ppr:1:node --bind-to none {where} \\",
        f'    "${{forwarded[@]}}" bash "$HERE/{NODE_SCRIPT}" "$@"',
    ]
    return (script(MPIRUN_FILE, lines), *node_files(start, f"by {MPIRUN_FILE}"))
