"""Each split, a LoRA and what a family's own nodes bring, for families whose files and layers a test names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from safetensors.torch import load_file, save_file
from torch import Tensor

from scripts.comfyui import ComfyUI
from tests.host.comfy_graphs import (
    EVERY_SPLIT,
    TOKENS,
    TOLERANCE,
    LatentOf,
    graph_of,
    masked,
    save_families,
    save_latent,
    spread,
    with_reference,
)
from tests.host.conftest import relative_error
from tests.host.graphs import Graph, insert_after
from tests.host.test_comfy_files import save_lora, with_lora
from tests.tiny_comfy import TINY

Layers = Mapping[str, tuple[str, ...]]
"""Of each family the layers that its LoRA changes, by the names in its file."""

ONE_CALL = ("cosmos", "cosmos_i2v")
"""The families that run one model call at a time, which Parallel Sampler refuses."""


def job(name: str) -> Graph:
    """A family's own, with what its prompts hold beside the text."""
    graph = graph_of(name, steps=2)
    for side, tokens in TOKENS.items():
        if TINY[name].extra(tokens):
            graph = insert_after(graph, side, "PackPrompt", "conditioning", file=f"{name}-beside-{side}.safetensors")
    return graph


@dataclass(frozen=True)
class Given:
    """What a family's own nodes put beside its text: tensors on the prompts, a mask of the first frame, references.

    `references` are the shapes of latents, which the prompts of `sides` have.
    """

    name: str
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    mask: bool = False
    references: tuple[tuple[int, ...], ...] = ()
    sides: tuple[str, ...] = ("positive", "negative")

    def graph(self, server: ComfyUI) -> Graph:
        """The family's job with it."""
        graph = graph_of(self.name, steps=2)
        for side, tokens in TOKENS.items():
            tensors = {**TINY[self.name].extra(tokens), **self.tensors}
            if tensors:
                file = "-".join((self.name, "given", *self.tensors, f"{side}.safetensors"))
                save_file(tensors, server.input_dir / file)
                graph = insert_after(graph, side, "PackPrompt", "conditioning", file=file)
        for number, shape in enumerate(self.references):
            file = f"{self.name}-reference-{number}"
            save_latent(server, file, 1, *shape)
            for side in self.sides:
                graph = with_reference(graph, file, side)
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
    models = server.base_dir / "models"
    for name, changed in layers.items():
        save_with_prompts(server, name)
        tensors = load_file(models / "diffusion_models" / f"{name}.safetensors")
        names = tuple(f"diffusion_model.{layer}" for layer in changed)
        save_lora(models / "loras" / f"{name}-lora.safetensors", names, tensors)


def assert_same(latent_of: LatentOf, name: str, split: str, graph: Graph) -> None:
    """A family's job under a split gives the stock result."""
    ours = spread(graph, strict=name not in ONE_CALL, **EVERY_SPLIT[split])
    assert relative_error(latent_of(ours), latent_of(graph)) <= TOLERANCE


def assert_lora(latent_of: LatentOf, name: str, split: str, matters: float) -> None:
    """A LoRA changes the picture by more than `matters`, and gives the stock result."""
    plain = job(name)
    graph = with_lora(plain, name, 0.8)
    assert relative_error(latent_of(plain), latent_of(graph)) > matters
    assert_same(latent_of, name, split, graph)


def assert_given(server: ComfyUI, latent_of: LatentOf, given: Given, split: str, matters: float) -> None:
    """The same of what is given beside the text."""
    graph = given.graph(server)
    assert relative_error(latent_of(job(given.name)), latent_of(graph)) > matters
    assert_same(latent_of, given.name, split, graph)
