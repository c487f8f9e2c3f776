"""Modulation is computed once: its activation for all blocks of a forward, and all of it for all patches of a model call."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear, silu

from parallel_backend.models.comfyui.proof.rank import ProofRank, plan_for
from parallel_backend.models.comfyui.small import small
from parallel_backend.models.sequence_parallel.modulation import Vector
from tests.support.tiny.models import draw

DECLARED = (
    "flux",
    "hunyuan video",
    "qwen-image",
    "z-image",
    "lumina 2, grouped heads",
    "sd 3.5 medium",
    "hidream",
    "kandinsky 5",
    "auraflow",
)


def test_silu_of_a_vector_is_computed_once_and_other_operations_equal_the_tensors() -> None:
    tensor, weight = draw(2, 8, seed=1), draw(4, 8, seed=2)
    vector: Any = Vector(tensor)
    assert nn.SiLU()(vector) is silu(vector)
    assert torch.equal(silu(vector), silu(tensor))
    assert silu(vector[:, None, :]) is silu(vector[:, None, :])
    assert torch.equal(silu(vector[:, None, :]), silu(tensor[:, None, :]))
    assert torch.equal(linear(vector, weight), linear(tensor, weight))
    assert torch.equal(vector.unsqueeze(1), tensor.unsqueeze(1))
    assert (vector.ndim, vector.shape, vector.dtype) == (2, tensor.shape, tensor.dtype)


@pytest.mark.parametrize("name", DECLARED)
def test_patches_of_a_call_share_their_modulation_and_calls_do_not(name: str) -> None:
    with torch.no_grad():
        case = small(name)

    rank = ProofRank(case, plan_for(case, patches=2))
    modulations = tuple(f"{path}." for group in case.declaration.groups for path in group.modulations)
    made: Counter[nn.Module] = Counter()
    for path, module in (named for block in rank.blocks for named in block.named_modules()):
        if isinstance(module, nn.Linear) and path.startswith(modulations):
            module.register_forward_hook(lambda module, *_: made.update([module]))
    counts = []
    for patch in (None, 0, 1, 0, 1):
        made.clear()
        rank.run(patch)
        counts.append([made.total(), len(made)])
    whole, first, behind, second, last = counts
    assert whole[0] == whole[1] > 0
    assert first == second == whole
    assert behind == last == [0, 0]
