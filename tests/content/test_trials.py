"""Trials of unknown functions: ComfyUI's loop and the workers' agree on small numbers, and a changed function is found."""

from __future__ import annotations

import copy
import functools
import linecache
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any
from unittest.mock import MagicMock

import msgspec
import pytest
import torch
from torch import Tensor

from parallel_backend.models.comfyui.content.known import verdict_cache
from parallel_backend.models.comfyui.content.source_digests import SourceDigestCheck
from parallel_backend.models.comfyui.features.recipe import decoded, encoded, function_from, packed, unpacked
from tests.support.nodes_module import ForGood, nodes_module
from tests.support.programs import recording  # imports ComfyUI
from tests.support.selection import thorough

import comfy.lora  # isort: skip
import comfy.model_base  # isort: skip
import comfy.samplers  # isort: skip
import comfy.weight_adapter as kinds  # isort: skip
import comfy.k_diffusion.sampling as k_diffusion  # isort: skip
import comfy_extras.nodes_cfg as nodes_cfg  # isort: skip
import comfy_extras.nodes_easycache as caches  # isort: skip
import comfy_extras.nodes_eps as nodes_eps  # isort: skip
import comfy_extras.nodes_freelunch as nodes_freelunch  # isort: skip
import comfy_extras.nodes_mahiro as nodes_mahiro  # isort: skip
import comfy_extras.nodes_nag as nodes_nag  # isort: skip

FOLDER = Path(comfy.samplers.__file__).parents[1]
assert recording
trials = nodes_module("model.trials", ForGood())
sampling = nodes_module("model.run.side_by_side", ForGood())
lora = nodes_module("model.features.lora", ForGood())
places = nodes_module("model.features.node_functions", ForGood())
recipes = nodes_module("model.features.recipe", ForGood())


def sampling_equal(kind: str) -> bool:
    return bool(trials.all_equal(lambda: sampling.sampling_results(kind, caches)))


def adapters_equal(kind: str) -> bool:
    return bool(trials.all_equal(lambda: lora.adapter_results(kind)))


@pytest.mark.parametrize("kind", sampling.CASES)
def test_comfyuis_loop_and_the_workers_agree(kind: str) -> None:
    assert sampling_equal(kind)


@pytest.mark.parametrize("cache", sampling.CACHES)
def test_a_step_cache_skips_a_step_in_the_trial(cache: str) -> None:
    case = sampling.TrialCase(cache=cache)
    with trials.isolated():
        ours, cached = sampling.SamplingTrial(case, caches).results()
        _, plain = sampling.SamplingTrial(replace(case, cache=""), caches).results()
    assert float((cached - ours).norm()) == 0.0 < float((plain - cached).norm())


def scaled(function: Any) -> Any:
    def edited(*args: Any, **given: Any) -> Any:
        return function(*args, **given) * 1.001

    # the module stays the same, as if ComfyUI's own file were edited
    return FunctionType(edited.__code__, function.__globals__, closure=edited.__closure__)


def edited_inpaint(
    self: Any, x: Any, sigma: Any, denoise_mask: Any, model_options: Any = None, seed: Any = None
) -> Any:
    """Call the model without restoring the latent outside of the mask afterwards."""
    if denoise_mask is not None:
        shown = self.inner_model.inner_model.scale_latent_inpaint(
            x=x, sigma=sigma, noise=self.noise, latent_image=self.latent_image, denoise_mask=denoise_mask
        )
        x = x * denoise_mask + shown * (1.0 - denoise_mask)
    return self.inner_model(x, sigma, model_options=model_options, seed=seed)


def skips_sooner(self: Any) -> bool:
    return self.output_prev_norm is not None and self.total_steps_skipped < 1


def scaled_sampler(function: Any) -> Any:
    """Return `inner_sample` with another sampler. Both loops call it, so that only the sampler's result can differ."""

    def inner(self: Any, noise: Any, latent: Any, device: Any, sampler: Any, *rest: Any, **given: Any) -> Any:
        other = copy.copy(sampler)
        other.sample = lambda *args, **more: sampler.sample(*args, **more) * 1.001
        return function(self, noise, latent, device, other, *rest, **given)

    return inner


