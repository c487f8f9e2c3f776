"""Properties of a declared model besides its blocks, against ComfyUI's own classes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace as redeclare

from parallel_backend.comm.meter import Meter
from parallel_backend.conditioning import ASKED, SHAPES, TEXT_PREPARATION, flatten
from parallel_backend.declaration import Declaration
from parallel_backend.denoise.prompts import Prompts
from parallel_backend.diffusion import PromptSpec
from parallel_backend.errors import Refused
from parallel_backend.mesh import build_mesh
from parallel_backend.models.comfyui.comfy_family import ComfyFamily
from parallel_backend.models.comfyui.meta_model import load_buffers
from parallel_backend.models.comfyui.model import ComfyForward, ComfyModel
from parallel_backend.models.comfyui.plan_shape import plan_shape
from parallel_backend.models.comfyui.proof.rank import CPU, plan_for
from parallel_backend.models.comfyui.reduced import keep_two_of_each
from parallel_backend.models.comfyui.small import OFTEN_USED, PICTURES, Builder, Case, small, small_model
from parallel_backend.models.comfyui.small.case import TEXT
from parallel_backend.models.comfyui.small.pictures import sd3
from parallel_backend.models.declared import DECLARATIONS
from parallel_backend.models.family import Execution, Stage
from parallel_backend.models.inputs import Inputs
from parallel_backend.models.sequence_parallel.blocks import blocks_of
from parallel_backend.models.sequence_parallel.module_attention import answered
from parallel_backend.models.sequence_parallel.picture import as_patch_size
from parallel_backend.weights.files.checkpoint import read_header
from parallel_backend.weights.stores.store import BlockAccess
from tests.support.classes import only_where_declared, only_where_small, small_or_skipped
from tests.support.latents import relative_error
from tests.support.ranks import run_ranks
from tests.support.tiny.comfyui import TINY, save_tiny
from tests.support.tiny.models import draw

# isort: split
import comfy.supported_models
from comfy.model_base import BaseModel

AROUND = ("apply_model", "_apply_model")
"""Methods of ComfyUI around its diffusion model. The workers do the same as the base class."""

CARRIED = {"LongCatImage": ["_apply_model"]}
"""Classes with a method of their own. It moves positions, which go with each forward (tests/families/test_images.py)."""


def described(kind: str) -> Any:
    """Return ComfyUI's description of a model class. No weights are made."""
    return getattr(comfy.supported_models, kind)({"disable_unet_model_creation": True, "hidden_size": 3072})


def comfy_forwards(case: Case, declaration: Declaration | None = None, patches: int = 1) -> Callable[[], ComfyForward]:
    """Return a function that begins a run on the only rank, with another declaration if one is given. Call it in `run_ranks`."""
    base = described(case.kind).get_model({}, "")
    base.diffusion_model = case.model
    plan = plan_for(case, patches=patches)
    (blocks,) = plan.stages
    model = ComfyModel(base, declaration or case.declaration, Stage(0, blocks, blocks))
    mesh = build_mesh(plan, CPU, Meter())
    return lambda: model.forward_on(Execution(mesh, plan, BlockAccess(), lambda: None))


@pytest.mark.parametrize("kind", DECLARATIONS)
def test_a_declared_class_overrides_no_method_around_its_diffusion_model(kind: str) -> None:
    """A class that overrides one of these methods would give wrong results without an error."""
    only_where_declared(kind)
    base = type(described(kind).get_model({}, ""))
    changed = [name for name in AROUND if getattr(base, name) is not getattr(BaseModel, name)]
    assert changed == CARRIED.get(kind, [])


