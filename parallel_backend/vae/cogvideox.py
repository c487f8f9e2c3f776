"""CogVideoX's autoencoder over diffusers' modules: frames go in batches, and all ranks compute each batch by rows.

A schedule decides which frames go through the network together. Normalisation spans exactly the frames of a batch, so the
schedule changes the result. "original" is the schedule of the authors and of diffusers. "comfyui" is ComfyUI's schedule. There
the first half of the decoder runs over the whole clip, and the second half over a few frames at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import Refused
from ..layout import cut
from ..weights.files.checkpoint import Checkpoint
from ..weights.files.keymap import KeyMap
from .autoencoder import SCHEDULES, Give, OnProgress, whole_tensors, without_encoder
from .row_layers import PARTS, CausalConvolution, affine, doubled, group_norm, halved, twice
from .rows import Slab

LATENT_FRAMES = 2
"""Latent frames in a batch of the original schedule."""

PIXEL_FRAMES = 8
"""Frames encoded in a batch, by both schedules."""

ROLLING_FRAMES = 4
"""Frames in a batch of the second half of ComfyUI's decoder."""

TIME_BLOCKS = 2
"""Number of the decoder's up blocks that double the frames. The first half of ComfyUI's decoder ends after these blocks."""


@dataclass(frozen=True)
class CogVideoXAutoencoderConfig:
    """The shape of an autoencoder, derived from its tensors.

    Attributes:
        widths: channels of each level of the encoder.
        layers: number of resnets in each level of the encoder.
        latent_channels: channels of a latent.
        missing: the first tensor of the encoder that the file lacks, or an empty string.
    """

    widths: tuple[int, ...]
    layers: int
    latent_channels: int
    missing: str = ""


