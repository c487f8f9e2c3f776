"""MiniMax-H3's video autoencoder, whose tiles are divided over ranks, against ComfyUI's own module on one rank."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel_backend.models.comfyui.autoencoder import compute_buffers
from parallel_backend.vae import AUTOENCODERS, recognise
from parallel_backend.vae.comfyui import ComfyAutoencoder
from parallel_backend.vae.rows import slab_of
from parallel_backend.weights.files.checkpoint import read_header
from parallel_backend.weights.stores.replicated import ReplicatedStore
from tests.support.comfy_oracle import comfy_on_path
from tests.support.rank_parts import CPU, everyone
from tests.support.ranks import run_ranks
from tests.support.selection import thorough
from tests.support.sparse_files import write_sparse
from tests.support.tiny.vae import decoded, encoded
from tests.vae.tiles import CLIPS, autoencoder, inputs, made

QUICK = ((1, True), (2, True), (3, False))


@cache
def expected_latent(name: str) -> Tensor:
    with torch.inference_mode():
        return autoencoder().encode(inputs(name)[1])


@cache
def expected_pixels(name: str, buffered: bool) -> Tensor:
    with torch.inference_mode():
        return autoencoder(buffered).decode(inputs(name)[0])


# the quick run has a decode without a buffer on three ranks, and one or two ranks with a buffer
@pytest.mark.parametrize(
    ("ranks", "buffered"),
    [
        pytest.param(ranks, buffered, marks=[thorough] * ((ranks, buffered) not in QUICK))
        for ranks in (1, 2, 3, 4)
        for buffered in (False, True)
    ],
)
def test_decodes_and_encodes_equal_comfyuis_bit_for_bit(ranks: int, buffered: bool) -> None:
    module = autoencoder(buffered)

    def work(rank: int) -> tuple[list[tuple[Tensor, Tensor]], int]:
        axis = everyone("rows")
        ours, computed, results = ComfyAutoencoder(module, 16), [0], []

        def count(*_: Any) -> None:
            computed[0] += 1

        module.decoder.register_forward_hook(count)
        for name in CLIPS:
            latent, pixels = inputs(name)
            with torch.inference_mode():
                results.append((decoded(ours, slab_of(latent, axis)), encoded(ours, slab_of(pixels, axis, 16))))
        return results, computed[0]

    by_rank = run_ranks(ranks, work)
    for name, results in zip(CLIPS, by_rank[0][0], strict=True):
        for ours, theirs in zip(results, (expected_pixels(name, buffered), expected_latent(name)), strict=True):
            assert torch.equal(ours, theirs)
    counts = [computed for _, computed in by_rank]
    assert sum(counts) == 8 + 3
    assert max(counts) - min(counts) <= len(CLIPS)


def test_buffers_that_no_file_contains_are_computed() -> None:
    with torch.device("meta"):
        ours = made()
    compute_buffers(ours)
    ReplicatedStore(ours).materialise(CPU)
    theirs = made()
    for name in ("latents_mean", "latents_std", "pixel_mean", "pixel_std", "decoder.pos_embed.inv_freq"):
        assert torch.equal(ours.get_buffer(name), theirs.get_buffer(name)), name


def test_a_minimax_file_is_recognised(tmp_path: Path) -> None:
    """The file has full size; its weights are a hole."""
    comfy_on_path()
    import comfy.ldm.minimax.vae

    with torch.device("meta"):
        module = comfy.ldm.minimax.vae.MiniMaxH3VideoVAE()
    name, _, config = recognise(read_header(write_sparse(tmp_path / "minimax.safetensors", module.state_dict())))
    family = AUTOENCODERS[name]
    assert family.kind(config) == "a MiniMax-H3 video VAE"
    assert [family.decoded_shape(config, (1, 24, n, 4, 3)) for n in (1, 2, 4, 7)] == [
        (1, 3, frames, 64, 48) for frames in (1, 5, 13, 22)
    ]
    assert not [name for name, buffer in family.build(config).module.named_buffers() if buffer.is_meta]