@pytest.mark.parametrize(
    ("kind", "place", "name", "edit"),
    [
        ("guidance", comfy.samplers, "cfg_function", scaled),
        (
            "guidance",
            comfy.samplers,
            "cond_cat",
            lambda f: lambda *a, **k: {n: v * 1.01 for n, v in f(*a, **k).items()},
        ),
        ("guidance", comfy.model_base.BaseModel, "process_timestep", lambda f: lambda self, t, **_: t * 0.9),
        ("mask", comfy.samplers.KSamplerX0Inpaint, "__call__", lambda f: edited_inpaint),
        ("noise sampler", k_diffusion.BrownianTreeNoiseSampler, "__call__", scaled),
        ("sampler driver", comfy.samplers.CFGGuider, "inner_sample", scaled_sampler),
        ("step cache", caches.EasyCacheHolder, "has_output_prev_norm", lambda f: skips_sooner),
        ("step cache", caches.LazyCacheHolder, "apply_cache_diff", scaled),
    ],
)
def test_a_changed_function_is_found(
    monkeypatch: pytest.MonkeyPatch, kind: str, place: Any, name: str, edit: Callable[[Any], Any]
) -> None:
    monkeypatch.setattr(place, name, edit(getattr(place, name)))
    assert not sampling_equal(kind)


