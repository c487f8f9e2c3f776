"""Behaviours of newer versions of ComfyUI, in a copy of the installed one with stand-ins appended to some of its files.

Each stand-in behaves as the version in its comment. The stock loader and the workers use the same copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from scripts.comfyui import ComfyUI
from tests.support.copies.sized import copied
from tests.support.graphs.comfyui import (
    DIFFERENT,
    PLANS,
    TOLERANCE,
    LatentOf,
    graph_of,
    masked,
    save_families,
    save_latent,
    spread,
)
from tests.support.graphs.diffusers import refused
from tests.support.graphs.family_checks import assert_equal_run, assert_matters_and_stock
from tests.support.graphs.flux import insert_after_model, node
from tests.support.graphs.sound import sound_graph
from tests.support.latents import relative_error, saved_latent
from tests.support.selection import thorough

pytestmark = thorough
"""These tests start a ComfyUI of their own; `models/test_newer` tests the workers' half in the quick run."""

STAND_INS: Mapping[str, str] = {
    # 0.35's cfgpp_ud10_ab: CFG++ without the name, which reads in its hook if there was a negative
    "comfy/k_diffusion/sampling.py": """


@torch.no_grad()
def sample_plus_plus(model, x, sigmas, extra_args=None, callback=None, disable=None):
    seen = {}

    def post_cfg_function(args):
        assert args["model"] is not None and args["cond"] is not None
        seen["side"] = args["cond_denoised"] if args["uncond"] is None else args["uncond_denoised"]
        seen["scale"] = args["cond_scale"]
        return args["denoised"]

    extra_args = dict(extra_args or {})
    extra_args["model_options"] = comfy.model_patcher.set_model_options_post_cfg_function(
        extra_args.get("model_options", {}).copy(), post_cfg_function, disable_cfg1_optimization=True
    )
    for i in range(len(sigmas) - 1):
        denoised = model(x, sigmas[i] * x.new_ones([x.shape[0]]), **extra_args)
        if callback is not None:
            callback({"x": x, "i": i, "sigma": sigmas[i], "sigma_hat": sigmas[i], "denoised": denoised})
        x = denoised + (x - seen["side"]) * (sigmas[i + 1] / sigmas[i]) * (1 + 0.01 * seen["scale"])
    return x
""",
    "comfy/samplers.py": """


for _names in (KSAMPLER_NAMES, SAMPLER_NAMES):
    if "plus_plus" not in _names:
        _names.append("plus_plus")
""",
    # 0.33's SamplerER_SDE always passes a function
    "comfy_extras/nodes_custom_sampler.py": """


class SamplerER_SDE(SamplerER_SDE):
    @classmethod
    def execute(cls, solver_type, max_stage, eta, s_noise) -> io.NodeOutput:
        def er_sde_noise_scaler(x):
            return x * ((x ** 0.3).exp() + 10.0) ** eta

        given = {"s_noise": s_noise, "noise_scaler": er_sde_noise_scaler, "max_stage": max_stage}
        return io.NodeOutput(comfy.samplers.ksampler("er_sde", given))

    get_sampler = execute
""",
    # 0.34's MiniMax-H3 mixes some of the noise into the latent outside a mask
    "comfy/model_base.py": """


def _shown(self, sigma, noise, latent_image, **kwargs):
    return 0.7 * latent_image + 0.3 * noise


MiniMaxH3.scale_latent_inpaint = _shown
""",
    # 0.33's LTX-2 reads a set from its options
    "comfy/ldm/wan/model.py": """


class WanModel(WanModel):
    def forward(self, *args, transformer_options={}, **kwargs):
        out = super().forward(*args, transformer_options=transformer_options, **kwargs)
        if transformer_options.get("doubled_by") is not None:
            return out * 2
        halved = transformer_options.get("halved_blocks", ())
        return out * 0.5 if isinstance(halved, frozenset) and 1 in halved else out
""",
    "nodes.py": '''


class StandInOptions:
    """Sets an option of a model."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "set", "stand-ins"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",), "name": ("STRING",), "blocks": ("STRING",)}}

    def set(self, model, name, blocks):
        model = model.clone()
        value = frozenset(int(block) for block in blocks.split(",")) if blocks else object()
        model.model_options["transformer_options"][name] = value
        return (model,)


class StandInLoop:
    """Has a sampler work in its place, under the id of a loop's turn, as 0.35's loops do."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("LATENT",), "turn", "stand-ins"

    @classmethod
    def INPUT_TYPES(cls):
        types = {"model": "MODEL", "positive": "CONDITIONING", "negative": "CONDITIONING", "latent_image": "LATENT"}
        return {
            "required": {name: (kind, {"rawLink": True}) for name, kind in types.items()},
            "hidden": {"node": "UNIQUE_ID"},
        }

    def turn(self, node, **links):
        settings = {"seed": 7, "steps": 3, "cfg": 2.5, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}
        turn = f"{node}_iteration_1"
        expanded = {turn: {"class_type": "ParallelSampler", "inputs": {**links, **settings}}}
        return {"result": ([turn, 0],), "expand": expanded}


NODE_CLASS_MAPPINGS.update({"StandInOptions": StandInOptions, "StandInLoop": StandInLoop})
''',
}
"""Code to append to files of the copy."""

