"""Blocks of a module that are divided over ranks give every rank the results of the undivided module, bit by bit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel_backend.comm.communicator import Communicator
from parallel_backend.comm.meter import Meter
from parallel_backend.models.comfyui.divided_blocks import BlockFailed, DividedBlocks, outermost_lists, owners
from tests.support.comfy_oracle import comfy_on_path
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")
RANKS = 3

LLM = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 200,
}
T5 = {"num_layers": 4, "d_model": 64, "d_ff": 96, "num_heads": 4, "d_kv": 16, "vocab_size": 200}


def _encoders() -> Mapping[str, tuple[Callable[..., Any], str, Mapping[str, int]]]:
    """Return ComfyUI's classes of text encoders, with the names of their parts and the sizes to make them in."""
    comfy_on_path()
    import comfy.sd1_clip
    from comfy.text_encoders import flux, lumina2, sa_t5, wan, z_image

    clip = {"num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    return MappingProxyType(
        {
            "CLIP": (comfy.sd1_clip.SD1ClipModel, "clip_l", clip),
            "T5": (sa_t5.SAT5Model, "t5base", T5),
            "UMT5": (wan.te(), "umt5xxl", T5),
            "Qwen3": (z_image.te(), "qwen3_4b", LLM | {"vocab_size": 151936}),
            "Gemma 2": (lumina2.te(), "gemma2_2b", LLM),
            "Gemma 3": (lumina2.te(model_type="gemma3_4b"), "gemma3_4b", LLM),
            "Mistral": (flux.flux2_te(), "mistral3_24b", LLM | {"num_hidden_layers": 31}),
        }
    )


def divided(module: nn.Module, on_block: Callable[[], None] = lambda: None) -> Meter:
    """Divide a module's blocks over all ranks. Return the meter of their exchanges."""
    meter = Meter()
    axis = Communicator("text", dist.group.WORLD, CPU, False, meter)
    DividedBlocks(module, axis, axis, on_block)
    return meter


@torch.no_grad()
def filled(module: nn.Module) -> nn.Module:
    """Return a module with random parameters."""
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(0.1 * noise if parameter.ndim > 1 else 1 + 0.1 * noise)
    return module


@pytest.mark.parametrize("name", ["CLIP", "T5", "UMT5", "Qwen3", "Gemma 2", "Gemma 3", "Mistral"])
@torch.no_grad()
def test_comfyuis_text_encoders_give_the_same_bits_on_every_rank(name: str) -> None:
    make, part, sizes = _encoders()[name]
    encoder: Any = filled(make(device=CPU, dtype=torch.float32, model_options={f"{part}_model_config": sizes}))
    key = {"clip_l": "l"}.get(part, part)
    tokens = {key: [[(token, 1.0 + 0.1 * (token % 3)) for token in range(3, 80)]]}

    def encoded() -> tuple[Tensor, ...]:
        encoder.reset_clip_options()
        encoder.set_clip_options({"execution_device": CPU})
        out = encoder.encode_token_weights(tokens)
        return tuple(value for value in out[:2] if value is not None)

    def on_rank(_: int) -> tuple[tuple[Tensor, ...], int, int]:
        before = sum(parameter.numel() for parameter in encoder.parameters())
        divided(encoder)
        return encoded(), before, sum(parameter.numel() for parameter in encoder.parameters())

    expected = encoded()
    assert expected[0].std() > 0.01
    blocks = sum(parameter.numel() for _, each in outermost_lists(encoder) for parameter in each.parameters())
    results = run_ranks(RANKS, on_rank)
    for ours, before, after in results:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(ours, expected, strict=True))
        assert before - after >= blocks // 2
    assert sum(before - after for _, before, after in results) == (RANKS - 1) * blocks


