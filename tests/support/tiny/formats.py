"""The tiny FLUX in every format that users have. For GGUF, the same values also as plain safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support.sparse_files import write_sparse
from tests.support.tiny.flux import CHANNELS, HEAD_DIM, POOLED_WIDTH, TEXT_WIDTH, flux_tensors

HALVES = {
    Type.Q2_K: (80, 82),
    Type.Q3_K: (108,),
    Type.Q4_K: (0, 2),
    Type.Q5_K: (0, 2),
    Type.Q6_K: (208,),
    Type.Q8_0: (0,),
    Type.Q5_1: (0, 2),
    Type.Q5_0: (0,),
    Type.Q4_1: (0, 2),
    Type.Q4_0: (0,),
}
"""Byte offsets of a block's fp16 numbers. All other bytes may have any value."""


def random_blocks(kind: Type, rows: int, width: int, seed: int, size: float = 1.0) -> np.ndarray:
    """Return valid blocks `[rows, bytes]` of a type that the gguf package cannot quantise to.

    Args:
        size: the size of the fp16 numbers.
    """
    generator = np.random.default_rng(seed)
    values, nbytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = generator.integers(0, 256, (rows * width // values, nbytes), dtype=np.uint8)
    for start in HALVES[kind]:
        numbers = (size * generator.uniform(0.5, 1.5, (len(blocks), 1))).astype(np.float16)
        blocks[:, start : start + 2] = numbers.view(np.uint8)
    return blocks.reshape(rows, -1)


def save_fp8(path: Path, dtype: torch.dtype, **settings: object) -> Path:
    """Write the tiny FLUX with every tensor in plain fp8."""
    save_file({name: tensor.to(dtype) for name, tensor in flux_tensors(**settings).items()}, path)  # type: ignore[arg-type]
    return path


def save_scaled(path: Path, form: str, dtype: torch.dtype = torch.float8_e4m3fn, **settings: object) -> Path:
    """Write the tiny FLUX by `write_scaled`."""
    return write_scaled(path, flux_tensors(**settings), form, dtype)  # type: ignore[arg-type]


def write_scaled(
    path: Path,
    values: Mapping[str, Tensor],
    form: str,
    dtype: torch.dtype = torch.float8_e4m3fn,
    more: Mapping[str, str] = MappingProxyType({}),
) -> Path:
    """Write the blocks' matrices in scaled fp8 and the rest in bf16.

    Args:
        form: "old", "marks" or "metadata".
        more: further metadata of the file.
    """
    tensors: dict[str, Tensor] = {}
    layers = {}
    for name, tensor in values.items():
        layer, _, last = name.rpartition(".")
        if "blocks" not in name or last != "weight" or tensor.ndim != 2:
            tensors[name] = tensor.bfloat16()
            continue
        scale = tensor.abs().max() / torch.finfo(dtype).max
        tensors[name] = (tensor / scale).to(dtype)
        tensors[f"{layer}.{'scale_weight' if form == 'old' else 'weight_scale'}"] = scale
        layers[layer] = {"format": str(dtype).removeprefix("torch.")}
        if form == "old":
            tensors[f"{layer}.scale_input"] = torch.tensor(0.5)
        if form == "marks":
            tensors[f"{layer}.comfy_quant"] = torch.tensor(list(json.dumps(layers[layer]).encode()), dtype=torch.uint8)
    if form == "old":
        tensors["scaled_fp8"] = torch.zeros(2, dtype=dtype)
    metadata = dict(more)
    if form == "metadata":
        metadata["_quantization_metadata"] = json.dumps({"format_version": "1.0", "layers": layers})
    save_file(tensors, path, metadata=metadata or None)
    return path


def save_gguf(path: Path, plain: Path, kind: Type, **settings: object) -> Path:
    """Write the tiny FLUX by `quantise`."""
    return quantise(path, plain, kind, flux_tensors(**settings))  # type: ignore[arg-type]


def quantise(
    path: Path,
    plain: Path,
    kind: Type,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] = MappingProxyType({}),
) -> Path:
    """Write the blocks' matrices in a type of GGUF and the rest in fp32. Write their values to `plain` as safetensors.

    Rows whose length is no multiple of the type's block are Q8_0, as converters write them.
    """
    values: dict[str, Tensor] = {}
    stored: dict[str, tuple[np.ndarray, Type]] = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        data, held = tensor.numpy(), Type.F32
        if "blocks" in name and tensor.ndim == 2:
            rows, width = tensor.shape
            held = kind if width % gguf.GGML_QUANT_SIZES[kind][0] == 0 else Type.Q8_0
            if held in (Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0):
                data = gguf.quantize(data, held)
            else:
                data = random_blocks(held, rows, width, seed=number)
                spread = float(np.std(gguf.dequantize(data, held)))
                data = random_blocks(held, rows, width, seed=number, size=float(tensor.std()) / spread)
        stored[name] = data, held
        values[name] = torch.from_numpy(np.array(gguf.dequantize(data, held)))
    save_file(values, plain, metadata=dict(metadata) or None)
    return _write_gguf(path, stored, metadata)


FORMS = ("e4m3fn", "scaled fp8", "Q8_0")
"""Formats of the blocks' matrices in `save_as`, for models of any family."""

SCALE = 2.0**-7
"""Scale of every scaled matrix. It is the same for all, so that any matrix's rows can be merged or split."""


M = TypeVar("M", bound=nn.Module)


def as_stored(module: M, form: str) -> M:
    """Round a diffusers module's weights to the values that a file of a form stores ("" for fp32). Return the module."""
    scale = SCALE if form == "scaled fp8" else 1.0
    for name, parameter in module.named_parameters():
        if form == "Q8_0" and _in_blocks(name, parameter):
            blocks = gguf.quantize(parameter.detach().numpy(), Type.Q8_0)
            parameter.data = torch.from_numpy(np.array(gguf.dequantize(blocks, Type.Q8_0)))
        elif form and _in_blocks(name, parameter):
            parameter.data = (parameter.detach() / scale).to(torch.float8_e4m3fn).float() * scale
    return module


def save_as(form: str, plain: Path) -> Path:
    """Write a copy of an fp32 safetensors file with the blocks' matrices in a form."""
    path = plain.with_name(f"{plain.stem} {form}{'.gguf' if form == 'Q8_0' else '.safetensors'}")
    tensors = load_file(plain)
    if form == "Q8_0":
        kinds = {name: Type.Q8_0 if _in_blocks(name, tensor) else Type.F32 for name, tensor in tensors.items()}
        return _write_gguf(
            path, {name: (gguf.quantize(tensors[name].numpy(), kinds[name]), kinds[name]) for name in tensors}
        )
    scale = SCALE if form == "scaled fp8" else 1.0
    inside = {name for name, tensor in tensors.items() if _in_blocks(name, tensor)}
    stored = {name: (t / scale).to(torch.float8_e4m3fn) if name in inside else t for name, t in tensors.items()}
    if form == "scaled fp8":
        stored |= {f"{name}_scale": torch.tensor(scale) for name in inside}
    save_file(stored, path)
    return path


def _in_blocks(name: str, tensor: Tensor) -> bool:
    return "blocks." in name and name.endswith(".weight") and tensor.ndim == 2


def _write_gguf(
    path: Path, tensors: Mapping[str, tuple[np.ndarray, Type]], metadata: Mapping[str, str] = MappingProxyType({})
) -> Path:
    writer = gguf.GGUFWriter(path, "tiny")
    for name, text in metadata.items():
        writer.add_string(name, text)
    writer.add_quantization_version(2)
    writer.add_array("general.tags", ["tiny"])
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def save_sparse(path: Path, *, heads: int, single_blocks: int = 2) -> Path:
    """Write a FLUX of zeros in bf16 of the real size, as a sparse file that takes no room on the disk."""
    with FakeTensorMode():
        return write_sparse(path, flux_tensors(heads=heads, single_blocks=single_blocks))


def save_diffusers(folder: Path, single: Path, *, shard: str = "10MB", heads: int = 4, seed: int = 0) -> Path:
    """Write a folder of several shards with diffusers' own writer, and the same tensors to the file `single`."""
    from diffusers import FluxTransformer2DModel

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: Any = FluxTransformer2DModel(
            in_channels=4 * CHANNELS,
            num_layers=1,
            num_single_layers=2,
            attention_head_dim=HEAD_DIM,
            num_attention_heads=heads,
            joint_attention_dim=TEXT_WIDTH,
            pooled_projection_dim=POOLED_WIDTH,
            guidance_embeds=True,
        )
    model.save_pretrained(folder, max_shard_size=shard)
    save_file(model.state_dict(), single)
    return folder
