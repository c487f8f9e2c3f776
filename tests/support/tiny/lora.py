"""Random adapter files for the tiny FLUX checkpoints, by default those with two heads, in the key names that trainers write."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support.tiny.flux import CHANNELS, TEXT_WIDTH

HIDDEN = 256
RANK = 4

Sizes = Mapping[str, tuple[int, int]]


def _bfl(hidden: int) -> Sizes:
    """Return linear layers `(rows, columns)` in Black Forest Labs' names: some at the ends, fused, and in every block."""
    return {
        "img_in": (hidden, 4 * CHANNELS),
        "txt_in": (hidden, TEXT_WIDTH),
        "time_in.out_layer": (hidden, hidden),
        "double_blocks.0.img_mod.lin": (6 * hidden, hidden),
        "double_blocks.0.img_attn.qkv": (3 * hidden, hidden),
        "double_blocks.0.txt_attn.proj": (hidden, hidden),
        "double_blocks.0.txt_mlp.2": (hidden, 4 * hidden),
        "single_blocks.0.linear1": (7 * hidden, hidden),
        "single_blocks.1.linear2": (hidden, 5 * hidden),
        "final_layer.adaLN_modulation.1": (2 * hidden, hidden),
        "final_layer.linear": (4 * CHANNELS, hidden),
    }


def _diffusers(hidden: int) -> Sizes:
    """Return linear layers in diffusers' names: parts of fused layers, and a layer whose halves ComfyUI swaps."""
    return {
        "x_embedder": (hidden, 4 * CHANNELS),
        "time_text_embed.timestep_embedder.linear_2": (hidden, hidden),
        "transformer_blocks.0.attn.to_q": (hidden, hidden),
        "transformer_blocks.0.attn.to_v": (hidden, hidden),
        "transformer_blocks.0.attn.add_k_proj": (hidden, hidden),
        "transformer_blocks.0.attn.to_out.0": (hidden, hidden),
        "transformer_blocks.0.ff_context.net.0.proj": (4 * hidden, hidden),
        "single_transformer_blocks.0.attn.to_k": (hidden, hidden),
        "single_transformer_blocks.1.proj_mlp": (4 * hidden, hidden),
        "single_transformer_blocks.1.proj_out": (hidden, 5 * hidden),
        "norm_out.linear": (2 * hidden, hidden),
    }


Random = Callable[..., Tensor]
Make = Callable[[Random, int, int], dict[str, Tensor]]


def _factors(draw: Random, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Return two factors whose product is about as large as the weights."""
    return draw(rows, RANK), draw(RANK, columns) * 0.5 / columns**0.5


def _lora(up: str, down: str, alpha: float | None = None) -> Make:
    def make(draw: Random, rows: int, columns: int) -> dict[str, Tensor]:
        left, right = _factors(draw, rows, columns)
        return {up: left, down: right} | ({} if alpha is None else {"alpha": torch.tensor(alpha)})

    return make


def _dora(columnwise: bool) -> Make:
    def make(draw: Random, rows: int, columns: int) -> dict[str, Tensor]:
        norms = (1 + 0.3 * draw(1, columns)) * (rows / columns) ** 0.5 if columnwise else 1 + 0.3 * draw(rows, 1)
        return _lora("lora_up.weight", "lora_down.weight", 2.0)(draw, rows, columns) | {"dora_scale": norms}

    return make


def _loha(draw: Random, rows: int, columns: int) -> dict[str, Tensor]:
    w1_a, w1_b = _factors(draw, rows, columns)
    tensors = {"hada_w1_a": w1_a, "hada_w1_b": w1_b, "hada_w2_a": draw(rows, RANK), "hada_w2_b": draw(RANK, columns)}
    return tensors | {"alpha": torch.tensor(3.0)}


def _lokr(draw: Random, rows: int, columns: int) -> dict[str, Tensor]:
    left, right = _factors(draw, rows // 8, columns // 4)
    return {"lokr_w1": draw(8, 4) * 0.5, "lokr_w2_a": left, "lokr_w2_b": right, "alpha": torch.tensor(3.0)}


def _lokr_whole(draw: Random, rows: int, columns: int) -> dict[str, Tensor]:
    return {"lokr_w1_a": draw(4, 2), "lokr_w1_b": draw(2, 8), "lokr_w2": draw(rows // 4, columns // 8) / columns**0.5}


def _glora(draw: Random, rows: int, columns: int) -> dict[str, Tensor]:
    b1, b2 = _factors(draw, rows, columns)
    return {
        "a1.weight": draw(columns, RANK) * 0.2,
        "a2.weight": draw(RANK, columns) * 0.2,
        "b1.weight": b1,
        "b2.weight": b2,
        "alpha": torch.tensor(2.0),
    }


def _oft(draw: Random, rows: int, columns: int) -> dict[str, Tensor]:
    return {"oft_blocks": draw(rows // 32, 32, 32) * 0.1, "alpha": torch.tensor(20.0)}


def _difference(draw: Random, rows: int, columns: int) -> dict[str, Tensor]:
    return {"diff": 0.5 * draw(rows, columns) / columns**0.5, "diff_b": 0.3 * draw(rows)}


SCHEMES: Mapping[str, tuple[str, Callable[[int], Sizes], Make]] = {
    "lora-kohya": ("lora_unet_", _bfl, _lora("lora_up.weight", "lora_down.weight", 2.0)),
    "lora-peft": ("transformer.", _diffusers, _lora("lora_B.weight", "lora_A.weight")),
    "lora-bfl": ("diffusion_model.", _bfl, _lora("lora_B.weight", "lora_A.weight")),
    "loha": ("lora_unet_", _bfl, _loha),
    "loha-lycoris": ("lycoris_", _diffusers, _loha),
    "lokr": ("lycoris_", _diffusers, _lokr),
    "lokr-whole": ("lora_unet_", _bfl, _lokr_whole),
    "dora-rows": ("lora_unet_", _bfl, _dora(columnwise=False)),
    "dora-rows-of-parts": ("transformer.", _diffusers, _dora(columnwise=False)),
    "dora-columns": ("lora_unet_", _bfl, _dora(columnwise=True)),
    "dora-columns-of-parts": ("transformer.", _diffusers, _dora(columnwise=True)),
    "glora": ("lora_unet_", _bfl, _glora),
    "oft": ("lora_unet_", _bfl, _oft),
    "diff": ("diffusion_model.", _bfl, _difference),
}
"""The kinds of adapter files by name: the prefix of a layer's name, the layers of a width, and the maker of a layer's tensors.

A prefix that ends in "_" stands before a name whose dots are "_" too.
"""


def adapter_tensors(scheme: str, seed: int = 0, hidden: int = HIDDEN) -> dict[str, Tensor]:
    """Return the tensors of an adapter file for a model of this width."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    prefix, layers, make = SCHEMES[scheme]
    tensors = {
        f"{prefix}{name.replace('.', '_') if prefix.endswith('_') else name}.{part}": tensor.contiguous()
        for name, (rows, columns) in layers(hidden).items()
        for part, tensor in make(draw, rows, columns).items()
    }
    if scheme == "diff":
        tensors["diffusion_model.double_blocks.0.img_attn.norm.query_norm.set_weight"] = 1 + 0.2 * draw(128)
    return tensors


def save_adapter(path: Path, scheme: str, seed: int = 0) -> Path:
    """Write an adapter file."""
    save_file(adapter_tensors(scheme, seed), path)
    return path
