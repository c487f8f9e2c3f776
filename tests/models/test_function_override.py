"""A function in attention's place gives on Ulysses ranks the result of ComfyUI's own forward with the same function."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel_backend.models.comfyui.proof.rank import ProofRank, error_of, plan_for
from parallel_backend.models.sequence_parallel.compiled import OVERRIDE
from parallel_backend.models.sequence_parallel.function_override import OfHeads
from tests.support.attention_functions import block_sparse, causal, windowed
from tests.support.classes import small_or_skipped
from tests.support.comfy_oracle import comfy_on_path
from tests.support.ranks import run_ranks
from tests.support.selection import thorough

comfy_on_path()

TOLERANCE = 1e-5
FUNCTIONS: dict[str, OfHeads] = {"causal": causal, "block-sparse": block_sparse, "windowed": windowed((2, 5, 9) * 8)}
EVERY: Any = slice(None)
DIFFERENT = 1e-3


def outputs(name: str, of_heads: OfHeads, ranks: int, **more: Any) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Return ComfyUI's output without and with the function, and our output on each rank."""
    case = small_or_skipped(name)
    with torch.no_grad():
        plain = case.stock()
        heads = 24
        expected = replace(case, options={**case.options, OVERRIDE: of_heads(EVERY, heads)}).stock()

    def on_rank(_: int) -> Tensor | None:
        rank = ProofRank(case, plan_for(case, ulysses=ranks, **more))
        rank.forward.override = of_heads
        return rank.run()

    return plain, expected, run_ranks(ranks, on_rank)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("flux", 2),
        ("wan, text", 2),
        pytest.param("flux", 1, marks=thorough),
        pytest.param("flux", 4, marks=thorough),
        pytest.param("krea 2", 2, marks=thorough),
        pytest.param("krea 2", 4, marks=thorough),
        pytest.param("wan, text", 4, marks=thorough),
        pytest.param("qwen-image", 2, marks=thorough),
        pytest.param("z-image", 3, marks=thorough),
        pytest.param("minimax-h3", 2, marks=thorough),
        pytest.param("wan animate 2", 2, marks=thorough),
    ],
)
def test_the_result_equals_comfyuis_with_the_same_function(name: str, ranks: int, function: str) -> None:
    plain, expected, outs = outputs(name, FUNCTIONS[function], ranks)
    assert error_of(plain, expected) > DIFFERENT
    errors = [error_of(out, expected) for out in outs if out is not None]
    print(name, ranks, function, f"{max(errors):.1e}")
    assert max(errors) <= TOLERANCE
