"""A ComfyUI for models whose assumed sizes are too large for a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from scripts.comfyui import ComfyUI
from tests.support.copies.sized import VAE_SIZES, sized_copy
from tests.support.graphs.sound_tests import Stock, stock_of


@pytest.fixture(scope="session")
def sized_comfyui(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyUI]:
    """Provide a copy of ComfyUI that also reads model sizes from a file's metadata.

    The copy's detection reads these sizes as ComfyUI's own detection does for Wan and LTX-Video. Both loaders and the workers
    use the copy, in which nothing else differs. ComfyUI's detection assumes 17 billion parameters for HiDream, 10 for Mochi, 8
    for ERNIE-Image and 4 for OmniGen 2. The other models may have fewer blocks, but one block has a hundred million parameters
    or more. The VAE of HunyuanVideo has 0.25 billion parameters, that of HunyuanImage 2.1 0.4, of Wan 2.2 0.7 and of
    HunyuanVideo 1.5 more than one.
    """
    with sized_copy(tmp_path_factory.mktemp("sized"), sd=VAE_SIZES) as server:
        yield server


@pytest.fixture(scope="module")
def stock(comfyui: ComfyUI) -> Stock:
    return stock_of(comfyui)
