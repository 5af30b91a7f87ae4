"""What does MaxText itself make of a configuration?  Its class of pydantic, in a process of its own, without jax.

Reads [{text: "...", world: N}, ...] and writes for each either {error: ...} or the axes of its mesh, its batch and what
it keeps.  MAXTEXT_DIR has its checkout.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from framework_parsers import answer, stand_in


def prepare() -> Callable[[dict[str, Any]], dict[str, Any]]:
    source = Path(os.environ["MAXTEXT_DIR"]) / "src"
    sys.path.insert(0, str(source))
    stand_in("jax", "flax", "orbax", "etils", "pathwaysutils", "google", "tensorboardX", "psutil", "maxtext.version")
    import jax.numpy
    import yaml

    jax.numpy.ndarray = object
    devices = types.ModuleType("maxtext.utils.max_utils")  # whose other functions are of arrays
    devices.get_num_slices = lambda keys: keys["num_slices"]  # which is written
    sys.modules[devices.__name__] = devices
    from maxtext.configs.types import MaxTextConfig

    configs = source / "maxtext" / "configs"

    def check(case: dict[str, Any]) -> dict[str, Any]:
        given = yaml.safe_load(case["text"])
        jax.devices = lambda: list(range(case["world"]))
        jax.local_device_count = lambda: 1
        table = yaml.safe_load((configs / given.pop("base_config")).read_text())
        if "model_name" in given:  # what a model's own file says may not be said otherwise (configs/pyconfig.py)
            shipped = yaml.safe_load((configs / "models" / f"{given['model_name']}.yml").read_text())
            unlike = {key for key in shipped.keys() & given.keys() if shipped[key] != given[key]}
            assert not unlike, unlike
            table |= shipped
        table |= given
        unknown = table.keys() - MaxTextConfig.model_fields.keys()
        assert not (unknown & given.keys()), unknown & given.keys()
        config = MaxTextConfig(
            **{key: None if value == "None" else value for key, value in table.items() if key not in unknown}
        )
        return {
            "mesh": dict(zip(config.mesh_axes, config.ici_parallelism, strict=True)),
            "batch": config.global_batch_size_to_train_on,
            "pass": config.micro_batch_size_to_train_on,
            "micro_batches": config.num_pipeline_microbatches if config.using_pipeline_parallelism else 1,
            "repeats": config.num_pipeline_repeats if config.using_pipeline_parallelism else 1,
            "kept": config.tensors_on_device if config.remat_policy == "custom" else None,
            "layers": config.num_decoder_layers,
            "width": config.emb_dim,
        }

    return check


if __name__ == "__main__":
    answer(prepare)
