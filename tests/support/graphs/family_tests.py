"""Tests that the families' files share: each split, a LoRA, and the inputs of their own nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import ClassVar

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from scripts.comfyui import ComfyUI
from tests.support.graphs.comfyui import (
    DIFFERENT,
    EVERY_SPLIT,
    TOKENS,
    LatentOf,
    graph_of,
    masked,
    save_families,
    save_latent,
    with_reference,
)
from tests.support.graphs.family_checks import assert_stock
from tests.support.graphs.flux import Graph, insert_after
from tests.support.graphs.loras import save_lora, with_lora
from tests.support.latents import relative_error
from tests.support.selection import thorough
from tests.support.tiny.comfyui import TINY

Layers = Mapping[str, tuple[str, ...]]
"""Layers that each family's LoRA changes, by the names in the family's file."""

ONE_CALL = ("cosmos", "cosmos_i2v", "flow_rvs", "longcat")
"""Families that run one model call at a time, which Parallel Sampler refuses."""


def job(name: str, steps: int = 2) -> Graph:
    """Return a family's graph, with the tensors that its prompts hold besides text."""
    graph = graph_of(name, steps=steps)
    for side, tokens in TOKENS.items():
        if TINY[name].extra(tokens):
            graph = insert_after(graph, side, "PackPrompt", "conditioning", file=f"{name}-beside-{side}.safetensors")
    return graph


@dataclass(frozen=True)
class Given:
    """The inputs of a family's own nodes: tensors on the prompts, a mask of the first frame, reference latents.

    `references` has the latents' shapes, and `method` is the input of the node that sets the references' positions. Only the
    prompts of `sides` get the tensors and references.
    """

    name: str
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    mask: bool = False
    references: tuple[tuple[int, ...], ...] = ()
    sides: tuple[str, ...] = ("positive", "negative")
    method: str = ""

    def graph(self, server: ComfyUI) -> Graph:
        """Write the files and return the family's graph with these inputs."""
        graph = graph_of(self.name, steps=2)
        for side, tokens in TOKENS.items():
            tensors = {**TINY[self.name].extra(tokens), **(self.tensors if side in self.sides else {})}
            if tensors:
                file = "-".join((self.name, "given", *self.tensors, f"{side}.safetensors"))
                save_file(tensors, server.input_dir / file)
                graph = insert_after(graph, side, "PackPrompt", "conditioning", file=file)
        for number, shape in enumerate(self.references):
            file = f"{self.name}-reference-{number}"
            save_latent(server, file, 1, *shape)
            for side in self.sides:
                graph = with_reference(graph, file, side)
        if self.method:
            for side in self.sides:
                last = graph["sampler"]["inputs"][side][0]
                method = {"reference_latents_method": self.method}
                graph = insert_after(graph, last, "FluxKontextMultiReferenceLatentMethod", "conditioning", **method)
        _, frames, height, width = TINY[self.name].latent if self.mask else (0, 0, 0, 0)
        return masked(graph, width, height, frames) if self.mask else graph


def save_with_prompts(server: ComfyUI, name: str) -> None:
    """Write a model, its prompts and its latent."""
    save_families(server, name)
    save_latent(server, name, 1, *TINY[name].latent)
    for side, tokens in TOKENS.items():
        if beside := dict(TINY[name].extra(tokens)):
            save_file(beside, server.input_dir / f"{name}-beside-{side}.safetensors")


def save_with_loras(server: ComfyUI, layers: Layers) -> None:
    """Write models, prompts, latents and LoRAs."""
    for name, changed in layers.items():
        save_with_prompts(server, name)
        save_lora_of(server, name, changed)


def save_lora_of(server: ComfyUI, name: str, layers: tuple[str, ...]) -> None:
    """Write a LoRA for a model file that exists already."""
    models = server.base_dir / "models"
    tensors = load_file(models / "diffusion_models" / f"{name}.safetensors")
    names = tuple(f"diffusion_model.{layer}" for layer in layers)
    save_lora(models / "loras" / f"{name}-lora.safetensors", names, tensors)


def assert_same(latent_of: LatentOf, name: str, split: str, graph: Graph) -> None:
    """Assert that a family's graph gives the stock result under a split."""
    assert_stock(latent_of, graph, strict=name not in ONE_CALL, **EVERY_SPLIT[split])


@thorough
class Families:
    """The tests of families' models: a LoRA, each split except those in `refused`, and the inputs in `given`.

    A LoRA and the inputs must change the picture by more than `matters`.
    """

    layers: ClassVar[Layers]
    given: ClassVar[Mapping[str, Given]]
    matters: ClassVar[float] = DIFFERENT
    refused: ClassVar[tuple[tuple[str, str], ...]] = ()

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _files(cls, comfyui: ComfyUI) -> None:
        save_with_loras(comfyui, cls.layers)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "label" in metafunc.fixturenames:
            metafunc.parametrize(("label", "split"), [*product(self.given, ("ring 3", "pipefusion 2"))])
        elif "split" in metafunc.fixturenames:
            splits = [case for case in product(self.layers, EVERY_SPLIT) if case not in self.refused]
            metafunc.parametrize(("name", "split"), splits)
        else:
            metafunc.parametrize("name", self.layers)

    def test_every_split_gives_the_stock_result(self, name: str, split: str, latent_of: LatentOf) -> None:
        assert_same(latent_of, name, split, job(name))

    def test_lora(self, name: str, latent_of: LatentOf) -> None:
        plain = job(name)
        graph = with_lora(plain, name, 0.8)
        assert relative_error(latent_of(plain), latent_of(graph)) > self.matters
        assert_same(latent_of, name, "sharded", graph)

    def test_what_is_given(self, label: str, split: str, comfyui: ComfyUI, latent_of: LatentOf) -> None:
        given = self.given[label]
        graph = given.graph(comfyui)
        assert relative_error(latent_of(job(given.name)), latent_of(graph)) > self.matters
        assert_same(latent_of, given.name, split, graph)