def test_a_loop_that_skips_the_wrappers_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its wrapper the workers' loop would not run, and both results would be ComfyUI's."""

    def unwrapped(self: Any, noise: Any, latent: Any, device: Any, sampler: Any, *rest: Any, **given: Any) -> Any:
        return noise

    monkeypatch.setattr(comfy.samplers.CFGGuider, "inner_sample", unwrapped)
    with pytest.raises(RuntimeError, match="does not run the wrappers around a sampler"):
        sampling_equal("sampler driver")


def test_a_rewritten_function_with_equal_results_passes_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    own = comfy.samplers.cfg_function

    def cfg_function(model: Any, cond_pred: Any, uncond_pred: Any, cond_scale: float, *rest: Any, **given: Any) -> Any:
        if given["model_options"].get("sampler_post_cfg_function"):
            return own(model, cond_pred, uncond_pred, cond_scale, *rest, **given)
        turned = cond_pred * cond_scale + uncond_pred * (1.0 - cond_scale)
        return own(model, turned, turned, 1.0, *rest, **given)

    monkeypatch.setattr(comfy.samplers, "cfg_function", cfg_function)
    assert sampling_equal("guidance")


@pytest.mark.parametrize("kind", [*lora.ADAPTERS, "diff", "set"])
def test_comfyuis_adapters_and_the_workers_adapters_agree(kind: str) -> None:
    assert adapters_equal(kind)


# test_comfyuis_adapters_and_the_workers_adapters_agree compares each kind.
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[thorough] * (kind != "lora")) for kind in lora.ADAPTERS])
def test_a_changed_adapter_is_found_and_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, kind: str, tmp_path: Path
) -> None:
    adapter = getattr(kinds, lora.ADAPTERS[kind])
    own = adapter.calculate_weight
    monkeypatch.setattr(adapter, "calculate_weight", lambda self, weight, *rest: own(self, weight, *rest) * 1.001)
    assert not adapters_equal(kind)
    for each in lora.ADAPTERS:
        verdicts = trials.Verdicts(SourceDigestCheck(FOLDER, ()), tmp_path)
        results = functools.partial(lora.adapter_results, each)
        found = verdicts.mismatch("adapter", results, lora.functions_of(each))
        assert found is None if each != kind else f"comfy.weight_adapter.{kind}" in found


def test_a_verdict_is_cached_and_reported_once(tmp_path: Path) -> None:
    attempts = []

    def attempt() -> list[tuple[Tensor, Tensor]]:
        attempts.append(1)
        return [(torch.ones(2), torch.ones(2))]

    content = SourceDigestCheck(FOLDER, ())
    first = trials.Verdicts(content, tmp_path)
    assert first.unverified("mask")
    assert [first.mismatch("mask", attempt) for _ in range(3)] == [None] * 3
    assert not first.unverified("mask") and first.unverified("guidance")
    (told,) = first.reports()
    assert "comfy.samplers.KSamplerX0Inpaint" in told and first.reports() == []
    again = trials.Verdicts(content, tmp_path)
    assert again.mismatch("mask", attempt) is None and again.reports() == []
    assert len(attempts) == 1
    (kept,) = verdict_cache(tmp_path).all()
    assert kept.kind == "mask" and not kept.mismatch


def test_a_trial_compares_shapes_and_numbers() -> None:
    ones = torch.ones(2, 2)
    assert (
        trials.equal(ones + 1e-7, ones) and not trials.equal(ones + 1e-7, ones, 0.0) and trials.equal(ones, ones, 0.0)
    )
    assert not trials.equal(ones[:1], ones) and not trials.equal(ones * torch.nan, ones * torch.nan)
    with pytest.raises(RuntimeError, match="no results to compare"):
        trials.all_equal(list)


def test_a_trial_that_raises_is_not_cached(tmp_path: Path) -> None:
    def attempt() -> list[tuple[Tensor, Tensor]]:
        raise TypeError("missing 1 argument")

    verdicts = trials.Verdicts(SourceDigestCheck(FOLDER, ()), tmp_path)
    told = verdicts.mismatch("mask", attempt)
    assert told is not None and told.endswith("whose trial run failed (TypeError: missing 1 argument)")
    assert verdict_cache(tmp_path).all() == () and verdicts.unverified("mask")


def test_another_packs_function_is_not_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(comfy.samplers, "cond_cat", lambda *_, **__: {})
    verdicts = trials.Verdicts(SourceDigestCheck(FOLDER), tmp_path)
    told = verdicts.mismatch("guidance", lambda: pytest.fail("it was tried"))
    assert told == "comfy.samplers.cond_cat, which is another pack's"


def function_of(node: Any, *arguments: Any) -> Any:
    """Return the function that a node puts on a MODEL."""
    model = MagicMock()
    model.clone.return_value = model
    model.model.model_config.unet_config = {"model_channels": 16}
    node.execute(model, *arguments)
    (patch,) = (call for call in model.method_calls if call[0].startswith("set_model_"))
    return patch.args[0]


def tried(function: Any, recipe: Any = None) -> bool:
    """Return True if a function after the guidance passes the trial, whatever its digest."""
    recipe = recipe or recipes.RecipeReader().read(function)
    results = functools.partial(places._results, places.PLACES[places.GUIDANCE], function, recipe, ())
    return bool(trials.all_equal(results))


NODES = {
    "CFGNorm": (places.GUIDANCE, nodes_cfg.CFGNorm, (0.8,)),
    "CFGZeroStar": (places.GUIDANCE, nodes_cfg.CFGZeroStar, ()),
    "EpsilonScaling": (places.GUIDANCE, nodes_eps.EpsilonScaling, (1.02,)),
    "NAGuidance": (places.ATTENTION_OUTPUT, nodes_nag.NAGuidance, (5.0, 0.5, 1.5)),
    "FreeU": (places.UNET_OUTPUT, nodes_freelunch.FreeU, (1.1, 1.2, 0.9, 0.2)),
    "FreeU_V2": (places.UNET_OUTPUT, nodes_freelunch.FreeU_V2, (1.3, 1.4, 0.9, 0.2)),
}
CHANNELS = 16, 32, 64


@pytest.mark.parametrize("name", NODES)
def test_functions_of_nodes_are_tried_as_workers_run_them(name: str) -> None:
    place, node, arguments = NODES[name]
    function = function_of(node, *arguments)
    assert places.mismatch_at(place, function, CHANNELS) is None
    (recipe,) = places.recipes_at(place, [function], CHANNELS)
    assert recipe.node == name
    assert decoded(encoded([recipe])) == [recipe]
    elsewhere = [each for each in places.PLACES if each != place]
    assert all(places.recipes_at(each, [function], CHANNELS) is None for each in elsewhere)


def test_a_guidance_function_that_reads_the_whole_batch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    own = nodes_cfg.optimized_scale
    function = function_of(nodes_cfg.CFGZeroStar)
    recipe = recipes.RecipeReader().read(function)
    assert tried(function, recipe)
    of_batch = lambda a, b: own(a, b).mean() + 0 * own(a, b)  # noqa: E731
    of_batch.__module__ = "another_pack"
    monkeypatch.setattr(nodes_cfg, "optimized_scale", of_batch)
    assert not tried(function, recipe)
    found = places._mismatch(places.GUIDANCE, function, recipe, ())
    assert found == "comfy_extras.nodes_cfg.optimized_scale, which is another pack's"
    assert recipes.RecipeReader().read(function) is None
    assert places.recipes_at(places.GUIDANCE, [function]) is None


def test_a_nodes_function_that_needs_all_rows_or_the_model_is_not_sent_to_workers() -> None:
    function = function_of(nodes_mahiro.Mahiro)
    found = places.mismatch_at(places.GUIDANCE, function)
    assert found is not None and found.startswith("comfy_extras.nodes_mahiro.Mahiro.execute, whose result differs")
    found = places.mismatch_at(places.GUIDANCE, function_of(nodes_eps.TemporalScoreRescaling, 0.9, 1.0))
    assert found is not None and "it reads current_patcher" not in found and "which the workers do not receive" in found


NEW_NODES = """
import torch


