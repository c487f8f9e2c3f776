"""Checks of a model's inputs in ComfyUI's process: shapes and sizes that the model cannot take are refused with the numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from ...conditioning import packed_shapes
from ...declaration import Declaration
from ...diffusion import Value
from ...errors import Refused
from ..family import Conditioning
from ..sequence_parallel.picture import Picture, by
from .config import SEQUENCES, VOXELS, ComfyConfig

REFERENCE = "ref_latents"
"""The conditioning with reference latents, made by the model's own VAE."""

REFERENCE_METHOD = "ref_latents_method"
"""The conditioning that selects the positions of reference latents."""

CONCATENATED = "concat"
"""The conditioning that ComfyUI concatenates to the latent's channels."""

GUIDES, GUIDED = "keyframe_idxs", "denoise_mask"
"""The conditioning with the positions of LTX-Video's guides, which follow the latent's frames, and with the mask of both.

The model leaves out tokens whose mask is below 0.
"""

TEXT_WIDTHS = {"context": "context_dim", "y": "adm_in_channels"}
"""The names of the widths of text and pooled text in a UNet's configuration, by conditioning."""


def check_unsharded(config: ComfyConfig, latent: Tensor, conditioning: Conditioning) -> None:
    """Check the inputs of a model without a declaration: the latent's shape, and the widths of a UNet's texts.

    Raises:
        Refused: an input does not fit; the message has the numbers.
    """
    shape, channels = list(latent.shape), config.latent_channels
    sizes = {1: "length", 2: "height, width", 3: "frames, height, width"}[config.latent_dims]
    dims, channel_dim, takes = config.latent_dims + 2, 1, f"{channels}, {sizes}"
    if config.kind in SEQUENCES:
        dims, channel_dim, takes = 3, 2, f"tokens, {channels}"
    if config.kind in VOXELS:
        dims, takes = latent.ndim if latent.ndim in (4, 5) else 5, f"{channels}, ...voxels"
    if latent.ndim != dims or shape[channel_dim] != channels or min(shape) < 1:
        raise Refused(
            f"the latent has the shape {shape} and {config.kind} takes [batch, {takes}], none of them 0: use the empty "
            "latent or the VAE that belongs to this model."
        )
    for name, key in TEXT_WIDTHS.items():
        tensor, width = conditioning.get(name), config.described.unet_config.get(key)
        if not isinstance(width, int) or (tensor is not None and tensor.shape[-1] == width and min(tensor.shape) > 0):
            continue
        actual = "missing" if tensor is None else f"of the shape {list(tensor.shape)}"
        what = "text" if name == "context" else "pooled text"
        raise Refused(
            f"the conditioning's {what} is {actual} and {config.kind} takes a width of {width}: use the text encoder "
            "that belongs to this model."
        )


