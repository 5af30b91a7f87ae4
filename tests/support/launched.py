"""What do exported scripts start?  They are run with stand-ins for all that they call, which record their words."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from autoplan.frameworks.common.job import File

RECORD = '#!/bin/bash\nprintf "%s\\0" "${0##*/}" "$CUDA_DEVICE_MAX_CONNECTIONS" "$@" >>"$RECORDED"\n'
STANDINS = {
    "torchrun": RECORD,
    "srun": '#!/bin/bash\nwhile [[ $1 == -* ]]; do shift; done\nexec "$@"\n',
    "mpirun": '#!/bin/bash\nprintf "%s\\0" "$@" >>"$RECORDED.mpirun"\nwhile [[ $1 != bash ]]; do shift; done\n'
    'exec "$@"\n',
    "scontrol": '#!/bin/bash\nif [[ $1 == hostnames || $2 == hostnames ]]; then printf "node7\\nnode8\\n"; fi\n'
    'if [[ $2 == job ]]; then printf "JobId=$3\\n   Command=%s\\n   WorkDir=/\\n" "$COMMAND"; fi\n',
    "hostname": "#!/bin/bash\nprintf 'node7\\n'\n",
}


def run_files(
    folder: Path,
    files: Sequence[File],
    *words: str,
    stand_ins: Mapping[str, str] | None = None,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """The first of the files, run from an empty folder; torchrun's words, if it started, are in `folder`/recorded."""
    bin_folder, beside, work = folder / "stand-ins", folder / "launch folder", folder / "work"
    for made in (bin_folder, beside, work):
        made.mkdir(parents=True, exist_ok=True)
    for name, text in {**STANDINS, **(stand_ins or {})}.items():
        (bin_folder / name).write_text(text)
        (bin_folder / name).chmod(0o755)
    for tool in ("bash", "dirname", "grep", "sed"):  # and no others: no nvidia-smi of this machine
        if not (bin_folder / tool).exists():
            (bin_folder / tool).symlink_to(shutil.which(tool) or tool)
    for file in files:
        (beside / file.name).write_text(file.text)
    environment = {
        "PATH": str(bin_folder),
        "RECORDED": str(folder / "recorded"),
        "CUDA_DEVICE_MAX_CONNECTIONS": "",
        "PREFLIGHT": "0",
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_SUBMIT_DIR": str(work),
        "SLURM_NODEID": "1",
        "COMMAND": f"{beside / files[0].name} a b",
        **variables,
    }
    if files[0].name.endswith(".sbatch"):  # Slurm runs a copy
        start = folder / "slurm_script"
        start.write_text(files[0].text)
    else:
        start = beside / files[0].name
    result = subprocess.run(
        ["bash", str(start), *words], env=environment, cwd=work, capture_output=True, text=True, check=False
    )
    assert list(work.iterdir()) == []
    return result


def launched(folder: Path, files: Sequence[File], *words: str, **variables: str) -> list[str]:
    """The words with which the files start torchrun, its CUDA_DEVICE_MAX_CONNECTIONS first."""
    result = run_files(folder, files, *words, **variables)
    assert (result.returncode, result.stderr) == (0, "")
    program, *rest = (folder / "recorded").read_text().split("\0")[:-1]
    assert program == "torchrun"
    return rest
