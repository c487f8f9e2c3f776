"""Rows of a batch with different inputs give the same result alone and together, in a model's own forward.

Ranks compute rows, and prompts, separately. If a class computes rows from one another, its declaration says so.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from parallel_backend.models.comfyui.small import SMALL, Case, small
from tests.models.parallel_models import TOLERANCE
from tests.support.classes import small_or_skipped
from tests.support.latents import relative_error
from tests.support.selection import thorough
from tests.support.tiny.models import draw

ALONE = (
    "flux 2, zero-timestep reference",  # its guidance is for one row
    # the class makes a mask of a single row, into which it writes those of all rows
    "hunyuan video, masked text",
    "hunyuan video, first frame and reference",
    "hunyuan video, first frame, masked text",
    "hunyuan video 1.5, masked text and first frame",
    "hunyuan image, masked text",
    "hunyuan image, refiner, masked text",
    "skyreels, masked text",
)
"""Cases that ComfyUI's own class accepts with one row only."""

SHARED = ("ref_audio", "guide_attention_entries")
"""Conditioning that the whole batch shares."""

MASK = torch.tensor([1.0, 0.4]).view(2, 1, 1, 1)
FIRST_FRAME = "hunyuan video, first frame"
MEET: dict[str, dict[str, Tensor]] = {
    "ltx-2": {"denoise_mask": MASK[..., None].expand(2, 1, 3, 5, 4)},
    "ltx-2, reference sound": {"audio_denoise_mask": MASK.expand(2, 1, 9, 1)},
    FIRST_FRAME: {},
    # these have noise masks of their own
    "ltx-2, a timestep a frame": {},
    "ltx-2, weighed guide": {},
    "ltx-2.3, reference sound, a timestep a frame": {},
}
"""Cases whose rows change one another, with the additional conditioning that does so."""


def part(tree: Any, row: int) -> Any:
    """Return one row of all tensors."""
    return tree_map(lambda leaf: leaf[row : row + 1] if isinstance(leaf, Tensor) and leaf.ndim else leaf, tree)


def two_of(found: Case, *, times: bool = True, **more: Tensor) -> Case:
    """Return a call of two rows: the first is the case's, the second has other numbers in the same range.

    Args:
        times: True if the second row has another timestep too.
    """

    def both(leaf: Any, changed: bool = True) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.ndim:
            return leaf
        first = leaf[:1]
        if not changed or not leaf.is_floating_point():
            return torch.cat([first, first])
        drawn = first.min() + (first.max() - first.min()) * draw(*first.shape, seed=leaf.ndim).sigmoid()
        return torch.cat([first, drawn.to(first) if first.numel() > 1 else 0.6 * first])

    arguments = {name: value if name in SHARED else tree_map(both, value) for name, value in found.arguments.items()}
    return replace(
        found,
        x=both(found.x),
        timestep=tree_map(lambda leaf: both(leaf, times), found.timestep),
        arguments=arguments | more,
        shapes=tuple((2, *shape[1:]) for shape in found.shapes),
    )


@torch.no_grad()
def apart(two: Case) -> float:
    """Return the largest relative error between rows computed alone and in the batch."""
    errors = []
    for row, beside in enumerate(two.stock()):
        shapes = tuple((1, *shape[1:]) for shape in two.shapes)
        arguments = {name: value if name in SHARED else part(value, row) for name, value in two.arguments.items()}
        one = replace(
            two, x=part(two.x, row), timestep=part(two.timestep, row), arguments=arguments, shapes=shapes
        ).stock()[0]
        errors.append(relative_error(one, beside))
    return max(errors)


def declared(two: Case) -> str:
    return two.declaration.couples_rows(
        {name: value for name, value in two.arguments.items() if isinstance(value, Tensor)}
    )


QUICK = (FIRST_FRAME, "ltx-2.3")
OWN = [name for name, more in MEET.items() if not more and name != FIRST_FRAME]
TWO = [name for name in SMALL if name not in (*ALONE, *OWN) and not name.startswith("minimax-h3")]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[thorough] * ("," in name and name not in QUICK)) for name in TWO]
)
def test_rows_alone_equal_rows_of_the_batch(name: str) -> None:
    """LTX-2's rows differ in timesteps only by masks, and MiniMax-H3 makes one video at a time."""
    alike = {"guidance": torch.tensor([6.0, 6.0])} if name == FIRST_FRAME else {}
    two = two_of(small_or_skipped(name), times=not name.startswith("ltx-2"), **alike)
    assert not declared(two)
    assert apart(two) <= TOLERANCE


@pytest.mark.parametrize("name", [pytest.param(name, marks=[thorough] * (name in OWN)) for name in MEET])
def test_rows_that_change_one_another_are_declared(name: str) -> None:
    two = two_of(small(name), **MEET[name])
    assert apart(two) > 10 * TOLERANCE
    assert declared(two)
    assert not two.declaration.couples_rows(part(dict(two.arguments), 0))
