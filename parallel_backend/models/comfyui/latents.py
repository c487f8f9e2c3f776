"""Whether a latent, and those in the conditioning, are of sizes that a model can take: known before a worker has any of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from ...declaration import Declaration
from ...errors import Refused
from ..sequence_parallel.picture import Picture, by

REFERENCE = "ref_latents"
"""The conditioning that has latents of the model's own VAE as references."""

BESIDE = "concat"
"""The conditioning that ComfyUI lays beside the latent's channels."""

GUIDES, GUIDED = "keyframe_idxs", "denoise_mask"
"""Where the guides of LTX-Video are, which lie behind the latent's frames, and the mask of both; below 0 it leaves tokens out."""


REFERENCES = frozenset(
    {
        "ref_latents",
        "ref_latent",
        "reference_latent",
        "context_latents",
        "vace_context",
        "cond_video_latents",
        "time_dim_concat",
    }
)
"""Conditioning whose latents become tokens."""


def check_sizes(kind: str, declaration: Declaration, picture: Picture, conditioning: Mapping[str, Tensor]) -> None:
    """Raises Refused where the model would stop at a size in its middle, with the sizes and what works.

    Args:
        kind: the model's, as users know it.
        picture: the latent to sample.
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
        if base == BESIDE and tensor.shape[2:] != picture.shape[2:]:
            raise Refused(
                f"what lies beside the latent, such as a first frame or a control video, is of {by(tensor.shape[2:])} and the "
                f"latent to sample of {by(picture.shape[2:])}: use the latent that the node gives which makes it."
            )
        if base in declaration.per_frame_conditioning:
            _check_frames(base, tensor, picture)
    _check_guides(picture, conditioning)


def _check_sized(kind: str, name: str, tensor: Tensor, picture: Picture, values: Sequence[int]) -> None:
    """Of conditioning that goes with every token, `values` for one of the latent's; a model pads the latent, and not this."""
    sizes = tuple(size // each for size, each in zip(tensor.shape[-len(values) :], values, strict=False))
    tokens = tuple(size // step for size, step in zip(sizes, picture.patch_size, strict=False))
    if tokens == picture.grid:
        return
    if sizes == picture.shape[2:]:
        raise _not_whole(kind, picture)
    raise Refused(
        f"{name} in the conditioning is for a latent of {by(sizes)} and the one to sample is of {by(picture.shape[2:])}: use the "
        "latent that the node gives which makes that conditioning, or the same width, height and length in both."
    )


def _check_frames(name: str, tensor: Tensor, picture: Picture) -> None:
    """Of frames that are laid over the latent's first or behind its last ones."""
    sizes = picture.shape[3:]
    if (
        tensor.ndim == len(picture.shape)
        and Picture(tuple(tensor.shape), picture.patch_size).grid[1:] == picture.grid[1:]
    ):
        return
    raise Refused(
        f"{name} in the conditioning has the shape {list(tensor.shape)} and the latent to sample frames of {by(sizes)}: encode "
        "the picture at the width and height of that latent."
    )


def _check_guides(picture: Picture, conditioning: Mapping[str, Tensor]) -> None:
    guides, mask = conditioning.get(GUIDES), conditioning.get(GUIDED)
    if guides is None or not guides.shape[2]:
        return
    if mask is None or guides.shape[2] >= picture.tokens:
        raise Refused(
            f"the prompt has guides of {guides.shape[2]} tokens and the latent to sample ({by(picture.shape[2:])}) none behind "
            "its frames: sample the latent that LTXVAddGuide gives with the prompt."
        )
    if left_out := int((mask < 0).flatten(2).any(dim=1)[0].sum()):
        raise Refused(
            f"the guides leave {left_out} of the latent's {picture.tokens} tokens out, as those of an IC-LoRA with a "
            "reference_downscale_factor above 1 do, which is not supported with a parallel MODEL: use Load Diffusion Model."
        )


def _not_whole(kind: str, picture: Picture) -> Refused:
    return Refused(f"{kind} takes whole tokens only, and {picture.not_whole()}")


def reference_tokens(
    conditioning: Mapping[str, Tensor], patch_size: tuple[int, ...], more: frozenset[str] = frozenset()
) -> int:
    """Tokens of one batch item's references, and of `more` latents; beside a video one may be a frame by itself."""
    names, dims = REFERENCES | more, len(patch_size)
    shapes = (tuple(tensor.shape) for name, tensor in conditioning.items() if names.intersection(name.split(".")))
    latents = ((*shape[:2], 1, *shape[2:]) if len(shape) == 4 and dims == 3 else shape for shape in shapes)
    return sum(Picture(shape, patch_size).tokens for shape in latents if len(shape) == 2 + dims)
