"""Operations of encoding one image that torch counts in transformers' models, and those that autoplan predicts.

Layers are few, and large tensors are not written: products are counted without being computed.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from autoplan.cost.kernels.arithmetic import model_flops_per_token
from autoplan.readers.huggingface import read_huggingface
from autoplan.spec.model import ModelSpec

SIDE = 24  # patches along an image of any size: three of the windows of Qwen2.5, and whole squares of 2, 3 or 4
LARGE, LARGEST = 10**5, 10**9  # elements
LISTS = ("layer_types", "layers_block_type", "cross_attention_layers", "vision_feature_layer")  # of layers by number
# What encodes an image, one module after the other, in models without a method for it.
MODULES = {
    "blip": ("vision_model",),
    "git": ("git.image_encoder", "git.visual_projection"),
    "idefics": ("model.vision_model",),
    "llama4": ("vision_model", "multi_modal_projector"),
    "mllama": ("model.vision_model", "model.multi_modal_projector"),
    "pix2struct": ("encoder",),
    "vision-encoder-decoder": ("encoder",),
}


def image_excess(kind: str, build: Callable[[Any], Any]) -> float | None:
    """Relative excess of ours over what torch counts; None where the model's class takes no such image.

    `build` makes a model from a config.
    """
    config = _shallow(transformers.AutoConfig.for_model(kind))
    with torch.device("meta"):
        model = build(config)
    spec = read_huggingface(json.loads(json.dumps(config.to_dict(), default=str)), kind)
    if spec.encoder is None or (encode := _encoding(kind, model)) is None:
        return None
    _give_data(model)
    for image, patches, tiles in _images(config, spec, inspect.signature(encode).parameters):
        with contextlib.suppress(Exception), _Unwritten(), FlopCounterMode(display=False) as counter:
            encode(**image)
            return tiles * _predicted(spec, patches) / int(counter.get_total_flops()) - 1
    return None


def _shallow(config: Any) -> Any:
    """Return the config with few layers where these are alike."""
    text = config.get_text_config()
    vision: Any = getattr(config, "vision_config", getattr(config, "encoder", config))
    if not any(isinstance(getattr(text, name, None), list) for name in LISTS):
        text.num_hidden_layers = 1
    has_windows = hasattr(vision, "fullatt_block_indexes")
    for name in ("depth", "num_hidden_layers"):
        if vision is not text and isinstance(getattr(vision, name, None), int):
            setattr(vision, name, 4 if has_windows else 2)
    if vision is not text and isinstance(kinds := getattr(vision, "layer_types", None), list):
        vision.layer_types = kinds[:2]
    if has_windows:
        vision.fullatt_block_indexes = [3]
    for name in ("vision_feature_layer", "vision_feature_layers"):
        if isinstance(layers := getattr(config, name, None), list | tuple):
            setattr(config, name, [-1] * len(layers))
    if hasattr(vision, "pixel_shuffle_ratio"):  # Llama 4's, whose class has widths of several sizes by default
        vision.intermediate_size = round(vision.hidden_size / vision.pixel_shuffle_ratio**2)
        vision.vision_output_dim = vision.projector_output_dim
    part: Any
    for part in (vision, getattr(vision, "sam_config", None), getattr(config, "high_res_vision_config", None)):
        if hasattr(part, "global_attn_indexes"):  # Segment Anything's
            part.num_hidden_layers, part.global_attn_indexes = 3, [2]
    if indexes := getattr(vision, "intermediate_layers_indices", None):  # Mllama's, whose features are joined
        vision.intermediate_layers_indices, vision.num_global_layers = [0] * len(indexes), 2
    if hasattr(vision, "encoder_config"):
        vision.encoder_config.num_hidden_layers = 2
    if hasattr(vision, "insert_layer_id"):  # MiniCPM's, behind which four patches become one
        config.insert_layer_id = vision.insert_layer_id = 0
        vision.num_hidden_layers, vision.image_size = 5, SIDE * vision.patch_size
    if hasattr(config, "adapter_config"):  # Molmo's, of two layers' features
        config.adapter_config.vision_feature_layer = [0, 1]
    if (scale := getattr(config, "scale_factor", 1)) > 1:  # Idefics', whose default grid has no whole squares
        vision.image_size = -(-(vision.image_size // vision.patch_size) // scale) * scale * vision.patch_size
    if hasattr(vision, "max_num_patches"):
        vision.max_num_patches = SIDE**2
    if getattr(vision, "deepstack_visual_indexes", None):
        vision.deepstack_visual_indexes = [0]
    if getattr(config, "mm_tokens_per_image", None):
        vision.image_size = 896  # Gemma 3's, as its class's default has fewer patches than tokens
    if getattr(config, "projector_patch_to_query_dict", None):
        vision.image_size, vision.patch_size = 490, 14  # Aria's smaller images, of so many tokens
        config.projector_patch_to_query_dict = {35**2: 128}
        config.max_value_projector_patch_to_query_dict = 128
    return config


def _encoding(kind: str, model: Any) -> Callable[..., Any] | None:
    """Return what encodes an image."""
    if kind in MODULES:
        parts = [model.get_submodule(name) for name in MODULES[kind]]

        @functools.wraps(parts[0].forward)
        def encode(**image: Any) -> Any:
            result = parts[0](**image).last_hidden_state
            for part in parts[1:]:
                result = part(result)
            return result

        return encode
    owners: tuple[Any, ...] = (getattr(model, "model", None), model)
    return next((owner.get_image_features for owner in owners if hasattr(owner, "get_image_features")), None)


def _give_data(model: Any) -> None:
    """Give data to a model without any: zeros, or where they are many memory that is never touched.

    The experts of text models, which encode no image, would not even find room.
    """

    def made(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() > LARGEST:
            return tensor
        return (torch.empty_like if tensor.numel() > LARGE else torch.zeros_like)(tensor, device="cpu")

    model.requires_grad_(False)._apply(made)


class _Unwritten(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Does not compute from large tensors, of whose results the shapes alone are needed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (args, kwargs or {})
        sizes = [item.numel() for item in tree_leaves(given) if isinstance(item, torch.Tensor)]
        is_new = not func.is_view and all(item.alias_info is None for item in func._schema.arguments)
        if is_new and max(sizes, default=0) > LARGE:
            with contextlib.suppress(Exception):  # what depends on data
                shapes = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), given)
                made = func(*shapes[0], **shapes[1])
                if all(item.is_floating_point() for item in tree_leaves(made) if isinstance(item, torch.Tensor)):
                    return tree_map_only(torch.Tensor, lambda tensor: torch.empty_like(tensor, device="cpu"), made)
        return func(*args, **given[1])


def _images(config: Any, spec: ModelSpec, takes: Any) -> Iterator[tuple[dict[str, Any], int, int]]:
    """Yield an image in the shapes that a model may take it in, its patches (0: as in the config) and its tiles.

    `takes` are the names of what the model takes.
    """
    assert spec.encoder is not None
    vision = getattr(config, "vision_config", getattr(config, "encoder", config))
    patches, numbers = SIDE**2, spec.encoder.layers.vocab_size
    grid, rows = torch.tensor([[1, SIDE, SIDE]]), torch.zeros(patches, numbers)
    side: Any = getattr(vision, "patch_size", None)
    mask = torch.ones(1, patches, dtype=torch.long)
    if "image_grid_thw" in takes:
        merges = {"image_merge_sizes": torch.ones(1, dtype=torch.long)} if "image_merge_sizes" in takes else {}
        for values in (rows, rows[None], torch.zeros(patches, 3, side, side) if isinstance(side, int) else rows):
            yield {"pixel_values": values, "image_grid_thw": grid, **merges}, patches, 1
    elif "image_position_ids" in takes:
        places = torch.cartesian_prod(torch.arange(SIDE), torch.arange(SIDE))[None]
        yield {"pixel_values": rows[None], "image_position_ids": places}, patches, 1
    elif "spatial_shapes" in takes:
        yield {"pixel_values": rows[None], "spatial_shapes": grid[:, 1:], "pixel_attention_mask": mask}, patches, 1
    elif "target_sizes" in takes:
        whole = (vision.image_size // side) ** 2
        grid = torch.tensor([[vision.image_size // side] * 2], dtype=torch.int32)
        yield {"pixel_values": torch.zeros(1, 3, side, whole * side), "target_sizes": grid}, 0, 1
    elif "flattened_patches" in takes:
        yield {"flattened_patches": torch.zeros(1, spec.encoder.patches, 2 + numbers)}, 0, 1
    elif "image_token_pooling" in takes:
        tokens = spec.encoder.image_tokens
        pooled = torch.zeros(tokens, spec.encoder.patches // tokens, dtype=torch.long)
        whole, grids = torch.zeros(1, spec.encoder.patches, numbers), torch.tensor([[tokens, 1, 0, 0]])
        yield {"pixel_values": whole, "image_token_pooling": pooled, "image_grids": grids}, 0, 1
    else:
        yield from _pixels(config, vision, takes)


def _pixels(config: Any, vision: Any, takes: Any) -> Iterator[tuple[dict[str, Any], int, int]]:
    """Yield an image of the size in the config."""
    size = getattr(getattr(vision, "sam_config", vision), "image_size", None)
    size = size[0] if isinstance(size, list | tuple) else size
    if not isinstance(size, int):
        return
    pixels, further = torch.ones(1, 3, size, size), {}
    if "qformer_input_ids" in takes:
        further["qformer_input_ids"] = torch.zeros(1, 1, dtype=torch.long)
    if "aspect_ratio_ids" in takes:
        ratios, tiles = torch.ones(1, 1, dtype=torch.long), vision.max_num_tiles
        places = {"aspect_ratio_ids": ratios, "aspect_ratio_mask": torch.ones(1, 1, tiles, dtype=torch.long)}
        yield {"pixel_values": torch.ones(1, 1, tiles, 3, size, size), **places}, 0, 1
    if "high_res_pixel_values" in takes:
        fine = config.high_res_vision_config.image_size
        further["high_res_pixel_values"] = torch.ones(1, 3, fine, fine)
    if "image_grid_hw" in takes:
        side = vision.patch_size
        grid = torch.tensor([[size // side, size // side]])
        yield {"pixel_values": torch.zeros(int(grid.prod()), 3 * side**2), "image_grid_hw": grid}, 0, 1
    yield {"pixel_values": pixels, **further}, 0, 1
    yield {"pixel_values": pixels[None], **further}, 0, 1
    yield {"pixel_values": pixels[None], "pixel_attention_mask": torch.ones(1, 1, dtype=torch.bool)}, 0, 1
    for tiles in (1, 2, 3, 5):  # LLaVA's, beside the whole image
        whole = {"pixel_values": pixels.expand(tiles, -1, -1, -1), "image_sizes": torch.tensor([[size, size]])}
        yield whole, 0, tiles


def _predicted(spec: ModelSpec, patches: int) -> float:
    """Operations of a forward pass of the encoder over one image of `patches` patches; 0: as many as in the config."""
    encoder = spec.encoder
    assert encoder is not None
    if patches:
        tokens = max(patches * encoder.image_tokens // encoder.patches, 1)
        encoder = replace(encoder, patches=patches, image_tokens=tokens)
    seq_len, models = 4096, [replace(spec, encoder=replace(encoder, images=images)) for images in (1.0, 2.0)]
    with_one, with_two = (model_flops_per_token(model, seq_len) for model in models)
    return seq_len * (with_two - with_one) / 3  # a step is three forward passes
