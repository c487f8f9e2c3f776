"""Random networks that ComfyUI's model patches run next to a model's blocks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.support.comfy_oracle import comfy_on_path
from tests.support.tiny.models import randomise

ANIMA = 256
"""Width of the tiny Anima in tests.support.tiny.comfyui."""

TARGETS = ("self_attn_q_proj", "self_attn_k_proj", "self_attn_v_proj", "cross_attn_q_proj", "mlp_layer1")


def save_lllite(path: Path, *, width: int = ANIMA, masked: bool = False, seed: int = 0) -> Path:
    """Write an LLLite for two blocks of the tiny Anima in tests.support.tiny.comfyui."""
    model, metadata = lllite_model(width, masked=masked, blocks=(0, 7), seed=seed)
    path.parent.mkdir(exist_ok=True)
    save_file(model.state_dict(), path, metadata)
    return path


def lllite_model(model_width: int, *, masked: bool, blocks: Sequence[int], seed: int = 0) -> tuple[Any, dict[str, str]]:
    """Return an LLLite and its file's metadata. A `masked` LLLite also takes a mask, and has no pooling of several widths."""
    comfy_on_path()
    from comfy.ldm.anima.lllite import AnimaLLLite
    from comfy.ops import disable_weight_init

    first, width, inner = "lllite_conditioning1.", 24, 16
    shapes = {
        f"{first}conv1.weight": (width // 2, 4 if masked else 3),
        f"{first}conv3.weight": (width,),
        f"{first}proj.weight": (inner,),
        f"{first}resblocks.0.norm1.weight": (width,),
    }
    if not masked:
        shapes[f"{first}aspp.proj.0.weight"] = (width,)
    for block in blocks:
        for target in TARGETS:
            shapes[f"lllite_dit_blocks_{block}_{target}.down.weight"] = (inner, model_width)
            shapes[f"lllite_dit_blocks_{block}_{target}.cond_to_film.weight"] = (2 * inner, inner)
    known = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    metadata = {"lllite.inpaint_masked_input": "true"} if masked else {"lllite.aspp_dilations": "1,3"}
    settings = {"device": "cpu", "dtype": torch.float32, "operations": disable_weight_init}
    return randomise(AnimaLLLite(known, metadata, **settings), seed=seed), metadata
