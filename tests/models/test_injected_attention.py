"""Attention that a node injects into MiniMax-H3's blocks gives on Ulysses ranks the result of ComfyUI's own forward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel_backend.errors import Refused
from parallel_backend.models.comfyui.features.block_attention import injecting_attention
from parallel_backend.models.comfyui.proof.rank import ProofRank, error_of, plan_for
from parallel_backend.models.comfyui.small import Case, small
from tests.support.comfy_oracle import comfy_on_path
from tests.support.copies.sparse_h3 import NODE, edited
from tests.support.ranks import run_ranks

TOLERANCE, DIFFERENT = 1e-5, 1e-3

NEWER = """
    def forward(self, x, t_emb, mod_segments, rope_freqs, transformer_options={{}}, attention=None):
        x = _mod_gate(x, gate_msa, attention(h, rope_freqs=rope_freqs, transformer_options=transformer_options))
    def __init__(self, adaln_curve_grid=None, gate_compress={},
        transformer_options["minimax_h3_layout"] = layout
                        transformer_options=args["transformer_options"], attention=args.get("attention"))}}
"""
"""Lines of a newer model, equal to the result of editing an older one."""


@pytest.fixture(scope="module")
def case() -> Iterator[Case]:
    """Provide a small model of ComfyUI's class as of version 0.35."""
    comfy_on_path()
    from comfy.ldm.minimax import model

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


@pytest.mark.parametrize(("ranks", "cubes"), [(1, True), (2, True), (3, False), (4, True)])
def test_two_calls_equal_comfyuis_with_the_same_injected_attention(
    ranks: int, cubes: bool, case: Case, node: dict[str, Any]
) -> None:
    """State of the first call changes the second. One plan has a rank without any head."""
    latents = case.x, case.x.flip(-1)

    def called() -> Case:
        return with_sparse(case, node, cubes, lambda number: case.model.blocks[number])

    with torch.no_grad():
        plain, both = case.stock(), called()
        first, second = (replace(both, x=x).stock() for x in latents)
        alone = replace(called(), x=latents[1]).stock()
    assert error_of(plain, first) > DIFFERENT
    assert error_of(alone, second) > DIFFERENT

    def on_rank(_: int) -> list[Tensor | None]:
        rank = ProofRank(case, plan_for(case, ulysses=ranks))
        own = with_sparse(
            case, node, cubes, lambda number: rank.model.of_some_heads(f"blocks.{number}"), injecting_attention
        )
        outs = []
        for x in latents:
            rank.case = replace(own, x=x)
            outs.append(rank.run())
        return outs

    errors = [
        error_of(out, expected)
        for outs in run_ranks(ranks, on_rank)
        for out, expected in zip(outs, (first, second), strict=True)
        if out is not None
    ]
    print(ranks, f"{max(errors):.1e}")
    assert len(errors) >= 2 and max(errors) <= TOLERANCE


def test_the_source_of_a_model_whose_blocks_accept_attention_is_not_edited() -> None:
    """ComfyUI's blocks accept attention from 0.35 on. There the file says if attention has a gate."""
    comfy_on_path()
    from comfy.ldm.minimax import model

    once = edited(inspect.getsource(model))
    assert "attention=None" in once and "to_gate_compress" in once
    assert edited(once) == once
    newer = NEWER.format(False)
    assert edited(newer) == NEWER.format(True)


class Seen:
    """A block that keeps its arguments."""

    def __init__(self) -> None:
        self.given: dict[str, Any] = {}

    def __call__(self, arguments: dict[str, Any]) -> dict[str, Any]:
        self.given = arguments
        return {"img": arguments["img"]}


def test_a_block_replacement_passes_attention_to_the_block() -> None:
    tokens, block = torch.ones(5, 4), Seen()
    held = injecting_attention(lambda given, more: more["original_block"]({**given, "attention": given["img"].shape}))
    assert held({"img": tokens, "t_emb": None}, {"original_block": block})["img"] is tokens
    assert block.given == {"img": tokens, "t_emb": None, "attention": tokens.shape}


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
        injecting_attention(function)({"img": torch.ones(5, 4), "t_emb": 1}, {"original_block": Seen()})
