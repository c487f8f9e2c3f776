"""MageFlow: Qwen-Image's blocks. References follow the picture's tokens. A token is one position of the latent."""

from __future__ import annotations

from msgspec.structs import replace

from .qwen_image import QWEN_IMAGE

MAGE_FLOW = replace(QWEN_IMAGE, control={})
