"""Options of a model's encoder: its images, its tokens, and ranks of its own."""

from __future__ import annotations

import re
from dataclasses import replace

from autoplan.base.errors import InputError
from autoplan.base.units import check_count
from autoplan.readers.cluster import of_size
from autoplan.spec.lengths import ImageCounts
from autoplan.spec.model import EncoderApart, ModelSpec
from autoplan.topology.cluster import ClusterSpec


def with_encoder_options(
    model: ModelSpec,
    *,
    images: ImageCounts | None = None,
    image_tokens: int | None = None,
    encoder_len: int | None = None,
    ranks: str | None = None,
) -> ModelSpec:
    """Return the model with the images of a mean sample, and an encoder of such lengths, on such ranks."""
    encoder = model.any_encoder
    if encoder_len is not None:
        if encoder is None or not model.cross_attention:
            raise InputError(f"--encoder-len needs a model with cross attention, {model.name} has none: leave it out")
        check_count("--encoder-len", encoder_len, at_most=10**7)
        model = replace(model, encoder=replace(encoder, patches=encoder_len))
    if images is None and image_tokens is None and ranks is None:
        return model
    if encoder is None or model.cross_attention:
        lacks = "has none"
        if model.left_out:
            lacks = f"is priced without the {model.left_out} in its config.json"
        elif encoder is not None and encoder.embedding == "matrix":
            lacks = "attends to one in every sample"
        raise InputError(
            f"--images, --image-tokens and --encoder-ranks need a model with images, {model.name} {lacks}: "
            "leave them out"
        )
    if image_tokens is not None:
        check_count("--image-tokens", image_tokens, at_most=10**7)
        patches = max(round(encoder.patches * image_tokens / encoder.image_tokens), 1)
        encoder = replace(encoder, image_tokens=image_tokens, patches=patches)
    if images is not None:
        encoder = replace(encoder, images=images.mean)
    if ranks is None:
        return model.with_encoder(encoder)
    return replace(model, encoder=None, encoder_apart=EncoderApart(encoder=encoder, **_degrees(ranks)))


def _degrees(text: str) -> dict[str, int]:
    """Return the degrees of an encoder on ranks of its own, as in "tp=2,dp=4"."""
    parts = [re.fullmatch(r"\s*(tp|dp)=([1-9][0-9]{0,6})\s*", part) for part in text.split(",")]
    degrees = {part[1]: int(part[2]) for part in parts if part}
    if len(degrees) < len(parts):
        raise InputError(f"--encoder-ranks {text[:40]!r}: write the degrees of the encoder's ranks, such as tp=2,dp=4")
    return degrees


def encoder_ranks(model: ModelSpec, cluster: ClusterSpec) -> tuple[str | None, ...]:
    """Return the ranks that an encoder may have: those of the text model (None), or up to half of the devices.

    On several nodes these are whole nodes; tensor-parallel groups stay within one.
    """
    encoder = model.any_encoder
    if encoder is None or model.cross_attention:
        return (None,)
    unit = cluster.devices_per_node if cluster.num_nodes > 1 else 1
    sizes = [unit * 2**power for power in range(cluster.num_devices.bit_length())]
    degrees = [2**power for power in range(cluster.devices_per_node.bit_length())]
    grids = (
        f"tp={tp},dp={size // tp}"
        for size in sizes
        for tp in degrees
        if 2 * size <= cluster.num_devices and size % tp == 0 and encoder.layers.num_heads % tp == 0
    )
    return (None, *grids)


def beside_encoder(cluster: ClusterSpec, apart: EncoderApart | None) -> ClusterSpec:
    """Return the part of a cluster that an encoder on ranks of its own leaves to the text model.

    On several nodes that is whole nodes.  Raises InputError if the text model has fewer devices than the encoder.
    """
    if apart is None:
        return cluster
    left = cluster.num_devices - apart.num_devices
    if cluster.num_nodes > 1:
        left = left // cluster.devices_per_node * cluster.devices_per_node
    if left < apart.num_devices:
        raise InputError(
            f"--encoder-ranks tp={apart.tp},dp={apart.dp}: {apart.num_devices} of the {cluster.num_devices} devices of "
            f"{cluster.name} leave {max(left, 0)} to the text model, fewer than to the encoder: lower dp"
        )
    return of_size(cluster, left)
