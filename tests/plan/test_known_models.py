"""Known models have the sizes of ComfyUI's own classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from parallel_backend.models.comfyui.plan_shape import plan_shape
from parallel_backend.models.declared import DECLARATIONS
from parallel_backend.models.sequence_parallel.blocks import blocks_of
from parallel_backend.models.sequence_parallel.compiled import OVERRIDE
from parallel_backend.plan.predict.known_models import known_model, model_names
from tests.dry.full_size import SETTINGS, flux, flux2, hunyuan15, minimax, qwen, wan, z_image
from tests.support.comfy_oracle import comfy_on_path


def chroma(operations: Any) -> Any:
    from comfy.ldm.chroma.model import Chroma

    return Chroma(
        in_channels=64, out_channels=64, context_in_dim=4096, hidden_size=3072, mlp_ratio=4.0, num_heads=24, depth=19,
        depth_single_blocks=38, axes_dim=[16, 56, 56], theta=10000, patch_size=2, qkv_bias=True, in_dim=64, out_dim=3072,
        hidden_dim=5120, n_layers=5, txt_ids_dims=[], vec_in_dim=None, operations=operations, **SETTINGS,
    )  # fmt: skip


def hunyuan(operations: Any) -> Any:
    from comfy.ldm.hunyuan_video.model import HunyuanVideo

    return HunyuanVideo(
        in_channels=16, out_channels=16, vec_in_dim=768, context_in_dim=4096, hidden_size=3072, mlp_ratio=4.0, num_heads=24,
        depth=20, depth_single_blocks=40, axes_dim=[16, 56, 56], theta=256, patch_size=[1, 2, 2], qkv_bias=True,
        guidance_embed=True, byt5=False, meanflow=False, use_cond_type_embedding=False, vision_in_dim=None,
        meanflow_sum=False, operations=operations, **SETTINGS,
    )  # fmt: skip


def krea2(operations: Any) -> Any:
    from comfy.ldm.krea2.model import SingleStreamDiT

    return SingleStreamDiT(operations=operations, **SETTINGS)


def ltx(operations: Any) -> Any:
    from comfy.ldm.lightricks.av_model import LTXAVModel

    return LTXAVModel(
        cross_attention_adaln=True, apply_gated_attention=True, caption_proj_before_connector=True,
        caption_projection_first_linear=False, use_middle_indices_grid=True, operations=operations, **SETTINGS,
    )  # fmt: skip


def sdxl(operations: Any) -> Any:
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

    return UNetModel(
        image_size=32, in_channels=4, out_channels=4, model_channels=320, num_res_blocks=[2, 2, 2], channel_mult=(1, 2, 4),
        num_head_channels=64, use_spatial_transformer=True, use_linear_in_transformer=True, context_dim=2048,
        transformer_depth=[0, 0, 2, 2, 10, 10], transformer_depth_output=[0, 0, 0, 2, 2, 2, 10, 10, 10],
        transformer_depth_middle=10, adm_in_channels=2816, num_classes="sequential", operations=operations, **SETTINGS,
    )  # fmt: skip


MODELS: dict[str, tuple[str, Callable[[Any], Any], int, int]] = {
    "flux-dev": ("Flux", flux, 16, 2),
    "flux2-dev": ("Flux2", flux2, 128, 2),
    "flux2-klein-4b": ("Flux2", partial(flux2, hidden=3072, doubles=5, singles=20, text=7680), 128, 2),
    "flux2-klein-9b": ("Flux2", partial(flux2, hidden=4096, doubles=8, singles=24, text=12288), 128, 2),
    "chroma": ("Chroma", chroma, 16, 2),
    "qwen-image": ("QwenImage", qwen, 16, 3),
    "z-image-turbo": ("ZImage", z_image, 16, 2),
    "wan2.2-14b": ("WAN21_T2V", wan, 16, 3),
    "wan2.1-1.3b": ("WAN21_T2V", partial(wan, hidden=1536, inner=8960, layers=30), 16, 3),
    "wan2.2-5b": ("WAN22_T2V", partial(wan, hidden=3072, inner=14336, layers=30, channels=48), 48, 3),
    "hunyuan-video": ("HunyuanVideo", hunyuan, 16, 3),
    "hunyuan-video-1.5": ("HunyuanVideo15", hunyuan15, 32, 3),
    "krea2": ("Krea2", krea2, 16, 3),
    "minimax-h3": ("MiniMaxH3", minimax, 24, 3),
    "ltx-2.3": ("LTXAV", ltx, 128, 3),
}
"""The known models by name: ComfyUI's class, a function that makes its module of ComfyUI's layers, and its latents' channels
and dimensions without the batch.
"""


def layers() -> Any:
    """Return ComfyUI's layers, as its process makes models of them."""
    comfy_on_path()
    import comfy.ops

    return comfy.ops.disable_weight_init


def test_other_known_models_are_of_diffusers_or_equal_to_one_of_these() -> None:
    others = {name for name in model_names() if not name.startswith(("cogvideox", "pixart"))} - MODELS.keys()
    assert others == {"flux-schnell", "wan2.1-14b", "z-image", "sdxl"}


def test_an_unsharded_model_has_the_parameters_and_operations_of_its_class() -> None:
    """Operations are counted by torch, on tensors without data."""
    unet, known = sdxl(layers()), known_model("sdxl")
    assert known.shape.parameters == sum(parameter.numel() for parameter in unet.parameters())
    x, text, pooled = (torch.empty(1, *size, **SETTINGS) for size in ((4, 128, 128), (77, 2048), (2816,)))
    with torch.no_grad(), FlopCounterMode(display=False) as counted:
        unet(x, torch.empty(1, device="meta"), context=text, y=pooled, transformer_options={OVERRIDE: attention})
    assert known.work is not None
    flops = (known.work.flops + known.work.scores) * known.shape.image_tokens(1024, 1024)
    assert flops == pytest.approx(counted.get_total_flops(), rel=0.01)


def attention(_: Any, q: Tensor, k: Tensor, v: Tensor, heads: int, **__: Any) -> Tensor:
    """Return torch's attention. ComfyUI's asks for the free memory, which the meta device does not have."""
    q, k, v = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("name", MODELS)
def test_sizes_equal_those_of_comfyuis_class(name: str) -> None:
    kind, make, channels, dims = MODELS[name]
    module, declaration = make(layers()), DECLARATIONS[kind]
    built = plan_shape(name, module, declaration, blocks_of(module, declaration), channels, dims)
    ours = known_model(name).shape
    of_the_job = {"pixels": ours.pixels, "token_frames": ours.token_frames, "text": ours.text, "guided": ours.guided}
    expected = replace(built, **of_the_job)
    if name == "flux-dev":  # published times were fitted without biases and norms, with an older embedding
        assert ours.parameters == pytest.approx(expected.parameters, rel=0.001)
        assert ours.token_weights == expected.token_weights
        return
    assert ours == expected