class Block(nn.Module):
    """A block that returns results of every kind, and changes an argument in place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, generator=torch.Generator().manual_seed(3)))

    def forward(self, x: Tensor, state: Tensor, unchanged: Tensor) -> Any:
        state.add_(self.weight)
        return x * self.weight, {"same": unchanged, "list": [x + 1, None, (2, "text", 1.5)], "numbers": x > 0}


class Stack(nn.Module):
    """A module with a list of blocks whose results it combines."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        state, constant = torch.zeros(4), torch.arange(4.0)
        for block in self.blocks:
            x, more = block(x, state, unchanged=constant)
            assert more["same"] is constant
            assert more["list"][1:] == [None, (2, "text", 1.5)]
            x = torch.where(more["numbers"], x, more["list"][0])
        return x, state


@torch.no_grad()
def test_results_of_every_kind_arrive_and_arguments_changed_in_place_change_everywhere() -> None:
    x = torch.linspace(-1, 1, 12).view(3, 4)
    expected = Stack()(x)

    def on_rank(_: int) -> tuple[Tensor, Tensor, int]:
        module = Stack()
        meter = divided(module)
        result, state = module(x)
        return result, state, sum(meter.sent.values())

    results = run_ranks(RANKS, on_rank)
    for result, state, _ in results:
        assert torch.equal(result, expected[0])
        assert torch.equal(state, expected[1])
    floats, flags = 4 * (2 * x.numel() + 4), x.numel()
    tensors = 4 * (RANKS - 1) * (floats + flags)
    assert tensors < sum(sent for *_, sent in results) < tensors + 4 * (RANKS - 1) * 1000


@torch.no_grad()
def test_an_error_of_one_block_is_raised_on_every_rank_and_the_next_call_works() -> None:
    def on_rank(_: int) -> tuple[str, Tensor]:
        module = Stack()
        divided(module)
        try:
            module(torch.zeros(3, 5))
            failure = ""
        except BlockFailed as error:
            failure = str(error)
        return failure, module(torch.ones(3, 4))[0]

    failures, results = zip(*run_ranks(RANKS, on_rank), strict=True)
    assert set(failures) == {failures[0]}
    assert failures[0].startswith("blocks.0: RuntimeError: The size of tensor")
    assert all(torch.equal(result, Stack()(torch.ones(3, 4))[0]) for result in results)


class Strange(nn.Module):
    """A block that returns an object of no plain kind."""

    def forward(self, x: Tensor) -> object:
        return slice(0, 1)


def test_a_block_whose_results_cannot_be_sent_is_named_on_every_rank() -> None:
    def on_rank(_: int) -> str:
        module = nn.Module()
        module.blocks = nn.ModuleList([Strange()])
        divided(module)
        with pytest.raises(BlockFailed) as failure:
            module.blocks[0](torch.ones(1))
        return str(failure.value)

    words = "blocks.0 of the text encoder returns a slice, which cannot be sent: use Load CLIP."
    assert all(words in failure for failure in run_ranks(2, on_rank))


@torch.no_grad()
def test_a_cancelled_call_ends_on_every_rank_before_the_same_block() -> None:
    def on_rank(_: int) -> int:
        calls = 0

        def on_block() -> None:
            nonlocal calls
            calls += 1
            if calls == 3:
                raise InterruptedError

        module = Stack()
        divided(module, on_block)
        with pytest.raises(InterruptedError):
            module(torch.ones(3, 4))
        return calls

    assert run_ranks(RANKS, on_rank) == [3] * RANKS


def test_ranks_own_runs_of_blocks_of_about_equal_bytes() -> None:
    equal = [nn.Linear(4, 4) for _ in range(7)]
    assert owners(equal, 3) == [0, 0, 1, 1, 1, 2, 2]
    large_first = [nn.Linear(40, 40), *(nn.Linear(4, 4) for _ in range(4))]
    assert owners(large_first, 2) == [0, 1, 1, 1, 1]
    assert owners(equal[:1], 4) == [2]
    assert functools.reduce(max, owners(equal, 16)) < 16
