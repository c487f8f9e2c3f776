"""Networks next to the blocks, on each rank's tokens, give the result of ComfyUI's own patches in its own forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from parallel_backend.models.comfyui.features.networks import (
    AnimaLLLite,
    NetworkCall,
    QwenDiffSynth,
    ZImageControl,
    patches_of,
)
from parallel_backend.models.comfyui.proof.rank import ProofRank, plan_for
from parallel_backend.models.comfyui.small import Builder, Case, small
from tests.models.parallel_models import PLANS, TOLERANCE, outputs, worst
from tests.support.selection import thorough
from tests.support.tiny.models import draw, randomise
from tests.support.tiny.networks import lllite_model

SIGMAS = {"sigmas": torch.tensor([0.6])}


@dataclass(frozen=True)
class Patched:
    """A case, the network as the workers have it, and ComfyUI's patches of the same network."""

    case: Case
    network: NetworkCall
    stock: Callable[[], Mapping[str, Any]]


def _lllite() -> Patched:
    from comfy.ldm.anima import lllite

    case = small("cosmos-predict2")
    model, metadata = lllite_model(case.model.model_channels, masked=True, blocks=(0, 1))
    image, mask = draw(1, 40, 60, 3, seed=3).sigmoid(), draw(1, 40, 60, seed=4).sigmoid()
    values = {"strength": 0.8, "sigma_start": 0.9, "sigma_end": 0.1}

    def stock() -> Mapping[str, Any]:
        whole = lllite.AnimaLLLitePatch(SimpleNamespace(model=model), image, mask, *values.values())
        targets = {part: f"self_attn_{part}_proj" for part in "qkv"}
        return {
            "post_input": [whole],
            "attn1_patch": [lllite.AnimaLLLiteAttentionPatch(whole, targets)],
            "attn2_patch": [lllite.AnimaLLLiteAttentionPatch(whole, {"q": "cross_attn_q_proj"})],
            "mlp_patch": [lllite.AnimaLLLiteMLPPatch(whole)],
        }

    return Patched(
        case, AnimaLLLite(dict(model.state_dict()), {"image": image, "mask": mask}, values | metadata), stock
    )


def _diffsynth(name: str) -> Patched:
    from comfy_extras.nodes_model_patch import BlockWiseControlBlock, DiffSynthCnetPatch

    case = small(name)
    width, count = case.model.inner_dim, len(case.model.transformer_blocks)
    blocks = torch.nn.ModuleList(
        [BlockWiseControlBlock(width, operations=Builder().settings["operations"]) for _ in range(count)]
    )
    randomise(blocks, seed=5)
    rows, columns = (-(-size // 2) for size in case.x.shape[-2:])
    encoded = draw(1, rows * columns, width, seed=6)

    def stock() -> Mapping[str, Any]:
        patch = DiffSynthCnetPatch.__new__(DiffSynthCnetPatch)  # its own constructor needs a VAE
        model = SimpleNamespace(control_block=lambda img, given, index: blocks[index](img, given))
        patch.__dict__ |= {"model_patch": SimpleNamespace(model=model), "strength": 0.7, "encoded_image": encoded}
        patch.vae = SimpleNamespace(spacial_compression_encode=lambda: 8)
        patch.encoded_image_size = tuple(8 * size for size in case.x.shape[-2:])
        return {"double_block": [patch]}

    return Patched(case, QwenDiffSynth(dict(blocks.state_dict()), {"encoded": encoded}, {"strength": 0.7}), stock)


def _zimage(name: str, **settings: Any) -> Patched:
    """Return a case whose network has more blocks than the model, so that the network runs to its end."""
    from comfy.ldm.lumina.controlnet import ZImage_Control
    from comfy_extras.nodes_model_patch import ZImageControlPatch

    case = small(name)
    width, heads = case.model.dim, case.model.n_heads
    given = {"dim": width, "n_heads": heads, "n_kv_heads": heads, "n_control_layers": 15, **settings}
    module = randomise(ZImage_Control(**given, **Builder().settings), seed=5)
    channels = 16 + given.get("additional_in_dim", 0)
    height, columns = (size + size % 2 for size in case.x.shape[-2:])
    encoded = draw(1, channels, height, columns, seed=6)

    def stock() -> Mapping[str, Any]:
        patch = ZImageControlPatch.__new__(ZImageControlPatch)
        vars(patch).update(
            model_patch=SimpleNamespace(model=module), strength=0.7, encoded_image=encoded, temp_data=None
        )
        patch.vae = SimpleNamespace(spacial_compression_encode=lambda: 8)
        patch.encoded_image_size = (8 * height, 8 * columns)
        return {"noise_refiner": [patch], "double_block": [patch]}

    return Patched(
        case, ZImageControl(dict(module.state_dict()), {"encoded": encoded}, {"strength": 0.7, **given}), stock
    )


KINDS: Mapping[str, Callable[[], Patched]] = {
    "lllite": _lllite,
    "diffsynth": lambda: _diffsynth("qwen-image, masked text"),
    "diffsynth, references": lambda: _diffsynth("qwen-image-edit, zero-timestep references"),
    "z-image": lambda: _zimage("z-image", additional_in_dim=17, refiner_control=True),
    "z-image, first version": lambda: _zimage("z-image"),
    "z-image, broken": lambda: _zimage("z-image", refiner_control=True, broken=True),
}
PATCHES = "3 patches over 2 stages, ulysses 2"
QUICK = {("lllite", "ulysses 2"), ("lllite", PATCHES), ("diffsynth", PATCHES), ("diffsynth, references", "ring 3"),
    ("z-image", "ring 3"), ("z-image, first version", "ulysses 2"),
}  # fmt: skip
WHOLE = "z-image"
"""The first word of networks that no plan with stages or patches supports."""


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        pytest.param(kind, plan, marks=() if (kind, plan) in QUICK else thorough)
        for kind in KINDS
        for plan in PLANS
        if not (kind.startswith(WHOLE) and "patches" in PLANS[plan])
    ],
)
def test_a_network_gives_the_models_own_result(kind: str, plan: str) -> None:
    """The whole call equals ComfyUI's, and so does each patch with a cache of the same call."""
    with torch.no_grad():
        patched = KINDS[kind]()
        case = replace(patched.case, options={**SIGMAS, "patches": patched.stock()})
        expected = case.stock()
        assert worst([[patched.case.stock()]], expected) > 1e-2

    def call_network(rank: ProofRank) -> None:
        entrance = rank.model.entrance

        def entered(*args: Any, transformer_options: Any, **given: Any) -> Any:
            more = {"patches": patches_of([patched.network], rank.model.now.call)}
            return entrance(*args, transformer_options={**transformer_options, **SIGMAS, **more}, **given)

        rank.model.entrance = entered  # type: ignore[method-assign]

    found = outputs(patched.case, plan_for(patched.case, **PLANS[plan]), call_network)
    assert worst(found, expected) <= TOLERANCE
