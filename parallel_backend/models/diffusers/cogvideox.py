"""CogVideoX (2b, 5b, 1.5-5B; text and image to video) on diffusers' CogVideoXTransformer3DModel.

Results, positions included, equal those of diffusers' CogVideoXPipeline. ComfyUI's port has other positions for the 1.0 models.
As in ComfyUI, and unlike in diffusers, a latent of odd height or width is padded circularly to the patch size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...diffusion import Value
from ...errors import Refused
from ...plan import ModelShape
from ...plan.predict.kernel_counts import of_a_block, passes_of_a_block
from ...weights.files.checkpoint import Checkpoint
from ...weights.files.keymap import KeyMap
from ...weights.files.scaled_fp8 import resolve_scales
from ..declared.cogvideox import COGVIDEOX
from ..family import Conditioning
from ..inputs import Inputs
from ..inspection import check_tensors, count_blocks, find_prefix, sizes
from ..sequence_parallel.blocks import ParallelModel
from .cogvideox_keys import PATCH, cogvideox_keys, comfy_name
from .cogvideox_positions import LEARNED, LEARNED_TEXT, SAMPLE, positions_for, rotary
from .diffusers_family import DiffusersFamily, padded
from .model import Call

PREFIXES = ("", "model.diffusion_model.")
CHANNELS = 16
LARGE_HEADS = 48
"""The number of heads of 5b and 1.5; 2b has 30.

Nothing else in files of the 1.0 models tells 2b from 5b, and ComfyUI does not tell them apart.
"""

SPATIAL_ALIGNMENT = 16
"""Sinusoidal absolute positions need a multiple of this number of features."""

SMALL_SHIFT, LARGE_SHIFT = 3.0, 1.0
"""Shifts of the signal-to-noise ratio in the noise schedule (snr_shift_scale): for 2b, and for the other models."""


@dataclass(frozen=True)
class CogVideoXConfig:
    """The shape of a CogVideoX model, read from its tensors.

    Attributes:
        hidden: the number of features of a token.
        head_dim: the number of features of an attention head.
        layers: the number of blocks.
        in_channels: the number of channels of the input, with the image's latent.
        patch_frames: the number of latent frames in a token; 2 in CogVideoX 1.5.
        text_width: the width of the text.
        time_width: the width of the timestep's embedding.
        offset: True if the model embeds the image's offset.
        learned_positions: the number of tokens with a learned position, or 0.
        rotary: True if positions are rotary, as in all models but 2b.
    """

    hidden: int
    head_dim: int
    layers: int
    in_channels: int
    patch_frames: int
    text_width: int
    time_width: int
    offset: bool
    learned_positions: int
    rotary: bool

    @property
    def patch_size(self) -> tuple[int, int, int]:
        """Return the latent values of one token in frames, height and width."""
        return self.patch_frames, PATCH, PATCH

    @property
    def heads(self) -> int:
        """Return the number of attention heads."""
        return self.hidden // self.head_dim

    @property
    def image_channels(self) -> int:
        """Return the number of channels of the image's latent in an image-to-video model; 0 in other models."""
        return self.in_channels - CHANNELS

    @property
    def snr_shift(self) -> float:
        """Return the noise schedule's snr_shift_scale."""
        return LARGE_SHIFT if self.rotary else SMALL_SHIFT


