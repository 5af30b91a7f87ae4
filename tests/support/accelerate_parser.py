"""What does Accelerate itself make of a config file?  A process of its own, as it imports torch.

Reads the texts of config files, writes for each either {error: ...} or {environment: {...}, sizes: {...}}.
"""

from __future__ import annotations

import os
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from framework_parsers import answer

PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")


def check(text: str, folder: Path) -> dict[str, Any]:
    from accelerate.commands import launch
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.launch import prepare_multi_gpu_env

    place = folder / "accelerate.yaml"
    place.write_text(text)
    args = launch.launch_command_parser().parse_args(
        ["--config_file", str(place), "--main_process_port", "0", "train.py"]
    )
    known = set(vars(args))
    for name, section in vars(load_config_from_file(str(place))).items():
        # Accelerate takes what it does not know inside a section, and does nothing with it.
        prefix = name.removesuffix("config") if name in ("fsdp_config", "fp8_config") else ""
        for key in section if isinstance(section, dict) else ():
            if key not in known and prefix + key not in known:
                raise ValueError(f"{name}.{key} is no option")
    args, _, _ = launch._validate_launch_command(args)
    before = dict(os.environ)
    environment = {key: value for key, value in prepare_multi_gpu_env(args).items() if key.startswith(PREFIXES)}
    os.environ.update(environment)
    try:
        plugin = FullyShardedDataParallelPlugin() if args.use_fsdp else None
        sizes = ParallelismConfig() if args.use_parallelism_config else None
        if sizes is not None:
            sizes._validate_accelerator(
                types.SimpleNamespace(
                    multi_device=True,
                    num_processes=int(args.num_processes),
                    is_fsdp2=plugin is not None and plugin.fsdp_version == 2,
                    is_main_process=False,
                    distributed_type="FSDP",
                )
            )
    finally:
        os.environ.clear()
        os.environ.update(before)
    return {
        "environment": environment,
        "sizes": dict(sizes._sizes) if sizes else {},
        "reshards": plugin.reshard_after_forward if plugin else None,
        "checkpoints": plugin.activation_checkpointing if plugin else None,
        "processes": int(args.num_processes),
    }


def prepare(folder: Path) -> Callable[[str], dict[str, Any]]:
    import accelerate.utils.launch as starting

    starting.is_fp8_available = lambda: True  # torchao need not be here to read what it is told
    return lambda text: check(text, folder)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        answer(lambda: prepare(Path(folder)))
