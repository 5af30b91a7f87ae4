"""Operations of encoding one image that torch counts in transformers' models, and those that are said to take place.

Only what stands beside the text model is given data; its layers are few.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from autoplan.cost.kernels.arithmetic import model_flops_per_token
from autoplan.readers.huggingface import read_huggingface
from autoplan.spec.model import ModelSpec

SIDE = 16  # patches along an image of any size: two of the windows of Qwen2.5
LISTS = ("layer_types", "layers_block_type", "cross_attention_layers", "vision_feature_layer")  # of layers by number


def image_excess(kind: str, build: Callable[[Any], Any]) -> float | None:
    """Relative excess of ours over what torch counts; None where the model's class takes no such image.

    `build` makes a model from a config.
    """
    config = _shallow(transformers.AutoConfig.for_model(kind))
    with torch.device("meta"):
        model = build(config)
    spec = read_huggingface(json.loads(json.dumps(config.to_dict(), default=str)), kind)
    if spec.encoder is None or not hasattr(model, "get_image_features"):
        return None
    _give_data(model)
    for image, patches in _images(getattr(config, "vision_config", config), spec):
        with contextlib.suppress(Exception), FlopCounterMode(display=False) as counter:
            model.get_image_features(**image)
            return _said(spec, patches) / int(counter.get_total_flops()) - 1
    return None


def _shallow(config: Any) -> Any:
    """Return the config with few layers where these are alike."""
    text, vision = config.get_text_config(), getattr(config, "vision_config", config)
    if not any(isinstance(getattr(text, name, None), list) for name in LISTS):
        text.num_hidden_layers = 1
    has_windows = hasattr(vision, "fullatt_block_indexes")
    for name in ("depth", "num_hidden_layers"):
        if vision is not text and isinstance(getattr(vision, name, None), int):
            setattr(vision, name, 4 if has_windows else 2)
    if has_windows:
        vision.fullatt_block_indexes = [3]
    if getattr(vision, "deepstack_visual_indexes", None):
        vision.deepstack_visual_indexes = [0]
    if getattr(config, "mm_tokens_per_image", None):
        vision.image_size = 896  # Gemma 3's, as its class's default has fewer patches than tokens
    return config


def _give_data(model: Any) -> None:
    """Give zeros to all modules but the text model and its head."""
    for owner in (model, getattr(model, "model", None)):
        for name, module in owner.named_children() if owner is not None else ():
            if name not in ("model", "lm_head") and "language" not in name:
                module.to_empty(device="cpu")
                for tensor in (*module.parameters(), *module.buffers()):
                    tensor.data.zero_()


def _images(vision: Any, spec: ModelSpec) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield an image in all shapes that models take it in, with its number of patches; 0: as in the config."""
    assert spec.encoder is not None
    patches, numbers = SIDE**2, spec.encoder.layers.vocab_size
    grid, rows = torch.tensor([[1, SIDE, SIDE]]), torch.zeros(patches, numbers)
    yield {"pixel_values": rows, "image_grid_thw": grid}, patches
    yield {"pixel_values": rows[None], "image_grid_thw": grid}, patches
    if isinstance(side := getattr(vision, "patch_size", None), int):
        yield {"pixel_values": torch.zeros(patches, 3, side, side), "image_grid_thw": grid}, patches
    mask = torch.ones(1, patches, dtype=torch.long)
    yield {"pixel_values": rows[None], "spatial_shapes": grid[:, 1:], "pixel_attention_mask": mask}, patches
    side = getattr(vision, "image_size", None)
    if isinstance(side := side[0] if isinstance(side, list | tuple) else side, int):
        pixels = torch.ones(1, 3, side, side)
        yield {"pixel_values": pixels}, 0
        yield {"pixel_values": pixels[None]}, 0
        yield {"pixel_values": pixels, "image_sizes": torch.tensor([[side, side]])}, 0


def _said(spec: ModelSpec, patches: int) -> float:
    """Operations of a forward pass of the encoder over one image, of so many patches."""
    encoder = spec.encoder
    assert encoder is not None
    if patches:
        tokens = max(patches * encoder.image_tokens // encoder.patches, 1)
        spec = replace(spec, encoder=replace(encoder, patches=patches, image_tokens=tokens))
    seq_len = 4096
    per_token = model_flops_per_token(spec, seq_len) - model_flops_per_token(replace(spec, encoder=None), seq_len)
    return seq_len * per_token / 3
