"""What is not known is tried: ComfyUI's own loop and the workers' on small numbers agree, and a changed function is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

from parallel_backend.models.comfyui.content.known import verdict_cache
from parallel_backend.models.comfyui.content.source_digests import SourceDigestCheck
from tests.support.nodes_module import ForGood, nodes_module
from tests.support.programs import recording  # imports ComfyUI

import comfy.lora  # isort: skip
import comfy.model_base  # isort: skip
import comfy.samplers  # isort: skip
import comfy.weight_adapter as kinds  # isort: skip
import comfy.k_diffusion.sampling as k_diffusion  # isort: skip
import comfy_extras.nodes_cfg as nodes_cfg  # isort: skip
import comfy_extras.nodes_easycache as caches  # isort: skip
import comfy_extras.nodes_eps as nodes_eps  # isort: skip

FOLDER = Path(comfy.samplers.__file__).parents[1]
assert recording
trial = nodes_module("model.run.side_by_side", ForGood())
verdicts = nodes_module("model.verdicts", ForGood())
adapters = nodes_module("model.features.adapters_tried", ForGood())
lora = nodes_module("model.features.lora", ForGood())
rebuilt = nodes_module("model.features.rebuilt", ForGood())

OTHER = "which gives another result than the workers' where both were tried"


def translate(size: Any, patches: Any) -> Any:
    return lora.AdapterReader({"w": size}, {}).translate(patches)


@pytest.mark.parametrize("kind", trial.CASES)
def test_comfyuis_own_and_the_workers_agree(kind: str) -> None:
    assert trial.fault(kind, caches) == ""


@pytest.mark.parametrize("cache", trial.CACHES)
def test_a_step_cache_has_something_to_skip_there(cache: str) -> None:
    case = trial.TrialCase(cache=cache)
    cached, ours = trial.Trial(case, caches).both()
    plain, _ = trial.Trial(replace(case, cache=""), caches).both()
    assert float((cached - ours).norm()) == 0.0 < float((plain - cached).norm())


def scaled(function: Any) -> Any:
    def edited(*args: Any, **given: Any) -> Any:
        return function(*args, **given) * 1.001

    # of the same module, as where ComfyUI's own file is edited
    return FunctionType(edited.__code__, function.__globals__, closure=edited.__closure__)


def edited_inpaint(
    self: Any, x: Any, sigma: Any, denoise_mask: Any, model_options: Any = None, seed: Any = None
) -> Any:
    """What is outside of the mask is not put back behind the model."""
    if denoise_mask is not None:
        shown = self.inner_model.inner_model.scale_latent_inpaint(
            x=x, sigma=sigma, noise=self.noise, latent_image=self.latent_image, denoise_mask=denoise_mask
        )
        x = x * denoise_mask + shown * (1.0 - denoise_mask)
    return self.inner_model(x, sigma, model_options=model_options, seed=seed)


def skips_sooner(self: Any) -> bool:
    return self.output_prev_norm is not None and self.total_steps_skipped < 1


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
        ("sampler driver", comfy.samplers.CFGGuider, "inner_sample", scaled),
        ("step cache", caches.EasyCacheHolder, "has_output_prev_norm", lambda f: skips_sooner),
        ("step cache", caches.LazyCacheHolder, "apply_cache_diff", scaled),
    ],
)
def test_a_changed_function_is_found(
    monkeypatch: pytest.MonkeyPatch, kind: str, place: Any, name: str, edit: Callable[[Any], Any]
) -> None:
    own = getattr(place, name)
    if kind == "sampler driver":  # both go through it, so that it is told by what it gives the sampler

        def edit(f: Any) -> Any:
            def inner(self: Any, noise: Any, latent: Any, device: Any, sampler: Any, *rest: Any, **given: Any) -> Any:
                return f(self, noise, latent, device, Later(sampler), *rest, **given)

            return inner

        class Later:
            def __init__(self, sampler: Any) -> None:
                self.__dict__.update(vars(sampler))
                self._sampler = sampler

            def max_denoise(self, *args: Any) -> Any:
                return self._sampler.max_denoise(*args)

            def sample(self, *args: Any, **given: Any) -> Any:
                return self._sampler.sample(*args, **given) * 1.001

    monkeypatch.setattr(place, name, edit(own))
    assert trial.fault(kind, caches) == OTHER


def test_a_loop_that_leaves_the_wrappers_out_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its wrapper the workers' loop is not reached, and both results would be ComfyUI's."""

    def unwrapped(self: Any, noise: Any, latent: Any, device: Any, sampler: Any, *rest: Any, **given: Any) -> Any:
        return noise

    monkeypatch.setattr(comfy.samplers.CFGGuider, "inner_sample", unwrapped)
    with pytest.raises(RuntimeError, match="runs samplers without the wrappers around them"):
        trial.fault("sampler driver", caches)


