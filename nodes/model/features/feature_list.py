"""Lists of the features of ComfyUI's nodes that workers carry out. A new feature is a file beside this one and a line here."""

from __future__ import annotations

from . import attention_override, block_attention, networks, node_functions, pose_cache, prefix_cache

IN_EVERY_CALL = (
    networks.FEATURE,
    attention_override.FEATURE,
    node_functions.UNET_FEATURE,
    pose_cache.FEATURE,
    prefix_cache.FEATURE,
)

IN_THE_LOOP = (*IN_EVERY_CALL, block_attention.FEATURE)
"""The features of a run whose denoise loop is in the workers. Block attention keeps state there from step to step."""

IN_A_SINGLE_CALL = (*IN_EVERY_CALL, node_functions.SKIPPED_FEATURE, node_functions.GUIDANCE_FEATURE)
"""The features of a model call that ComfyUI's own denoise loop makes."""
