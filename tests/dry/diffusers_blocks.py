"""Counts the kernels that blocks of diffusers' own modules launch, as ours are counted. Published times are of
these modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .fake_gpu import DEVICE, FakeGpu


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, device=DEVICE, dtype=dtype)


def _flux() -> Any:
    """Return FLUX with q and k normed by diffusers' own RMSNorm, in steps, as in the releases that were measured."""
    from diffusers import FluxTransformer2DModel
    from diffusers.models.normalization import RMSNorm

    model: Any = FluxTransformer2DModel(num_layers=1, num_single_layers=1, guidance_embeds=True)
    for name, norm in list(model.named_modules()):
        if isinstance(norm, nn.RMSNorm):
            model.set_submodule(name, RMSNorm(norm.normalized_shape[0], 1e-6))
    return model


def _flux_inputs() -> dict[str, Any]:
    return {
        "hidden_states": _empty(1, 4096, 64), "encoder_hidden_states": _empty(1, 512, 4096),
        "pooled_projections": _empty(1, 768), "timestep": _empty(1), "guidance": _empty(1), "img_ids": _empty(4096, 3),
        "txt_ids": _empty(512, 3),
    }  # fmt: skip


def _cogvideox() -> Any:
    from diffusers import CogVideoXTransformer3DModel

    return CogVideoXTransformer3DModel(num_attention_heads=48, num_layers=1, use_rotary_positional_embeddings=True)


def _cogvideox_inputs() -> dict[str, Any]:
    angles = _empty(13 * 30 * 45, 64, dtype=torch.float32)
    return {
        "hidden_states": _empty(2, 13, 16, 60, 90), "encoder_hidden_states": _empty(2, 226, 4096), "timestep": _empty(2),
        "image_rotary_emb": (angles, angles),
    }  # fmt: skip


def _hunyuan() -> Any:
    from diffusers import HunyuanVideoTransformer3DModel

    return HunyuanVideoTransformer3DModel(num_layers=1, num_single_layers=1, num_refiner_layers=1)


def _hunyuan_inputs() -> dict[str, Any]:
    return {
        "hidden_states": _empty(1, 16, 33, 90, 160), "encoder_hidden_states": _empty(1, 256, 4096),
        "encoder_attention_mask": _empty(1, 256, dtype=torch.bool), "pooled_projections": _empty(1, 768),
        "timestep": _empty(1), "guidance": _empty(1),
    }  # fmt: skip


def _wan() -> Any:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(num_layers=1)


def _wan_inputs() -> dict[str, Any]:
    return {
        "hidden_states": _empty(1, 16, 21, 90, 160), "encoder_hidden_states": _empty(1, 512, 4096), "timestep": _empty(1),
    }  # fmt: skip


MODULES: Mapping[str, tuple[Callable[[], Any], Callable[[], dict[str, Any]], tuple[str, ...]]] = {
    "flux-dev": (_flux, _flux_inputs, ("transformer_blocks", "single_transformer_blocks")),
    "cogvideox-5b": (_cogvideox, _cogvideox_inputs, ("", "transformer_blocks")),
    "hunyuan-video": (_hunyuan, _hunyuan_inputs, ("transformer_blocks", "single_transformer_blocks")),
    "wan2.2-14b": (_wan, _wan_inputs, ("", "blocks")),
}
"""The known models by name: a function that makes the model with one block of each kind, the model's inputs, and the paths of
its double and single blocks.
"""


def block_kernels(name: str) -> tuple[int, int]:
    """Return the kernels of an eager double block and single block; 0 for a kind that the model lacks."""
    make, inputs, places = MODULES[name]
    with torch.device("meta"):
        model = make().to(torch.bfloat16)
    gpu = FakeGpu()
    with gpu.running(0, 1):
        model.to_empty(device=DEVICE)
        return _counted(gpu, model, inputs(), places[0]), _counted(gpu, model, inputs(), places[1])


def _counted(gpu: FakeGpu, model: nn.Module, inputs: Mapping[str, Any], place: str) -> int:
    if not place:
        return 0
    block, kernels = model.get_submodule(f"{place}.0"), 0

    def after(*_: object) -> None:
        nonlocal kernels
        kernels = gpu.counts.kernels.total()

    hooks = [block.register_forward_pre_hook(lambda *_: gpu.begin() and None), block.register_forward_hook(after)]
    model(**inputs)
    for hook in hooks:
        hook.remove()
    return kernels
