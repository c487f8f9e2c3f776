"""Inputs of odd dtypes and numbers give ComfyUI's own result."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.refusals.no_pictures import with_sigmas
from tests.support.graphs.flux import Graph, ksampler_graph, parallel
from tests.support.latents import relative_error, saved_latent
from tests.support.selection import thorough


def equal(comfyui, graph: Graph, **plan) -> bool:
    runs = [comfyui.queue(each, timeout=300).check() for each in (graph, parallel(graph, **plan))]
    theirs, ours = (saved_latent(comfyui, run) for run in runs)
    return relative_error(ours, theirs) <= 1e-5


# the quick run has one dtype
@pytest.mark.parametrize("dtype", [pytest.param(torch.float64, marks=thorough), torch.bool], ids=str)
def test_conditioning_of_any_dtype_is_cast_as_in_comfyui(comfyui, dtype):
    tensors = load_file(comfyui.input_dir / "cond-37.safetensors")
    name = str(dtype).removeprefix("torch.")
    save_file(tensors | {"cond": tensors["cond"].to(dtype)}, comfyui.input_dir / f"{name}.safetensors")
    assert equal(comfyui, ksampler_graph("tiny-schnell", positive=name, width=64, height=64, steps=2, cfg=2.0))


def test_a_single_sigma_and_rising_sigmas_give_comfyuis_latent(comfyui):
    assert equal(comfyui, with_sigmas("0.7"), pipefusion=2)
    assert equal(comfyui, with_sigmas("0.3, 0.6, 0.9"))
