"""The autoencoder of FLUX, Stable Diffusion and PixArt (AutoencoderKL) over diffusers' modules, on all ranks by rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..attention.kernels import choose_kernel, flash_fault
from ..attention.parallel import around_the_ring
from ..weights.checkpoint import Checkpoint
from ..weights.keymap import KeyMap
from ..weights.vae_keys import older_diffusers_kl_name, original_kl_name
from .autoencoder import Mark, whole_tensors
from .conv import conv2d, doubled, halved
from .norm import group_norm
from .rows import Slab

LEVELS = 4
LAYERS = 2
WIDTHS = (1, 2, 4, 4)
"""Levels, resnets a level of the encoder, and channels of each level as multiples of the first's."""


@dataclass(frozen=True)
class KLConfig:
    """The shape of an AutoencoderKL; `moments` tells whether it has 1x1 convolutions around the latent."""

    encoder_width: int
    decoder_width: int
    latent_channels: int
    moments: bool


class KLFamily:
    """Reads AutoencoderKL files with the original's (ComfyUI's) or diffusers' tensor names."""

    def recognises(self, checkpoint: Checkpoint) -> bool:
        """By the attention in the decoder's middle and the 2D convolutions."""
        entry = checkpoint.entries.get("decoder.conv_in.weight")
        normalised = "bn.running_mean" in checkpoint.entries  # FLUX.2's
        return entry is not None and len(entry.shape) == 4 and entry.shape[1] in (4, 16) and not normalised

    def configure(self, checkpoint: Checkpoint) -> KLConfig:
        """Read off the first convolutions."""
        entries = checkpoint.entries
        first = entries["decoder.conv_in.weight"].shape
        return KLConfig(
            encoder_width=entries["encoder.conv_in.weight"].shape[0],
            decoder_width=first[0] // WIDTHS[-1],
            latent_channels=first[1],
            moments="post_quant_conv.weight" in entries,
        )

    def kind(self, _config: KLConfig) -> str:
        """Its name in sentences."""
        return "an image VAE (AutoencoderKL)"

    def dims(self, _config: KLConfig) -> int:
        """A picture's."""
        return 4

    def channels(self, config: KLConfig) -> int:
        """Channels of a latent."""
        return config.latent_channels

    def keys(self, config: KLConfig, checkpoint: Checkpoint) -> KeyMap:
        """By either naming."""
        diffusers = "decoder.mid_block.resnets.0.conv1.weight" in checkpoint.entries
        older = "decoder.mid_block.attentions.0.query.weight" in checkpoint.entries

        def name_in_file(name: str) -> str:
            if diffusers:
                return older_diffusers_kl_name(name) if older else name
            return original_kl_name(name, LEVELS)

        return whole_tensors(self.build(config).module, name_in_file, checkpoint)

    def decoded_shape(self, config: KLConfig, latent: Sequence[int]) -> tuple[int, ...]:
        """Eight pixels for a value of the latent."""
        batch, _, height, width = latent
        return (batch, 3, height * KLAutoencoder.scale, width * KLAutoencoder.scale)

    def build(self, config: KLConfig) -> KLAutoencoder:
        """The autoencoder on the meta device."""
        return KLAutoencoder(config)


class KLAutoencoder:
    """Encoder and decoder of diffusers' AutoencoderKL; they may differ in width."""

    scale = 2 ** (LEVELS - 1)

    def __init__(self, config: KLConfig) -> None:
        from diffusers.models.autoencoders.vae import Decoder, Encoder

        def widths(first: int) -> tuple[int, ...]:
            return tuple(first * factor for factor in WIDTHS)

        latent = config.latent_channels
        with torch.device("meta"):
            self.module = nn.Module()
            self.module.encoder = Encoder(
                out_channels=latent,
                down_block_types=("DownEncoderBlock2D",) * LEVELS,
                block_out_channels=widths(config.encoder_width),
                layers_per_block=LAYERS,
            )
            self.module.decoder = Decoder(
                in_channels=latent,
                up_block_types=("UpDecoderBlock2D",) * LEVELS,
                block_out_channels=widths(config.decoder_width),
                layers_per_block=LAYERS,
            )
            if config.moments:
                self.module.quant_conv = nn.Conv2d(2 * latent, 2 * latent, 1)
                self.module.post_quant_conv = nn.Conv2d(latent, latent, 1)
        self._moments = config.moments

    def decode(self, latent: Slab, schedule: str, mark: Mark) -> Iterator[Slab]:
        """The picture, in one piece; a picture has no schedule."""
        decoder: Any = self.module.decoder
        x = conv2d(self.module.post_quant_conv, latent) if self._moments else latent  # type: ignore[arg-type]
        x = middle(decoder.mid_block, conv2d(decoder.conv_in, x), mark)
        for block in decoder.up_blocks:
            for resnet in block.resnets:
                x = residual(resnet, x, mark)
            for up in block.upsamplers or ():
                x = doubled(up.conv, x)
        yield conv2d(decoder.conv_out, normalised(decoder.conv_norm_out, x))

    def encode(self, pixels: Slab, schedule: str, mark: Mark) -> Iterator[Slab]:
        """The mean, in one piece."""
        encoder: Any = self.module.encoder
        x = conv2d(encoder.conv_in, pixels)
        for block in encoder.down_blocks:
            for resnet in block.resnets:
                x = residual(resnet, x, mark)
            for down in block.downsamplers or ():
                x = halved(down.conv, x)
        x = middle(encoder.mid_block, x, mark)
        x = conv2d(encoder.conv_out, normalised(encoder.conv_norm_out, x))
        moments = conv2d(self.module.quant_conv, x) if self._moments else x  # type: ignore[arg-type]
        yield moments.with_values(moments.values.chunk(2, dim=1)[0])


def middle(block: Any, x: Slab, mark: Mark) -> Slab:
    """The middle of encoder and decoder: a resnet, attention, a resnet. A collective."""
    return residual(block.resnets[1], attention(block.attentions[0], residual(block.resnets[0], x, mark)), mark)


def residual(block: Any, x: Slab, mark: Mark) -> Slab:
    """diffusers' ResnetBlock2D without a time embedding. A collective."""
    h = conv2d(block.conv1, normalised(block.norm1, x))
    h = conv2d(block.conv2, normalised(block.norm2, h))
    shortcut = x if block.conv_shortcut is None else conv2d(block.conv_shortcut, x)
    mark()
    return h.with_values(h.values.add_(shortcut.values))


def normalised(norm: nn.GroupNorm, x: Slab) -> Slab:
    """Group normalisation, then SiLU. A collective."""
    return x.with_values(F.silu(group_norm(norm, x), inplace=True))


def attention(block: Any, x: Slab) -> Slab:
    """All positions attend to all others, with one head as wide as the channels; keys go round the ring of ranks."""

    def tokens(linear: nn.Linear) -> Tensor:
        return F.linear(sequence, linear.weight, linear.bias).unsqueeze(2)

    sequence = group_norm(block.group_norm, x).flatten(2).transpose(1, 2)
    q, kv = tokens(block.to_q), torch.stack((tokens(block.to_k), tokens(block.to_v)))
    width, channels = x.values.shape[-1], x.values.shape[1]
    counts = [width * (run.stop - run.start) for run in x.runs]
    kernel = choose_kernel("auto", q.device, q.dtype, channels, flash_fault(q.device))
    out = around_the_ring(x.axis, counts, kernel.attend, q, kv).squeeze(2)
    out = F.linear(out, block.to_out[0].weight, block.to_out[0].bias)
    return x.with_values(out.transpose(1, 2).reshape(x.values.shape).add_(x.values))
