"""Files as converters and splitters write them: folded tensors, lost dimensions, parts, and tensors of unknown types."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from parallel_backend.errors import Refused
from parallel_backend.models.comfyui.comfy_family import ComfyFamily
from parallel_backend.models.comfyui.importing import import_comfyui
from parallel_backend.models.families import FAMILIES
from parallel_backend.weights.files.checkpoint import read_header
from parallel_backend.weights.files.keymap import Piece
from parallel_backend.weights.layers.cast import CastLinear, use_cast_layers
from parallel_backend.weights.layers.packing import can_be_held, resident_bytes, shape_parameters
from parallel_backend.weights.loading.loader import WeightSource, load_weights, want_of
from parallel_backend.weights.stores.replicated import ReplicatedStore
from tests.support.rank_parts import CPU, everyone, neighbours, watch
from tests.support.ranks import run_ranks
from tests.support.tiny.comfyui import WIDE, save_header, save_tiny
from tests.support.tiny.flux import flux_tensors
from tests.weights.tiny import write_gguf

FOLD = 256
ALIGNMENT = 32
"""A GGUF file pads each tensor to a multiple of this number of bytes."""
SHAPES = {
    "wide.weight": (8, 512),
    "straddling.weight": (128, 320),
    "straddling.bias": (128,),
    "conv.weight": (64, 48, 3, 3),
    "conv.bias": (64,),
}
"""Shapes in which rows of 320 values are one block and a quarter of most types, and rows of 3 no block."""


def layers() -> nn.Module:
    model = nn.Module()
    with torch.device("meta"):
        model.wide = nn.Linear(512, 8, bias=False)
        model.straddling = nn.Linear(320, 128)
        model.conv = nn.Conv2d(48, 64, 3)
    use_cast_layers(model)
    return model


def write_unread(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Write a sparse GGUF file of fp16 tensors; its values take no space on the disk."""
    writer = gguf.GGUFWriter(path, "tiny")
    for name, shape in shapes.items():
        writer.add_tensor_info(name, shape, np.dtype(np.float16), 2 * math.prod(shape))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_ti_data_to_file, writer.close):
        step()
    aligned = sum(-(-2 * math.prod(shape) // ALIGNMENT) * ALIGNMENT for shape in shapes.values())
    os.truncate(path, -(-path.stat().st_size // ALIGNMENT) * ALIGNMENT + aligned)


@pytest.mark.parametrize(
    ("kind", "dtype"), [(Type.F16, torch.float32), (Type.Q8_0, torch.bfloat16), (Type.Q4_0, torch.float32)]
)
def test_folded_tensors_have_the_values_that_the_gguf_package_expands(
    tmp_path: Path, kind: Type, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    folded = {name: tensor.view(-1, FOLD) if tensor.ndim > 1 else tensor for name, tensor in tensors.items()}
    kinds = {name: kind for name in tensors if not name.endswith("bias")}
    shapes = {name: shape for name, shape in SHAPES.items() if shape != folded[name].shape}
    values = write_gguf(tmp_path / "x.gguf", folded, kinds, shapes)
    checkpoint = read_header(tmp_path / "x.gguf")
    assert {name: entry.shape for name, entry in checkpoint.entries.items()} == SHAPES
    assert all(map(can_be_held, checkpoint.entries.values()))
    keys = {name: Piece(name, 0, shape[0], shape[1:]) for name, shape in SHAPES.items()}

    def rank(_: int) -> dict[str, Tensor]:
        model = layers()
        shape_parameters(model, checkpoint, keys, dtype)
        model.to_empty(device=CPU)
        store = ReplicatedStore(model, everyone("everyone"))
        load_weights(model, store, WeightSource(checkpoint, keys, dtype), neighbours(), watch())
        held = sum(parameter.nbytes for parameter in model.parameters())
        assert held == resident_bytes(checkpoint, dtype)
        found = {}
        for name, layer in model.named_children():
            weight = layer.full_weight(torch.float32) if isinstance(layer, CastLinear) else layer.weight
            found[f"{name}.weight"] = weight.float()
            if getattr(layer, "bias", None) is not None:
                found[f"{name}.bias"] = layer.bias.float()
        return found

    for found in run_ranks(2, rank):
        assert found.keys() == values.keys()
        for name, tensor in found.items():
            expected = values[name].view(SHAPES[name])
            packed = kind in (Type.Q8_0, Type.Q4_0) and name.startswith(("wide", "straddling")) and "bias" not in name
            assert torch.equal(tensor, expected if packed else expected.to(dtype).float()), name


@pytest.mark.parametrize(("first", "count"), [(0, 1), (31, 2), (32, 64), (100, 333), (0, 2880), (2879, 1)])
@pytest.mark.parametrize("pieces", [1, 3])
def test_any_range_of_values_is_read_from_blocks(tmp_path: Path, first: int, count: int, pieces: int) -> None:
    """A rank that holds a part of a convolution's weight reads it so, in pieces that split blocks."""
    values = write_gguf(tmp_path / "x.gguf", {"x": torch.randn(9, 320)}, {"x": Type.Q8_0}, {"x": (10, 32, 3, 3)})["x"]
    (entry,) = read_header(tmp_path / "x.gguf").entries.values()
    into = torch.empty(count)
    want = want_of(entry, first, into, None, {entry.file: 0})
    data = torch.from_numpy(np.fromfile(entry.file, dtype=np.uint8))[want.start : want.stop]
    offset = 0
    for piece in data.chunk(pieces):
        want.put(offset, piece)
        offset += len(piece)
    assert torch.equal(into, values.flatten()[first : first + count])


def check_same_model(path: Path, plain: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Assert that a file is found to be the same model as a plain file, with tensors of these shapes."""
    _, expected = ComfyFamily().inspect(read_header(plain))
    part, found = ComfyFamily().inspect(read_header(path))
    assert found.kind == expected.kind and found.shape == expected.shape
    assert {name: entry.shape for name, entry in part.entries.items()} == {name: shapes[name] for name in part.entries}
    assert found.described.unet_config == expected.described.unet_config


def test_an_sdxl_of_other_converters_is_detected_as_its_class(tmp_path: Path) -> None:
    """stable-diffusion.cpp writes projections as convolutions. city96's folds tensors with rows of no multiple of 256 values."""
    plain = save_tiny(tmp_path, "sdxl")
    tensors = load_file(plain)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    projections = {
        n: t[:, :, None, None] for n, t in tensors.items() if n.endswith((".proj_in.weight", ".proj_out.weight"))
    }
    odd = {
        n: t.view(-1, FOLD) for n, t in tensors.items() if t.ndim > 1 and t.shape[-1] % FOLD and t.numel() % FOLD == 0
    }
    assert projections and len(odd) > 50
    for changed, kinds in ((projections, {}), (odd, dict.fromkeys(odd, Type.Q8_0))):
        write_gguf(tmp_path / "x.gguf", tensors | changed, kinds, {name: shapes[name] for name in kinds})
        check_same_model(tmp_path / "x.gguf", plain, shapes)


@pytest.mark.parametrize("family", ["sd3", "wan"])
def test_dimensions_of_size_one_that_a_converter_dropped_are_restored(tmp_path: Path, family: str) -> None:
    """Two cases: Stable Diffusion 3's positions, from whose shape ComfyUI reads a size, and Wan's modulation."""
    plain = save_tiny(tmp_path, family)
    tensors = load_file(plain)
    lost = {
        name: tensor.squeeze() if tensor.ndim > 1 and tensor.shape[0] == 1 else tensor
        for name, tensor in tensors.items()
    }
    assert any(lost[name].shape != tensor.shape for name, tensor in tensors.items())
    write_gguf(tmp_path / "x.gguf", lost, {})
    check_same_model(tmp_path / "x.gguf", plain, {name: tuple(tensor.shape) for name, tensor in tensors.items()})


def test_a_z_image_with_dropped_dimensions_has_the_shapes_of_its_class(tmp_path: Path) -> None:
    """Most converters drop the leading dimension of size 1 of its pad tokens."""
    import_comfyui()
    import comfy.ops

    model = WIDE["wide_z_image"](comfy.ops.disable_weight_init, n_layers=2)
    plain = save_header(tmp_path / "plain.safetensors", model, "F16", 2)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    lost = {name: shape[1:] if len(shape) > 1 and shape[0] == 1 else shape for name, shape in shapes.items()}
    assert {name for name in shapes if lost[name] != shapes[name]} == {"x_pad_token", "cap_pad_token"}
    write_unread(tmp_path / "x.gguf", lost)
    assert ComfyFamily().inspect(read_header(tmp_path / "x.gguf"))[0].entries.keys() == shapes.keys()
    check_same_model(tmp_path / "x.gguf", plain, shapes)


@pytest.mark.parametrize("beside", [(), (0, 2)])
def test_a_part_of_a_model_is_refused_with_the_names_of_the_others(tmp_path: Path, beside: tuple[int, ...]) -> None:
    names = [f"model-{number + 1:05d}-of-00003.gguf" for number in range(3)]
    for number in {1, *beside}:
        write_gguf(tmp_path / names[number], {"x": torch.zeros(64)}, {}, numbers={"split.no": number, "split.count": 3})
    with pytest.raises(Refused) as refusal:
        read_header(tmp_path / names[1])
    said = str(refusal.value)
    assert said.startswith(f"{names[1]} is part 2 of 3 of a model (the others are {names[0]}, {names[2]}; ")
    assert "complete" not in said
    assert ("missing in its folder" in said) is not beside


UNKNOWN: Mapping[str, dict[str, Any]] = {
    "a type of tomorrow": {"dtype": "F4_E2M1", "shape": [3, 5], "data_offsets": [0, 8]},
    "complex numbers": {"dtype": "C64", "shape": [2], "data_offsets": [0, 16]},
    "no values": {"dtype": "U64", "shape": [0, 4], "data_offsets": [0, 0]},
    "seven dimensions": {"dtype": "F16", "shape": [1, 2, 1, 1, 1, 1, 1], "data_offsets": [0, 4]},
}


def with_tensor(path: Path, name: str, tensor: dict[str, Any]) -> Path:
    """Write a safetensors file again with one more tensor after the others."""
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    begin, end = (len(body) + offset for offset in tensor["data_offsets"])
    header[name] = tensor | {"data_offsets": [begin, end]}
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + body + bytes(end - begin))
    return path


@pytest.mark.parametrize("what", UNKNOWN)
def test_an_unused_tensor_of_an_unknown_type_is_ignored(tmp_path: Path, what: str) -> None:
    save_file(flux_tensors(heads=1), tmp_path / "x.safetensors")
    path = with_tensor(tmp_path / "x.safetensors", "nobody.uses.this", UNKNOWN[what])
    part, config = ComfyFamily().inspect(read_header(path))
    assert config.kind == "FluxSchnell" and "nobody.uses.this" not in part.entries


@pytest.mark.parametrize("used", [False, True])
def test_an_unsupported_gguf_type_is_refused_only_if_a_module_uses_it(tmp_path: Path, used: bool) -> None:
    path, tensors = tmp_path / "x.gguf", flux_tensors(heads=1)
    name = "double_blocks.0.img_mod.lin.bias" if used else "unused"
    write_gguf(path, {name: torch.zeros_like(tensors.pop(name, torch.zeros(256))), **tensors}, {})
    data = path.read_bytes()
    place = data.index(name.encode()) + len(name) + 4 + 8
    path.write_bytes(data[:place] + struct.pack("<I", Type.IQ4_XS) + data[place + 4 :])
    if used:
        with pytest.raises(Refused, match=f"holds {name} as IQ4_XS, a type not supported"):
            ComfyFamily().inspect(read_header(path))
    else:
        part, _ = FAMILIES["comfyui"].inspect(read_header(path))
        assert "unused" not in part.entries
