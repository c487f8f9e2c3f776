"""Another pack's changes of a MODEL, GUIDER or SAMPLER change a parallel MODEL's picture in the same way, or are refused."""

from __future__ import annotations

import pytest

from tests.support.graphs.flux import Graph, node, parallel, queue_logged, ways
from tests.support.graphs.other_packs import (
    REFUSED,
    basic,
    called_back,
    changed,
    changed_by_steps,
    custom,
    guided,
)
from tests.support.latents import relative_error, saved_latent
from tests.support.selection import thorough

WAY_OUT = "the weights live in the workers; remove that node, or use Load Diffusion Model."


def sampled(kind: str) -> Graph:
    return custom(sampler=node("PackSampler", kind=kind))


STEP_BY_STEP: dict[str, tuple[Graph, str]] = {
    **{
        kind: (changed(kind), reason)
        for kind, reason in {
            "object patch apply_model": "the object patch apply_model",
            "object patch process_timestep": "the object patch process_timestep",
            "calculate_denoised of its own": "a model sampling with its own calculate_denoised",
            "timestep of its own": "a model sampling with its own timestep",
            "apply_model on the instance": "a model with its own apply_model",
            "a class of its own": "the class PackModel in the model",
            "an injection": "the injection pack",
            "cfg_function": "the function cfg_function of another pack",
            "forward on the instance": "a diffusion model with its own forward",
            "a hook on the diffusion model": "a hook on the diffusion model",
        }.items()
    },
    "one side": (guided("one side"), "a guider without a negative prompt at cfg 2"),
    "predict_noise on the instance": (
        guided("predict_noise on the instance"),
        "a guider with its own predict_noise",
    ),
    "a subclass": (guided("a subclass"), "the class StrongGuider in the guider"),
    "sample on the instance": (sampled("sample on the instance"), "a sampler with its own sample"),
    "a function that looks at the latent": (
        sampled("a function that looks at the latent"),
        "the sampler looking, which takes a norm of the latent",
    ),
    "a function that notes something": (
        sampled("a function that notes something"),
        "the sampler noting, which changes the guider or the model's options during the run",
    ),
}
"""Graphs that run in ComfyUI's loop, and the reason that the log gives."""


THOROUGH = {
    "object patch process_timestep": "object patch apply_model",
    "timestep of its own": "calculate_denoised of its own",
}
"""The kinds left to `--all`, each with the kind of the quick run that the same check finds."""


@pytest.mark.parametrize(
    ("graph", "reason"),
    [pytest.param(*case, id=kind, marks=[thorough] * (kind in THOROUGH)) for kind, case in STEP_BY_STEP.items()],
)
def test_changes_of_the_sampling_run_in_comfyuis_loop_with_the_same_effect(assert_equal_latents, graph, reason):
    assert ways(assert_equal_latents(parallel(graph), graph)) == [reason]


def test_a_sampler_function_that_computes_elementwise_is_recorded(latent_of, assert_equal_latents):
    graph = sampled("a function around ComfyUI's")
    assert ways(assert_equal_latents(parallel(graph), graph)) == ["loop"]
    assert relative_error(latent_of(custom()), latent_of(graph)) > 0.1


def test_a_sampler_function_without_callbacks_is_recorded_and_excludes_pipefusion(assert_equal_latents):
    graph = sampled("a function that tells nothing")
    for plan, way in [
        ({"devices": "cpu:2", "cfg": 2}, "loop"),
        (
            {"devices": "cpu:2", "pipefusion": 2, "warmup_steps": 99},
            "the sampler silent, which reports no steps, with PipeFusion",
        ),
    ]:
        assert ways(assert_equal_latents(parallel(graph, **plan), graph)) == [way]


@pytest.mark.parametrize("kind", ["object patch apply_model", "timestep of its own", "an injection"])
def test_parallel_sampler_refuses_changes_of_the_sampling(comfyui, kind):
    graph, reason = STEP_BY_STEP[kind]
    run = comfyui.queue(parallel(graph, sampler=True))
    assert run.status == "error"
    message = run.error.exception_message
    assert message.startswith(f"Parallel Sampler does not support {reason}: choose ")
    assert message.endswith(", or KSampler, which is slower (one model call at a time).")


def refused(comfyui, kind):
    run = comfyui.queue(parallel(changed(kind)))
    return run.error.exception_message if run.error else run.status


