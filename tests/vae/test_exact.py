"""CogVideoX's autoencoder over ranks against diffusers' and ComfyUI's own, on the same random weights.

Activations fall as 1/N with the number of ranks, and low precision loses no more than the reference's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor

from parallel_backend.vae import Autoencoder
from parallel_backend.vae.rows import slab_of
from tests.support.allocations import peak_bytes
from tests.support.comfy_oracle import comfy_on_path
from tests.support.latents import relative_error
from tests.support.rank_parts import everyone
from tests.support.ranks import run_in_turn, run_ranks
from tests.support.selection import thorough
from tests.support.tiny.vae import (
    SMALL,
    cogvideox_vae,
    cogvideox_vae_tensors,
    decoded,
    diffusers_cogvideox_vae,
    encoded,
)

TOLERANCE = 1e-5
RANKS = (1, 2, 3, 4)

CLIPS = {1: (1, 5, 3), 9: (3, 3, 1), 17: (5, 2, 1), 8: (2, 7, 1), 5: (2, 1, 1)}
"""The latent's frames, height and width by the number of frames. Some have fewer rows than ranks, others divide unevenly."""


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def over_ranks(autoencoder: Autoencoder, ranks: int, latents: list[Tensor], pixels: list[Tensor], schedule: str):
    """Return all latents decoded and all pixels encoded by one group of ranks."""

    def work(rank: int) -> tuple[list[Tensor], list[Tensor]]:
        axis = everyone("space")
        clips = [decoded(autoencoder, slab_of(z, axis), schedule) for z in latents]
        return clips, [encoded(autoencoder, slab_of(x, axis, autoencoder.scale), schedule) for x in pixels]

    return run_ranks(ranks, work)[0]


@cache
def clips() -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(7)
    latents = [torch.randn(1, 16, *shape, generator=generator) for shape in CLIPS.values()]
    sizes = [(frames, 8 * height, 8 * width) for frames, (_, height, width) in CLIPS.items()]
    return latents, [torch.rand(1, 3, *size, generator=generator) * 2 - 1 for size in sizes]


@cache
def cogvideox_oracle(schedule: str) -> tuple[list[Tensor], list[Tensor]]:
    """Return the videos decoded and encoded by diffusers ("original") or by ComfyUI."""
    latents, pixels = clips()
    if schedule == "original":
        theirs = diffusers_cogvideox_vae()
        return [theirs.decode(z).sample for z in latents], [theirs.encode(x).latent_dist.mode() for x in pixels]
    comfy_on_path()
    import comfy.ldm.cogvideo.vae

    theirs = comfy.ldm.cogvideo.vae.AutoencoderKLCogVideoX(block_out_channels=SMALL, layers_per_block=1)
    theirs.load_state_dict(cogvideox_vae_tensors())
    return [theirs.decode(z) for z in latents], [theirs.encode(x) for x in pixels]


QUICK = ((3, "original"), (4, "comfyui"))
"""Ranks and schedules of the quick run, with halos on one side and on both, and latents with fewer rows than ranks."""


@pytest.mark.parametrize(
    ("ranks", "schedule"),
    [
        pytest.param(ranks, schedule, marks=[thorough] * ((ranks, schedule) not in QUICK))
        for ranks in RANKS
        for schedule in ("original", "comfyui")
    ],
)
def test_cogvideox_over_ranks_equals_diffusers_or_comfyuis(schedule: str, ranks: int) -> None:
    results = over_ranks(cogvideox_vae(), ranks, *clips(), schedule)
    for ours_made, theirs_made in zip(results, cogvideox_oracle(schedule), strict=True):
        for ours_one, theirs_one in zip(ours_made, theirs_made, strict=True):
            assert relative_error(ours_one, theirs_one) < TOLERANCE


def test_the_two_schedules_of_cogvideox_differ() -> None:
    """A schedule that is not followed can therefore not pass the other tests."""
    for original, comfyui in zip(cogvideox_oracle("original")[0][1:], cogvideox_oracle("comfyui")[0][1:], strict=True):
        assert relative_error(comfyui, original) > 0.01


def test_sizes_between_multiples_encode_as_in_diffusers() -> None:
    pixels = torch.rand(1, 3, 5, 37, 27, generator=torch.Generator().manual_seed(3))
    _, (latent,) = over_ranks(cogvideox_vae(), 3, [], [pixels], "original")
    assert relative_error(latent, diffusers_cogvideox_vae().encode(pixels).latent_dist.mode()) < TOLERANCE


@pytest.mark.parametrize("schedule", [pytest.param("original", marks=thorough), "comfyui"])
def test_cogvideoxs_peak_memory_falls_as_1_over_n(schedule: str) -> None:
    autoencoder, latent = cogvideox_vae(), torch.randn(1, 16, 2, 16, 1)

    def on(ranks: int) -> tuple[int, Callable[[int], int]]:
        def work(rank: int) -> int:
            slab = slab_of(latent, everyone("rows"))
            return peak_bytes(lambda: autoencoder.decode(slab, schedule, lambda: None, lambda piece: None))

        return ranks, work

    (alone,), shared = run_in_turn([on(ranks) for ranks in (1, 4)])
    rows = latent.shape[-2] // len(shared)
    halo = (rows + 2) / rows  # in latent rows, the smallest halo
    assert max(shared) <= alone / len(shared) * halo


def test_bf16_is_about_as_near_to_fp32_as_diffusers() -> None:
    ours, theirs = cogvideox_vae(), diffusers_cogvideox_vae()
    latent = torch.randn(1, 16, 3, 4, 5, generator=torch.Generator().manual_seed(1))

    def work(rank: int) -> Tensor:
        ours.module.bfloat16()
        return decoded(ours, slab_of(latent.bfloat16(), everyone("rows")), "original").float()

    exact = theirs.decode(latent).sample
    error = (theirs.bfloat16().decode(latent.bfloat16()).sample.float() - exact).norm()
    assert (run_ranks(2, work)[0] - exact).norm() <= 1.5 * error
