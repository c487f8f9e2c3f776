"""Blocks of a module that are divided over ranks give every rank the results of the undivided module, bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from parallel_backend.comm.communicator import Communicator
from parallel_backend.comm.meter import Meter
from parallel_backend.models.comfyui.divided_blocks import BlockFailed, DividedBlocks, outermost_lists, owners
from parallel_backend.models.comfyui.proof.ranks import RankFailed
from parallel_backend.models.comfyui.shared_decisions import SharedDecisions
from tests.support.comfyuis import is_listed
from tests.support.ranks import run_ranks

# isort: split
import comfy.sd1_clip
from comfy.text_encoders import ace15, flux, gemma4, gpt_oss, lumina2, minimax, qwen3vl, qwen35, sa_t5, wan, z_image

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


@dataclass(frozen=True)
class Small:
    """A small text encoder.

    Attributes:
        make: ComfyUI's class.
        part: the name of its tokens and of its sizes.
        sizes: the sizes that differ from the class's own.
        picture: its prompts may have pictures.
    """

    make: Callable[..., Any]
    part: str
    sizes: Mapping[str, Any]
    picture: bool = False


VISION = {"hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "depth": 4, "deepstack_visual_indexes": [1, 2]}
QWEN35 = LLM | {
    "head_dim": 64,
    "mrope_section": [3, 3, 2],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
GEMMA4 = LLM | {"num_hidden_layers": 7, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16}
GPT_OSS = LLM | {
    "head_dim": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}


@pytest.fixture(autouse=True, scope="module")
def small_vision() -> Iterator[None]:
    """Make ComfyUI's vision encoders small."""
    with pytest.MonkeyPatch.context() as patch:
        for name in qwen3vl.QWEN3VL_VISION:
            patch.setitem(qwen3vl.QWEN3VL_VISION, name, VISION)
        patch.setitem(qwen3vl.QWEN3VL_VISION_COMMON, "num_heads", VISION["num_heads"])
        patch.setitem(qwen35.QWEN35_MODELS["qwen35_2b"], "vision", VISION)
        small = {"num_attention_heads": 2, "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48}
        vision = gemma4.GEMMA4_VISION_CONFIG | small | {"head_dim": 16}
        patch.setattr(gemma4.Gemma4_E2B_Config, "vision_config", vision)
        sound = gemma4.GEMMA4_AUDIO_CONFIG | small | {"output_proj_dims": 48}
        patch.setattr(gemma4.Gemma4_E2B_Config, "audio_config", sound)
        yield


CLIP = {"num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
ENCODERS: Mapping[str, Small] = {
    "CLIP": Small(comfy.sd1_clip.SD1ClipModel, "clip_l", CLIP),
    "T5": Small(sa_t5.SAT5Model, "t5base", T5),
    "UMT5": Small(wan.te(), "umt5xxl", T5),
    "Qwen3": Small(z_image.te(), "qwen3_4b", LLM | {"vocab_size": 151936}),
    "Gemma 2": Small(lumina2.te(), "gemma2_2b", LLM),
    "Gemma 3": Small(lumina2.te(model_type="gemma3_4b"), "gemma3_4b", LLM),
    "Mistral": Small(flux.flux2_te(), "mistral3_24b", LLM | {"num_hidden_layers": 31}),
    "Gemma 4": Small(gemma4.gemma4_te(model_class=gemma4.Gemma4_E2B), "gemma4", GEMMA4),
    "Qwen3-VL": Small(qwen3vl.te(model_type="qwen3vl_8b"), "qwen3vl_8b", LLM, picture=True),
    "Qwen3.5": Small(qwen35.te(model_type="qwen35_2b"), "qwen35_2b", QWEN35, picture=True),
    "MiniMax-H3": Small(minimax.te(), "qwen3vl_32b", LLM, picture=True),
    "GPT-OSS": Small(gpt_oss.lens_te(), "gpt_oss", GPT_OSS),
    "ACE-Step 1.5": Small(ace15.te(), "", LLM | {"vocab_size": 217204}),
}
"""ComfyUI's classes of text encoders, with sizes to make them in."""


def divided(module: nn.Module, on_block: Callable[[], None] = lambda: None) -> tuple[DividedBlocks, Meter]:
    """Divide a module's blocks over all ranks. Return them, and the meter of their exchanges."""
    meter = Meter()
    axis = Communicator("text", dist.group.WORLD, CPU, False, meter)
    return DividedBlocks(module, axis, axis, on_block), meter


@torch.no_grad()
def filled(module: nn.Module) -> nn.Module:
    """Return a module with random parameters, also those that ComfyUI's layers get only from a file."""
    for part in module.modules():
        if getattr(part, "weight", None) is None and hasattr(part, "in_features"):
            shape = getattr(part, "_orig_shape", (part.out_features, part.in_features))
            part.load_state_dict({"weight": torch.empty(shape)}, strict=False)
    for name, buffer in module.named_buffers():
        if name.endswith("layer_scalar"):  # a file's value too
            buffer.fill_(0.7)
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(0.1 * noise if parameter.ndim > 1 else 1 + 0.1 * noise)
    return module


def made(small: Small) -> Any:
    """Return a text encoder with random weights."""
    options = {
        f"{small.part}_model_config": small.sizes,
        "gpt_oss_config": small.sizes,
        "selected_layers": (0, 2),
        "txt_offset": 4,
    }
    return filled(small.make(device=CPU, dtype=torch.float32, model_options=options))


SOUND = {
    "generate_audio_codes": True,
    "min_tokens": 6,
    "seed": 5,
    "cfg_scale": 2.0,
    "temperature": 0.85,
    "top_p": 0.9,
    "top_k": 0,
    "min_p": 0.0,
}
"""Settings by which ACE-Step 1.5 draws codes of sound while it encodes a prompt."""


def tokens_of(small: Small) -> dict[str, Any]:
    """Return a prompt's tokens, with a picture if the encoder takes one."""
    tokens: list[tuple[Any, float]] = [(token, 1.0 + 0.1 * (token % 3) * (not small.picture)) for token in range(3, 80)]
    if small.picture:
        pixels = torch.rand(1, 64, 96, 3, generator=torch.Generator().manual_seed(1))
        tokens.insert(5, ({"type": "image", "data": pixels, "original_type": "image"}, 1.0))
    if not small.part:
        prompts = {
            name: [tokens[:number]] for number, name in enumerate(("lm_prompt_negative", "lm_prompt", "lyrics"), 5)
        }
        return {"qwen3_06b": [tokens], "lm_metadata": SOUND, **prompts}
    return {{"clip_l": "l"}.get(small.part, small.part): [tokens]}


def same(ours: Any, theirs: Any) -> bool:
    """Return True if two leaves of a result are equal, tensors bit by bit."""
    return torch.equal(ours, theirs) if isinstance(theirs, Tensor) else bool(ours == theirs)


@pytest.mark.parametrize("name", [name for name in ENCODERS if name != "Gemma 4"])  # which the next test has
@torch.no_grad()
def test_comfyuis_text_encoders_give_the_same_bits_on_every_rank(name: str) -> None:
    small = ENCODERS[name]
    encoder = made(small)

    def encoded() -> list[Any]:
        encoder.reset_clip_options()
        encoder.set_clip_options({"execution_device": CPU})
        return tree_leaves(encoder.encode_token_weights(tokens_of(small)))

    def on_rank(_: int) -> tuple[list[Any], int, int]:
        before = sum(parameter.numel() for parameter in encoder.parameters())
        blocks, _ = divided(encoder)
        with blocks.decisions:
            return encoded(), before, sum(parameter.numel() for parameter in encoder.parameters())

    expected = encoded()
    assert expected[0].std() > 0.01
    blocks = sum(parameter.numel() for _, each in outermost_lists(encoder) for parameter in each.parameters())
    results = run_ranks(RANKS, on_rank)
    for ours, before, after in results:
        assert len(ours) == len(expected)
        assert all(map(same, ours, expected))
        assert before - after >= blocks // 2
    assert sum(before - after for _, before, after in results) == (RANKS - 1) * blocks


WRITTEN = 8
"""Number of tokens that an encoder writes."""


def written(encoder: Any, small: Small) -> list[int]:
    """Return the tokens that an encoder draws after a prompt."""
    encoder.reset_clip_options()
    encoder.set_clip_options({"layer": None})
    encoder.set_clip_options({"execution_device": CPU})
    found: list[int] = encoder.generate(
        tokens_of(small), do_sample=True, max_length=WRITTEN, temperature=1.0, top_k=40, top_p=0.95, min_p=0.0,
        repetition_penalty=1.1, seed=5, presence_penalty=0.0,
    )  # fmt: skip
    return found


@pytest.mark.parametrize("name", ["Gemma 4", "Qwen3-VL", "Qwen3.5"])
@torch.no_grad()
def test_every_rank_writes_the_same_text_and_caches_stay_with_their_blocks(name: str) -> None:
    small = ENCODERS[name]
    encoder = made(small)
    expected = written(encoder, small)
    assert len(set(expected)) > WRITTEN // 2

    def on_rank(_: int) -> tuple[list[int], int]:
        blocks, meter = divided(encoder)
        with blocks.decisions:
            return written(encoder, small), sum(meter.sent.values())

    if name == "Gemma 4" and not is_listed():  # its caches are objects of ComfyUI's from 0.33 on
        with pytest.raises(RankFailed, match="which cannot be sent: use Load CLIP"):
            run_ranks(RANKS, on_rank)
        return
    results = run_ranks(RANKS, on_rank)
    assert all(tokens == expected for tokens, _ in results)
    layers, width = small.sizes["num_hidden_layers"], small.sizes["hidden_size"]
    hidden = 4 * (RANKS - 1) * layers * width * (2 * 77 + WRITTEN)  # the prompt with a picture's tokens, and each token
    if name != "Gemma 4":  # whose blocks share keys and values
        assert sum(sent for _, sent in results) < 5 * hidden


class Deciding(nn.Module):
    """A module that computes until a number is large enough, from numbers that differ between ranks."""

    def forward(self, number: Tensor) -> tuple[int, int]:
        rounds = 0
        while number.item() < 3:
            number, rounds = number + 1, rounds + 1
        return rounds, int(torch.multinomial(torch.full((50,), 0.02), 1))


def test_ranks_that_would_decide_differently_follow_the_first() -> None:
    def on_rank(rank: int) -> tuple[int, int]:
        torch.manual_seed(rank)
        axis = Communicator("text", dist.group.WORLD, CPU, False, Meter())
        with SharedDecisions(axis, axis):
            decided: tuple[int, int] = Deciding()(torch.tensor(float(rank)))
        return decided

    torch.manual_seed(0)
    assert run_ranks(RANKS, on_rank) == [Deciding()(torch.tensor(0.0))] * RANKS


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
        _, meter = divided(module)
        result, state = module(x)
        return result, state, sum(meter.sent.values())

    results = run_ranks(RANKS, on_rank)
    for result, state, _ in results:
        assert torch.equal(result, expected[0])
        assert torch.equal(state, expected[1])
    floats, flags = 4 * (2 * x.numel() + 4), x.numel()
    tensors = 4 * (RANKS - 1) * (floats + flags)
    assert tensors < sum(sent for *_, sent in results) < tensors + 4 * (RANKS - 1) * 1000


class Strange(nn.Module):
    """A block that returns an object of no plain kind."""

    def forward(self, x: Tensor) -> object:
        return slice(0, 1)


@torch.no_grad()
def test_errors_of_a_block_and_of_its_result_are_raised_on_every_rank_and_the_next_call_works() -> None:
    def on_rank(_: int) -> tuple[str, str, Tensor]:
        module, strange = Stack(), nn.Module()
        strange.blocks = nn.ModuleList([Strange()])
        divided(module)
        divided(strange)
        with pytest.raises(BlockFailed) as failed:
            module(torch.zeros(3, 5))
        with pytest.raises(BlockFailed) as unsent:
            strange.blocks[0](torch.ones(1))
        return str(failed.value), str(unsent.value), module(torch.ones(3, 4))[0]

    expected = Stack()(torch.ones(3, 4))[0]
    failures, unsendable, results = zip(*run_ranks(RANKS, on_rank), strict=True)
    assert set(failures) == {failures[0]}
    assert failures[0].startswith("blocks.0: RuntimeError: The size of tensor")
    words = "blocks.0 of the text encoder returns a slice, which cannot be sent: use Load CLIP."
    assert all(words in each for each in unsendable)
    assert all(torch.equal(result, expected) for result in results)


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
    assert max(owners(equal, 16)) < 16
