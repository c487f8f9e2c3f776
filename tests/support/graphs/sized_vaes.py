"""The tests of VAEs whose assumed sizes are too large for a test."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
from PIL import Image

from scripts.comfyui import ComfyUI
from tests.support.graphs.comfyui import (
    DIFFERENT,
    TOKENS,
    TOLERANCE,
    LatentOf,
    graph_of,
    save_families,
    save_latent,
    spread,
)
from tests.support.graphs.family_tests import Sized
from tests.support.graphs.flux import insert_after, node
from tests.support.graphs.vae import decode, encode, parallel, pixels
from tests.support.latents import relative_error, saved_latent
from tests.support.selection import thorough
from tests.vae.comfy_vaes import KINDS, save_comfy_vae


def save_vae(server: ComfyUI, name: str) -> None:
    save_comfy_vae(server.base_dir / "models" / "vae" / f"{name}.safetensors", name)


@thorough
class SizedVAE(Sized):
    """The tests of a family's `vae`."""

    vae: ClassVar[str]

    @pytest.mark.parametrize("workers", [2, 3, 4])
    def test_vaes(self, workers: int, comfyui: ComfyUI) -> None:
        save_vae(comfyui, self.vae)
        save_latent(comfyui, f"of-{self.vae}", *KINDS[self.vae].latent)
        graph = decode(self.vae, f"of-{self.vae}")
        assert relative_error(pixels(comfyui, parallel(graph, workers)), pixels(comfyui, graph)) <= TOLERANCE
        graph = encode(self.vae, f"of-{self.vae}")
        ours, theirs = (saved_latent(comfyui, comfyui.queue(g).check()) for g in (parallel(graph, workers), graph))
        assert relative_error(ours, theirs) <= TOLERANCE


class SizedVAEOfPictures(SizedVAE):
    """The tests of `SizedVAE`, and of models that start from a picture.

    `pictures` maps each model to the VAE that encodes the picture and to the node that takes it.
    """

    pictures: ClassVar[Mapping[str, tuple[str, dict[str, Any]]]]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "name" in metafunc.fixturenames:
            metafunc.parametrize("name", self.pictures)

    def test_a_first_frame_encoded_by_a_parallel_vae(self, name: str, comfyui: ComfyUI, latent_of: LatentOf) -> None:
        vae, making = self.pictures[name]
        save_vae(comfyui, vae)
        save_families(comfyui, name)
        noise = torch.randint(0, 256, (4, 5, 3), generator=torch.Generator().manual_seed(1), dtype=torch.uint8).numpy()
        Image.fromarray(noise).resize((80, 64), Image.Resampling.NEAREST).save(comfyui.input_dir / "first.png")
        graph = graph_of(name, steps=2) | {
            "vae": node("VAELoader", vae_name=f"{vae}.safetensors"),
            "first": node("LoadImage", image="first.png"),
        }
        inputs, given = graph["sampler"]["inputs"], {"vae": ["vae", 0], "start_image": ["first", 0]}
        if name == "wan22_5b":
            inputs["latent_image"] = ["making", 0]
        else:
            given |= {side: [side, 0] for side in TOKENS}
            inputs |= {"positive": ["making", 0], "negative": ["making", 1], "latent_image": ["making", 2]}
        graph["making"] = node(making["class_type"], **making["inputs"], **given)
        stock = latent_of(graph)
        assert relative_error(latent_of(insert_after(graph, "first", "ImageInvert", "image")), stock) > DIFFERENT
        assert relative_error(latent_of(spread(parallel(graph), ring=2)), stock) <= TOLERANCE
