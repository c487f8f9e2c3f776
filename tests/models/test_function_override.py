"""A function in attention's place gives on Ulysses ranks the result of ComfyUI's own forward with the same function."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from parallel_backend.models.comfyui.proof.rank import ProofRank, plan_for
from parallel_backend.models.sequence_parallel.compiled import OVERRIDE
from tests.models.parallel_models import TOLERANCE, outputs, worst
from tests.support.attention_functions import windowed
from tests.support.classes import small_or_skipped
from tests.support.selection import thorough

WINDOWED = windowed((2, 5, 9) * 8)
"""A function in which each head has a window of its own, which depends on the positions of tokens."""

DIFFERENT = 1e-3


@pytest.mark.parametrize(
    ("name", "ranks", "chunks"),
    [
        ("flux", 4, 1),  # one rank has no head
        ("omnigen 2", 2, 2),  # a head of keys is on both ranks, and each rank has two heads of keys
        ("wan, text", 2, 1),  # every rank has the text's keys
        *(
            pytest.param(name, ranks, 1, marks=thorough)
            for name, ranks in (
                ("flux", 1),
                ("krea 2", 4),
                ("qwen-image", 2),
                ("z-image", 3),
                ("minimax-h3", 2),
                ("wan animate 2", 2),
            )
        ),
    ],
)
def test_the_result_equals_comfyuis_with_the_same_function(name: str, ranks: int, chunks: int) -> None:
    case = small_or_skipped(name)

    def override(rank: ProofRank) -> None:
        rank.forward.override = WINDOWED

    with torch.no_grad():
        plain = case.stock()
        expected = replace(case, options={**case.options, OVERRIDE: WINDOWED(slice(None), 24)}).stock()
    assert worst([[plain]], expected) > DIFFERENT
    plan = plan_for(case, ulysses=ranks, head_chunks=chunks)
    assert worst(outputs(case, plan, override), expected) <= TOLERANCE
