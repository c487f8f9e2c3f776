"""MageFlow: Qwen-Image's blocks; references behind the picture; a token is one place of the latent."""

from __future__ import annotations

from msgspec.structs import replace

from .qwen_image import QWEN_IMAGE

MAGE_FLOW = replace(QWEN_IMAGE, control={})
