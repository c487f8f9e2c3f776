"""Behaviour of newer versions of ComfyUI, shown with stand-ins on whatever ComfyUI is tested against."""

from __future__ import annotations

import functools
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel_backend.declaration import DistributedAttention, ReplicatedKeys
from parallel_backend.errors import Refused
from parallel_backend.models.comfyui.features.compile import COMPILED
from parallel_backend.models.comfyui.proof.rank import ProofRank, plan_for
from parallel_backend.models.comfyui.small import Case, small
from parallel_backend.models.sequence_parallel.compiled import CompiledBlocks
from parallel_backend.models.sequence_parallel.module_attention import unknown_arguments
from parallel_backend.weights.stores.store import BlockAccess
from tests.models.parallel_models import TOLERANCE, outputs_in_turn, worst
from tests.support.selection import thorough

# isort: split
import comfy.ldm.minimax.model as minimax
import comfy.ldm.wan.model as wan
from comfy.ldm.lightricks.model import CrossAttention
from comfy.ldm.minimax.model import FinalLayer
from comfy.ldm.modules.attention import optimized_attention

WAN = "wan, image"
"""A model that attends to a picture besides the text."""


@pytest.fixture(scope="module")
def case() -> Callable[[str], Case]:
    @functools.cache
    def get(name: str) -> Case:
        with torch.no_grad():
            return small(name)

    return get


def attends_with(monkeypatch: pytest.MonkeyPatch, **given: Any) -> None:
    """Have Wan give each call of attention an argument, as ComfyUI 0.31 does."""
    monkeypatch.setattr(wan, "optimized_attention", functools.partial(wan.optimized_attention, **given))


def check(case: Case, expected: Tensor, plans: Sequence[Mapping[str, int]]) -> None:
    """Assert that one rank gives the expected bits, and that the ranks of each plan give the expected result."""
    alone, *several = outputs_in_turn(case, [plan_for(case, **degrees) for degrees in ({}, *plans)])
    assert torch.equal(alone[0][0], expected)
    for degrees, found in zip(plans, several, strict=True):
        assert worst(found, expected) <= TOLERANCE, degrees


