"""Tensors that ComfyUI takes apart when it loads a file: the rows of the file that make each tensor, and other changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from parallel_backend.models.comfyui.moved_rows import Process, moved_rows
from parallel_backend.weights.files.checkpoint import read_header
from parallel_backend.weights.files.entry import TensorEntry
from tests.support.tiny.models import draw

# isort: split
import comfy.supported_models

Tensors = Mapping[str, Tensor]

FILES: Mapping[str, Tensors] = {
    "Stable_Cascade_C": {
        "blocks.0.attn.in_proj_weight": draw(12, 5, seed=0),
        "blocks.0.attn.in_proj_bias": draw(12, seed=1),
        "blocks.1.attn.in_proj_weight": draw(6, 5, seed=2),
        "clf.1.weight": draw(4, 4, 1, 1, seed=3),
    },
    "PixelDiTT2I": {
        "core.pixel_embedder.proj.weight": draw(4, 3, seed=0),
        "core.pixel_blocks.0.adaLN_modulation.0.weight": draw(6 * 4 * 9, 7, seed=1),
        "core.pixel_blocks.0.adaLN_modulation.0.bias": draw(6 * 4 * 9, seed=2),
        "net_ema.left_out": draw(3, seed=3),
    },
}
"""Example tensors of a file, by ComfyUI's class."""

OTHERWISE: Mapping[str, Callable[[Tensor], Tensor]] = {
    "twice as much": lambda tensor: tensor * 2,
    "one more": lambda tensor: tensor + 1,
    "turned over": lambda tensor: tensor.flip(1),
    "transposed": lambda tensor: tensor.T.contiguous(),
    "without a column": lambda tensor: tensor[:, :3],
    "of another type": lambda tensor: tensor.half(),
}


def found_in(path: Path, process: Process) -> dict[str, TensorEntry]:
    """Return the tensors that ComfyUI makes from rows of a file's tensors."""
    checkpoint = read_header(path)
    tensors = checkpoint.meta_tensors()
    entries = {id(tensor): checkpoint.entries[name] for name, tensor in tensors.items()}
    return moved_rows(process, tensors, process(dict(tensors)), entries)


@pytest.mark.parametrize("kind", FILES)
def test_found_rows_equal_comfyuis_tensors(kind: str, tmp_path: Path) -> None:
    process: Process = getattr(comfy.supported_models, kind)({}).process_unet_state_dict
    save_file(dict(FILES[kind]), tmp_path / "model.safetensors")
    names = {(entry.offset): name for name, entry in read_header(tmp_path / "model.safetensors").entries.items()}
    found = found_in(tmp_path / "model.safetensors", process)
    tensors = load_file(tmp_path / "model.safetensors")
    expected = {name: tensor for name, tensor in process(dict(tensors)).items() if name not in tensors}
    same = {name for name, tensor in expected.items() if any(tensor is each for each in tensors.values())}
    assert found.keys() == expected.keys() - same
    assert found
    for name, entry in found.items():
        rows = [tensors[names[run.offset]][start:stop] for run, start, stop in entry.runs(0, entry.rows)]
        assert torch.equal(torch.cat(rows), expected[name])
        assert entry.shape == expected[name].shape


@pytest.mark.parametrize("kind", OTHERWISE)
def test_tensors_with_changed_values_or_shapes_are_not_found(kind: str, tmp_path: Path) -> None:
    save_file({"one": draw(5, 4, seed=0), "other": draw(5, 4, seed=1)}, tmp_path / "model.safetensors")

    def process(tensors: dict[str, Tensor]) -> Tensors:
        return {"rows": tensors["other"][1:3], "changed": OTHERWISE[kind](tensors["one"])}

    assert found_in(tmp_path / "model.safetensors", process).keys() == {"rows"}
