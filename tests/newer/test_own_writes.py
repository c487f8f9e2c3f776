"""A ComfyUI whose classes write into their diffusion model before a run, as Qwen-Image 2.1's does: the workers write the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from scripts.comfyui import ComfyUI
from tests.support.copies.sized import copied
from tests.support.graphs.comfyui import DIFFERENT, PLANS, LatentOf, graph_of, save_families, spread
from tests.support.graphs.diffusers import refused
from tests.support.graphs.family_checks import assert_equal_run, assert_stock
from tests.support.graphs.flux import Graph, insert_after_model, step_by_step
from tests.support.graphs.unsharded import batched
from tests.support.latents import relative_error
from tests.support.selection import thorough

pytestmark = thorough
"""These tests start a ComfyUI of their own. The quick run has the same rules in `models/test_own_writes`."""

WITH_A_SETTER = """


def _get(self):
    return self._current_patcher


def _set(self, patcher):
    self._current_patcher = patcher
    diffusion_model = getattr(self, "diffusion_model", None)
    if diffusion_model is not None:
        diffusion_model.current_patcher = patcher
        diffusion_model.slot = None
        diffusion_model.reset_prefix_cache(patcher is not None and len(patcher.hook_patches) == 0)


BaseModel.current_patcher = property(_get, _set)
"""
"""ComfyUI's BaseModel, with a setter of the shape that Qwen-Image 2.1's class has."""

READS_IT = """


class {name}({name}):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.prefix_cache = self.slot = self.current_patcher = None
        self.prefix_cache_enabled = False

    def reset_prefix_cache(self, enabled):
        self.prefix_cache = None
        self.prefix_cache_enabled = enabled

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        if self.prefix_cache_enabled and self.current_patcher.get_free_memory(out.device) > 0:
            self.prefix_cache = [out.shape]
            return out * 0.5
        return out
"""
"""A diffusion model whose result differs if its prefix cache is enabled."""

PACK = '''


class StandInWrites:
    """Writes into the diffusion model during a run, as another pack may."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "patch", "stand-ins"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",), "how": ("STRING",)}}

    def patch(self, model, how):
        model = model.clone()
        write = {
            "the attribute": lambda inside: setattr(inside, "prefix_cache_enabled", False),
            "its method": lambda inside: inside.reset_prefix_cache(False),
            "another value": lambda inside: inside.reset_prefix_cache(7),
            "another attribute": lambda inside: setattr(inside, "prefix_cache", "mine"),
        }[how]
        model.add_callback("on_pre_run", lambda patcher: write(patcher.model.diffusion_model))
        return (model,)


NODE_CLASS_MAPPINGS["StandInWrites"] = StandInWrites
'''

FILES = {
    "comfy/model_base.py": WITH_A_SETTER,
    "comfy/ldm/wan/model.py": READS_IT.format(name="WanModel"),
    "comfy/ldm/modules/diffusionmodules/openaimodel.py": READS_IT.format(name="UNetModel"),
    "nodes.py": PACK,
}
WHOLE = {"one worker": {"devices": "cpu:1"}, "cfg 2": {"devices": "cpu:2", "cfg": 2}}


@pytest.fixture(scope="module")
def comfyui(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyUI]:
    server = copied(tmp_path_factory.mktemp("own-writes"), FILES)
    save_families(server, "wan", "sd15")
    with server:
        yield server


def unet() -> Graph:
    return batched(graph_of("sd15", steps=2), 2)


@pytest.mark.parametrize("plan", WHOLE)
def test_an_unsharded_model_gets_its_class_writes(comfyui: ComfyUI, latent_of: LatentOf, plan: str) -> None:
    assert_equal_run(comfyui, spread(unet(), **WHOLE[plan]), latent_of(unet()))


@pytest.mark.parametrize("plan", PLANS)
def test_a_sequence_parallel_model_gets_its_class_writes(latent_of: LatentOf, plan: dict[str, Any]) -> None:
    assert_stock(latent_of, graph_of("wan"), **plan)


def test_a_model_gets_its_class_writes_one_model_call_at_a_time(latent_of: LatentOf) -> None:
    graph = step_by_step(unet())
    assert_stock(latent_of, graph, devices="cpu:1", strict=False)


@pytest.mark.parametrize("how", ["the attribute", "its method", "another value", "another attribute"])
def test_writes_of_another_pack_are_refused(comfyui: ComfyUI, latent_of: LatentOf, how: str) -> None:
    graph = insert_after_model(unet(), "StandInWrites", how=how)
    name = "prefix_cache" if how == "another attribute" else "prefix_cache_enabled"
    assert f"Changing diffusion_model.{name} cannot be done" in refused(comfyui, spread(graph, "cpu:1"))
    if how in ("the attribute", "its method"):
        assert relative_error(latent_of(graph), latent_of(unet())) > DIFFERENT
    assert_stock(latent_of, unet(), devices="cpu:1")
