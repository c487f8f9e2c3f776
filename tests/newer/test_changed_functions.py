"""A ComfyUI with one changed function: its own picture, or a refusal that names the function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import save_file

from parallel_backend.models.comfyui.content.known import tables, versions
from scripts.comfyui import ComfyUI, Graph
from tests.support.copies.changed import copied, plain, said
from tests.support.graphs.comfyui import PLANS, TOLERANCE, masked, spread
from tests.support.graphs.family_checks import assert_equal_run
from tests.support.graphs.flux import insert_after_model, queue_logged, ways
from tests.support.latents import relative_error, saved_latent
from tests.support.selection import thorough
from tests.support.tiny.models import draw

pytestmark = thorough
"""These tests start a ComfyUI each; `tests/content` tests that changes are found, and by which digest."""

OTHER = "whose result differs from the workers' in a trial run"
LAYER = "blocks.0.self_attn.q"


def with_mask(steps: int = 3) -> Graph:
    return masked(plain(steps), 10, 9, 3)


def with_cache() -> Graph:
    given = {"reuse_threshold": 0.9, "start_percent": 0.0, "end_percent": 1.0, "verbose": False}
    return insert_after_model(plain(6), "EasyCache", **given)


def with_lora() -> Graph:
    return insert_after_model(plain(), "LoraLoaderModelOnly", lora_name="changed.safetensors", strength_model=1.0)


@dataclass(frozen=True)
class Edit:
    """A change of one of ComfyUI's files.

    The change affects the picture of `graph`. A run's message names `function`, which is empty if the workers run the change
    too.
    """

    file: str
    before: str
    after: str
    graph: Callable[[], Graph]
    function: str


EDITS = {
    "a sampler": Edit(
        "comfy/k_diffusion/sampling.py",
        "# Euler method\n        x = x + d * dt",
        "# Euler method\n        x = x + d * dt * 0.99",
        plain,
        "",
    ),
    "a helper two calls down": Edit(
        "comfy/samplers.py", "    input_x = x_in\n", "    input_x = x_in * 1.01\n", plain, "get_area_and_mult"
    ),
    "the mask": Edit(
        "comfy/samplers.py",
        "out = out * denoise_mask + self.latent_image * latent_mask",
        "out = out * denoise_mask + self.latent_image * latent_mask * 0.9 + 0.1 * latent_mask",
        with_mask,
        "KSamplerX0Inpaint.__call__",
    ),
    "the guidance": Edit(
        "comfy/samplers.py", "(cond_pred - uncond_pred) * cond_scale", "(cond_pred - uncond_pred) * (cond_scale + 0.2)", plain,
        "cfg_function",
    ),
    "a step cache": Edit(
        "comfy_extras/nodes_easycache.py",
        "x[tuple(batch_slice)] += cache_diffs[uuid].to(x.device)",
        "x[tuple(batch_slice)] += cache_diffs[uuid].to(x.device) * 1.05",
        with_cache,
        "EasyCacheHolder.apply_cache_diff",
    ),
}  # fmt: skip


@pytest.fixture
def changed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[ComfyUI, Edit]]:
    edit: Edit = EDITS[request.param]
    with copied(tmp_path, edit.file, edit.before, edit.after) as server:
        yield server, edit


@pytest.mark.parametrize("changed", EDITS, indirect=True)
def test_a_changed_function_gives_comfyuis_own_picture(changed: tuple[ComfyUI, Edit]) -> None:
    """The picture is that ComfyUI's own. Only graphs that depend on the function run one model call at a time."""
    server, edit = changed
    graph = edit.graph()
    stock = saved_latent(server, server.queue(graph, timeout=600).check())
    run, log = queue_logged(server, spread(graph, **PLANS[0], strict=False), timeout=600)
    assert relative_error(saved_latent(server, run.check()), stock) <= TOLERANCE
    strict = spread(graph, **PLANS[0])
    if not edit.function:
        assert ways(log) == ["loop"]
        assert relative_error(saved_latent(server, server.queue(strict, timeout=600).check()), stock) <= TOLERANCE
        return
    (way,) = ways(log)
    assert way.endswith(f"{edit.function}, {OTHER}") and way.startswith("comfy")
    assert any(way in text.text for text in run.texts), "the node says it too"
    assert said(server, strict) == (
        f"Parallel Sampler does not support {way}: choose a tested ComfyUI ({versions(tables())}), or KSampler, which "
        "is slower (one model call at a time)."
    )
    stages = spread(graph, **PLANS[1], strict=False)
    message = said(server, stages)
    assert way in message and "choose pipefusion 1 in Parallel Plan" in message
    if edit.graph is not plain:  # a graph that does not depend on the function runs in the loop
        other, log = queue_logged(server, spread(plain(), **PLANS[0]), timeout=600)
        other.check()
        assert ways(log) == ["loop"]


def test_a_changed_adapter_is_refused(tmp_path: Path) -> None:
    before, after = "lora_diff = torch.mm(", "lora_diff = 1.1 * torch.mm("
    with copied(tmp_path, "comfy/weight_adapter/lora.py", before, after) as server:
        with safe_open(server.base_dir / "models" / "diffusion_models" / "wan.safetensors", "pt") as file:
            rows, columns = file.get_slice(f"{LAYER}.weight").get_shape()
        factors = {"lora_B": draw(rows, 4, seed=1), "lora_A": draw(4, columns, seed=2)}
        tensors = {f"diffusion_model.{LAYER}.{part}.weight": tensor for part, tensor in factors.items()}
        save_file(tensors, server.base_dir / "models" / "loras" / "changed.safetensors")
        for strict in (True, False):
            message = said(server, spread(with_lora(), **PLANS[0], strict=strict))
            assert f"comfy.weight_adapter.lora.LoRAAdapter.calculate_weight, {OTHER}" in message
            assert "cannot be applied to a parallel MODEL" in message
        run, log = queue_logged(server, spread(plain(), **PLANS[0]), timeout=600)
        run.check()
        assert ways(log) == ["loop"]


def test_an_equivalent_function_is_tried_once_and_trusted(tmp_path: Path) -> None:
    before, after = (
        "uncond_pred + (cond_pred - uncond_pred) * cond_scale",
        "uncond_pred + cond_scale * (cond_pred - uncond_pred)",
    )
    with copied(tmp_path, "comfy/samplers.py", before, after) as server:
        told: list[Any] = []
        for steps in (3, 4):
            stock = saved_latent(server, server.queue(plain(steps), timeout=600).check())
            run, log = assert_equal_run(server, spread(plain(steps), **PLANS[0]), stock)
            sentence = "comfy.samplers.cfg_function differs from all tested ComfyUI versions"
            told.append((sentence in log, any(sentence in text.text for text in run.texts)))
        assert told == [(True, True), (False, False)]
