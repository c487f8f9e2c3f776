"""A ComfyUI for models that it takes to be too large for a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from scripts.comfyui import ComfyUI
from tests.support.copies.sized import VAE_SIZES, sized_copy


@pytest.fixture(scope="session")
def sized_comfyui(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyUI]:
    """It can be told otherwise.

    It is a copy of the real one whose detection also looks for sizes in a file's metadata, as ComfyUI's own does for Wan and
    LTX-Video. Both loaders and the workers use that copy, of which all else is as it was. In ComfyUI's detection HiDream has 17
    billion parameters, Mochi 10, ERNIE-Image 8 and OmniGen 2 four; of the others blocks may be left out, but a block has a
    hundred million or more. The VAE of HunyuanVideo has a quarter of a billion, that of HunyuanImage 2.1 0.4, of Wan 2.2 0.7 and
    of HunyuanVideo 1.5 more than one.
    """
    with sized_copy(tmp_path_factory.mktemp("sized"), sd=VAE_SIZES) as server:
        yield server
