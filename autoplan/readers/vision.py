"""Encoders of images and sound before text models, from vision_config or audio_config of a config.json.

Layer sizes are described in presets/huggingface.toml, like those of text models; this module describes the parts around
the layers: patch embedding, positions and projector.  Source: modeling_<type>.py of transformers 5.23.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from autoplan.base.errors import InputError
from autoplan.readers.config_keys import Keys

# Image tokens of Qwen2-VL and 2.5, whose images have no fixed size: the maximum that the processor creates
# (image_processing_qwen2_vl.py, max_pixels = 28 x 28 x 1280).
QWEN_IMAGE_TOKENS = 1280


class Around(NamedTuple):
    """Parts of an encoder around its layers: the fields of `Encoder`, and the numbers in a patch.

    If some layers only attend within blocks of patches, `window` is the number of patches in a block, and one layer in
    `full_attention_interval` attends to all patches.  With `has_head` SigLIP's pooling head reads all of them.
    """

    patch_numbers: int
    patches: int
    image_tokens: int
    projector: tuple[tuple[int, int], ...]
    num_other_parameters: int
    window: int | None = None
    full_attention_interval: int = 0
    has_head: bool = False


class Sizes(NamedTuple):
    """Sizes of the encoder's layers and of the text model."""

    num_layers: int
    hidden: int
    ffn: int
    text: int  # hidden size of the text model


def _count(config: dict[str, Any], key: str, default: int | None = None) -> int:
    """Return the positive integer under a key, or the first element of a list of equal ones."""
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, list) and value and all(item == value[0] for item in value):
        value = value[0]
    if type(value) is not int or not 1 <= value <= 10**6:
        raise InputError(f"vision_config.{key} must be a whole number from 1 to 1000000, got {str(value)[:40]!r}")
    return value