class CogVideoXFamily(DiffusersFamily[CogVideoXConfig]):
    """The family of CogVideoX, which reads files with ComfyUI's or diffusers' tensor names and builds the model."""

    declaration = COGVIDEOX
    conditioning_names: frozenset[str] | None = frozenset({"context", "concat", "ofs"})

    def inspect(self, checkpoint: Checkpoint) -> tuple[Checkpoint, CogVideoXConfig]:
        """Return the model's tensors and its configuration.

        Raises:
            Refused: the file holds no supported CogVideoX model.
        """
        name = checkpoint.path.name
        markers = ("blocks.0.norm1.linear.weight", "transformer_blocks.0.norm1.linear.weight")
        prefix = find_prefix(checkpoint, PREFIXES, (*markers, "patch_embed.text_proj.weight"), least=2)
        if prefix is None:
            raise Refused(f"{name} has no CogVideoX tensors: choose a CogVideoX 2b, 5b or 1.5-5B file.")
        part = resolve_scales(checkpoint.select(prefix, comfy_name), prefix)
        try:
            config = _read_config(part)
        except KeyError as missing:
            raise Refused(f"{name} lacks the CogVideoX tensor {missing}: choose a complete CogVideoX file.") from None
        if config.in_channels not in (CHANNELS, 2 * CHANNELS):
            raise Refused(
                f"{name} takes {config.in_channels} latent channels (Fun and control models do); only CogVideoX models "
                f"with {CHANNELS} (text to video) or {2 * CHANNELS} (image to video) are supported."
            )
        if config.learned_positions not in (0, LEARNED):
            raise Refused(
                f"{name} has learned positions for {config.learned_positions} tokens and {LEARNED} are supported, as in "
                "CogVideoX-5b image to video: choose another file."
            )
        if not config.rotary and config.hidden % SPATIAL_ALIGNMENT:
            raise Refused(
                f"{name} has {config.hidden} features and no rotary positions, which needs a multiple of {SPATIAL_ALIGNMENT}: "
                "choose a complete CogVideoX file."
            )
        check_tensors(part, self.keys(config), "CogVideoX", config.hidden)
        return part, config

    def shape(self, config: CogVideoXConfig) -> ModelShape:
        """Return the model's size and limits. The numbers of parameters leave out biases and norms."""
        hidden, time, volume = config.hidden, config.time_width, PATCH**2 * config.patch_frames
        ends = volume * (config.in_channels + CHANNELS) + config.text_width + config.learned_positions
        return ModelShape(
            name="cogvideox",
            hidden=hidden,
            heads=config.heads,
            double_blocks=0,
            single_blocks=config.layers,
            double_weights=0,
            single_weights=12 * hidden**2 + 12 * time * hidden,
            other_weights=hidden * (ends + 3 * time) + time**2 * (1 + 2 * config.offset),
            token_weights=12 * hidden**2,
            channels=CHANNELS * volume,
            token_frames=4 * config.patch_frames,
            text=LEARNED_TEXT,
            guided=True,
            embeds_whole=True,
            single_operations=of_a_block("CogVideoXBlock"),
            passes=passes_of_a_block("CogVideoXBlock"),
        )

    def two_of_each(self, config: CogVideoXConfig) -> tuple[CogVideoXConfig, tuple[int, ...]]:
        """Return a configuration of two blocks and the real number of blocks. The model has one kind of block."""
        return replace(config, layers=2), (config.layers,)

    def check(
        self, config: CogVideoXConfig, latent: Tensor, conditioning: Conditioning, values: Mapping[str, Value]
    ) -> None:
        """Refuse inputs of the wrong size, and a missing image. The message has the numbers."""
        shape = list(latent.shape)
        if latent.ndim != 5 or latent.shape[1] != CHANNELS:
            raise Refused(
                f"the latent has the shape {shape} and CogVideoX takes [batch, {CHANNELS}, frames, height, width]: "
                "use EmptyHunyuanLatentVideo, or encode with a CogVideoX VAE."
            )
        if min(shape) < 1:
            raise Refused(
                f"the latent has the shape {shape}, which is empty: use a batch of at least 1 and at least 16 x 16 pixels."
            )
        if latent.shape[2] % config.patch_frames:
            frames = latent.shape[2]
            fewer = f" or {frames - 1}" if frames > 1 else ""
            raise Refused(
                f"the latent has {frames} frames (of 4 video frames each, the first of 1) and CogVideoX 1.5 computes "
                f"them in pairs: use {frames + 1} (a length of {4 * frames + 1} in EmptyHunyuanLatentVideo){fewer}."
            )
        text = conditioning["context"]
        if text.ndim != 3 or text.shape[1] == 0 or text.shape[2] != config.text_width:
            raise Refused(
                f"the conditioning's text has the shape {list(text.shape)} and this model takes "
                f"[batch, tokens, {config.text_width}]: use CLIPLoader with the type cogvideox and t5xxl."
            )
        self._check_image(config, latent, conditioning.get("concat"))
        size = (latent.shape[3], latent.shape[4])
        if config.learned_positions and size != SAMPLE:
            raise Refused(
                f"the latent is {size[1]} x {size[0]} and CogVideoX-5b image to video takes {SAMPLE[1]} x {SAMPLE[0]} only "
                f"({8 * SAMPLE[1]} x {8 * SAMPLE[0]} pixels), because its positions are learned: use that size."
            )

    @staticmethod
    def _check_image(config: CogVideoXConfig, latent: Tensor, image: Tensor | None) -> None:
        if not config.image_channels:
            if image is not None:
                raise Refused(
                    "the conditioning has an image and this CogVideoX model makes videos from text alone: choose an "
                    "image-to-video model, or remove the image from the conditioning."
                )
        elif image is None:
            raise Refused(
                "this CogVideoX model turns an image into a video and was given no image: put "
                "InstructPixToPixConditioning with the image and the VAE between the prompts and the sampler, or "
                "choose a text-to-video model."
            )
        elif image.shape[1:] != (config.image_channels, *latent.shape[2:]):
            raise Refused(
                f"the image's latent has the shape {list(image.shape)} and [batch, {config.image_channels}, "
                f"{', '.join(map(str, latent.shape[2:]))}] is needed: encode it with a CogVideoX VAE."
            )

    def keys(self, config: CogVideoXConfig) -> KeyMap:
        """Return the key map: for each parameter, the tensor and rows of the file that it is made of."""
        return cogvideox_keys(
            hidden=config.hidden,
            head_dim=config.head_dim,
            layers=config.layers,
            in_channels=config.in_channels,
            out_channels=CHANNELS,
            patch_frames=config.patch_frames,
            conv=config.patch_frames == 1,
            text_width=config.text_width,
            time_width=config.time_width,
            offset=config.offset,
            learned_positions=config.learned_positions,
        )

    def make(self, config: CogVideoXConfig) -> nn.Module:
        """Make diffusers' module. Positions that are not learned are computed for each call."""
        from diffusers.models.transformers.cogvideox_transformer_3d import (
            CogVideoXTransformer3DModel,  # the import takes 5 s, and only workers need it
        )

        learned = bool(config.learned_positions)
        height, width = SAMPLE if learned else (0, 0)  # size 0 makes no positions
        module = CogVideoXTransformer3DModel(
            num_attention_heads=config.heads,
            attention_head_dim=config.head_dim,
            in_channels=config.in_channels,
            out_channels=CHANNELS,
            time_embed_dim=config.time_width,
            ofs_embed_dim=config.time_width if config.offset else None,
            text_embed_dim=config.text_width,
            num_layers=config.layers,
            sample_height=height,
            sample_width=width,
            patch_size=PATCH,
            patch_size_t=config.patch_frames if config.patch_frames > 1 else None,
            use_rotary_positional_embeddings=config.rotary,
            use_learned_positional_embeddings=learned,
        )
        embed: Any = module.patch_embed
        positions = embed._buffers.pop("pos_embedding", None)
        if learned:
            embed.register_parameter("pos_embedding", nn.Parameter(positions))
        return module  # type: ignore[no-any-return]

    def call(self, config: CogVideoXConfig) -> Call:
        """Return the function that runs the model's forward with ComfyUI's conditioning and order of dimensions."""

        def call(spread: ParallelModel, latent: Tensor, inputs: Inputs) -> Tensor:
            conditioning, rope = inputs.conditioning, None
            x = torch.cat([latent, conditioning["concat"]], dim=1) if "concat" in conditioning else latent
            x = padded(x, PATCH).transpose(1, 2)
            if config.rotary:
                rope = spread.now.once_a_run("positions", (x,), lambda: rotary(config.head_dim, config.patch_frames, x))
            with positions_for(spread.module.patch_embed, conditioning["context"].shape[1]):
                (out,) = spread.entrance(
                    x,
                    conditioning["context"],
                    inputs.timestep,
                    ofs=conditioning.get("ofs"),
                    image_rotary_emb=rope,
                    return_dict=False,
                )
            return out.transpose(1, 2)[..., : latent.shape[3], : latent.shape[4]]  # type: ignore[no-any-return]

        return call


def _read_config(part: Checkpoint) -> CogVideoXConfig:
    proj = sizes(part, "patch_embed.proj.weight", 2, 4)
    patch_frames = 1 if len(proj) == 4 else 2
    modulation = sizes(part, "blocks.0.norm1.linear.weight")
    hidden = proj[0]
    (head_dim,) = sizes(part, "blocks.0.norm_q.weight", 1)
    positions = "patch_embed.pos_embedding"
    return CogVideoXConfig(
        hidden=hidden,
        head_dim=head_dim,
        layers=count_blocks(part, "blocks"),
        in_channels=proj[1] if patch_frames == 1 else proj[1] // (PATCH**2 * patch_frames),
        patch_frames=patch_frames,
        text_width=sizes(part, "patch_embed.text_proj.weight")[1],
        time_width=modulation[1],
        offset="ofs_embedding_linear_1.weight" in part.entries,
        learned_positions=sizes(part, positions, 3)[1] if positions in part.entries else 0,
        rotary=patch_frames > 1 or hidden // head_dim >= LARGE_HEADS,
    )
