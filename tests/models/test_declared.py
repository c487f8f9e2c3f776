"""Properties of a declared model besides its blocks, against ComfyUI's own classes."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from msgspec.structs import replace as redeclare

from parallel_backend.comm.meter import Meter
from parallel_backend.mesh import build_mesh
from parallel_backend.models.comfyui.meta_model import load_buffers
from parallel_backend.models.comfyui.model import ComfyModel
from parallel_backend.models.comfyui.plan_shape import plan_shape
from parallel_backend.models.comfyui.reduced import keep_two_of_each
from parallel_backend.models.comfyui.small import OFTEN_USED, PICTURES, Builder, small_model
from parallel_backend.models.comfyui.small.case import TEXT
from parallel_backend.models.comfyui.small.pictures import sd3
from parallel_backend.models.declared import DECLARATIONS
from parallel_backend.models.family import Execution, Stage
from parallel_backend.models.inputs import Inputs
from parallel_backend.models.sequence_parallel.blocks import blocks_of
from parallel_backend.models.sequence_parallel.module_attention import answered
from parallel_backend.models.sequence_parallel.picture import as_patch_size
from parallel_backend.weights.stores.store import BlockAccess
from tests.support.classes import only_where_declared, only_where_small, small_or_skipped
from tests.support.plans import cpu_plan
from tests.support.ranks import run_ranks

# isort: split
from comfy.model_base import BaseModel

from tests.models.described import described

AROUND = ("apply_model", "_apply_model")
"""Methods of ComfyUI around its diffusion model. The workers do the same as the base class."""

CARRIED = {"LongCatImage": ["_apply_model"]}
"""Classes with a method of their own. It moves positions, which go with each forward (tests/families/test_images.py)."""


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
    base = described(case.kind).get_model({}, "")
    base.diffusion_model, seen = case.model, []
    case.model.register_forward_pre_hook(
        lambda *call: seen.append(call[2]["transformer_options"]["cache"]), with_kwargs=True
    )
    declaration = redeclare(case.declaration, pipefusion_options={"cache": {"device": "off"}})
    blocks, cpu = len(case.model.joint_blocks), torch.device("cpu")
    plan = cpu_plan(blocks=blocks, patches=patches)
    requested = {"transformer_options.cache.device": "auto", "transformer_options.cache.dtype": "int8"}
    inputs = Inputs("key", case.x.shape, case.x.dtype, cpu, case.timestep, case.arguments, values=requested)

    @torch.no_grad()
    def once(_: int) -> list[Any]:
        model = ComfyModel(base, declaration, Stage(0, blocks, blocks))
        model.forward_on(Execution(build_mesh(plan, cpu, Meter()), plan, BlockAccess(), lambda: None))(
            inputs, case.x, None
        )
        return seen

    expected = {"device": "off"} if patches > 1 else {"device": "auto", "dtype": "int8"}
    assert run_ranks(1, once) == [[expected]]


def test_a_call_does_not_change_its_conditioning() -> None:
    """Conditioning is kept from step to step, and this model writes into its text."""
    case = sd3(Builder(), context_size=TEXT, context_processor_layers=1).case()
    text, x, cpu = case.arguments["context"], case.x, torch.device("cpu")
    with torch.no_grad():
        expected = case.model(x, case.timestep, context=text.clone(), y=case.arguments["y"])
    base = described(case.kind).get_model({}, "")
    base.diffusion_model = case.model
    blocks = len(case.model.joint_blocks)
    plan = cpu_plan(blocks=blocks)
    inputs = Inputs("key", x.shape, x.dtype, cpu, case.timestep, case.arguments)

    @torch.no_grad()
    def twice(_: int) -> Any:
        model = ComfyModel(base, case.declaration, Stage(0, blocks, blocks))
        forward = model.forward_on(Execution(build_mesh(plan, cpu, Meter()), plan, BlockAccess(), lambda: None))
        return [forward(inputs, x, None) for _ in range(2)]

    (outs,) = run_ranks(1, twice)
    assert all(torch.equal(out, expected) for out in outs)