def test_a_function_that_is_written_otherwise_and_does_the_same_is_found_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    own = comfy.samplers.cfg_function

    def cfg_function(model: Any, cond_pred: Any, uncond_pred: Any, cond_scale: float, *rest: Any, **given: Any) -> Any:
        turned = cond_pred * cond_scale + uncond_pred * (1.0 - cond_scale)
        return (
            own(model, turned, turned, 1.0, *rest, **given)
            if not hooked(given)
            else own(model, cond_pred, uncond_pred, cond_scale, *rest, **given)
        )

    def hooked(given: Any) -> bool:
        return bool(given["model_options"].get("sampler_post_cfg_function"))

    monkeypatch.setattr(comfy.samplers, "cfg_function", cfg_function)
    assert trial.fault("guidance") == ""


@pytest.mark.parametrize("kind", [*adapters.ADAPTERS, "diff", "set"])
def test_comfyuis_adapters_and_the_workers_agree(kind: str) -> None:
    assert adapters.fault(kind, translate) == ""


@pytest.mark.parametrize("kind", adapters.ADAPTERS)
def test_a_changed_adapter_is_found_and_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, kind: str, tmp_path: Path
) -> None:
    adapter = getattr(kinds, adapters.ADAPTERS[kind])
    own = adapter.calculate_weight
    monkeypatch.setattr(adapter, "calculate_weight", lambda self, weight, *rest: own(self, weight, *rest) * 1.001)
    assert "other weights" in adapters.fault(kind, translate)
    judged = verdicts.Verdicts(SourceDigestCheck(FOLDER, ()), tmp_path)
    others = [each for each in adapters.ADAPTERS if each != kind]
    told = judged.fault("adapter", lambda: adapters.fault(kind, translate), adapters.things_of(kind))
    assert told is not None and f"comfy.weight_adapter.{kind}" in told
    for other in others:
        assert (
            judged.fault("adapter", lambda other=other: adapters.fault(other, translate), adapters.things_of(other))
            is None
        )  # type: ignore[misc]


def test_a_verdict_is_kept_and_told_once(tmp_path: Path) -> None:
    attempts = []

    def attempt() -> str:
        attempts.append(1)
        return ""

    content = SourceDigestCheck(FOLDER, ())
    first = verdicts.Verdicts(content, tmp_path)
    assert first.doubtful("mask")
    assert [first.fault("mask", attempt) for _ in range(3)] == [None] * 3
    assert not first.doubtful("mask") and first.doubtful("guidance")
    (told,) = first.reports()
    assert "comfy.samplers.KSamplerX0Inpaint" in told and first.reports() == []
    again = verdicts.Verdicts(content, tmp_path)
    assert again.fault("mask", attempt) is None and again.reports() == []
    assert len(attempts) == 1
    (kept,) = verdict_cache(tmp_path).all()
    assert kept.kind == "mask" and not kept.mismatch


def test_what_fails_where_it_is_tried_is_not_kept(tmp_path: Path) -> None:
    def attempt() -> str:
        raise TypeError("missing 1 argument")

    judged = verdicts.Verdicts(SourceDigestCheck(FOLDER, ()), tmp_path)
    told = judged.fault("mask", attempt)
    assert told is not None and told.endswith("which could not be tried (TypeError: missing 1 argument)")
    assert verdict_cache(tmp_path).all() == () and judged.doubtful("mask")


def test_another_packs_function_is_not_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(comfy.samplers, "cond_cat", lambda *_, **__: {})
    judged = verdicts.Verdicts(SourceDigestCheck(FOLDER), tmp_path)
    told = judged.fault("guidance", lambda: pytest.fail("it was tried"))
    assert told == "comfy.samplers.cond_cat, which is another pack's"


class Patched:
    """Where a node puts its function."""

    def clone(self) -> Patched:
        return self

    def set_model_sampler_post_cfg_function(self, function: Any) -> None:
        self.function = function


@pytest.mark.parametrize(
    ("node", "given"), [(nodes_cfg.CFGNorm, (0.8,)), (nodes_cfg.CFGZeroStar, ()), (nodes_eps.EpsilonScaling, (1.02,))]
)
def test_functions_of_guidance_nodes_are_tried_as_workers_run_them(node: Any, given: tuple[Any, ...]) -> None:
    model = Patched()
    node.execute(model, *given)
    assert rebuilt.fault_of(model.function) is None
    assert rebuilt._difference(model.function, node.__module__.rpartition(".")[2]) == ""


def test_a_function_of_a_guidance_node_that_looks_at_the_whole_batch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    own = nodes_cfg.optimized_scale
    monkeypatch.setattr(nodes_cfg, "optimized_scale", lambda a, b: own(a, b).mean() + 0 * own(a, b))
    model = Patched()
    nodes_cfg.CFGZeroStar.execute(model)
    assert rebuilt._difference(model.function, "nodes_cfg").startswith("which gives something else")