class NewNodes:
    def row_wise(self, strength):
        scale = {1: strength}

        def blend(latents):
            return latents["denoised"] * scale[1] + latents["cond_denoised"].mean(1, keepdim=True)

        return blend

    def counting(self):
        calls = 0

        def count(latents):
            nonlocal calls
            calls += 1
            return latents["denoised"] * (1 if calls < 9 else 2)

        return count

    def listing(self):
        seen = []

        def note(latents):
            seen.append(1)
            return latents["denoised"]

        return note

    def reading(self):
        def read(latents):
            return latents["denoised"] * (1 if latents.get("sigma") is None else 2)

        return read

    def drawing(self):
        def draw(latents):
            return latents["denoised"] + torch.randn(4, 1, 1)

        return draw
"""


@pytest.fixture(scope="module")
def new_nodes() -> Iterator[Any]:
    """Provide a node of a comfy_extras module that no tested ComfyUI has."""
    file = FOLDER / "comfy_extras" / "nodes_new_at_known_places.py"
    module = ModuleType(f"comfy_extras.{file.stem}")
    module.__file__ = str(file)
    linecache.cache[str(file)] = (len(NEW_NODES), None, NEW_NODES.splitlines(keepends=True), str(file))
    exec(compile(NEW_NODES, str(file), "exec"), vars(module))
    sys.modules[module.__name__] = module
    yield module.NewNodes()
    del sys.modules[module.__name__], linecache.cache[str(file)]


def test_a_new_nodes_function_is_rebuilt_after_a_trial(new_nodes: Any) -> None:
    function = new_nodes.row_wise(0.7)
    assert tried(function)
    rebuilt = function_from(*decoded(encoded([recipes.RecipeReader().read(function)])))
    latents = {name: trials.random(seed, (1, 4, 6, 5)) for seed, name in enumerate(places.LATENTS)}
    assert torch.equal(rebuilt(dict(latents)), function(dict(latents)))


def test_a_new_nodes_function_that_workers_cannot_run_is_found(new_nodes: Any) -> None:
    for method, reason in (
        ("counting", "keeps state"),
        ("listing", "keeps state"),
        ("reading", "reads sigma, which the workers"),
    ):
        with pytest.raises(ValueError, match=reason):
            tried(getattr(new_nodes, method)())
    assert not tried(new_nodes.drawing())


def test_plain_values_are_packed_and_unpacked_unchanged() -> None:
    value = {"a": (1, 2.5, None), 3: [True, {4, 5}], "b": float("inf"), (1, "c"): frozenset({"d"}), "empty": {}}
    assert unpacked(msgspec.json.decode(msgspec.json.encode(packed(value)))) == value
    with pytest.raises(TypeError, match="Tensor is no plain value"):
        packed([torch.ones(1)])
