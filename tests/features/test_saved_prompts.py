"""Save Conditioning and Load Conditioning: saved prompts come back bit for bit (refused ones: tests/refusals/inputs.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from scripts.comfyui import ComfyUI, QueuedRun
from tests.support.graphs.flux import node
from tests.support.graphs.prompts import WHOLE, round_trip


def write(comfyui: ComfyUI, tensors: dict[str, Tensor], name: str = "whole") -> None:
    save_file(tensors, comfyui.input_dir / f"{name}.safetensors")


def saved(comfyui: ComfyUI, run: QueuedRun) -> Path:
    (file,) = comfyui.files(run.check(), "save")
    return file


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=lambda dtype: str(dtype).removeprefix("torch.")
)
@pytest.mark.parametrize("names", [("cond",), ("cond", "pooled_output"), tuple(WHOLE)], ids=", ".join)
def test_saved_prompts_come_back_bit_for_bit(comfyui, names, dtype):
    tensors = {name: WHOLE[name].to(dtype) if WHOLE[name].is_floating_point() else WHOLE[name] for name in names}
    write(comfyui, tensors)
    file = saved(comfyui, comfyui.queue(round_trip("round-trip")))
    assert file.parent == comfyui.input_dir
    assert_same(load_file(file), tensors)


@pytest.mark.parametrize("guidance", [0.0, 2.7])
def test_guidance_is_kept_and_used_again(comfyui, guidance):
    write(comfyui, WHOLE)
    with_guidance = node("FluxGuidance", conditioning=["load", 0], guidance=guidance)
    first = saved(comfyui, comfyui.queue(round_trip("guidance", with_guidance)))
    assert load_file(first)["guidance"] == torch.tensor([guidance])
    graph = round_trip("guidance")
    graph["load"]["inputs"]["conditioning"] = first.name
    assert_same(load_file(saved(comfyui, comfyui.queue(graph))), load_file(first))


@pytest.mark.parametrize(
    ("prefix", "folder"),
    [("mine", "."), ("prompts/folder/", "prompts"), ("", "."), ("prompt 9_1_", ".")],
)
def test_saving_overwrites_no_file_and_loading_reads_a_replaced_file(comfyui, prefix, folder):
    files = []
    for value in (1.0, 2.0, 3.0):
        write(comfyui, {"cond": torch.full((1, 3, 64), value)})
        files.append(saved(comfyui, comfyui.queue(round_trip(prefix))))
    assert {file.parent for file in files} == {comfyui.input_dir / folder}
    assert [load_file(file)["cond"].unique().item() for file in files] == [1.0, 2.0, 3.0]


def test_files_in_folders_are_offered(comfyui):
    write(comfyui, WHOLE)
    file = saved(comfyui, comfyui.queue(round_trip("deep/er/one")))
    options = json.dumps(comfyui.object_info("LoadConditioning"))
    assert f"deep/er/{file.name}" in options
    graph = round_trip("from-folder")
    graph["load"]["inputs"]["conditioning"] = f"deep/er/{file.name}"
    assert_same(load_file(saved(comfyui, comfyui.queue(graph))), WHOLE)


def test_a_prefix_that_leaves_the_input_folder_is_refused(comfyui):
    write(comfyui, WHOLE)
    run = comfyui.queue(round_trip("../outside/prompt"))
    assert run.status == "error"
    assert not (comfyui.base_dir / "outside").exists()


def test_a_missing_file_is_rejected_before_anything_runs(comfyui):
    graph = round_trip("missing")
    graph["load"]["inputs"]["conditioning"] = "missing.safetensors"
    run = comfyui.queue(graph)
    assert run.status == "rejected"
    assert "missing.safetensors is not in ComfyUI's input folder" in run.error.exception_message
