"""ComfyUI's code, and the file of a text encoder, for the tests of parallel CLIPs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.comfy_oracle import comfy_on_path
from tests.support.tiny.text_encoders import save_text_encoder

comfy_on_path()


@pytest.fixture(scope="session")
def clip_l(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide the file of CLIP-L with random weights."""
    path = tmp_path_factory.mktemp("clip") / "clip-l.safetensors"
    save_text_encoder(path, "clip-l")
    return path