def check_declared(
    config: ComfyConfig,
    declaration: Declaration,
    latent: Tensor,
    conditioning: Conditioning,
    values: Mapping[str, Value],
) -> None:
    """Check the inputs of a model with a declaration, and refuse conditioning that the declaration names as unsupported.

    Raises:
        Refused: an input does not fit or is unsupported; the message has the numbers.
    """
    shape, dims = list(latent.shape), config.latent_dims
    if latent.ndim != dims + 2 or latent.shape[1] != config.latent_channels:
        sizes = "height, width" if dims == 2 else "frames, height, width"
        raise Refused(
            f"the latent has the shape {shape} and {config.kind} takes [batch, {config.latent_channels}, {sizes}]: use the "
            "empty latent or the VAE that belongs to this model."
        )
    if min(shape) < 1:
        least = config.patch_size[-1] * config.described.latent_format.spacial_downscale_ratio
        raise Refused(
            f"the latent has the shape {shape}, which is empty: use a batch of at least 1 and at least {least} x "
            f"{least} pixels."
        )
    text = conditioning.get("context")
    if text is not None and text.ndim == 3 and text.shape[1] == 0:
        raise Refused(
            f"the conditioning's text has the shape {list(text.shape)} and at least one token is needed: encode a prompt."
        )
    if text is None or text.ndim != 3 or text.shape[2] not in config.text_widths:
        actual = "missing" if text is None else f"of the shape {list(text.shape)}"
        widths = " or ".join(map(str, config.text_widths))
        raise Refused(
            f"the conditioning's text is {actual} and {config.kind} takes [batch, tokens, {widths}]: use the text encoder "
            "that belongs to this model."
        )
    mask = conditioning.get("attention_mask") if declaration.takes_text_mask else None
    if mask is not None and mask.ndim == 2 and mask.shape[1] not in (1, text.shape[1]):
        raise Refused(
            f"the conditioning's attention_mask is for {mask.shape[1]} tokens and its text has {text.shape[1]}: encode the "
            "prompt again, or remove the node that changes one of them."
        )
    pooled = conditioning.get("y")
    if pooled is not None and pooled.shape[-1] < config.pooled_width:
        raise Refused(
            f"the conditioning's pooled text is {pooled.shape[-1]} wide and {config.kind} takes {config.pooled_width}: use "
            "the text encoders that belong to this model."
        )
    _check_sizes(config.kind, declaration, Picture(tuple(shape), config.patch_size), conditioning)
    concat = conditioning.get("concat")
    if concat is not None and concat.shape[1] != config.concat_channels:
        raise Refused(
            f"the picture that is added to the latent, such as a first frame, has {concat.shape[1]} channels with its "
            f"mask and {config.kind} takes {config.concat_channels}: encode it with the VAE that belongs to this "
            "model."
        )
    for name, tensor in conditioning.items():
        base = name.split(".")[0]
        if base == REFERENCE and (tensor.shape[1] != config.latent_channels or min(tensor.shape) < 1):
            raise Refused(
                f"a reference latent has the shape {list(tensor.shape)} and {config.kind} takes {config.latent_channels} "
                "channels: encode the reference picture with the VAE that belongs to this model."
            )
        if base == declaration.concatenated_latent and tensor.shape[2:-1] != latent.shape[2:-1]:
            raise Refused(
                f"the picture to edit is a latent {tensor.shape[-2]} high and the latent to sample is "
                f"{latent.shape[-2]} high: use the latent output of the node that adds the picture "
                "(InstructPixToPixConditioning)."
            )
        if base in declaration.unsupported_conditioning:
            raise Refused(
                f"{base} in the conditioning cannot be used with a parallel {config.kind} MODEL: "
                f"{declaration.unsupported_conditioning[base]}, or use Load Diffusion Model."
            )
    method = values.get(REFERENCE_METHOD)
    if method is not None and config.methods and method not in config.methods:
        raise Refused(
            f"the reference latents method {method} is not supported ({', '.join(config.methods)} are): set it in "
            "FluxKontextMultiReferenceLatentMethod."
        )
    _check_sound(config, declaration, packed_shapes(values))


def _check_sound(config: ComfyConfig, declaration: Declaration, shapes: Sequence[Sequence[int]]) -> None:
    """Raise Refused for a video with sound of the wrong shape, or without sound if the model needs sound.

    Args:
        shapes: the shapes of the latents that are packed in one; empty for a video alone.
    """
    if not shapes and not declaration.sound_optional:
        raise Refused(
            f"the latent holds a video alone and {config.kind} takes a video and its sound: use this model's empty "
            "latent for video and sound."
        )
    if shapes and not _fits(shapes[1:], config.sound):
        actual = " and ".join(str(list(shape)) for shape in shapes[1:])
        sizes = ", ".join("length" if size is None else str(size) for size in config.sound)
        takes = f"[batch, {sizes}]" if sizes else "none"
        raise Refused(
            f"the latent's sound has the shape {actual} and {config.kind} takes {takes}: use the empty latent that belongs to "
            "this model."
        )
    if shapes and shapes[0][0] > 1 and declaration.no_batches:
        raise Refused(
            f"the latent is a batch of {shapes[0][0]} and {config.kind} makes one video at a time: use batch_size 1, or queue "
            "the prompt again."
        )


