"""What the declarations say of each model besides its blocks, against ComfyUI's own classes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parallel_backend.models.comfyui.family import _keep_two_of_each, _shape, load_buffers
from parallel_backend.models.declared import DECLARATIONS
from parallel_backend.models.spread.blocks import blocks_of
from parallel_backend.models.spread.picture import as_patch_size
from tests.models.tiny_classes import CASES, SETTINGS
from tests.models.tiny_images import IMAGES

# isort: split
import comfy.model_base
import comfy.supported_models
from comfy.model_base import BaseModel

AROUND = ("apply_model", "_apply_model")
"""What ComfyUI does around its diffusion model; the workers do the same."""


def described(kind: str) -> Any:
    """ComfyUI's description of a model, of which no weights are made."""
    return getattr(comfy.supported_models, kind)({"disable_unet_model_creation": True, "hidden_size": 3072})


@pytest.mark.parametrize("kind", DECLARATIONS)
def test_nothing_is_done_around_a_declared_model_that_the_workers_do_not_do(kind: str) -> None:
    """A class that does, such as LongCatImage, which moves positions, would be wrong without an error."""
    base = type(described(kind).get_model({}, ""))
    assert [name for name in AROUND if getattr(base, name) is not getattr(BaseModel, name)] == []


def test_a_class_that_does_more_is_noticed() -> None:
    base = comfy.model_base.LongCatImage
    assert [name for name in AROUND if getattr(base, name) is not getattr(BaseModel, name)] == ["_apply_model"]


@pytest.mark.parametrize("name", IMAGES)
def test_a_declaration_has_the_models_own_sizes(name: str) -> None:
    """Tokens as the latents of the kind have dimensions, heads as attention is called with them, the text's width."""
    with torch.no_grad():
        case = IMAGES[name]()
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

    with torch.no_grad():
        case.model(
            case.x, case.timestep, transformer_options={"optimized_attention_override": attention}, **case.arguments
        )
    assert case.declaration.heads_of(case.model) in seen


@pytest.mark.parametrize("name", [*CASES, *IMAGES])
def test_all_that_a_model_has_is_loaded_or_made(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers make a model on the meta device and load its parameters: nothing else may be left there."""
    monkeypatch.setitem(SETTINGS, "device", "meta")
    model = {**CASES, **IMAGES}[name]().model
    load_buffers(model)
    assert [key for key, buffer in model.named_buffers() if buffer.is_meta] == []
    assert {key for key, tensor in model.state_dict().items() if tensor.is_meta} == dict(
        model.named_parameters()
    ).keys()


@pytest.mark.parametrize("name", IMAGES)
def test_two_blocks_of_each_kind_are_timed(name: str) -> None:
    """As many as plans are told of kinds, and the model still runs."""
    case = IMAGES[name]()
    blocks = blocks_of(case.model, case.declaration)
    shape = _shape(case.kind, case.model, case.declaration, blocks, case.x.shape[1], case.x.ndim - 2)
    kinds = [count for count in (shape.double_blocks, shape.single_blocks) if count]
    _keep_two_of_each(case.model, case.declaration)
    assert blocks_of(case.model, case.declaration)[-1].unit + 1 == 2 * len(kinds)
    with torch.no_grad():
        assert case.stock().shape == case.x.shape
