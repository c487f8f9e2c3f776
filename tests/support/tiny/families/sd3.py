"""Tiny Stable Diffusion 3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.support.tiny.family import HEADS, Tiny, layer_settings
from tests.support.tiny.models import draw


def _sd3(_: Any, operations: Any) -> Any:
    """Return SD 3.5 medium, whose positions are a table in the file."""
    from comfy.ldm.modules.diffusionmodules.mmdit import OpenAISignatureMMDITWrapper

    model = OpenAISignatureMMDITWrapper(
        input_size=None, in_channels=16, depth=HEADS, pos_embed_max_size=8, num_patches=64, qk_norm="rms",
        adm_in_channels=2048, x_block_self_attn_layers=[0, 1],
        context_embedder_config={
            "target": "torch.nn.Linear", "params": {"in_features": 4096, "out_features": HEADS * 64}
        },
        **layer_settings(operations),
    )  # fmt: skip
    model.pos_embed.copy_(draw(*model.pos_embed.shape, seed=6))
    return model


TINY: Mapping[str, Tiny] = {
    "sd3": Tiny(_sd3, (16, 9, 14), 4096, pooled=2048),
}
