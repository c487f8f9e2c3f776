"""Every kind of adapter, on every kind of parameter, gives the result of ComfyUI's own loader.

Adapters may fit the parameter or not. Rows that are computed alone give the same values.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel_backend.errors import Refused
from parallel_backend.weights.adapters.lora import AdapterSet, apply, needs_all_rows
from tests.support.nodes_module import ForGood, nodes_module
from tests.support.selection import thorough

# isort: split
import comfy.lora
import comfy.ops
import comfy.utils
from comfy.model_patcher import ModelPatcher

lora = nodes_module("model.features.lora", ForGood())
asked = nodes_module("model.features.adapter_requests", ForGood())

CPU = torch.device("cpu")
TOLERANCE = 1e-6
OPS = comfy.ops.disable_weight_init
ROWS = 6


def draw(*size: int, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


class Leaf(nn.Module):
    """A module without submodules. Its parameter is neither `weight` nor `bias`."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(draw(ROWS, 4, seed=20))


class Block(nn.Module):
    """A block with each kind of parameter that models have. One parameter lies next to submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.modulation = nn.Parameter(draw(1, ROWS, 4, seed=21))
        self.leaf = Leaf()
        self.norm = OPS.LayerNorm(ROWS)
        self.matrix = OPS.Linear(4, ROWS)
        self.square = OPS.Linear(ROWS, ROWS)
        self.one = OPS.Linear(4, 1)
        self.conv1 = OPS.Conv1d(4, ROWS, 2)
        self.conv2 = OPS.Conv2d(4, ROWS, (2, 3))
        self.conv3 = OPS.Conv3d(4, ROWS, (1, 2, 2))
        self.qkv = OPS.Linear(4, 3 * ROWS)
        self.head = OPS.Linear(4, 2 * ROWS)
        for number, parameter in enumerate(self.parameters()):
            parameter.data.copy_(draw(*parameter.shape, seed=number) + 0.1)
            parameter.requires_grad_(False)


class Stock(ModelPatcher):
    """ComfyUI's loader, changed to continue after an error and to keep the name of the parameter that raised it."""

    def __init__(self) -> None:
        model = nn.Module()
        model.diffusion_model = Block()
        super().__init__(model, CPU, CPU)
        self.raised: set[str] = set()

    def patch_weight_to_device(self, key: str, *args: Any, **given: Any) -> Any:
        try:
            return super().patch_weight_to_device(key, *args, **given)
        except Exception:
            self.raised.add(key)


PLACES: dict[str, tuple[Any, tuple[int, ...]]] = {
    **{
        name.removesuffix(".weight"): (f"diffusion_model.{name}", tuple(parameter.shape))
        for name, parameter in Block().named_parameters()
        if name not in ("qkv.weight", "head.weight")
    },
    "k": (("diffusion_model.qkv.weight", (0, ROWS, ROWS)), (ROWS, 4)),
    "columns": (("diffusion_model.qkv.weight", (1, 1, 2)), (3 * ROWS, 2)),
    "swapped": (("diffusion_model.head.weight", (0, 0, 2 * ROWS), comfy.utils.swap_scale_shift), (2 * ROWS, 4)),
}
"""Targets of an adapter, by a name in its file: ComfyUI's key (with part and function) and the shape of the target."""

STRENGTHS = (0.7, 0.9), (1.0, 1.0), (-1.3, 1.0), (0.0, 1.0)
"""Pairs of the adapter's strength and a factor on the parameter itself."""

FITS = "fits", "transposed", "flat", "more", "one row", "scalar"
"""Shapes of an adapter's result: equal to the parameter's, twice another shape of as many values, another number of values, and
fewer.
"""


def shaped(size: tuple[int, ...], fit: str) -> tuple[int, ...]:
    return {
        "fits": size,
        "transposed": tuple(reversed(size)),
        "flat": (math.prod(size),),
        "more": (size[0] + 2, *size[1:]),
        "one row": (1, *size[1:]),
        "scalar": (),
    }[fit]


def factors(size: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor]:
    rows = size[0] if size else 1
    return draw(rows, 2, seed=seed), draw(2, math.prod(size[1:]), seed=seed + 1)


