"""Inputs for `benchmarks.undeclared`: the tests' small files, and the graphs of tests/families with ComfyUI's own nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import torch
from torch import Tensor

from scripts.comfyui import REPO, ComfyUI, Graph
from tests.families.test_images import refining
from tests.support.graphs.comfyui import FLUX1, LATENTS, TOKENS, graph_of, save_latent, with_tensors
from tests.support.graphs.family_tests import Families, Given, job, save_with_prompts
from tests.support.graphs.sound import sound_graph
from tests.support.graphs.videos import SEEN
from tests.support.graphs.wide import save_wide_with_prompts, wide
from tests.support.tiny.flux import save_conditioning, save_flux
from tests.support.tiny.models import draw

Job = Callable[[ComfyUI], Graph]
"""A function that writes a graph's files and returns the graph with the stock loader."""

FILL = {"concat_latent_image": draw(1, 16, 13, 9, seed=61), "concat_mask": draw(1, 1, 104, 72, seed=62).gt(0).float()}


FRAME = {
    "concat_latent_image": draw(1, 16, 3, 9, 10, seed=63),
    "concat_mask": (torch.arange(3) > 0).float().view(1, 1, 3, 1, 1).expand(1, 1, 3, 9, 10).contiguous(),
}
"""A first frame in the size of Wan's job."""


def saved(name: str, make: Job) -> Job:
    """Return a job that first writes the family's files."""

    def saving(server: ComfyUI) -> Graph:
        save_with_prompts(server, name)
        return make(server)

    return saving


def plain(name: str) -> Job:
    """Return a family's own job."""
    return saved(name, lambda _: job(name))


def flux(name: str, given: Mapping[str, Tensor], **settings: Any) -> Job:
    """Return a job of one of FLUX.1's classes, chosen by the settings of its file."""

    def make(server: ComfyUI) -> Graph:
        save_flux(server.base_dir / "models" / "diffusion_models" / f"{name}.safetensors", **settings)
        for side, tokens in TOKENS.items():
            save_conditioning(server.input_dir / f"{name}-{side}.safetensors", tokens)
        graph = graph_of(name, steps=2) | {"latent": LATENTS[FLUX1]}
        return with_tensors(server, graph, name, given) if given else graph

    return make


def at_real_width(name: str, prompts: str) -> Job:
    """Return a job of a model in its real width, which ComfyUI assumes."""

    def make(server: ComfyUI) -> Graph:
        save_wide_with_prompts(server, name)
        return wide(name, prompts)

    return make


def with_sound(name: str) -> Job:
    """Return a job of a video with its sound."""

    def make(server: ComfyUI) -> Graph:
        save_latent(server, "ltxav-sound", 1, 8, 11, 16)
        return sound_graph(name, steps=2)

    return saved(name, make)


def inputs() -> Iterator[tuple[str, Job]]:
    """Yield the inputs of tests/families by name: each file's plain graph, and its graphs with its own nodes' inputs."""
    yield "flux schnell", flux(FLUX1, {})
    yield "flux dev", flux("undeclared-dev", {}, guidance=True)
    yield "flux fill", flux("undeclared-fill", FILL, guidance=True, channels=96)
    for given in (
        *map(Given, ("flux2", "vace", "wan", "wan22_5b")),
        Given("flux2", references=((128, 3, 4),)),
        Given("wan_i2v", FRAME | SEEN),
        Given("wan22_5b", mask=True),
    ):
        beside = ", ".join([*given.tensors, *["first frame"] * given.mask, *["reference"] * len(given.references)])
        yield f"{given.name}{', ' if beside else ''}{beside}", saved(given.name, given.graph)
    yield "hunyuan image refiner", saved("refiner", lambda _: refining())
    for name in ("wide_chroma", "wide_qwen", "wide_z_image"):
        yield name, at_real_width(name, "")
        yield f"{name}, masked text", at_real_width(name, "-masked")
    for name in ("ltxav", "minimax"):
        yield f"{name}, with sound", with_sound(name)
    for found in iter_modules([str(REPO / "tests" / "families")]):
        module = import_module(f"tests.families.{found.name}")
        for each in vars(module).values():
            if isinstance(each, type) and issubclass(each, Families) and each.__module__ == module.__name__:
                for name in each.layers:
                    yield name, plain(name)
                for label, given in getattr(each, "given", {}).items():
                    yield label, saved(given.name, given.graph)
