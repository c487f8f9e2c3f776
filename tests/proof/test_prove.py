"""A model's class is proved on a small model: the plain call, Ulysses, Ring, patches, and rows and prompts separately."""

from __future__ import annotations

import functools
import inspect
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel_backend.models.comfyui.content.known import same_files, tables
from parallel_backend.models.comfyui.content.model_code import AROUND, sources_of
from parallel_backend.models.comfyui.proof.prove import TOLERANCE, prove
from parallel_backend.models.comfyui.proof.rank import errors_of, worst
from parallel_backend.models.comfyui.small import SMALL, Builder, small, small_model
from parallel_backend.models.comfyui.small.kinds import KINDS, all_cases, cases_of
from parallel_backend.models.declared import DECLARATIONS
from tests.support.classes import only_where_small
from tests.support.comfy_oracle import comfy_on_path
from tests.support.selection import thorough

comfy_on_path()

import comfy.conds as conds  # noqa: E402
import comfy.ldm.flux.layers as flux  # noqa: E402
import comfy.ldm.wan.model as wan  # noqa: E402
import comfy.model_base as model_base  # noqa: E402

FOLDER = Path(os.environ["COMFYUI_PATH"])


def test_every_declared_class_has_its_small_models() -> None:
    assert KINDS.keys() == DECLARATIONS.keys()
    assert {case for kind in KINDS for case in all_cases(kind)} <= SMALL.keys()
    assert all(cases_of(kind, {}) for kind in KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_small_models_have_the_declaration_of_their_class_whose_files_are_known_only_unchanged(kind: str) -> None:
    """A class whose files are known in a tested ComfyUI needs no proof. With any file changed it does."""
    names = all_cases(kind)
    only_where_small(names[0])
    examples = [SMALL[name](Builder(device="meta")) for name in names]
    assert all(DECLARATIONS[example.kind] is DECLARATIONS[kind] for example in examples)
    model = examples[0].model
    sources = sources_of(model, FOLDER)
    own = f"{type(model).__module__.replace('.', '/')}.py"
    assert {own, *AROUND} <= {path for path, _ in sources}
    assert same_files(sources, tables())
    for index, (path, _) in enumerate(sources):
        assert not same_files([*sources[:index], (path, "0" * 12), *sources[index + 1 :]], tables())


def test_small_calls_are_chosen_by_the_files_configuration() -> None:
    assert cases_of("Flux", {}) == ("flux", "flux, references", "flux, references by index")
    assert cases_of("WAN22_T2V", {}) == ("wan, text", "wan 2.2, a timestep a frame")
    assert cases_of("LTXAV", {"caption_proj_before_connector": True})[0] == "ltx-2.3"
    assert cases_of("LTXAV", {})[0] == "ltx-2"


def test_settings_that_choose_code_come_from_the_file_and_sizes_do_not() -> None:
    file = {"guidance_embed": False, "hidden_size": 3072, "txt_ids_dims": [1, 2], "vec_in_dim": None}
    model = small_model("flux", Builder(device="meta", chosen=file))
    assert model.params.guidance_embed is False and model.params.txt_ids_dims == [1, 2]
    assert model.params.hidden_size == 96 and getattr(model, "vector_in", None) is None


def less_the_mean(of: Callable[..., Any], dim: int) -> Callable[..., Any]:
    """Return a forward that also mixes the tokens of a stream (dimension 1) or the items of a batch (0).

    The results are equal wherever all tokens or items are present.
    """

    @functools.wraps(of)
    def edited(*args: Any, **given: Any) -> Any:
        out = of(*args, **given)
        return out - 0.1 * out.mean(dim=dim, keepdim=True) if isinstance(out, Tensor) else out

    edited.__signature__ = inspect.signature(of)  # type: ignore[attr-defined]
    return edited


EDITS: dict[str, tuple[str, Any, int]] = {
    "a block": ("wan, text", wan.WanAttentionBlock, 1),
    "its attention call": ("wan, text", wan.WanSelfAttention, 1),
    "its head": ("wan, text", wan.Head, 1),
    "items of a batch": ("wan, text", wan.WanModel, 0),
    "FLUX's last layer": ("flux", flux.LastLayer, 1),
    "FLUX's blocks": ("flux", flux.SingleStreamBlock, 1),
}
"""Edits of a forward by name: the small model, the class with the forward, and the dimension over which the edit mixes values."""


# test_an_argument_that_comfyuis_class_adds_is_part_of_the_proof mixes the items of a batch in the quick run.
@pytest.mark.parametrize("edit", [pytest.param(edit, marks=[thorough] * (edit != "a block")) for edit in EDITS])
def test_an_edited_class_fails_the_proof(edit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, kind, dim = EDITS[edit]
    monkeypatch.setattr(kind, "forward", less_the_mean(kind.forward, dim))
    errors = prove(small(case))
    wrong = {"ulysses 2", "ring 3"} if dim else {"data 2", "cfg 2"}
    assert {split for split, error in errors.items() if error > 1e-4} >= wrong, errors


def test_an_argument_that_comfyuis_class_adds_is_part_of_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewrite a forward so that it mixes rows if an argument is given. The proof passes until `extra_conds` gives it."""
    forward, conditioning = wan.WanModel.forward, model_base.WAN21.extra_conds

    @functools.wraps(forward)
    def mixing(*args: Any, mixes: bool = False, **given: Any) -> Any:
        out = forward(*args, **given)
        return out - 0.1 * out.mean(dim=0, keepdim=True) if mixes else out

    monkeypatch.setattr(wan.WanModel, "forward", mixing)
    errors = prove(small("wan, text"))
    assert errors.keys() >= {"ulysses 2", "ring 3", "data 2", "cfg 2"}
    assert max(errors.values()) <= TOLERANCE, errors
    added = {"mixes": conds.CONDConstant(True)}
    monkeypatch.setattr(model_base.WAN21, "extra_conds", lambda *args, **given: conditioning(*args, **given) | added)
    errors = prove(small("wan, text"))
    assert {split for split, error in errors.items() if error > 1e-4} == {"data 2", "cfg 2"}, errors


def test_nan_is_the_largest_error() -> None:
    """The rank and the errors before it do not matter."""
    right = torch.ones(2, 3)
    errors = [errors_of([right * factor], right) for factor in (1, math.nan, 1)]
    assert worst(errors) == math.inf
