"""A function in attention's place gives on Ulysses ranks the result of ComfyUI's own forward with the same function."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from parallel_backend.models.comfyui.proof.rank import ProofRank, plan_for
from parallel_backend.models.sequence_parallel.compiled import OVERRIDE
from parallel_backend.models.sequence_parallel.function_override import OfHeads
from tests.models.parallel_models import TOLERANCE, outputs, worst
from tests.support.attention_functions import block_sparse, causal, windowed
from tests.support.classes import small_or_skipped
from tests.support.comfy_oracle import comfy_on_path
from tests.support.selection import thorough

comfy_on_path()

HEADS = 24
FUNCTIONS: dict[str, OfHeads] = {"causal": causal, "block-sparse": block_sparse, "windowed": windowed((2, 5, 9) * 8)}
EVERY: Any = slice(None)
DIFFERENT = 1e-3


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
    case, of_heads = small_or_skipped(name), FUNCTIONS[function]

    def override(rank: ProofRank) -> None:
        rank.forward.override = of_heads

    with torch.no_grad():
        plain = case.stock()
        expected = replace(case, options={**case.options, OVERRIDE: of_heads(EVERY, HEADS)}).stock()
    assert worst([[plain]], expected) > DIFFERENT
    assert worst(outputs(case, plan_for(case, ulysses=ranks), override), expected) <= TOLERANCE
