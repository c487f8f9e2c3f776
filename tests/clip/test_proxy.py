"""The CLIP that nodes see: uses that need the weights in ComfyUI, and files that make no text encoder, are refused by name."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import save_file

from parallel_backend.errors import PlanRefused, Refused
from parallel_backend.host import Backend, Deadlines
from parallel_backend.plan import ParallelPlan
from tests.support.nodes_module import nodes_module
from tests.support.tiny.formats import save_gguf

# isort: split
import comfy.hooks

Load = Callable[..., Any]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Provide a function that loads files as the node does. No worker starts."""
    server: Any = ModuleType("server")  # ComfyUI's server, which nothing here uses
    server.PromptServer = object
    monkeypatch.setitem(sys.modules, "server", server)
    module = nodes_module("clip.clip", monkeypatch)
    backend = Backend(Deadlines(), lambda *_: None)
    yield lambda *paths, kind="stable_diffusion", **settings: module.load_clip(
        backend, [str(path) for path in paths], kind, ParallelPlan(**{"devices": "cpu:2"} | settings)
    )
    backend.close()


def test_workers_without_room_for_their_part_are_refused_before_they_start(load: Load, clip_l: Path) -> None:
    with pytest.raises(
        PlanRefused, match=r"text encoder: its workers on cpu need 3\d\d MB .* and cpu has 100 MB \(memory_lim"
    ):
        load(clip_l, memory_limit=0.1)
    load(clip_l, memory_limit=1.0)


def scheduled(clip: Any) -> Any:
    """Encode a prompt with hooks that have a schedule."""
    copied = clip.clone()
    copied.patcher.forced_hooks, copied.use_clip_schedule = comfy.hooks.HookGroup(), True
    return copied.encode_from_tokens_scheduled(copied.tokenize("a fox"))


USES: dict[str, Callable[[Any], Any]] = {
    "Saving the text encoder": lambda clip: clip.state_dict_for_saving(),
    "Reading the weights": lambda clip: clip.get_sd(),
    "Merging text encoders": lambda clip: clip.get_key_patches(),
    "Loading other weights": lambda clip: clip.load_sd({}),
    "Applying LoRA hooks": lambda clip: clip.patcher.add_hook_patches(None, {}),
    "Injecting bypass_lora": lambda clip: clip.patcher.set_injections("bypass_lora", []),
    "Replacing clip_l": lambda clip: clip.patcher.add_object_patch("clip_l", None),
    "Wrapping weights": lambda clip: clip.patcher.add_weight_wrapper("key", None),
    "Moving the text encoder to another device": lambda clip: clip.patcher.deepclone_multigpu(),
    "Calling the text encoder's CLIPTextModel": lambda clip: clip.cond_stage_model.clip_l.transformer(None),
    "Encoding without loading the text encoder": lambda clip: clip.cond_stage_model.encode_token_weights({"l": []}),
    "Encoding a prompt with a schedule of hooks": scheduled,
}
"""Uses of a CLIP that need its weights in ComfyUI's process, by the beginnings of their refusals."""


def test_uses_that_need_the_weights_here_are_refused_by_name(load: Load, clip_l: Path) -> None:
    clip = load(clip_l)
    for words, use in USES.items():
        with pytest.raises(Refused, match=re.escape(f"{words} cannot be done with a parallel CLIP: ")) as refusal:
            use(clip)
        assert "use Load CLIP" in str(refusal.value)
    clip.load_model()
    with pytest.raises(
        Refused, match=r"the prompt cannot be sent to the workers \(a slice is no plain value\): use Load CLIP"
    ):
        clip.cond_stage_model.encode_token_weights({"l": [[(slice(0, 1), 1.0)]]})


def test_copies_share_the_encoder_and_have_patches_of_their_own(load: Load, clip_l: Path) -> None:
    clip = load(clip_l)
    copy = clip.clone()
    key = "clip_l.transformer.text_model.encoder.layers.0.mlp.fc1.weight"
    copy.add_patches({key: (torch.zeros(3072, 768),)}, 0.5)
    assert type(copy) is type(clip)
    assert copy.cond_stage_model is clip.cond_stage_model
    assert set(copy.patcher.adapters().recipe) == {key}
    assert not clip.patcher.adapters().recipe
    with pytest.raises(Refused, match="Merging text encoders"):
        copy.add_patches({key: [(1.0, torch.zeros(3072, 768), 1.0, None, None)]})


def test_a_lora_on_quantised_weights_is_refused(load: Load, clip_l: Path) -> None:
    clip = load(clip_l)
    key = "clip_l.transformer.text_model.encoder.layers.0.mlp.fc1.weight"
    layer = clip.cond_stage_model.get_submodule(key.removesuffix(".weight"))
    layer.weight = torch.nn.Parameter(layer.weight.to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(Refused, match=f"Applying a LoRA to {key}, whose weights are quantised, cannot be done"):
        clip.add_patches({key: (torch.zeros(3072, 768),)}, 0.5)


def test_files_that_make_no_text_encoder_of_the_type_are_refused(load: Load, clip_l: Path, tmp_path: Path) -> None:
    other = tmp_path / "model.safetensors"
    save_file({"img_in.weight": torch.zeros(4, 4)}, other)
    with pytest.raises(
        Refused, match=r"model\.safetensors lacks the tensor clip_l\..*: choose a complete text encoder"
    ):
        load(other)
    with pytest.raises(Refused, match=r"clip-l\.safetensors lacks the tensor t5xxl\.[\w.]+: choose a complete"):
        load(clip_l, clip_l, kind="flux")
    wrong = tmp_path / "wrong.safetensors"
    save_file({"text_model.encoder.layers.0.mlp.fc1.weight": torch.zeros(8, 8)}, wrong)
    with pytest.raises(
        Refused, match="has tensors of other sizes than ComfyUI's text encoder of the type stable_diffusion"
    ):
        load(wrong)
    blocks = save_gguf(tmp_path / "blocks.gguf", tmp_path / "plain.safetensors", gguf.GGMLQuantizationType.Q8_0)
    with pytest.raises(Refused, match=r"blocks\.gguf holds GGUF blocks, which ComfyUI's Load CLIP does not read"):
        load(blocks)
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(clip_l.read_bytes()[:1000000])
    with pytest.raises(Refused, match=r"cut\.safetensors .* download it again"):
        load(cut)


def test_devices_that_do_not_exist_are_refused_before_the_file_is_read(load: Load, tmp_path: Path) -> None:
    with pytest.raises(PlanRefused, match="99"):
        load(tmp_path / "nothing.safetensors", devices="99")
