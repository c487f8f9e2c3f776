"""Attention that a node injects into MiniMax-H3's blocks gives on Ulysses ranks the result of ComfyUI's own forward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel_backend.errors import Refused
from parallel_backend.models.comfyui.features.block_attention import injecting_attention
from parallel_backend.models.comfyui.proof.rank import ProofRank, error_of, plan_for
from parallel_backend.models.comfyui.small import Case, small
from tests.support.copies.sparse_h3 import NODE, edited
from tests.support.ranks import OnRank, run_in_turn

# isort: split
from comfy.ldm.minimax import model

TOLERANCE, DIFFERENT = 1e-5, 1e-3


@pytest.fixture(scope="module")
def case() -> Iterator[Case]:
    """Provide a small model of ComfyUI's class as of version 0.35."""
    before = dict(vars(model))
    exec(compile(edited(inspect.getsource(model)), "minimax.py", "exec"), vars(model))
    yield small("minimax-h3")
    vars(model).update(before)


@pytest.fixture(scope="module")
def node() -> dict[str, Any]:
    found: dict[str, Any] = {}
    exec(NODE, found)
    return found


def with_sparse(case: Case, node: dict[str, Any], cubes: bool, seen: Callable[[int], Any], held: Any = None) -> Case:
    """Return the call with a replacement of each block, which keeps state from one call to the next."""
    patch = node["SparseOfSteps"](start=0.9, dense_blocks={1}, keep=2, cubes=cubes)
    made = {
        ("double_block", number): (held or (lambda each: each))(node["patch_of_block"](seen(number), number, patch))
        for number in range(len(case.model.blocks))
    }
    options = {"sigmas": torch.tensor([0.5]), "uuids": ["one"], "patches_replace": {"dit": made}}
    return replace(case, options={**case.options, **options})


@pytest.mark.parametrize(("cubes", "sizes"), [(True, (1, 2, 4)), (False, (3,))])
def test_two_calls_equal_comfyuis_with_the_same_injected_attention(
    cubes: bool, sizes: Sequence[int], case: Case, node: dict[str, Any]
) -> None:
    """State of the first call changes the second. One of four ranks has no head."""
    latents = case.x, case.x.flip(-1)

    def called() -> Case:
        return with_sparse(case, node, cubes, lambda number: case.model.blocks[number])

    with torch.no_grad():
        plain, both = case.stock(), called()
        stock = [replace(both, x=x).stock() for x in latents]
        alone = replace(called(), x=latents[1]).stock()
    assert error_of(plain, stock[0]) > DIFFERENT
    assert error_of(alone, stock[1]) > DIFFERENT

    def over(ranks: int) -> tuple[int, OnRank]:
        def on_rank(_: int) -> list[Tensor]:
            rank = ProofRank(case, plan_for(case, ulysses=ranks))
            own = with_sparse(
                case, node, cubes, lambda number: rank.model.of_some_heads(f"blocks.{number}"), injecting_attention
            )
            outs = []
            for x in latents:
                rank.case = replace(own, x=x)
                out = rank.run()
                assert out is not None
                outs.append(out)
            return outs

        return ranks, on_rank

    for outs_by_rank in run_in_turn([over(ranks) for ranks in sizes]):
        for outs in outs_by_rank:
            assert max(error_of(out, right) for out, right in zip(outs, stock, strict=True)) <= TOLERANCE


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (lambda given, more: more["original_block"]({**given, "t_emb": 2}), "changes the block's arguments t_emb"),
        (lambda given, more: more["original_block"]({**given, "more": 2}), "changes the block's arguments more"),
        (lambda given, more: [more["original_block"](given) for _ in range(2)], "runs the block twice"),
        (lambda given, more: dict(more["original_block"](given)), "returns another result than the block"),
        (lambda given, more: given, "returns another result than the block"),
        (lambda given, more: given["img"].mean(), "reads mean of the tokens"),
        (lambda given, more: given["img"] * 2, "reads the values of the tokens"),
    ],
)
def test_any_other_change_by_a_block_replacement_is_refused(function: Any, what: str) -> None:
    with pytest.raises(Refused, match=what):
        injecting_attention(function)(
            {"img": torch.ones(5, 4), "t_emb": 1}, {"original_block": lambda given: {"img": given["img"]}}
        )