def _fits(shapes: Sequence[Sequence[int]], sound: Sequence[int | None]) -> bool:
    """Return True if there is one sound, and its shape is as declared."""
    ((_, *sizes), *more_shapes) = shapes
    return (
        not more_shapes
        and len(sizes) == len(sound)
        and all(expected in (None, size) for expected, size in zip(sound, sizes, strict=True))
    )


def _check_sizes(kind: str, declaration: Declaration, picture: Picture, conditioning: Mapping[str, Tensor]) -> None:
    """Raise Refused for sizes at which the model itself would fail halfway.

    Args:
        kind: the model's name for messages.
        picture: the tokens of the latent to sample.
    """
    if declaration.divisible_latent and not picture.whole:
        raise _not_whole(kind, picture)
    for name, tensor in conditioning.items():
        base = name.split(".")[0]
        if base == REFERENCE and tensor.ndim != len(picture.shape):
            raise Refused(
                f"a reference latent has the shape {list(tensor.shape)} and {kind} takes {len(picture.shape)} dimensions: encode "
                "the reference picture with the VAE that belongs to this model."
            )
        if base in declaration.per_token_conditioning:
            _check_sized(kind, base, tensor, picture, declaration.per_token_conditioning[base])
        if base == CONCATENATED and tensor.shape[2:] != picture.shape[2:]:
            raise Refused(
                "the picture or video that is added to the latent, such as a first frame or a control video, is of "
                f"{by(tensor.shape[2:])} and the latent to sample is of {by(picture.shape[2:])}: use the latent "
                "output of the node that adds it."
            )
        if base in declaration.per_frame_conditioning:
            _check_frames(base, tensor, picture)
    _check_guides(picture, conditioning)


def _check_sized(kind: str, name: str, tensor: Tensor, picture: Picture, values: Sequence[int]) -> None:
    """Check the size of conditioning that has values for each token. A model may pad latents, but not this conditioning.

    Args:
        values: the number of the conditioning's values per latent value, in each dimension.
    """
    sizes = tuple(size // each for size, each in zip(tensor.shape[-len(values) :], values, strict=False))
    tokens = tuple(size // step for size, step in zip(sizes, picture.patch_size, strict=False))
    if tokens == picture.grid:
        return
    if sizes == picture.shape[2:]:
        raise _not_whole(kind, picture)
    raise Refused(
        f"{name} in the conditioning is for a latent of {by(sizes)} and the one to sample is of "
        f"{by(picture.shape[2:])}: use the latent output of the node that makes that conditioning, or the same width, "
        "height and length in both."
    )


def _check_frames(name: str, tensor: Tensor, picture: Picture) -> None:
    """Check the size of frames that a model puts in place of the latent's first frames or after its last frame."""
    sizes = picture.shape[3:]
    if (
        tensor.ndim == len(picture.shape)
        and Picture(tuple(tensor.shape), picture.patch_size).grid[1:] == picture.grid[1:]
    ):
        return
    raise Refused(
        f"{name} in the conditioning has the shape {list(tensor.shape)} and the latent to sample has frames of "
        f"{by(sizes)}: encode the picture at the width and height of that latent."
    )


def _check_guides(picture: Picture, conditioning: Mapping[str, Tensor]) -> None:
    guides, mask = conditioning.get(GUIDES), conditioning.get(GUIDED)
    if guides is None or not guides.shape[2]:
        return
    if mask is None or guides.shape[2] >= picture.tokens:
        raise Refused(
            f"the prompt has guides of {guides.shape[2]} tokens and the latent to sample ({by(picture.shape[2:])}) "
            "has none after its frames: sample the latent output of LTXVAddGuide together with its prompts."
        )
    if left_out := int((mask < 0).flatten(2).any(dim=1)[0].sum()):
        raise Refused(
            f"the guides leave out {left_out} of the latent's {picture.tokens} tokens, as an IC-LoRA with a "
            "reference_downscale_factor above 1 does, which is not supported with a parallel MODEL: use Load "
            "Diffusion Model."
        )


def _not_whole(kind: str, picture: Picture) -> Refused:
    return Refused(f"{kind} does not pad latents, and {picture.not_whole()}")
