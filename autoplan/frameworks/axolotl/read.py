"""Reader of axolotl's YAML (067b021); places are below src/axolotl/."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from autoplan.base.errors import InputError
from autoplan.frameworks.axolotl.options import COSTLESS, KEEPS, KERNELS, LENGTH, LOSSES, MESH, NAMES
from autoplan.frameworks.common.launch import Launch, LaunchContext, Reader
from autoplan.frameworks.common.option_table import read_fields
from autoplan.frameworks.common.options import Argument, Options, parse_yaml
from autoplan.frameworks.hf_trainer.launch import Mesh, Program, launch_of
from autoplan.frameworks.hf_trainer.options import ACCUMULATION, MICRO_BATCH, is_on
from autoplan.readers.finetuning import OF_AXOLOTL, of_axolotl
from autoplan.readers.preference import OF_PREFERENCES, of_rl
from autoplan.spec.enums import ChunkedLoss, Precision
from autoplan.spec.lengths import Batching
from autoplan.spec.preference import Preference


def recognises(name: str, text: str) -> bool:
    """Return whether a file is a configuration of axolotl."""
    if not name.endswith((".yaml", ".yml")):
        return False
    return all(re.search(rf"^{key}\s*:", text, re.MULTILINE) for key in ("base_model", "micro_batch_size"))


def read(text: str, context: LaunchContext) -> Launch:
    """Return the launch of a configuration, which never contains the number of devices."""
    table = parse_yaml(text, "the file")
    by_name = {written: name for name, written in NAMES.items()}
    options = Options(
        Argument(argument.option, argument.text, by_name.get(key, key), argument.value)
        for key, argument in Options.of_table(table).arguments.items()
    )
    preference = of_rl(table, "the file")
    options.understood.update(key for key in OF_PREFERENCES if key in options.arguments)
    if table.get("model_config_type") == "mamba":
        raise InputError("model_config_type mamba is not read: pass --model with --as hf-trainer")
    finetuning = of_axolotl(table, "the file")
    options.understood.update(key for key in OF_AXOLOTL if key in options.arguments)
    if finetuning.has_adapters and table.get("unfrozen_parameters"):
        options.remark("unfrozen_parameters", "adapters alone are priced as trained")
    options.pass_over(*COSTLESS)
    options.defaults["per_device_train_batch_size"] = 1  # utils/schemas/config.py
    if batch := options.optional_count("batch_size", least=1):  # per device and step (utils/config/__init__.py:202)
        options.defaults[ACCUMULATION.key] = max(batch // MICRO_BATCH.of(options), 1)
    uses_fsdp1 = _uses_fsdp1(table)
    options.defaults["fsdp_version"] = 1 if uses_fsdp1 else 2
    mesh = read_fields(MESH, options)
    if options.optional_count("expert_parallel_size", 1, least=1) not in (None, 1):
        # integrations/expert_parallel/README.md: an axis beside dp_shard, over which the other weights are sharded
        raise InputError(
            "expert_parallel_size > 1 gives each rank of it a copy of everything but the experts, which is not priced: "
            "set it to 1"
        )
    if (recompute := options.value("gradient_checkpointing")) in ("offload", "offload_disk"):
        options.remark("gradient_checkpointing", "activations that are kept are priced on the device")
    if isinstance(recompute, str):
        options.arguments["gradient_checkpointing"] = Argument(
            "gradient_checkpointing",
            recompute,
            "gradient_checkpointing",
            recompute.casefold() not in ("false", ""),
        )
    for key in options.arguments:
        is_kernel = re.match(r"(liger_|cut_cross_entropy$|lora_\w+_kernel$|unsloth_)", key) is not None
        if is_kernel and is_on(options, key) and (preference is not None or key not in LOSSES):
            options.remark(key, "priced with the kernels of transformers")
    plugins = options.value("plugins") or []
    # The plugin of cut cross entropy turns it on, that of Liger takes a switch.
    cut = next(key for key, (_, kind) in LOSSES.items() if kind is ChunkedLoss.CUT)
    is_cut = isinstance(plugins, list) and LOSSES[cut][0] in plugins and not options.has(cut)
    losses = [kind for key, (_, kind) in LOSSES.items() if is_on(options, key) or (is_cut and key == cut)]
    known = [plugin for plugin, _ in LOSSES.values()]
    if not isinstance(plugins, list) or any(str(plugin) not in known for plugin in plugins):
        options.remark("plugins", "changes by a plugin are not priced")
    if is_on(options, "fp8"):
        options.remark("fp8", "priced as bf16")
    program = Program(
        target="axolotl",
        model_key="base_model",
        length_key=LENGTH,
        length=512,
        batching=_batching(options, table, preference),
        preference=preference,
        finetuning=finetuning if finetuning.has_adapters else None,
        precision=Precision.BF16,  # "auto" (utils/schemas/config.py:559)
        mesh=Mesh(**mesh),
        holds_bf16=not is_on(options, "fp16"),  # all weights are loaded in bf16 (utils/config/__init__.py:192)
        keeps_adapters=options.has(KEEPS) and not options.flag(KEEPS),
        autocasts=options.value("bf16") != "full",  # core/builders/base.py:273
        config_turns_fsdp_on=True,
        chunked_loss=next(iter(losses), ChunkedLoss.NONE) if preference is None else ChunkedLoss.NONE,
        attention=next((kernel for key, kernel in KERNELS.items() if is_on(options, key)), None),
        takes_last_precision=True,  # "auto" counts as on (utils/config/__init__.py)
    )
    return launch_of(options, context, program, None)


def _uses_fsdp1(table: Mapping[str, Any]) -> bool:
    """Return whether FSDP1 is on, the default with fsdp_config (utils/schemas/validation.py:1126)."""
    section = table.get("fsdp_config")
    if not isinstance(section, dict) or not section:
        return False
    version = table.get("fsdp_version") or section.get("fsdp_version") or section.get("version")
    return str(version) != "2"


def _batching(options: Options, table: Mapping[str, Any], preference: Preference | None) -> Batching:
    """Return how samples form sequences (core/trainers/base.py, utils/collators/batching.py)."""
    if is_on(options, "sample_packing") and preference is None:
        return "packed"
    if preference is not None and preference.loss == "dpo":  # TRL's collator ignores the padding options
        return "padded"
    if table.get("datasets") is None and preference is None:  # pretraining
        return "joined"
    if preference is not None:
        options.defaults["pad_to_sequence_len"] = True  # utils/schemas/validation.py:247
    return "full" if is_on(options, "pad_to_sequence_len") else "padded"


READER = Reader(target="axolotl", recognises=recognises, read=read)
