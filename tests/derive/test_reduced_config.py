"""Models of many heads are derived with fewer heads, with the same result as with all heads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from parallel_backend import declaration as d
from parallel_backend.derive.calls import Subject
from parallel_backend.derive.derive import derive
from parallel_backend.derive.reduced_config import derived_reduced, reduced_configs, widened
from parallel_backend.derive.small import Small, small_of, subjects_of
from parallel_backend.models.comfyui.importing import import_comfyui
from tests.derive.found import FOUND
from tests.derive.toys import toy
from tests.support.selection import thorough
from tests.support.tiny.comfyui import save_header, save_unread

HEADS = 8


def wan(folder: Path, **sizes: Any) -> Small:
    """Return Wan's small model, with twice as many heads as the derivation needs."""
    import_comfyui()
    import comfy.ops
    from comfy.ldm.wan.model import WanModel

    model = WanModel(
        model_type="t2v",
        **{"dim": HEADS * 128, "num_heads": HEADS, "ffn_dim": 256, "text_dim": 4096, "num_layers": 2, **sizes},
        dtype=torch.float32,
        device="meta",
        operations=comfy.ops.disable_weight_init,
    )
    with torch.inference_mode():
        return small_of(save_header(folder / "wan.safetensors", model), 8e9)


def first(small: Small) -> list[Subject]:
    with torch.inference_mode():
        return [next(subjects_of(small))]


def test_a_reduced_configuration_has_fewer_heads_and_matching_sizes(tmp_path: Path) -> None:
    small = wan(tmp_path, ffn_dim=1500)
    tried = [*reduced_configs(small, first(small)[0])]
    assert [each.changes for each in tried] == [
        {"dim": 512, "ffn_dim": 750, "num_heads": 4},
        {"dim": 512, "num_heads": 4},
    ]
    assert all((each.times, each.heads) == (2, (4, 128)) for each in tried)


@pytest.mark.parametrize("heads", [3, 5, 7])
def test_a_model_with_a_prime_number_of_heads_is_not_reduced(heads: int, tmp_path: Path) -> None:
    small = wan(tmp_path, dim=heads * 128, num_heads=heads)
    assert not [*reduced_configs(small, first(small)[0])]


# test_at_real_widths_fewer_heads_give_the_same_declaration has a declaration that holds.
def test_a_declaration_that_does_not_hold_for_all_heads_is_rejected(tmp_path: Path) -> None:
    """The narrow class acts as another class. A class that is quickly derived is not reduced at all."""
    small = wan(tmp_path)
    looked_at: list[Small] = []

    def made(narrow: Small) -> Sequence[Subject]:
        looked_at.append(narrow)
        return [toy()]

    assert derived_reduced(small, first(small), made, least=0) is None
    [narrow] = looked_at
    assert (narrow.base.diffusion_model.num_heads, narrow.base.diffusion_model.dim) == (4, 512)
    assert narrow.kind == small.kind
    assert derived_reduced(small, first(small), lambda narrow: [], least=0) is None
    assert derived_reduced(small, first(small), first) is None


def test_a_widened_declaration_has_more_heads_everywhere() -> None:
    wide = widened(FOUND, 5)
    assert wide.attention_heads == d.Constant((5 * 24, 128))
    chosen = wide.groups[0].attentions
    assert isinstance(chosen, d.AttentionsBySubmodule)
    assert chosen.present[0] == d.DistributedAttention(("x", "context"), kv_heads=10)
    assert chosen.absent == (d.DistributedAttention(("x",)),)


@thorough
@pytest.mark.parametrize(("name", "sizes"), [("wide_qwen", {"blocks": 2}), ("wide_z_image", {}), ("wide_chroma", {})])
def test_at_real_widths_fewer_heads_give_the_same_declaration(name: str, sizes: dict[str, int], tmp_path: Path) -> None:
    """Only the costs of a token, as fractions of the model's, may differ a little."""
    import_comfyui()
    with torch.inference_mode():
        small = small_of(save_unread(tmp_path, name, **sizes), 8e9)
    found, whole = derived_reduced(small, first(small), first), derive(first(small))
    assert found is not None
    for ours, its in zip(found.declaration.groups, whole.declaration.groups, strict=True):
        assert ours.active_weights == pytest.approx(its.active_weights, rel=0.05)
        assert ours.activation_copies == pytest.approx(its.activation_copies, rel=0.1)
    assert costless(found.declaration) == costless(whole.declaration)


def costless(data: d.Declaration) -> Any:
    groups = tuple(msgspec.structs.replace(each, active_weights=0.0, activation_copies=0.0) for each in data.groups)
    return msgspec.structs.replace(data, groups=groups)
