"""Activations fall as 1/N with the number of ranks, and low precision loses no more than the reference's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from parallel_backend.vae.rows import slab_of
from tests.support.allocations import peak_bytes
from tests.support.rank_parts import everyone
from tests.support.ranks import run_in_turn, run_ranks
from tests.support.selection import thorough
from tests.support.tiny.vae import cogvideox_vae, decoded, diffusers_cogvideox_vae


@pytest.mark.parametrize("schedule", [pytest.param("original", marks=thorough), "comfyui"])
def test_cogvideoxs_peak_memory_falls_as_1_over_n(schedule: str) -> None:
    autoencoder, latent = cogvideox_vae(), torch.randn(1, 16, 2, 16, 1)

    def on(ranks: int) -> tuple[int, Callable[[int], int]]:
        def work(rank: int) -> int:
            torch.set_grad_enabled(False)
            slab = slab_of(latent, everyone("rows"))
            return peak_bytes(lambda: autoencoder.decode(slab, schedule, lambda: None, lambda piece: None))

        return ranks, work

    (alone,), *shared = run_in_turn([on(ranks) for ranks in (1, 2, 4)])
    for peaks in shared:
        rows = latent.shape[-2] // len(peaks)
        halo = (rows + 2) / rows  # in latent rows, the smallest halo
        assert max(peaks) <= alone / len(peaks) * halo


def test_bf16_is_about_as_near_to_fp32_as_diffusers() -> None:
    ours, theirs = cogvideox_vae(), diffusers_cogvideox_vae()
    latent = torch.randn(1, 16, 3, 4, 5, generator=torch.Generator().manual_seed(1))

    def work(rank: int) -> Tensor:
        ours.module.bfloat16()
        return decoded(ours, slab_of(latent.bfloat16(), everyone("rows")), "original").float()

    with torch.no_grad():
        exact = theirs.decode(latent).sample
        error = (theirs.bfloat16().decode(latent.bfloat16()).sample.float() - exact).norm()
        assert (run_ranks(2, work)[0] - exact).norm() <= 1.5 * error
