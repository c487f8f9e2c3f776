"""A made-up video model: layers over text and video in one sequence, alternating with hint layers that attend to a sound."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import comfy.ops
import torch
from comfy.ldm.flux.layers import EmbedND, timestep_embedding
from comfy.ldm.flux.math import apply_rope
from comfy.ldm.modules.attention import optimized_attention
from torch import Tensor, nn

STEP = (1, 2, 2)


class Layer(nn.Module):
    """A layer that attends to all tokens, after a modulation."""

    def __init__(self, width: int, heads: int, make: Any, settings: Mapping[str, Any]) -> None:
        super().__init__()
        self.heads = heads
        self.norm = make.LayerNorm(width, elementwise_affine=False, eps=1e-6, **settings)
        self.change = make.Linear(width, 3 * width, **settings)
        self.qkv = make.Linear(width, 3 * width, **settings)
        self.out = make.Linear(width, width, **settings)
        self.mlp = nn.Sequential(
            make.Linear(width, 2 * width, **settings), nn.GELU(), make.Linear(2 * width, width, **settings)
        )

    def forward(self, tokens: Tensor, time: Tensor, places: Tensor, transformer_options: Any) -> Tensor:
        shift, scale, gate = self.change(time)[:, None].chunk(3, dim=2)
        q, k, v = (
            each.unflatten(2, (self.heads, -1)).transpose(1, 2)
            for each in self.qkv(self.norm(tokens) * (1 + scale) + shift).chunk(3, dim=2)
        )
        q, k = apply_rope(q, k, places)
        seen = optimized_attention(q, k, v, self.heads, skip_reshape=True, transformer_options=transformer_options)
        tokens = tokens + gate * self.out(seen)
        made: Tensor = tokens + self.mlp(self.norm(tokens))
        return made


class HintLayer(Layer):
    """A layer over the tokens of the hint, which then attend to the sound of their frame."""

    def __init__(self, width: int, heads: int, make: Any, settings: Mapping[str, Any]) -> None:
        super().__init__(width, heads, make, settings)
        self.hear, self.heard = make.Linear(width, width, **settings), make.Linear(width, 2 * width, **settings)
        self.told = make.Linear(width, width, **settings)

    def forward(  # type: ignore[override]
        self,
        hint: Tensor,
        time: Tensor,
        places: Tensor,
        sound: Tensor,
        transformer_options: Any,
    ) -> tuple[Tensor, Tensor]:
        hint = super().forward(hint, time, places, transformer_options)
        frames = sound.shape[1]
        q = self.hear(hint).unflatten(1, (frames, -1)).flatten(0, 1)
        k, v = self.heard(sound).flatten(0, 1).chunk(2, dim=2)
        of_sound = optimized_attention(q, k, v, self.heads, transformer_options=transformer_options)
        hint = hint + of_sound.unflatten(0, (-1, frames)).flatten(1, 2)
        return self.told(hint), hint


class Unheard(nn.Module):
    """The model: a hint layer follows every `every`-th layer."""

    def __init__(
        self,
        width: int,
        heads: int,
        text_width: int,
        depth: int,
        every: int,
        dtype: Any = None,
        device: Any = None,
        operations: Any = comfy.ops.disable_weight_init,
        **_: Any,
    ) -> None:
        super().__init__()
        settings = {"dtype": dtype, "device": device}
        self.width, self.dtype, self.every = width, dtype, every
        self.embed_video = operations.Conv3d(16, width, STEP, stride=STEP, **settings)
        self.embed_hint = operations.Conv3d(16, width, STEP, stride=STEP, **settings)
        self.embed_text = operations.Linear(text_width, width, **settings)
        self.embed_sound = operations.Linear(24, width, **settings)
        self.embed_time = operations.Linear(width, width, **settings)
        self.places = EmbedND(width // heads, 10000, [width // heads - 16, 8, 8])
        self.layers = nn.ModuleList([Layer(width, heads, operations, settings) for _ in range(depth)])
        self.hints = nn.ModuleList([HintLayer(width, heads, operations, settings) for _ in range(-(-depth // every))])
        self.norm = operations.LayerNorm(width, elementwise_affine=False, eps=1e-6, **settings)
        self.unembed = operations.Linear(width, 16 * 4, **settings)

    def forward(
        self,
        x: Tensor,
        timestep: Tensor,
        context: Tensor,
        hint: Tensor,
        sound: Tensor,
        transformer_options: Any,
        **_: Any,
    ) -> Tensor:
        """Return the output for a video.

        Args:
            x: the video, `[batch, 16, frames, height, width]`.
            hint: a tensor of the video's shape.
            sound: `[batch, frames, moments, 24]`.
        """
        video = self.embed_video(x)
        frames, rows, columns = video.shape[2:]
        video = video.flatten(2).transpose(1, 2)
        told = self.embed_hint(hint).flatten(2).transpose(1, 2)
        text, heard = self.embed_text(context), self.embed_sound(sound)
        time = self.embed_time(timestep_embedding(timestep, self.width).to(x.dtype))
        grid = torch.cartesian_prod(*(torch.arange(float(size)) for size in (frames, rows, columns)))[None].to(x.device)
        alone = self.places(grid)
        places = self.places(torch.cat([grid.new_zeros(1, text.shape[1], 3), grid], dim=1))
        tokens = torch.cat([text, video], dim=1)
        for number, layer in enumerate(self.layers):
            tokens = layer(tokens, time, places, transformer_options=transformer_options)
            if number % self.every == 0:
                more, told = self.hints[number // self.every](
                    told, time, alone, heard, transformer_options=transformer_options
                )
                tokens[:, text.shape[1] :] += more
        out: Tensor = self.unembed(self.norm(tokens[:, text.shape[1] :])).transpose(1, 2)
        out = out.unflatten(1, (16, 2, 2)).unflatten(4, (frames, rows, columns))
        return out.permute(0, 1, 4, 5, 2, 6, 3).flatten(5, 6).flatten(3, 4)
