"""Frames of a video arrive in this process while the workers decode later frames."""

from __future__ import annotations

import torch

from parallel_backend.plan import ParallelPlan
from tests.support.selection import thorough
from tests.vae.comfy_vaes import KINDS, build, save_comfy_vae

TOLERANCE = 1e-5


@thorough
def test_frames_of_a_batch_arrive_video_by_video(run, tmp_path):
    vae, kind = tmp_path / "vae.safetensors", KINDS["wan"]
    save_comfy_vae(vae, "wan")
    latents = torch.randn(2, kind.latent[1], 9, *kind.latent[3:], generator=torch.Generator().manual_seed(1))
    come = []
    run.decode(vae, latents, ParallelPlan(devices="cpu:2"), on_pixels=lambda *piece: come.append(piece))
    assert [(item, start) for item, start, _ in come] == [(item, start) for item in (0, 1) for start in (0, 9, 17, 25)]
    with torch.inference_mode():
        theirs = build("wan").decode(latents)
    for item in (0, 1):
        ours = torch.cat([pixels for of, _, pixels in come if of == item], 1)
        assert (ours - theirs[item]).norm() / theirs[item].norm() <= TOLERANCE
