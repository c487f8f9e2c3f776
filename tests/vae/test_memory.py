"""Activations fall as 1/N with the number of ranks, and low precision loses no more than the reference's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel_backend.comm.communicator import Communicator
from parallel_backend.comm.meter import Meter
from parallel_backend.vae.cogvideox import CogVideoXAutoencoder, CogVideoXAutoencoderConfig
from parallel_backend.vae.rows import slab_of
from tests.support.allocations import peak_bytes
from tests.support.ranks import run_in_turn, run_ranks
from tests.support.tiny.vae import SMALL, decoded, random_weights

CPU = torch.device("cpu")
CASES = {
    "CogVideoX, original": (
        CogVideoXAutoencoder(CogVideoXAutoencoderConfig(SMALL, 1, 16)),
        (1, 16, 3, 16, 2),
        "original",
    ),
    "CogVideoX, ComfyUI's": (
        CogVideoXAutoencoder(CogVideoXAutoencoderConfig(SMALL, 1, 16)),
        (1, 16, 3, 16, 2),
        "comfyui",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_peak_memory_falls_as_1_over_n(case: str) -> None:
    autoencoder, shape, schedule = CASES[case]
    autoencoder.module.to_empty(device=CPU).load_state_dict(random_weights(autoencoder.module, seed=0))
    latent = torch.randn(shape)

    def on(ranks: int) -> tuple[int, Callable[[int], int]]:
        def work(rank: int) -> int:
            torch.set_grad_enabled(False)
            axis = Communicator("rows", dist.group.WORLD if ranks > 1 else None, CPU, False, Meter())
            slab = slab_of(latent, axis)
            return peak_bytes(lambda: autoencoder.decode(slab, schedule, lambda: None, lambda piece: None))

        return ranks, work

    (alone,), *shared = run_in_turn([on(ranks) for ranks in (1, 2, 4)])
    for peaks in shared:
        rows = shape[-2] // len(peaks)
        halo = (rows + 2) / rows  # in latent rows, the smallest halo
        assert max(peaks) <= alone / len(peaks) * halo


def test_bf16_is_about_as_near_to_fp32_as_diffusers() -> None:
    from diffusers import AutoencoderKLCogVideoX

    ours = CogVideoXAutoencoder(CogVideoXAutoencoderConfig(SMALL, 1, 16))
    weights = random_weights(ours.module, seed=0)
    ours.module.to_empty(device=CPU).load_state_dict(weights)
    theirs = AutoencoderKLCogVideoX(block_out_channels=SMALL, layers_per_block=1, latent_channels=16)
    theirs.load_state_dict(weights)
    latent = torch.randn(1, 16, 3, 4, 5, generator=torch.Generator().manual_seed(1))

    def work(rank: int) -> Tensor:
        axis = Communicator("rows", dist.group.WORLD, CPU, False, Meter())
        ours.module.bfloat16()
        return decoded(ours, slab_of(latent.bfloat16(), axis), "original").float()

    with torch.no_grad():
        exact = theirs.decode(latent).sample
        error = (theirs.bfloat16().decode(latent.bfloat16()).sample.float() - exact).norm()
        assert (run_ranks(2, work)[0] - exact).norm() <= 1.5 * error