@pytest.mark.parametrize("low_precision", [False, pytest.param(True, marks=thorough)])
def test_a_scale_of_attention_is_honoured_and_its_precision_changes_nothing(
    low_precision: bool, case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = case(WAN)
    with torch.no_grad():
        plain = found.stock()
        attends_with(monkeypatch, scale=0.02)
        expected = found.stock()
    assert worst([[plain]], expected) > 1e-3
    attends_with(monkeypatch, low_precision_attention=low_precision)
    check(found, expected, [{"ring": 2}, {"ulysses": 2, "pipefusion": 2, "patches": 2}])


def test_an_unknown_argument_of_attention_runs_only_with_comfyuis_own_kernel(
    case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank passes the argument on. Where ranks divide the keys, the argument is refused."""
    found = case(WAN)
    with torch.no_grad():
        expected = found.stock()
    attends_with(monkeypatch, tone=3)
    check(found, expected, [])
    rank = ProofRank(found, plan_for(found, patches=2))
    with pytest.raises(Refused, match="the model's attention was given tone, which this pack does not support"):
        rank.run()


# The test of a scale has the arguments, and models/test_compiled the compiled blocks.
@thorough
def test_compiled_blocks_honour_the_arguments_of_their_attention(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = case(WAN)
    attends_with(monkeypatch, low_precision_attention=False, scale=0.02)
    with torch.no_grad():
        expected = found.stock()
    torch._dynamo.reset()
    rank = ProofRank(found, plan_for(found, patches=2))
    rank.hold(BlockAccess(), CompiledBlocks("aot_eager", COMPILED))
    out = rank.run()
    assert rank.forward.uncompiled() == () and out is not None
    assert worst([[out]], expected) <= TOLERANCE
    torch._dynamo.reset()


class Newer(nn.Module):
    """A stand-in for a block of a ComfyUI that gives attention arguments unknown to this pack."""

    def forward(self, x: Tensor, tone: float) -> Tensor:
        x = optimized_attention(x, x, x, 1, low_precision_attention=False, scale=tone, hue=tone)
        return optimized_attention(x, x, x, heads=1, hue=None, low_precision_attention="never")


class Half(Newer):
    """A block that gives the argument in one of two calls."""

    def forward(self, x: Tensor, tone: float) -> Tensor:
        return optimized_attention(optimized_attention(x, x, x, 1, hue=3), x, x, 1)


def test_unknown_arguments_of_attention_are_found_in_a_classs_source() -> None:
    """An argument counts if every call is given it and some calls are for our kernels."""
    assert unknown_arguments(nn.Sequential(Newer()), [DistributedAttention(("x",)), ReplicatedKeys()]) == ["hue"]
    assert unknown_arguments(Newer(), [ReplicatedKeys(), ReplicatedKeys()]) == []
    assert unknown_arguments(Half(), [DistributedAttention(("x",)), ReplicatedKeys()]) == []


class ComputesItsHeads(FinalLayer):  # type: ignore[misc]
    """A stand-in for MiniMax-H3's final layer of ComfyUI 0.35, which gets the sigmas.

    It reads its heads' weights and multiplies by a part of them itself, with a row of modulation for each token.
    """

    def forward(
        self,
        x: Any,
        t_emb: Any,
        video: Any,
        audio: Any,
        sigma: Any = None,
        sample_sigmas: Any = None,
        shifts: Any = None,
    ) -> Any:
        assert self.video_out.weight.shape[0] // self.video_out.out_features == 1
        shift, scale = self.adaln_proj(t_emb)
        found = []
        for (start, stop, _), head in ((video, self.video_out), (audio, self.audio_out)):
            rows = torch.arange(stop - start) % len(t_emb)
            tokens = self.norm(x[start:stop]) * (1.0 + scale[rows]) + shift[rows]
            found.append(nn.functional.linear(tokens, head.weight[: head.out_features], head.bias))
        return tuple(found)


SOUND_SPLITS = ({"ring": 3}, {"pipefusion": 3, "ulysses": 2, "patches": 1})


def test_a_final_layer_that_reads_its_heads_weights_gives_comfyuis_result(
    case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = case("minimax-h3")
    monkeypatch.setattr(found.model.final_layer, "__class__", ComputesItsHeads)
    with torch.no_grad():
        expected = found.stock()
    check(found, expected, SOUND_SPLITS)
    assert found.declaration.sigmas(found.model)


def test_a_row_of_modulation_for_each_token_gives_comfyuis_result(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for MiniMax-H3 with a noise mask of ComfyUI 0.34, whose video has a row for each token."""
    found = case("minimax-h3")
    written = "mod_segments.append((a, b, row_base + seg_tag[kind]))"
    by_token = "mod_segments.append((a, b, row_base + seg_tag[kind] if kind == 'text' else torch.arange(b - a) % 6))"
    source = textwrap.dedent(inspect.getsource(minimax.MiniMaxH3Model._forward))
    assert source.count(written) == 1
    with torch.no_grad():
        plain = found.stock()
        here = dict(vars(minimax))
        exec(source.replace(written, by_token), here)
        monkeypatch.setattr(minimax.MiniMaxH3Model, "_forward", here["_forward"])
        expected = found.stock()
    assert worst([[plain]], expected) > 1e-3
    check(found, expected, SOUND_SPLITS)


class Guided(CrossAttention):  # type: ignore[misc]
    """A stand-in for LTX-2's attention of ComfyUI 0.33, whose guidance makes self-attention return its values."""

    def forward(self, x: Any, context: Any = None, *args: Any, transformer_options: Any = None, **others: Any) -> Any:
        if context is None and (transformer_options or {}).get("stg_skip_self_attn", False):
            return self.to_out(self.to_v(x))
        return super().forward(x, context, *args, transformer_options=transformer_options, **others)


@pytest.mark.parametrize(
    "option", ["stg_skip_self_attn", *(pytest.param(option, marks=thorough) for option in ("run_ax", "v2a_cross_attn"))]
)
def test_an_option_that_turns_attentions_off_gives_comfyuis_result(
    option: str, case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = case("ltx-2")
    for block in plain.model.transformer_blocks:
        monkeypatch.setattr(block.attn1, "__class__", Guided)
        monkeypatch.setattr(block.audio_attn1, "__class__", Guided)
    found = replace(plain, options={option: option == "stg_skip_self_attn"})
    with torch.no_grad():
        expected = found.stock()
        assert worst([[plain.stock()]], expected) > 1e-3
    check(found, expected, SOUND_SPLITS)
