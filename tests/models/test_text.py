"""A model's own preparation of its texts before sampling runs once a run, not at every step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from parallel_backend.conditioning import ASKED, SHAPES, TEXT_PREPARATION, flatten
from parallel_backend.denoise.prompts import Prompts
from parallel_backend.diffusion import PromptSpec
from parallel_backend.models.comfyui.small import small
from parallel_backend.models.comfyui.small.case import TEXT
from tests.models.described import comfy_forwards
from tests.support.ranks import run_ranks
from tests.support.tiny.models import draw

STEPS = 3
TOKENS = (7, 4)
"""Token counts of the positive and the negative prompt."""


def test_texts_are_refined_once_a_run() -> None:
    """MiniMax-H3 refines each prompt once, and again in a second run. The result equals refining at every step."""
    case = small("minimax-h3")
    texts = {str(side): draw(1, tokens, TEXT, seed=side) for side, tokens in enumerate(TOKENS)}
    values: dict[str, Any] = {}
    flatten(SHAPES, [list(shape) for shape in case.shapes], {}, values)
    flatten(TEXT_PREPARATION, {ASKED: True}, {}, values)
    sides = {side: [PromptSpec({"context": str(side)}, values=values)] for side in range(len(TOKENS))}
    times = [torch.tensor(800.0 - 200.0 * step) for step in range(STEPS)]
    refined: list[int] = []

    @torch.no_grad()
    def run_twice(_: int) -> tuple[list[list[int]], list[float]]:
        begin, counts, errors = comfy_forwards(case), [], []
        for _run in range(2):
            refined.clear()
            prompts = Prompts(sides, tuple(sides), texts, torch.float32, 1, slice(0, 1))
            forward = begin()
            outs = []
            for time in times:
                sigmas = (time[None] / 1000, torch.stack(times) / 1000)
                for batch in prompts.at(sigmas[0][0]):
                    outs.append((batch, time, forward(batch.inputs(case.x, time, torch.float32, sigmas), case.x, None)))
            counts.append(refined.copy())
            for batch, time, out in outs:
                expected = replace(case, timestep=time[None], arguments=batch.conditioning).stock()
                assert out is not None
                errors.append(((out - expected).norm() / expected.norm()).item())
        return counts, errors

    case.model.token_refiner.register_forward_hook(lambda _, given, __: refined.append(given[0].shape[0]))
    ((counts, errors),) = run_ranks(1, run_twice)
    assert counts == [[*TOKENS], [*TOKENS]]
    assert len(errors) == 2 * STEPS * len(TOKENS)
    assert max(errors) <= 1e-5