SPLITS = [PLANS[0], {"devices": "cpu:2", "cfg": 2}]


@pytest.fixture(scope="module")
def comfyui(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyUI]:
    server = copied(tmp_path_factory.mktemp("newer"), STAND_INS)
    save_families(server, "wan", "minimax")
    save_latent(server, "kept-video", 1, 24, 7, 8, 6)
    save_latent(server, "kept-sound", 1, 32, 2, 37)
    with server:
        yield server


@pytest.mark.parametrize("cfg", [2.5, 1.0])
@pytest.mark.parametrize("plan", SPLITS)
def test_a_sampler_is_known_as_cfg_plus_plus_by_its_hook(
    comfyui: ComfyUI, latent_of: LatentOf, plan: dict[str, Any], cfg: float
) -> None:
    graph = graph_of("wan", sampler_name="plus_plus", cfg=cfg)
    stock = latent_of(graph)
    assert relative_error(latent_of(graph_of("wan", cfg=cfg)), stock) > DIFFERENT
    assert_equal_run(comfyui, spread(graph, **plan), stock)


@pytest.mark.parametrize("eta", [1.0, 0.4])
def test_a_sampler_nodes_function_runs_in_the_workers(comfyui: ComfyUI, latent_of: LatentOf, eta: float) -> None:
    plain = graph_of("wan")
    given = plain["sampler"]["inputs"]
    graph = plain | {
        "select": node("SamplerER_SDE", solver_type="ER-SDE", max_stage=3, eta=eta, s_noise=0.9),
        "sigmas": node("BasicScheduler", model=["model", 0], scheduler="simple", steps=4, denoise=1.0),
        "sampler": node(
            "SamplerCustom",
            **{name: given[name] for name in ("model", "positive", "negative", "latent_image", "cfg")},
            add_noise=True,
            noise_seed=5,
            sampler=["select", 0],
            sigmas=["sigmas", 0],
        ),
    }
    assert_equal_run(comfyui, spread(graph, **PLANS[0], strict=False), latent_of(graph))


@pytest.mark.parametrize("plan", SPLITS)
def test_an_option_that_is_a_set_reaches_the_workers(latent_of: LatentOf, plan: dict[str, Any]) -> None:
    plain = graph_of("wan")
    graph = insert_after_model(plain, "StandInOptions", name="halved_blocks", blocks="1,29")
    assert_matters_and_stock(latent_of, plain, graph, **plan)


def test_an_option_that_the_model_reads_and_that_cannot_be_sent_is_refused(comfyui: ComfyUI) -> None:
    graph = insert_after_model(graph_of("wan"), "StandInOptions", name="doubled_by", blocks="")
    message = refused(comfyui, spread(graph, **PLANS[0]))
    assert "the option doubled_by (a object) cannot be applied to a parallel MODEL" in message


def test_an_option_that_no_model_reads_is_not_sent(latent_of: LatentOf) -> None:
    plain = graph_of("wan")
    graph = insert_after_model(plain, "StandInOptions", name="of_another_pack", blocks="")
    assert relative_error(latent_of(spread(graph, **PLANS[0])), latent_of(plain)) <= TOLERANCE


def test_a_mask_of_a_class_that_mixes_in_noise_gives_the_stock_latent(comfyui: ComfyUI, latent_of: LatentOf) -> None:
    plain = sound_graph("minimax", steps=2) | {
        "video": node("LoadLatent", latent="kept-video.latent"),
        "sound": node("LoadLatent", latent="kept-sound.latent"),
        "latent": node("LTXVConcatAVLatent", video_latent=["video", 0], audio_latent=["sound", 0]),
    }
    graph = masked(plain, 6, 8, 7, of="video")
    stock = latent_of(graph)
    assert relative_error(latent_of(plain), stock) > DIFFERENT
    assert_equal_run(comfyui, spread(graph, **PLANS[0], strict=False), stock, "a mask with the model MiniMaxH3")


def test_a_run_in_a_loop_is_reported_on_the_loops_node(comfyui: ComfyUI, latent_of: LatentOf) -> None:
    plain = graph_of("wan")
    graph = spread(plain, **PLANS[0])
    links = {name: graph["sampler"]["inputs"][name] for name in ("model", "positive", "negative", "latent_image")}
    run = comfyui.queue(graph | {"sampler": node("StandInLoop", **links)}, timeout=300).check()
    assert relative_error(saved_latent(comfyui, run), latent_of(plain)) <= TOLERANCE
    texts = [each.text for each in run.texts if each.node == "sampler"]
    assert "Preparing" in texts and any(text.startswith("Step 3 of 3") for text in texts)
    _, _, _, extra_data, *_ = comfyui.history(run.prompt_id)["prompt"]
    assert set(extra_data["parallel"]) == {"sampler"}
