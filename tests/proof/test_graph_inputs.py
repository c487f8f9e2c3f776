"""Small prompts of a class are combined until ComfyUI makes from them the inputs that a graph gives."""

from __future__ import annotations

import pytest
import torch

from parallel_backend.conditioning import TEXT_PREPARATION
from parallel_backend.errors import Refused
from parallel_backend.models.comfyui.own_call import conditioning_of, own_class
from parallel_backend.models.comfyui.small import SMALL, Builder, small_with_inputs
from parallel_backend.models.comfyui.small.graph_inputs import GraphInputs, graph_inputs_of
from parallel_backend.models.comfyui.small.kinds import KINDS, cases_of
from tests.support.classes import only_where_declared
from tests.support.comfy_oracle import comfy_on_path
from tests.support.selection import thorough

comfy_on_path()

QUICK = ("Flux", "WAN22_T2V", "LTXV")
TEXT: GraphInputs = {"context": None}


def given_by(kind: str, name: str) -> GraphInputs:
    """Return the inputs that ComfyUI's class makes from a small prompt."""
    example = SMALL[name](Builder())
    base = own_class(kind, example.model, {})
    with torch.inference_mode():
        made = conditioning_of(base, example.noise, example.prompt)
    return graph_inputs_of({argument: each.cond for argument, each in made.items()})


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[thorough] * (kind not in QUICK)) for kind in KINDS])
def test_each_small_call_is_found_by_its_inputs(kind: str) -> None:
    only_where_declared(kind)
    names = cases_of(kind, {})
    for name in names:
        given = given_by(kind, name)
        case = small_with_inputs(names, Builder(), kind, given)
        for argument, chosen in given.items():
            if "." not in argument:
                assert case.arguments[argument] is not None
            if chosen is not None:
                assert case.arguments[argument] == chosen
        assert torch.isfinite(case.stock()).all()


def test_inputs_of_several_small_calls_are_combined() -> None:
    names = cases_of("WAN21_T2V", {})
    both = {**TEXT, "time_dim_concat": None, "context_latents": None}
    one = {**TEXT, "context_latents": None}
    for given in (TEXT, one, both):
        case = small_with_inputs(names, Builder(), "WAN21_T2V", given)
        assert {name for name, value in case.arguments.items() if value is not None} == given.keys()


def test_a_graphs_mask_and_text_values_are_used() -> None:
    masked = small_with_inputs(cases_of("WAN22_T2V", {}), Builder(), "WAN22_T2V", {**TEXT, "denoise_mask": None})
    assert masked.timestep.shape == (1, 3)
    flux = given_by("Flux", "flux, references")
    assert flux["ref_latents_method"] == "offset"
    chosen = small_with_inputs(cases_of("Flux", {}), Builder(), "Flux", {**flux, "ref_latents_method": "uxo"})
    assert chosen.arguments["ref_latents_method"] == "uxo"


def test_an_input_of_no_small_call_is_named_and_the_workers_text_preparation_is_no_input() -> None:
    prepared = {"c_crossattn": torch.ones(1), TEXT_PREPARATION: {"asked": True}, "c_concat": torch.ones(1), "y": None}
    assert graph_inputs_of(prepared) == TEXT
    with pytest.raises(Refused, match="has no test call with new_input as in this graph"):
        small_with_inputs(cases_of("Flux", {}), Builder(), "Flux", {**given_by("Flux", "flux"), "new_input": None})
