"""An invented class in a copy of ComfyUI gets a declaration from a graph's own call, then gives the stock result on workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from scripts.comfyui import ComfyUI, Graph
from tests.support.comfy_oracle import comfy_on_path
from tests.support.graphs.comfyui import DIFFERENT, TOKENS, TOLERANCE, graph_of, save_latent, spread
from tests.support.graphs.derived import FOUND, PATIENCE, own_cache
from tests.support.graphs.flux import insert_after
from tests.support.latents import latents, relative_error, saved_latent
from tests.support.selection import thorough
from tests.support.tiny.models import draw, randomise
from tests.support.unheard.copy import comfyui_with_it

FRAMES, HEIGHT, WIDTH = 5, 8, 12
SIZES = {"width": 96, "heads": 3, "text_width": 48, "depth": 5, "every": 2}

PLANS: tuple[dict[str, Any], ...] = (
    {"devices": "cpu:2", "cfg": 1, "ulysses": 2},
    {"devices": "cpu:3", "cfg": 1, "ring": 3, "weights": "sharded"},
    {"devices": "cpu:2", "cfg": 1, "pipefusion": 2, "warmup_steps": 99},
    {"devices": "cpu:4", "cfg": 2, "ulysses": 2},
)


def save(server: ComfyUI) -> None:
    """Save the model's file, a latent, prompts, and their further inputs: hints and sounds of two seeds."""
    comfy_on_path()
    from tests.support.unheard.model import Unheard

    model = randomise(Unheard(**SIZES), seed=3)
    folder = server.base_dir / "models" / "diffusion_models"
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in model.state_dict().items()}, folder / "unheard.safetensors"
    )
    save_latent(server, "unheard", 1, 16, FRAMES, HEIGHT, WIDTH)
    for side, tokens in TOKENS.items():
        save_file(
            {"cond": draw(1, tokens, SIZES["text_width"], seed=tokens)},
            server.input_dir / f"unheard-{side}.safetensors",
        )
    for seed in (1, 2):
        given = {"hint": draw(1, 16, FRAMES, HEIGHT, WIDTH, seed=seed), "sound": draw(1, FRAMES, 4, 24, seed=10 * seed)}
        save_file(given, server.input_dir / f"given-{seed}.safetensors")


def job(seed: int) -> Graph:
    """Return the graph with the hint and the sound of a seed."""
    graph = graph_of("unheard", steps=2)
    for side in TOKENS:
        graph = insert_after(graph, side, "PackPrompt", "conditioning", file=f"given-{seed}.safetensors")
    return graph


@thorough
def test_an_invented_class_runs_on_several_workers(tmp_path: Path) -> None:
    server = comfyui_with_it(tmp_path)
    server.env |= own_cache(tmp_path)
    save(server)
    graph = job(1)
    with server:
        latent_of = latents(server)
        stock = latent_of(graph)
        assert relative_error(latent_of(job(2)), stock) > DIFFERENT
        first = server.queue(spread(graph, strict=False, **PLANS[0]), timeout=PATIENCE).check()
        found = FOUND.search(server.log)
        assert found is not None and found[1] == "Unheard"
        assert "3 patches over 2 stages" in found[2]
        assert relative_error(saved_latent(server, first), stock) <= TOLERANCE
        for plan in PLANS[1:]:
            run = server.queue(spread(graph, **plan), timeout=PATIENCE).check()
            assert relative_error(saved_latent(server, run), stock) <= TOLERANCE, plan
        assert len(FOUND.findall(server.log)) == 1
