"""Arguments that LLaMA-Factory (ff6d4d1) has beside those of the Trainer; places are below src/llamafactory/."""

from __future__ import annotations

from autoplan.frameworks.common.option_table import Value, switch
from autoplan.frameworks.hf_trainer.options import WRITTEN_OPTIM
from autoplan.spec.enums import Recompute
from autoplan.spec.lengths import Batching
from autoplan.spec.optimizers import OptimizerName

LENGTH = "cutoff_len"
PURE = "pure_bf16"  # weights are held in bf16, adapters in fp32 as PEFT makes them (model/adapter.py:343)
# It recomputes unless it is told otherwise, whatever the Trainer's argument says (model/model_utils/checkpointing.py).
NO_RECOMPUTE = switch(
    "disable_gradient_checkpointing", "recompute", Recompute.FULL, on=Recompute.NONE, off=Recompute.FULL
)
# The keys of sequences, by how samples become them (hparams/data_args.py:108).
BATCHINGS: dict[Batching, dict[str, Value]] = {
    "packed": {"packing": True, "neat_packing": True},
    "joined": {"packing": True, "neat_packing": False},
    "padded": {"packing": False},
}
# Its own argument takes the place of the Trainer's (train/trainer_utils.py).
OPTIMIZER_SETTINGS: dict[OptimizerName, dict[str, Value]] = {
    **{name: {"optim": word} for name, word in WRITTEN_OPTIM.items()},
    "muon": {"use_muon": True},
}
COSTLESS = (
    "flash_attn",
    "use_reentrant_gc",
    "rope_scaling",
    "image_max_pixels",
    "video_max_pixels",
    "predict_with_generate",
    "infer_backend",
    "fsdp_transformer_layer_cls_to_wrap",
)
