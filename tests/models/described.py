"""ComfyUI's descriptions of models, without weights."""

from __future__ import annotations

from typing import Any

import comfy.supported_models


def described(kind: str) -> Any:
    """Return ComfyUI's description of a model class. No weights are made."""
    return getattr(comfy.supported_models, kind)({"disable_unet_model_creation": True, "hidden_size": 3072})
