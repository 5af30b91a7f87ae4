"""Arguments of LLaMA-Factory (ff6d4d1) in addition to the Trainer's; places are below src/llamafactory/."""

from __future__ import annotations

from autoplan.frameworks.common.option_table import Value, switch
from autoplan.frameworks.hf_trainer.options import WRITTEN_OPTIM
from autoplan.spec.enums import AttentionKernel, Recompute
from autoplan.spec.lengths import Batching
from autoplan.spec.optimizers import OptimizerName

LENGTH = "cutoff_len"
# What stands before a text model, frozen by default (hparams/finetuning_args.py:546).
FREEZES = ("freeze_vision_tower", "freeze_multi_modal_projector")
PURE = "pure_bf16"  # weights are in bf16, adapters in fp32 as PEFT creates them (model/adapter.py:343)
# Recomputation is on by default and ignores the Trainer's argument (model/model_utils/checkpointing.py).
NO_RECOMPUTE = switch(
    "disable_gradient_checkpointing", "recompute", Recompute.FULL, on=Recompute.NONE, off=Recompute.FULL
)
# Sequence settings by batching (hparams/data_args.py:108).
BATCHINGS: dict[Batching, dict[str, Value]] = {
    "packed": {"packing": True, "neat_packing": True},
    "joined": {"packing": True, "neat_packing": False},
    "padded": {"packing": False},
}
# LLaMA-Factory's argument replaces the Trainer's (train/trainer_utils.py).
OPTIMIZER_SETTINGS: dict[OptimizerName, dict[str, Value]] = {
    **{name: {"optim": word} for name, word in WRITTEN_OPTIM.items()},
    "muon": {"use_muon": True},
}
# Kernels of attention (extras/constants.py, AttentionFunction).
KERNEL_WORDS = {
    AttentionKernel.FLASH: "sdpa",
    AttentionKernel.FLASH2: "fa2",
    AttentionKernel.FLASH3: "fa3",
    AttentionKernel.UNFUSED: "disabled",
}
COSTLESS = (
    *("use_reentrant_gc", "rope_scaling", "image_max_pixels", "video_max_pixels", "predict_with_generate"),
    *("infer_backend", "val_size", "fsdp_transformer_layer_cls_to_wrap"),
    *("pissa_init", "pissa_iter", "pissa_convert"),  # how adapters begin, and are saved
)
