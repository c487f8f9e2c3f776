"""The list of the features of ComfyUI's nodes that a worker carries out. A new feature is a function and a line here."""

from __future__ import annotations

from ....conditioning import (
    ATTENTION_GUIDANCE,
    ATTENTION_OVERRIDE,
    BLOCK_ATTENTION,
    POSE_CACHE,
    SKIPPED_BLOCKS,
    UNET_FUNCTIONS,
)
from .block_attention import injected_attention
from .feature import RankFeature
from .node_functions import attention_guidance, attention_override, skipped_blocks, unet_functions
from .pose_cache import pose_cache

FEATURES = (
    RankFeature(SKIPPED_BLOCKS, skipped_blocks),
    RankFeature(POSE_CACHE, pose_cache),
    RankFeature(ATTENTION_OVERRIDE, attention_override, reads_sigmas=True),
    RankFeature(BLOCK_ATTENTION, injected_attention, reads_sigmas=True),
    RankFeature(ATTENTION_GUIDANCE, attention_guidance),
    RankFeature(UNET_FUNCTIONS, unet_functions),
)
"""The features, in the order in which their options are added to a model call."""