class CogVideoXAutoencoderFamily:
    """The family of CogVideoX autoencoder files. ComfyUI's files have diffusers' tensor names too."""

    imports: tuple[str, ...] = ("diffusers.models.autoencoders",)

    def recognises(self, checkpoint: Checkpoint) -> bool:
        """Return True if the file has causal convolutions and norms conditioned by the latent. ComfyUI checks the same."""
        names = ("decoder.conv_in.conv.weight", "decoder.mid_block.resnets.0.norm1.norm_layer.weight")
        return all(name in checkpoint.entries for name in names)

    def configure(self, checkpoint: Checkpoint) -> CogVideoXAutoencoderConfig:
        """Return the configuration, derived from the encoder's blocks, or from the decoder's if there is no encoder.

        The decoder has one resnet more in each level than the encoder.

        Raises:
            Refused: the file has fewer levels than CogVideoX needs.
        """
        entries = checkpoint.entries
        alone = not any(name.startswith("encoder.") for name in entries)
        stem = "decoder.up_blocks." if alone else "encoder.down_blocks."
        indices = {
            tuple(map(int, name.split(".")[2:5:2])) for name in entries if name.startswith(stem) and ".resnets." in name
        }
        levels, layers = max(level for level, _ in indices) + 1, max(layer for _, layer in indices) + 1
        order = range(levels)[::-1] if alone else range(levels)
        if levels <= TIME_BLOCKS:
            raise Refused(f"{checkpoint.path.name} has {levels} levels and CogVideoX has 4: choose another VAE file.")
        config = CogVideoXAutoencoderConfig(
            widths=tuple(entries[f"{stem}{level}.resnets.0.conv2.conv.weight"].shape[0] for level in order),
            layers=layers - alone,
            latent_channels=entries["decoder.conv_in.conv.weight"].shape[1],
        )
        return replace(config, missing=without_encoder(self.build(config).module, str, checkpoint))

    def kind(self, _config: CogVideoXAutoencoderConfig) -> str:
        """Return the autoencoder's name, as it appears in messages to the user."""
        return "a CogVideoX VAE"

    def dims(self, _config: CogVideoXAutoencoderConfig) -> int:
        """Return the number of dimensions of a latent, which is always that of a video."""
        return 5

    def channels(self, config: CogVideoXAutoencoderConfig) -> int:
        """Return the number of channels of a latent."""
        return config.latent_channels

    def missing(self, config: CogVideoXAutoencoderConfig) -> str:
        """Return the name of the first tensor of the encoder that the file lacks, or an empty string."""
        return config.missing

    def keys(self, config: CogVideoXAutoencoderConfig, checkpoint: Checkpoint) -> KeyMap:
        """Return the key map. Parameters and tensors have the same names."""
        return whole_tensors(self.build(config).module, lambda name: name, checkpoint)

    def decoded_shape(self, config: CogVideoXAutoencoderConfig, latent: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the pixels of a latent.

        Each latent frame gives four frames. If the number of latent frames is odd, the first gives a single frame.
        """
        batch, _, frames, height, width = latent
        scale = 2 ** (len(config.widths) - 1)
        return (batch, 3, 4 * frames - 3 * (frames % 2), height * scale, width * scale)

    def build(self, config: CogVideoXAutoencoderConfig) -> CogVideoXAutoencoder:
        """Return the autoencoder on the meta device."""
        return CogVideoXAutoencoder(config)


class CogVideoXAutoencoder:
    """An AutoencoderKLCogVideoX of diffusers that runs batch by batch."""

    def __init__(self, config: CogVideoXAutoencoderConfig) -> None:
        from diffusers.models.autoencoders.autoencoder_kl_cogvideox import AutoencoderKLCogVideoX

        levels = len(config.widths)
        self.scale = 2 ** (levels - 1)
        with torch.device("meta"):
            self.module: Any = AutoencoderKLCogVideoX(
                down_block_types=("CogVideoXDownBlock3D",) * levels,
                up_block_types=("CogVideoXUpBlock3D",) * levels,
                block_out_channels=config.widths,
                latent_channels=config.latent_channels,
                layers_per_block=config.layers,
            )
        if config.missing:
            self.module.encoder = None

    def decode(self, latent: Slab, schedule: str, on_progress: OnProgress, give: Give) -> None:
        """Decode a clip and pass its frames to `give` in order, batch by batch."""
        for frames in Clip(self.module, schedule, on_progress).decode(latent):
            give(frames)

    def encode(self, pixels: Slab, schedule: str, on_progress: OnProgress) -> Iterator[Slab]:
        """Return an iterator over the latent frames of a clip in order, batch by batch."""
        return Clip(self.module, schedule, on_progress).encode(pixels)


class Clip:
    """The network for one clip, with the frames that its convolutions keep from batch to batch.

    Args:
        module: diffusers' AutoencoderKLCogVideoX.
        schedule: one of SCHEDULES.
        on_progress: called after each resnet.
    """

    def __init__(self, module: Any, schedule: str, on_progress: OnProgress) -> None:
        assert schedule in SCHEDULES
        self._module = module
        self._rolling = schedule == "comfyui"
        self._on_progress = on_progress
        self._conv = CausalConvolution(forgets_single_frames=self._rolling)

    def decode(self, latent: Slab) -> Iterator[Slab]:
        """Yield the clip's frames in order, batch by batch, as `[1, 3, frames, rows, width]`. Every batch is a collective.

        Args:
            latent: `[1, channels, latent frames, rows, width]`.
        """
        frames = latent.values.shape[2]
        if not self._rolling:
            for batch in original_batches(frames, LATENT_FRAMES):
                z = latent.with_values(latent.values[:, :, batch])
                yield self._second_half(self._first_half(z), z)
            return
        x = self._first_half(latent)
        self._conv = CausalConvolution()
        count = x.values.shape[2]
        z = latent.with_values(latent.values[:, :, condition_frames(count, frames)])
        for start in range(0, count, ROLLING_FRAMES):
            batch = slice(start, start + ROLLING_FRAMES)
            yield self._second_half(x.with_values(x.values[:, :, batch]), z.with_values(z.values[:, :, batch]))

    def encode(self, clip: Slab) -> Iterator[Slab]:
        """Yield the means of the latent frames in order, batch by batch, as `[1, channels, latent frames, rows, width]`.

        Args:
            clip: `[1, 3, frames, rows, width]`.
        """
        frames = clip.values.shape[2]
        batches = separate_batches(frames) if self._rolling else original_batches(frames, PIXEL_FRAMES)
        for batch in batches:
            moments = self._encode(clip.with_values(clip.values[:, :, batch]))
            yield moments.with_values(moments.values.chunk(2, dim=1)[0])

    def _first_half(self, z: Slab) -> Slab:
        decoder = self._module.decoder
        x = self._conv(decoder.conv_in, z)
        for block in decoder.mid_block.resnets:
            x = self._resnet(block, x, z)
        for block in decoder.up_blocks[:TIME_BLOCKS]:
            x = self._up(block, x, z)
        return x

    def _second_half(self, x: Slab, z: Slab) -> Slab:
        decoder = self._module.decoder
        for block in decoder.up_blocks[TIME_BLOCKS:]:
            x = self._up(block, x, z)
        x = x.with_values(F.silu(spatial_norm(decoder.norm_out, x, z), inplace=True))
        return self._conv(decoder.conv_out, x)

    def _encode(self, x: Slab) -> Slab:
        encoder = self._module.encoder
        x = self._conv(encoder.conv_in, x)
        for block in encoder.down_blocks:
            for resnet in block.resnets:
                x = self._resnet(resnet, x, None)
            for down in block.downsamplers or ():
                x = halved(down.conv, x.with_values(fewer_frames(x.values)) if down.compress_time else x)
        for resnet in encoder.mid_block.resnets:
            x = self._resnet(resnet, x, None)
        x = x.with_values(F.silu(group_norm(encoder.norm_out, x), inplace=True))
        return self._conv(encoder.conv_out, x)

    def _up(self, block: Any, x: Slab, z: Slab) -> Slab:
        for resnet in block.resnets:
            x = self._resnet(resnet, x, z)
        for up in block.upsamplers or ():
            x = doubled(up.conv, x.with_values(more_frames(x.values)) if up.compress_time else x)
        return x

    def _resnet(self, block: Any, x: Slab, z: Slab | None) -> Slab:
        h = x
        for norm, conv in ((block.norm1, block.conv1), (block.norm2, block.conv2)):
            values = group_norm(norm, h) if z is None else spatial_norm(norm, h, z)
            h = self._conv(conv, h.with_values(F.silu(values, inplace=True)))
            del values
        residual = x.values if block.in_channels == block.out_channels else pointwise(block.conv_shortcut, x.values)
        self._on_progress()
        return h.with_values(h.values.add_(residual))


def spatial_norm(norm: Any, x: Slab, z: Slab) -> Tensor:
    """Apply diffusers' CogVideoXSpatialNorm3D: a group norm, scaled and shifted by the latent. This is a collective.

    The 1x1 convolutions run on the latent before it is enlarged to the size of x. This gives the same result.
    """
    scale, shift = affine(norm.norm_layer, x)
    times = x.values.shape[-1] // z.values.shape[-1]
    frames = condition_frames(x.values.shape[2], z.values.shape[2])
    gain, bias = (pointwise(conv.conv, z.values) for conv in (norm.conv_y, norm.conv_b))
    out = torch.empty_like(x.values)
    for part in cut(out.shape[1], PARTS):
        normal = x.values[:, part] * scale[:, part] + shift[:, part]
        large = [twice(twice(t[:, part][:, :, frames], -2, times), -1, times) for t in (gain, bias)]
        torch.add(normal.mul_(large[0]), large[1], out=out[:, part])
    return out


def pointwise(conv: nn.Conv3d, values: Tensor) -> Tensor:
    """Apply a 1x1x1 convolution to values that may have no rows."""
    if not values.numel():
        return values.new_empty(1, conv.out_channels, *values.shape[2:])
    return F.conv3d(values, conv.weight, conv.bias)


def condition_frames(frames: int, latent_frames: int) -> list[int]:
    """Return, for each frame, the index of the latent frame that conditions it.

    If the number of frames is odd, the first latent frame conditions only the first frame.
    """
    if frames > 1 and frames % 2:
        rest = frames - 1
        return [0] + [1 + index * (latent_frames - 1) // rest for index in range(rest)]
    return [index * latent_frames // frames for index in range(frames)]


def more_frames(values: Tensor) -> Tensor:
    """Return every frame twice. If the number of frames is odd, the first frame stays single."""
    alone = values.shape[2] % 2
    return torch.cat((values[:, :, :alone], twice(values[:, :, alone:], 2)), dim=2)


def fewer_frames(values: Tensor) -> Tensor:
    """Return the averages of pairs of frames. If the number of frames is odd, the first frame stays single."""
    alone = values.shape[2] % 2
    pairs = values[:, :, alone:].unflatten(2, (-1, 2)) if values.shape[2] > 1 else values[:, :, :0, None]
    return torch.cat((values[:, :, :alone], pairs.mean(3)), dim=2)


def original_batches(frames: int, size: int) -> list[slice]:
    """Return batches of `size` frames. The first batch takes the remainder too."""
    count, remainder = max(frames // size, 1), frames % size
    starts = [0, *(index * size + remainder for index in range(1, count))]
    return [slice(start, stop) for start, stop in zip(starts, [*starts[1:], frames], strict=True)]


def separate_batches(frames: int) -> list[slice]:
    """Return the batches in which ComfyUI encodes. The remainder is a separate batch and comes first."""
    remainder = frames % PIXEL_FRAMES
    starts = [*([0] if remainder else []), *range(remainder, frames, PIXEL_FRAMES)]
    return [slice(start, stop) for start, stop in zip(starts, [*starts[1:], frames], strict=True)]
