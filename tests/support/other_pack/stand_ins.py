"""Stand-ins for text encoders and autoencoders that ComfyUI knows in one size only, which takes gigabytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

SOUND_RATE = 16000


def drawn(seed: str, *shape: int) -> Tensor:
    """Return random numbers that depend only on the text and the shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(map(ord, seed))))


class Text:
    """A text encoder that gives each text seven random tokens.

    For LTX-2.3 it marks them as unprocessed: the model does the rest.
    """

    def __init__(self, width: int, unprocessed: bool) -> None:
        self._width = width
        self._more = {"unprocessed_ltxav_embeds": True} if unprocessed else {}
        self.cond_stage_model = nn.Module()

    def tokenize(self, text: str, **_: Any) -> str:
        return text

    def encode_from_tokens_scheduled(self, text: str, **_: Any) -> list[list[Any]]:
        return [[drawn(text, 1, 7, self._width), {"pooled_output": drawn(text, 1, 768), **self._more}]]

    def generate(self, *_: Any, **__: Any) -> list[int]:
        return []

    def decode(self, *_: Any, **__: Any) -> str:
        return "a better prompt"

    def clone(self) -> Text:
        return self

    def add_patches(self, *_: Any) -> list[str]:
        return []


class Decoder:
    """A video VAE that shows the mean of a latent's channels, each value as a square over some frames."""

    def __init__(self, size: int, frames: Callable[[int], int]) -> None:
        self._size = size
        self._frames = frames

    def decode(self, latent: Tensor) -> Tensor:
        _, _, length, height, width = latent.shape
        size = (self._frames(length), height * self._size, width * self._size)
        pixels = nn.functional.interpolate(latent.mean(dim=1, keepdim=True).sigmoid(), size)
        return pixels.movedim(1, -1).expand(*pixels.shape[:1], *size, 3)


class SoundDecoder:
    """A sound VAE with the sizes of LTX-2's.

    Latents are `[batch, channels, length, rows]` or `[batch, channels, rows, length]`.
    """

    audio_sample_rate = output_sample_rate = SOUND_RATE
    latent_channels = 8
    latent_frequency_bins = 16

    def __init__(self, length: int) -> None:
        self._length = length
        self.first_stage_model = self

    def num_of_latents_from_frames(self, frames: int, rate: float) -> int:
        return max(1, round(frames / rate * 25))

    def decode(self, latent: Tensor) -> Tensor:
        heard = latent.movedim(self._length, 1).flatten(2).mean(dim=2).repeat_interleave(SOUND_RATE // 25, dim=1)
        return torch.stack((heard.tanh(), heard.sin()), dim=2)


class PackClip:
    """A node that gives a text encoder."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"width": ("INT",), "unprocessed": ("BOOLEAN",)}}

    RETURN_TYPES = ("CLIP",)
    FUNCTION = "give"

    def give(self, width: int, unprocessed: bool) -> tuple[Any]:
        return (Text(width, unprocessed),)


VAES: dict[str, Callable[[], Any]] = {
    "HunyuanVideo 1.5": lambda: Decoder(16, lambda length: 4 * length - 3),
    "Wan 2.2": lambda: Decoder(16, lambda length: 4 * length - 3),
    "MiniMax-H3": lambda: Decoder(16, lambda length: 5 + (length - 2) // 5 * 17),
    "MiniMax-H3's sound": lambda: SoundDecoder(3),
    "LTX-2's sound": lambda: SoundDecoder(2),
}


class PackVae:
    """A node that gives a VAE that only decodes."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"kind": (list(VAES),)}}

    RETURN_TYPES = ("VAE",)
    FUNCTION = "give"

    def give(self, kind: str) -> tuple[Any]:
        return (VAES[kind](),)
