"""Models that nobody has seen: one with two blocks and at most one habit that cannot be told from outside, one that takes
another picture, and one with hints.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from parallel_backend.derive.calls import ModelCall, Sizes, Subject
from parallel_backend.models.sequence_parallel.compiled import OVERRIDE
from tests.support.comfy_oracle import comfy_on_path
from tests.support.tiny.models import draw, randomise

comfy_on_path()

from comfy.ldm.modules.attention import optimized_attention  # noqa: E402

WIDTH, HEADS = 24, 3


class Block(nn.Module):
    def __init__(self, habit: str) -> None:
        super().__init__()
        self.habit = habit
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, transformer_options: Any) -> Tensor:
        if self.habit == "random":
            x = x + torch.randn_like(x)
        if self.habit == "mixing":
            x = x + x.mean(dim=1, keepdim=True)
        if self.habit == "looking" and float(x.sum()) > 1e9:  # no compiler accepts this branch
            x = -x
        if self.habit == "in place":
            x.mul_(1.5)
        q, k, v = self.qkv(x).chunk(3, dim=2)
        times = 2 if self.habit == "branch" and float(x[0, 0, 0]) > 0 else 1
        for _ in range(times):
            x = x + self.out(optimized_attention(q, k, v, HEADS, transformer_options=transformer_options))
        return x


class Between(nn.Module):
    """Attention of each half of the tokens to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList([Halves()])

    def forward(self, tokens: Tensor, transformer_options: Any) -> Tensor:
        made: Tensor = self.steps[0](tokens.unflatten(1, (2, -1)).flatten(0, 1), transformer_options)
        return made.unflatten(0, (-1, 2)).flatten(1, 2)


class Halves(nn.Module):
    """Attention over its own input."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor, transformer_options: Any) -> Tensor:
        mixed = optimized_attention(tokens, tokens, tokens, HEADS, transformer_options=transformer_options)
        made: Tensor = self.out(mixed)
        return made


class Toy(nn.Module):
    """A model whose tokens are 2 x 2 latent values."""

    def __init__(self, habit: str = "") -> None:
        super().__init__()
        self.habit = habit
        self.into = nn.Conv2d(4, WIDTH, 2, stride=2)
        self.blocks = nn.ModuleList([Block(habit), Block(habit)])
        self.between = Between()
        self.back = nn.Linear(WIDTH, 16)

    def forward(
        self,
        x: Tensor,
        timestep: Tensor,
        context: Tensor,
        transformer_options: Any,
        scene: Tensor | None = None,
        hint: Any = 0,
    ) -> Tensor:
        if self.habit == "failing":
            raise ValueError("no picture of this size")
        if self.habit == "one row" and x.shape[0] > 1:
            raise ValueError("no batch")
        made = self.into(x + hint)
        pictures = [made] if scene is None else [made, self.into(scene)]
        tokens = torch.cat([each.flatten(2).transpose(1, 2) for each in pictures], dim=1)
        tokens = tokens + timestep[:, None, None] + context.mean()
        for block in self.blocks:
            tokens = block(tokens, transformer_options=transformer_options)
            if self.habit == "between":
                tokens = tokens + self.between(tokens, transformer_options)
        out = self.back(tokens[:, : made[0, 0].numel()]).transpose(1, 2).unflatten(2, made.shape[2:])
        spread = OVERRIDE in transformer_options and self.habit == "deceiving"
        return nn.functional.pixel_shuffle(out, 2) * (1.1 if spread else 1.0)


def toy(habit: str = "") -> Subject:
    """Return the model and its calls."""

    def call(sizes: Sizes) -> ModelCall:
        latent, text = draw(sizes.rows, 4, *sizes.picture, seed=1), draw(sizes.rows, sizes.text, 8, seed=2)
        return ModelCall(latent, torch.tensor([0.6]).expand(sizes.rows), {"context": text})

    return Subject(randomise(Toy(habit), seed=3), call, Sizes((8, 12), 7), batches=habit == "one row")


def toy_with_a_scene() -> Subject:
    """Return a model with two more latents, by names unknown to this pack: a scene, whose tokens follow the sampled latent's in
    the sequence, and a hint, which is added to the sampled latent.
    """
    alone = toy()

    def call(sizes: Sizes) -> ModelCall:
        made = alone.make(sizes)
        high, wide = sizes.picture
        latents = {"scene": draw(1, 4, high, wide + 4, seed=5), "hint": draw(1, 4, high, wide, seed=6)}
        return replace(made, arguments={**made.arguments, **latents})

    return replace(alone, make=call)


def unheard() -> Subject:
    """Return the class that a test adds to a copy of ComfyUI (tests/support/unheard), and its calls."""
    from tests.support.unheard.model import Unheard

    def call(sizes: Sizes) -> ModelCall:
        latent, text = draw(1, 16, *sizes.picture, seed=1), draw(1, sizes.text, 48, seed=2)
        given = {"hint": draw(1, 16, *sizes.picture, seed=3), "sound": draw(1, sizes.picture[0], 4, 24, seed=4)}
        return ModelCall(latent, torch.tensor([0.6]), {"context": text, **given})

    model = Unheard(width=96, heads=3, text_width=48, depth=5, every=2)
    return Subject(randomise(model, seed=3), call, Sizes((5, 8, 12), 7))