@pytest.mark.parametrize("name", PICTURES)
def test_a_declaration_has_the_models_own_sizes(name: str) -> None:
    """Latent dimensions and channels, the text's width, and the heads that attention is called with equal the declared ones."""
    with torch.no_grad():
        case = small_or_skipped(name)
    latents, sizes = (
        described(case.kind).latent_format,
        as_patch_size(case.declaration.patch_size(case.model), case.x.ndim - 2),
    )
    assert len(sizes) == case.x.ndim - 2 == latents.latent_dimensions
    assert case.x.shape[1] == latents.latent_channels
    assert case.declaration.text_width(case.model) == case.arguments["context"].shape[2]
    seen = set()

    def attention(kernel: Any, q: Any, k: Any, v: Any, heads: int, *args: Any, **kwargs: Any) -> Any:
        seen.add((heads, q.shape[3] if kwargs.get("skip_reshape") else q.shape[2] // heads))
        return kernel(q, k, v, heads, *args, **kwargs)

    with torch.no_grad(), ExitStack() as stack:
        for group in case.declaration.groups:
            stack.enter_context(answered(group.attention_module, attention))
        case.model(
            case.x, case.timestep, transformer_options={"optimized_attention_override": attention}, **case.arguments
        )
    assert case.declaration.attention_heads(case.model) in seen


@pytest.mark.parametrize("name", [*OFTEN_USED, *PICTURES])
def test_no_buffer_of_a_model_stays_on_the_meta_device(name: str) -> None:
    """Workers build a model on the meta device and load its parameters, so no other tensor may be left there."""
    only_where_small(name)
    model = small_model(name, Builder(device="meta"))
    load_buffers(model, ())
    assert [key for key, buffer in model.named_buffers() if buffer.is_meta] == []
    assert {key for key, tensor in model.state_dict().items() if tensor.is_meta} == dict(
        model.named_parameters()
    ).keys()


@pytest.mark.parametrize("name", PICTURES)
def test_a_model_cut_to_two_blocks_of_each_kind_runs(name: str) -> None:
    """Timing keeps two blocks of each kind that plans know of, and the model still runs."""
    case = small_or_skipped(name)
    blocks = blocks_of(case.model, case.declaration)
    shape = plan_shape(case.kind, case.model, case.declaration, blocks, case.x.shape[1], case.x.ndim - 2)
    kinds = [count for count in (shape.double_blocks, shape.single_blocks) if count]
    keep_two_of_each(case.model, case.declaration)
    assert blocks_of(case.model, case.declaration)[-1].unit + 1 == 2 * len(kinds)
    with torch.no_grad():
        assert case.stock().shape == case.x.shape


@pytest.mark.parametrize("patches", [1, 2])
def test_a_declarations_options_replace_a_requests_only_under_pipefusion(patches: int) -> None:
    case = sd3(Builder()).case()
    seen: list[Any] = []
    case.model.register_forward_pre_hook(
        lambda *call: seen.append(call[2]["transformer_options"]["cache"]), with_kwargs=True
    )
    declaration = redeclare(case.declaration, pipefusion_options={"cache": {"device": "off"}})
    requested = {"transformer_options.cache.device": "auto", "transformer_options.cache.dtype": "int8"}
    inputs = Inputs("key", case.x.shape, case.x.dtype, CPU, case.timestep, case.arguments, values=requested)

    @torch.no_grad()
    def once(_: int) -> list[Any]:
        comfy_forwards(case, declaration, patches)()(inputs, case.x, None)
        return seen

    expected = {"device": "off"} if patches > 1 else {"device": "auto", "dtype": "int8"}
    assert run_ranks(1, once) == [[expected]]


def test_a_call_does_not_change_its_conditioning() -> None:
    """Conditioning is kept from step to step, and this model writes into its text."""
    case = sd3(Builder(), context_size=TEXT, context_processor_layers=1).case()
    text, x = case.arguments["context"], case.x
    with torch.no_grad():
        expected = case.model(x, case.timestep, context=text.clone(), y=case.arguments["y"])
    inputs = Inputs("key", x.shape, x.dtype, CPU, case.timestep, case.arguments)

    @torch.no_grad()
    def twice(_: int) -> Any:
        forward = comfy_forwards(case)()
        return [forward(inputs, x, None) for _ in range(2)]

    (outs,) = run_ranks(1, twice)
    assert all(torch.equal(out, expected) for out in outs)


STEPS = 3
TOKENS = (7, 4)
"""Token counts of the positive and the negative prompt."""


def test_texts_are_refined_once_a_run() -> None:
    """MiniMax-H3 refines each prompt once, and again in a second run. The result equals refining at every step."""
    case = small("minimax-h3")
    texts = {str(side): draw(1, tokens, TEXT, seed=side) for side, tokens in enumerate(TOKENS)}
    values: dict[str, Any] = {}
    flatten(SHAPES, [list(shape) for shape in case.shapes], {}, values)
    flatten(TEXT_PREPARATION, {ASKED: True}, {}, values)
    sides = {side: [PromptSpec({"context": str(side)}, values=values)] for side in range(len(TOKENS))}
    times = [torch.tensor(800.0 - 200.0 * step) for step in range(STEPS)]
    refined: list[int] = []

    @torch.no_grad()
    def run_twice(_: int) -> tuple[list[list[int]], list[float]]:
        begin, counts, errors = comfy_forwards(case), [], []
        for _run in range(2):
            refined.clear()
            prompts = Prompts(sides, tuple(sides), texts, torch.float32, 1, slice(0, 1))
            forward = begin()
            outs = []
            for time in times:
                sigmas = (time[None] / 1000, torch.stack(times) / 1000)
                for batch in prompts.at(sigmas[0][0]):
                    outs.append((batch, time, forward(batch.inputs(case.x, time, torch.float32, sigmas), case.x, None)))
            counts.append(refined.copy())
            for batch, time, out in outs:
                expected = replace(case, timestep=time[None], arguments=batch.conditioning).stock()
                assert out is not None
                errors.append(relative_error(out, expected))
        return counts, errors

    case.model.token_refiner.register_forward_hook(lambda _, given, __: refined.append(given[0].shape[0]))
    ((counts, errors),) = run_ranks(1, run_twice)
    assert counts == [[*TOKENS], [*TOKENS]]
    assert len(errors) == 2 * STEPS * len(TOKENS)
    assert max(errors) <= 1e-5


def test_a_picture_to_edit_of_another_height_is_refused_with_both_heights(tmp_path: Path) -> None:
    """The model concatenates it with the noisy latent. ComfyUI's own message names no node."""
    family = ComfyFamily()
    config: Any = family.inspect(read_header(save_tiny(tmp_path, "longcat")))[1]
    config = replace(config, declaration=redeclare(config.declaration, concatenated_latent="image_cond"))
    given = {"context": draw(1, 5, TINY["longcat"].text, seed=1)}
    latent = draw(1, 16, 9, 14, seed=2)
    family.check(config, latent, given | {"image_cond": draw(1, 16, 9, 11, seed=3)}, {})
    with pytest.raises(
        Refused, match="the picture to edit is a latent 8 high and the latent to sample is 9 high: use "
    ):
        family.check(config, latent, given | {"image_cond": draw(1, 16, 8, 14, seed=3)}, {})