def dora(size: tuple[int, ...], scheme: str) -> Tensor:
    shape = {
        "rows": (size[:1] or (1,)) + (1,) * (len(size) - 1),
        "matrix": (*(size[:1] or (1,)), 1),
        "columns": (1, *size[1:2], *[1] * (len(size) - 2)),
        "vector": size[:1],
        "one": (1,),
    }[scheme]
    return draw(*shape, seed=9).abs() + 0.5


def made(kind: str, size: tuple[int, ...]) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of one layer of a file, for a parameter of this size, by the last part of their names."""
    rows = size[0] if size else 1
    up, down = factors(size, 1)
    other = factors(size, 3)
    alpha = torch.tensor(1.5)
    channels = size[1] if len(size) > 1 else 1
    match kind:
        case "lora":
            yield {"lora_B.weight": up, "lora_A.weight": down}
            if len(size) > 2:
                kernel = {"lora_B.weight": up[(..., *[None] * (len(size) - 2))], "alpha": alpha}
                yield kernel | {"lora_A.weight": down.reshape(2, *size[1:])}
            yield {"lora_B.weight": up, "lora_A.weight": torch.cat([down, down])}  # ranks that differ
        case "dora":
            for scheme in ("rows", "matrix", "columns", "vector", "one"):
                scale = dora(size, scheme)
                yield {"lora_B.weight": up, "lora_A.weight": down, "dora_scale": scale, "alpha": alpha}
            yield {"lora_B.weight": up, "lora_A.weight": down, "dora_scale": torch.tensor(1.2)}
        case "loha":
            loha = dict(zip(("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"), (up, down, *other), strict=True))
            yield loha | {"alpha": alpha}
            yield loha | {"dora_scale": dora(size, "rows")}
            yield loha | {"dora_scale": dora(size, "matrix")}
            yield loha | {"hada_w2_a": other[0][:1]}  # spread over all rows
            yield loha | {"hada_w2_b": torch.cat([down, down])}  # ranks that differ
        case "lokr":
            if rows % 2 or (channels % 2 and channels > 1):
                return
            wide = min(2, channels)
            first = draw(2, wide, seed=5)
            kernel = draw(rows // 2, channels // wide, *size[2:], seed=6)
            yield {"lokr_w1": first, "lokr_w2": kernel}
            yield {"lokr_w1": first, "lokr_w2": kernel.flatten(1) if kernel.dim() > 1 else kernel}
            small = {"lokr_w2_a": kernel.flatten(1)[:, :1].clone(), "lokr_w2_b": kernel.flatten(1)[:1].clone()}
            yield {"lokr_w1_a": draw(2, 1, seed=7), "lokr_w1_b": draw(1, wide, seed=8), **small, "alpha": alpha}
            yield {"lokr_w1": first, **small, "dora_scale": dora(size, "rows"), "alpha": alpha}
            yield {"lokr_w1": first, **small, "dora_scale": dora(size, "matrix"), "alpha": alpha}
        case "glora":
            for columns in {channels, math.prod(size[1:])}:
                a1, a2 = draw(columns, 2, seed=5), draw(2, columns, seed=6)
                names = "a1.weight", "a2.weight", "b1.weight", "b2.weight"
                yield dict(zip(names, (a1, a2, up, down), strict=True)) | {"alpha": alpha}
                yield dict(zip(names, (a2, a1, down, up), strict=True)) | {"alpha": alpha}
                yield dict(zip(names, (a1, a2, up, down), strict=True)) | {"dora_scale": dora(size, "rows")}
            yield {f"{name}.weight": draw(rows, rows, seed=n) for n, name in enumerate(("a1", "a2", "b1", "b2"))}
        case "oft":
            for block in (2, 3):
                blocks = 0.1 * draw(max(1, rows // block), block, block, seed=5)
                yield {"oft_blocks": blocks}
                yield {"oft_blocks": blocks, "alpha": torch.tensor(0.05)}
        case "boft":
            yield {"oft_blocks": 0.1 * draw(1, rows // 2, 2, 2, seed=5)}  # without alpha, which ComfyUI cannot take
        case _:
            yield {kind: draw(*size, seed=5)}


@pytest.mark.parametrize(
    "kind",
    [
        *("lora", "dora", "lokr"),
        # models/test_merged_fp8 has these on weights of their shape
        *(pytest.param(kind, marks=thorough) for kind in ("loha", "glora", "oft")),
        *("boft", "diff", "set_weight", "w_norm", "diff_b"),
    ],
)
@torch.inference_mode()  # as ComfyUI runs its nodes
def test_adapters_are_applied_left_out_or_refused_as_by_comfyuis_loader(kind: str) -> None:
    found: Counter[str] = Counter()
    wrong: list[str] = []
    sizes = {name: tuple(parameter.shape) for name, parameter in Block().named_parameters()}
    reader = lora.AdapterReader(sizes, {})
    for fit in FITS:
        by_place = {place: list(made(kind, shaped(size, fit))) for place, (_, size) in PLACES.items()}
        for number in range(max(map(len, by_place.values()))):
            layers = {place: tensors[number] for place, tensors in by_place.items() if number < len(tensors)}
            for strength, scale in STRENGTHS if fit == "fits" else STRENGTHS[number % 4 : number % 4 + 1]:
                for place, outcome, difference in both(reader, layers, strength, scale):
                    found[outcome] += 1
                    if difference:
                        wrong.append(f"{place} {fit} {number} {strength}: {outcome}, {difference}")
    assert wrong == []
    assert all(found[outcome] >= 8 for outcome in OUTCOMES.get(kind, ("applied", "left out"))), found


OUTCOMES = {
    "boft": ("left out",),
    "loha": ("applied", "left out", "raised"),
    "set_weight": ("applied", "left out", "raised"),
}
"""Outcomes of a kind's cases with ComfyUI, where they are not the usual two."""


