"""The small model of a file, with shorter lists of blocks; and entries of a prompt that are not tensors."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

from parallel_backend.derive.call_kind import CallKind
from parallel_backend.derive.calls import Sizes
from parallel_backend.derive.prompt import PromptExample, as_dicts
from parallel_backend.derive.request import read_request, request_bytes
from parallel_backend.models.comfyui.reduced import keep_some
from tests.derive.found import kind


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ModuleList([nn.Linear(4, 4), nn.GELU(), nn.Dropout(), nn.Linear(4, 4)])


def test_only_lists_of_blocks_are_shortened() -> None:
    """The surrounding code depends on the length of lists within blocks, and of lists of single layers."""
    model = nn.Module()
    model.blocks = nn.ModuleList(Block() for _ in range(5))
    model.norms = nn.ModuleList(nn.LayerNorm(4) for _ in range(4))
    model.projections = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
    assert keep_some(model, 2, 2) == {"blocks": 5}
    assert [len(each) for each in (model.blocks, model.norms, model.projections)] == [2, 4, 4]
    assert len(model.blocks[1].net) == 4


class Seen:
    """An output of a vision model, as ComfyUI gives it."""

    def __init__(self) -> None:
        self.hidden = torch.ones(1, 5, 8, dtype=torch.bfloat16)
        self.sizes = [(3, 4, 5)]


def test_objects_of_a_prompt_and_the_mask_reach_the_class(tmp_path: Path) -> None:
    entries = {
        "cross_attn": torch.ones(1, 7, 8),
        "seen": as_dicts(Seen(), Seen),
        "denoise_mask": torch.ones(1, 1, 3, 8, 10),
    }
    file = tmp_path / "request_bytes"
    file.write_bytes(request_bytes("file", [PromptExample(entries, (1, 16, 3, 8, 10), kind())], [], 1e9, 1.0))
    _, [prompt] = read_request(file)
    given = prompt.at(Sizes((5, 4, 6), 9))
    seen = given["seen"]
    assert isinstance(seen, SimpleNamespace)
    assert seen.hidden.shape == (1, 5, 8)
    assert seen.sizes == [(3, 4, 5)]
    assert given["denoise_mask"].shape == (1, 1, 5, 4, 6)


def test_frames_of_another_height_follow_the_latents_size() -> None:
    """The entry is a first frame that ComfyUI's class scales to the latent."""
    prompt = PromptExample({"concat_latent_image": torch.ones(1, 16, 3, 8, 10)}, (1, 16, 3, 9, 10), kind())
    assert prompt.at(Sizes((5, 4, 6), 9))["concat_latent_image"].shape == (1, 16, 5, 8, 10)


def test_options_that_the_class_itself_adds_make_no_other_kind() -> None:
    called = CallKind(kind().tensors, (*kind().values, ("transformer_options.rope_options.shift_t", "a number")))
    assert "shift_t in the conditioning" in kind().difference(called)
    known = kind().with_options({"rope_options": {"shift_t": 1.0}, "function": len})
    assert not known.difference(called)
    assert not known.difference(kind())
    other = CallKind(called.tensors, (*called.values, ("transformer_options.rope_options.scale_x", "a number")))
    assert "scale_x in the conditioning" in known.difference(other)