def test_changes_inside_the_model_are_refused_by_name(comfyui, assert_equal_latents):
    said = {kind: refused(comfyui, kind) for kind in REFUSED}
    assert said == {kind: f"{what} cannot be done with a parallel MODEL: {WAY_OUT}" for kind, what in REFUSED.items()}
    assert_equal_latents(parallel(basic()), basic())  # the same MODEL, without the changes


def replaced(name: str) -> str:
    return (
        f"{name} is replaced by other code (custom_nodes/other-pack/__init__.py), which cannot take effect on a parallel MODEL, "
        "because the workers run ComfyUI without other packs: remove the pack that replaces it, or use Load Diffusion Model."
    )


@pytest.mark.parametrize("kind", ["attention of the blocks", "attention from the second call on"])
def test_a_replaced_function_of_the_models_code_is_refused_by_name(comfyui, latent_of, kind):
    """tests/content/test_replaced.py tests which functions count as replaced."""
    assert relative_error(latent_of(changed(kind)), latent_of(basic())) > 1e-3
    assert refused(comfyui, kind) == replaced("comfy.ldm.flux.layers.attention")


def test_replaced_attention_of_torch_is_refused_with_any_attention_backend(comfyui):
    name = "torch.nn.functional.scaled_dot_product_attention"
    assert refused(comfyui, "attention of torch") == replaced(name)


def test_a_deep_copy_of_a_model_is_refused_and_a_shallow_one_keeps_its_own_patches(comfyui, latent_of):
    what = "Copying the diffusion model (copy.deepcopy)"
    assert refused(comfyui, "a deep copy") == f"{what} cannot be done with a parallel MODEL: {WAY_OUT}"
    graph = changed("a shallow copy with a patch")
    assert relative_error(latent_of(graph), latent_of(basic())) > 1e-3
    # last, because the patch stays in the stock loader's model until ComfyUI drops it from its cache
    assert relative_error(latent_of(parallel(graph)), latent_of(graph)) <= 1e-5


@pytest.mark.parametrize("kind", ["memory that becomes free", "memory that is taken", "another formula of memory"])
def test_a_step_gives_the_stock_latent_for_any_batches_of_comfyuis_second_pass(assert_equal_latents, kind):
    graph = changed_by_steps(kind)
    log = assert_equal_latents(parallel(graph, cfg=2), graph)
    assert ways(log) == ["the model option sampler_cfg_function"]
    assert ("model calls that ComfyUI did not use" in log) == (kind == "another formula of memory")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("x0 in place", "x0"),
        ("x by its data", "x"),
        *(pytest.param(*case, marks=thorough) for case in [("x in place", "x"), ("x0 through numpy", "x0")]),
    ],
)
def test_a_callback_that_changes_a_latent_ends_the_run_and_takes_effect_in_the_next(
    comfyui, assert_equal_latents, kind, name
):
    """The change is found for every way to write: torch's version counter does not see the last two kinds."""
    run = comfyui.queue(parallel(called_back(kind)))
    assert run.error is not None
    message = run.error.exception_message
    assert ".sample.<locals>.callback changed " in message
    assert (
        f"changed {name} of step 1 of 3, and the workers' loop cannot use the changed latent: queue the prompt again"
        in message
    )
    [reason] = ways(assert_equal_latents(parallel(called_back(kind, turn=1)), called_back(kind)))
    assert reason.endswith(".sample.<locals>.callback, which changes latents")
    # the same function, which now only reads the latent
    assert ways(assert_equal_latents(parallel(called_back("looks", turn=1)), called_back("looks"))) == ["loop"]


def test_a_function_that_counts_its_runs_runs_as_often_as_with_the_stock_loader(comfyui):
    """The first prompt of each loader makes a new SAMPLER, and the second prompt uses it again."""

    def twice(swap):
        comfyui.queue(basic()).check()  # makes ComfyUI drop the SAMPLER from its cache
        graph = swap(sampled("a function that counts its runs"))
        for seed in (1, 2):
            graph["noise"]["inputs"]["noise_seed"] = seed
            run, log = queue_logged(comfyui, graph)
            yield saved_latent(comfyui, run.check()), ways(log)

    stock = [latent for latent, _ in twice(dict)]
    for (ours, way), expected in zip(twice(parallel), stock, strict=True):
        assert relative_error(ours, expected) <= 1e-5
        assert way == ["the sampler counting, which keeps state between runs"]