def both(
    reader: Any, layers: dict[str, dict[str, Tensor]], strength: float, scale: float
) -> Iterator[tuple[str, str, str]]:
    """Yield for each parameter its key, ComfyUI's outcome for a file of these layers, and the workers' difference if any."""
    theirs = Stock()
    file = {f"{place}.{name}": tensor for place, tensors in layers.items() for name, tensor in tensors.items()}
    before = {name: tensor.clone() for name, tensor in theirs.model.state_dict().items()}
    keys = {place: PLACES[place][0] for place in layers}
    theirs.add_patches(comfy.lora.load_lora(file, keys, log_missing=False), strength, scale)
    patched = asked.patched_keys(theirs)
    theirs.patch_model(CPU)
    for key, expected in theirs.model.state_dict().items():
        patches = {key: theirs.patches[key]} if key in theirs.patches else {}
        if key in theirs.raised:
            with pytest.raises(Refused, match="ComfyUI cannot apply this LoRA"):
                reader.read(patches, object(), lambda: patched)
            yield key, "raised", ""
            continue
        adapters = reader.read(patches, object(), lambda: patched)
        outcome = "applied" if not torch.equal(expected, before[key]) else "left out" if patches else "none"
        difference = ""
        for alone in (False, True):
            ours = merged(adapters, key, before[key], alone)
            off = float((ours - expected).norm()) / float(expected.norm())
            if not off <= TOLERANCE and not torch.equal(ours.nan_to_num(), expected.nan_to_num()):
                difference = f"{off:.2g} off, rows alone: {alone}"
        said = " ".join(adapters.left_out)
        if outcome == "left out" and strength and key.rpartition(".")[0] not in said:
            difference = f"the node says {said!r}"
        if outcome == "applied" and strength and len(patches[key]) == 1 and said and scale == 1.0:
            difference = f"the node says {said!r}"
        yield key, outcome, difference


def merged(adapters: AdapterSet, key: str, weight: Tensor, alone: bool) -> Tensor:
    """Return a parameter with adapters applied. If `alone`, each row is computed alone where the adapters allow it."""
    out, size = weight.clone(), tuple(weight.shape)
    recipe = adapters.recipe.get(key.removeprefix(lora.PREFIX), [])
    step = 1 if alone and not any(needs_all_rows(adapter, adapters.tensors, size) for adapter in recipe) else size[0]
    for start in range(0, size[0], step):
        rows = slice(start, start + step)
        apply(recipe, adapters.tensors, out[rows], rows, size)
    return out
