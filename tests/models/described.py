"""Models as ComfyUI describes them."""

from __future__ import annotations

from typing import Any

import comfy.supported_models


def described(kind: str) -> Any:
    """ComfyUI's description of a model, of which no weights are made."""
    return getattr(comfy.supported_models, kind)({"disable_unet_model_creation": True, "hidden_size": 3072})