def _grid(config: dict[str, Any], patch: int, image: int = 224) -> tuple[int, int]:
    """Return (patches per image, numbers per patch) of an encoder for images of one size."""
    side = _count(config, "patch_size", patch)
    if not (along := _count(config, "image_size", image) // side):
        raise InputError(f"vision_config.image_size must be at least its patch_size {side}")
    return along**2, _count(config, "num_channels", 3) * side**2


def _has_head(config: dict[str, Any]) -> bool:
    """Return whether SigLIP has its pooling head."""
    return bool(config.get("vision_use_head", True)) and config["model_type"] != "clip_vision_model"


def _pooled(sizes: Sizes) -> int:
    """Return the elements of SigLIP's pooling head but those of keys and values, which alone read the patches.

    They are a learned query, attention, a norm and an MLP.
    """
    hidden, ffn = sizes.hidden, sizes.ffn
    return hidden + 2 * hidden**2 + 4 * hidden + 2 * hidden + 2 * hidden * ffn + ffn + hidden


def _vit(table: dict[str, Any], config: dict[str, Any], sizes: Sizes, *, patch: int) -> Around:
    """Describe CLIP (class token, embedding norm) and SigLIP (embedding bias, pooling head or none)."""
    patches, numbers = _grid(config, patch)
    hidden, text = sizes.hidden, sizes.text
    is_clip = config["model_type"] == "clip_vision_model"
    positions = patches + is_clip
    beside = (positions + 1) * hidden  # a class token, or the bias
    has_head = _has_head(config)
    beside += _pooled(sizes) * has_head
    kind, tokens = table["model_type"], patches
    if kind in ("gemma3", "shieldgemma2", "t5gemma2"):
        tokens = _count(table, "mm_tokens_per_image", 256)
        return Around(numbers, positions, tokens, ((hidden, text),), beside + hidden, has_head=has_head)
    if kind in ("modernvbert", "ultravbert"):  # the projector reads squares of patches
        merged = _count(table, "pixel_shuffle_factor", 4) ** 2
        beside += text * (kind == "ultravbert")  # a norm
        projector: tuple[tuple[int, int], ...] = ((merged * hidden, text),)
        return Around(numbers, positions, max(patches // merged, 1), projector, beside, has_head=has_head)
    if kind == "paligemma":
        return Around(numbers, positions, tokens, ((hidden, text),), beside + text, has_head=has_head)
    if kind == "cohere2_vision":  # a gate between the two matrices, over squares of patches
        merged, wide = _count(table, "downsample_factor", 2) ** 2, _count(table, "alignment_intermediate_size", 36864)
        projector = ((merged * hidden, wide), (wide // 2, text))
        return Around(numbers, positions, patches // merged, projector, beside + wide + text, has_head=has_head)
    biases = 2 * text * (table.get("multimodal_projector_bias", True) is True)
    if kind == "vipllava":  # features of several layers, with a norm
        layers = table.get("vision_feature_layer", [-2, -5, -8, -11, 6])
        wide = hidden * (len(layers) if isinstance(layers, list) else 1)
        return Around(numbers, positions, tokens, ((wide, text), (text, text)), beside + biases + 2 * wide)
    newline = text * (kind not in ("llava", "deepseek_vl"))
    projector = ((hidden, text), (text, text))
    return Around(numbers, positions, tokens, projector, beside + biases + newline, has_head=has_head)


def _clip(table: dict[str, Any], config: dict[str, Any], sizes: Sizes) -> Around:
    return _vit(table, config, sizes, patch=32)


def _siglip(table: dict[str, Any], config: dict[str, Any], sizes: Sizes) -> Around:
    return _vit(table, config, sizes, patch=16)


def _qwen(table: dict[str, Any], config: dict[str, Any], sizes: Sizes) -> Around:
    """Describe Qwen: a norm and two matrices over merged patches; Qwen3 adds learned positions and inner features."""
    merged = _count(config, "spatial_merge_size", 2) ** 2
    side = _count(config, "patch_size", config.get("spatial_patch_size", 14))
    channels = _count(config, "in_channels", config.get("in_chans", 3))
    numbers = channels * _count(config, "temporal_patch_size", 2) * side**2
    # Qwen2-VL's hidden_size is the output width of the projector, embed_dim the width of the layers.
    is_first = config["model_type"] == "qwen2_vl_vision"
    out = _count(config, "hidden_size" if is_first else "out_hidden_size", sizes.text)
    hidden, wide = sizes.hidden, merged * sizes.hidden
    projector: tuple[tuple[int, int], ...] = ((wide, wide), (wide, out))
    biases = wide + out
    if table["model_type"] == "hyperclovax_vision_v2":  # one more matrix projects to the text model
        projector, biases = (*projector, (out, sizes.text)), biases + sizes.text
    if not config["model_type"].startswith("qwen3"):
        norm = hidden * (2 if is_first else 1)
        around = Around(numbers, merged * QWEN_IMAGE_TOKENS, QWEN_IMAGE_TOKENS, projector, norm + biases)
        return around if is_first else _with_windows(around, config, sizes.num_layers, side)
    positions = _count(config, "num_position_embeddings", 2304)
    taken = len(config.get("deepstack_visual_indexes") or ())
    beside = (positions + 1) * hidden + 2 * hidden + biases + taken * (2 * wide + biases)
    return Around(numbers, positions, positions // merged, projector * (1 + taken), beside)


def _with_windows(around: Around, config: dict[str, Any], num_layers: int, side: int) -> Around:
    """Add Qwen2.5's windows: layers attend within squares of patches, except those that the file lists regularly."""
    full = config.get("fullatt_block_indexes", [7, 15, 23, 31])
    interval = full[0] + 1 if isinstance(full, list) and full and type(full[0]) is int else 0
    if interval <= 0 or full != list(range(interval - 1, num_layers, interval)):
        raise InputError(f"vision_config.fullatt_block_indexes must be every n-th layer, got {str(full)[:40]}")
    window = (_count(config, "window_size", 112) // side) ** 2
    return around._replace(window=window, full_attention_interval=interval)


def _internvl(table: dict[str, Any], config: dict[str, Any], sizes: Sizes) -> Around:
    """Describe InternVL: class token, learned positions, two scales per layer; the projector reads patch squares."""
    patches, numbers = _grid(config, 448, 14)
    ratio = table.get("downsample_ratio", 0.5)
    merged = round(1 / ratio**2) if isinstance(ratio, float | int) and 0 < ratio <= 1 else 0
    if not merged:
        raise InputError(f"downsample_ratio must lie in (0, 1], got {str(ratio)[:40]!r}")
    hidden, wide, text = sizes.hidden, merged * sizes.hidden, sizes.text
    beside = (patches + 1) * hidden + 2 * hidden + 2 * sizes.num_layers * hidden + 2 * wide + 2 * text
    return Around(numbers, patches + 1, patches // merged, ((wide, text), (text, text)), beside)


def _glm(table: dict[str, Any], config: dict[str, Any], sizes: Sizes) -> Around:
    """Describe GLM: learned positions and a norm after the embedding; a gated MLP over merged squares of patches."""
    side, merged = _count(config, "patch_size", 14), _count(config, "spatial_merge_size", 2) ** 2
    patches = (_count(config, "image_size", 336) // side) ** 2
    numbers = _count(config, "in_channels", 3) * _count(config, "temporal_patch_size", 2) * side**2
    hidden, out, wide = (
        sizes.hidden,
        _count(config, "out_hidden_size", 4096),
        _count(config, "intermediate_size", 13696),
    )
    beside = patches * hidden + hidden + hidden + out + 2 * out  # positions, bias, norm, bias, norm
    if config["model_type"] == "glm_ocr_vision":  # no learned positions, and no norm for them
        wide, beside = out * _count(config, "in_channels", 3), beside - patches * hidden - hidden
    projector = ((merged * hidden, out), (out, out), (out, wide), (out, wide), (wide, out))
    return Around(numbers, patches, max(patches // merged, 1), projector, beside)


def _llama4(table: dict[str, Any], config: dict[str, Any], sizes: Sizes) -> Around:
    """Describe Llama 4: class token and positions; an adapter over squares of patches, as wide as the layers' MLPs."""
    patches, numbers = _grid(config, 448, 14)
    ratio = config.get("pixel_shuffle_ratio", 0.5)
    if not isinstance(ratio, float | int) or not 0 < ratio <= 1:
        raise InputError(f"vision_config.pixel_shuffle_ratio must lie in (0, 1], got {str(ratio)[:40]!r}")
    inner, outer = _count(config, "projector_input_dim", 4096), _count(config, "projector_output_dim", 4096)
    projector = ((sizes.ffn, inner), (outer, outer), (_count(config, "vision_output_dim", 4096), sizes.text))
    beside = (patches + 2) * sizes.hidden
    return Around(numbers, patches + 1, max(round(patches * ratio**2), 1), projector, beside)


def _paddle(table: dict[str, Any], config: dict[str, Any], sizes: Sizes) -> Around:
    """Describe PaddleOCR: SigLIP without its head; a norm, then two matrices over squares of patches."""
    patches, numbers = _grid(config, 384, 14)
    return _squares(config, sizes, numbers, patches, wide=0)


def _cosmos(table: dict[str, Any], config: dict[str, Any], sizes: Sizes) -> Around:
    """Describe Cosmos: SigLIP-2 without its head; the projector's inner width is a setting of the model."""
    numbers = _count(config, "num_channels", 3) * _count(config, "patch_size", 16) ** 2
    wide = _count(table, "projector_hidden_size", 11520)
    return _squares(config, sizes, numbers, _count(config, "num_patches", 256), wide=wide)


def _squares(config: dict[str, Any], sizes: Sizes, numbers: int, patches: int, *, wide: int) -> Around:
    """Describe positions, a bias, a norm, and two matrices over squares of patches, as wide as these or `wide`."""
    merged = _count(config, "spatial_merge_size", 2) ** 2
    square = merged * sizes.hidden
    inner = wide or square
    beside = (patches + 1) * sizes.hidden + 2 * sizes.hidden + inner + sizes.text
    return Around(numbers, patches, max(patches // merged, 1), ((square, inner), (inner, sizes.text)), beside)


def _lfm2(table: dict[str, Any], config: dict[str, Any], sizes: Sizes) -> Around:
    """Describe LFM2: SigLIP-2 with its head; a norm and two matrices over squares of patches."""
    patches, numbers = (
        _count(config, "num_patches", 256),
        _count(config, "num_channels", 3) * _count(config, "patch_size", 16) ** 2,
    )
    merged, wide = _count(table, "downsample_factor", 2) ** 2, _count(table, "projector_hidden_size", 2560)
    square = merged * sizes.hidden
    has_head = _has_head(config)
    beside = (patches + 1) * sizes.hidden + _pooled(sizes) * has_head + 2 * square + wide + sizes.text
    projector = ((square, wide), (wide, sizes.text))
    return Around(numbers, patches, max(patches // merged, 1), projector, beside, has_head=has_head)


def _kimi(table: dict[str, Any], config: dict[str, Any], sizes: Sizes) -> Around:
    """Describe Kimi: grid positions, a norm before squares of patches are joined, and two matrices over them."""
    patches = _count(config, "pos_emb_height", 64) * _count(config, "pos_emb_width", 64)
    merged = math.prod(config.get("merge_kernel_size") or (2, 2))
    square = merged * sizes.hidden
    beside = (patches + 1) * sizes.hidden + 2 * sizes.hidden + square + sizes.text
    numbers = 3 * _count(config, "patch_size", 14) ** 2
    return Around(numbers, patches, patches // merged, ((square, square), (square, sizes.text)), beside)


def _sound(table: dict[str, Any], config: dict[str, Any], sizes: Sizes) -> Around:
    """Describe Whisper: two convolutions over three frames, the second halves them; several positions form a token."""
    positions = _count(config, "max_source_positions", config.get("max_position_embeddings", 1500))
    hidden, text, kind = sizes.hidden, sizes.text, config["model_type"]
    numbers, beside = 3 * (_count(config, "num_mel_bins", 128) + hidden), 2 * hidden
    if kind != "glmasr_encoder":  # has rotary positions
        beside += positions * hidden
    merged = {"voxtral_encoder": sizes.ffn // hidden, "glmasr_encoder": sizes.ffn // hidden}.get(kind, 2)
    if kind == "moss_transcribe_diarize_audio":
        merged = _count(table, "audio_merge_size", 4)
    wide = merged * hidden if kind not in ("qwen2_audio_encoder", "audioflamingo3_encoder") else hidden  # or their mean
    inner = 2 * text if kind == "glmasr_encoder" else text
    projector = ((wide, text),) if kind == "qwen2_audio_encoder" else ((wide, inner), (inner, text))
    if kind != "voxtral_encoder":
        beside += sum(outputs for _, outputs in projector)
    beside += 2 * text * (kind == "moss_transcribe_diarize_audio")  # a norm
    return Around(numbers, positions, positions // merged, projector, beside)


def _idefics(table: dict[str, Any], config: dict[str, Any], sizes: Sizes) -> Around:
    """Describe Idefics: SigLIP without its head; one matrix projects squares of patches to the text model."""
    patches, numbers = _grid(config, 224, 32)
    merged = _count(table, "scale_factor", 2) ** 2
    projector = ((merged * sizes.hidden, sizes.text),)
    return Around(numbers, patches, max(patches // merged, 1), projector, (patches + 1) * sizes.hidden)


def _pixtral(table: dict[str, Any], config: dict[str, Any], sizes: Sizes) -> Around:
    """Describe Pixtral: no learned positions; a norm before the projector, whose first matrix merges patch squares."""
    patches, numbers = _grid(config, 1024, 16)
    merged = _count(table, "spatial_merge_size", 2) ** 2
    hidden, text = sizes.hidden, sizes.text
    biases = 2 * text * (table.get("multimodal_projector_bias", False) is True)
    projector = ((merged * hidden, hidden), (hidden, text), (text, text))
    return Around(numbers, patches, max(patches // merged, 1), projector, hidden + biases)


def described(keys: Keys) -> Around:
    """Return the parts given as expressions: `numbers` per patch, `patches`, `image_tokens`, `projector`, `others`."""
    rule = keys.rules["around"]
    return Around(
        keys.number(rule["numbers"]),
        keys.number(rule["patches"]),
        keys.number(rule["image_tokens"]),
        tuple(keys.sizes(text) for text in rule["projector"]),
        keys.number(rule["others"]),
    )


# Parts around an encoder, by its model_type; the supported types of the surrounding model are in the data file.
AROUND: dict[str, Callable[[dict[str, Any], dict[str, Any], Sizes], Around]] = {
    "clip_vision_model": _clip,
    "siglip_vision_model": _siglip,
    "qwen2_vl_vision": _qwen,
    "qwen2_5_vl_vision": _qwen,
    "qwen3_vl_vision": _qwen,
    "exaone4_5_vision": _qwen,
    "qwen2_5_omni_vision_encoder": _qwen,
    "qwen3_omni_moe_vision_encoder": _qwen,
    "glm4v_vision": _glm,
    "glm4v_moe_vision": _glm,
    "glm_ocr_vision": _glm,
    "siglip2_vision_model": _lfm2,
    "kimi_k25_vision": _kimi,
    "qwen2_audio_encoder": _sound,
    "voxtral_encoder": _sound,
    "audioflamingo3_encoder": _sound,
    "glmasr_encoder": _sound,
    "moss_transcribe_diarize_audio": _sound,
    "llama4_vision_model": _llama4,
    "paddleocr_vl_vision": _paddle,
    "cosmos3_edge_vision": _cosmos,
    "internvl_vision": _internvl,
    "qianfan_ocr_vision": _internvl,
    "pixtral": _pixtral,
    "idefics3_vision": _idefics,
}
