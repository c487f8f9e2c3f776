"""Changes by stock nodes inside a model, which are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.support.graphs.flux import node

PICTURE = {
    "vae": node("VAELoader", vae_name="taef1"),
    "image": node("EmptyImage", width=64, height=64, batch_size=1, color=0x4080C0),
    "objects": node("PackObjects"),
    "uni3c": node("PackUni3C", width=384),
}
FROM_WITHIN: Mapping[str, tuple[str, dict[str, Any], str]] = {
    "QwenImageDiffsynthControlnet": (
        "flux2",
        {"model_patch": ["objects", 4], "vae": ["vae", 0], "image": ["image", 0], "strength": 1.0},
        "attention and block patches (double_block) cannot be applied to",
    ),
    "USOStyleReference": (
        "flux2",
        {"model_patch": ["objects", 4], "clip_vision_output": ["objects", 1]},
        "attention and block patches (post_input) cannot be applied to",
    ),
    "WanUni3CControlnetApply": (
        "wan",
        {"model_patch": ["uni3c", 0], "vae": ["vae", 0], "render_video": ["image", 0]}
        | {"strength": 1.0, "start_percent": 0.0, "end_percent": 1.0},
        "attention and block patches (double_block) cannot be applied to",
    ),
}
"""The refused nodes by class: the model, the node's inputs, and the beginning of the refusal."""
