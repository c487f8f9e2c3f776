"""The small model of a file: ComfyUI's own class with the file's configuration, two blocks of each kind, and calls for it."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import Refused
from ..models.comfyui.detection import DAMAGE, detect, unmakable
from ..models.comfyui.meta_model import make_in_memory, make_model
from ..models.comfyui.proof.ranks import in_a_line
from ..models.comfyui.reduced import keep_some, randomise
from ..weights.files.checkpoint import TensorEntry, read_header
from .calls import FAILS, ByClass, ModelCall, Sizes, Subject
from .deriving import unit_of
from .rules import not_derived

KEEPINGS = (2, 2), (3, 1)
"""Numbers of list members to keep: of the list's first kind, and of each other kind.

Models whose second half takes outputs of the first half (HunyuanDiT) run only with the second pair: their middle block is of
the first kind.
"""

TEXT = 7
"""Tokens of the text."""

MARKS = ("context", "text", "txt", "cap", "cond", "cross", "t5", "llm", "y_")
"""Parts of configuration and layer names that give the width of the text."""


@dataclass(frozen=True)
class Small:
    """A small copy of a file's model on the CPU, with the data to build it again.

    Attributes:
        path: the file.
        members_per_list: as in `small_of`.
        tensors: the file's tensors, on the meta device.
        entries: the position of each tensor's bytes in the file.
        kind: the name of the model's class.
        described: ComfyUI's configuration of the file.
        base: ComfyUI's BaseModel, small.
        lengths: the lengths of the diffusion model's lists in the file, by path.
    """

    path: Path
    members_per_list: tuple[int, int]
    tensors: Mapping[str, Tensor]
    entries: Mapping[str, TensorEntry]
    kind: str
    described: Any
    base: Any
    lengths: Mapping[str, int]


def small_of(
    path: Path,
    limit: float,
    members_per_list: tuple[int, int] = KEEPINGS[0],
    changes: Mapping[str, int] = MappingProxyType({}),
) -> Small:
    """Return the small model of a file.

    Args:
        path: the file.
        limit: most bytes that the model's weights may have, in fp32.
        members_per_list: the number of members to keep in each list: of its first kind, and of each other kind.
        changes: changes to the configuration that ComfyUI detects.

    Raises:
        Refused: the file is no model that ComfyUI knows, or the model is too large.
    """
    part, _, described = detect(read_header(path))
    described.unet_config.update(changes)
    tensors = part.meta_tensors()
    try:
        base = make_in_memory(described, tensors, part.entries)
    except DAMAGE as error:
        raise unmakable(part, error) from None
    kind, model = type(described).__name__, base.diffusion_model
    lengths = keep_some(model, *members_per_list)
    size = sum(tensor.numel() for tensor in model.state_dict().values()) * 4
    if size > limit:
        raise Refused(
            f"{kind} is too large to derive: with {members_per_list[0]} blocks of each kind it has {size / 2**30:.1f} "
            f"GiB of weights and {limit / 2**30:.1f} GiB are available; raise --memory, or close other programs."
        )
    randomise(model, 0, tensors)
    return Small(path, members_per_list, tensors, part.entries, kind, described, base, lengths)


def narrowed(small: Small, changes: Mapping[str, int]) -> Small:
    """Return the model with a changed configuration. Raises Refused if ComfyUI cannot build the model."""
    return small_of(small.path, math.inf, small.members_per_list, changes)


def unfilled(small: Small) -> nn.Module:
    """Return the model as workers build it in bf16, on the meta device, where nothing is computed."""
    model: nn.Module = make_model(small.described, small.tensors, torch.bfloat16, small.entries).diffusion_model
    keep_some(model, *small.members_per_list)
    return model


def subjects_of(small: Small) -> Iterator[Subject]:
    """Yield the small model with calls that it accepts: a video, then a single frame.

    Raises:
        Refused: the model accepts no call.
    """
    model, by_class = small.base.diffusion_model, ByClass(small.base)
    widths = _widths(small.described, model)
    tried = ""
    count = 0
    unit = unit_of(model)
    two = small.base.latent_format.latent_dimensions == 2
    rows, more = (4 * unit, 6 * unit), (18 * unit, 20 * unit)
    for picture in [rows, more] if two else [(3, *rows), (1, *rows)]:
        sizes = Sizes(picture, TEXT)
        for text, pooled in itertools.product(widths, [*widths, 0]):
            make = functools.partial(_call, by_class, text=text, pooled=pooled)
            try:
                make(sizes).of(model)
            except FAILS as error:
                tried = tried or in_a_line(error)
                continue
            count += 1
            yield Subject(model, make, sizes, batches=True, lengths=small.lengths)
            break
    if not count:
        raise not_derived(small.kind, f"its forward fails on every test call that was made up for it ({tried})")


def _call(by_class: ByClass, sizes: Sizes, text: int, pooled: int) -> ModelCall:
    """Return a call with a text of width `text` and a pooled text of width `pooled` (none for 0)."""
    generator = torch.Generator().manual_seed(2)
    prompt = {"cross_attn": torch.randn(1, sizes.text, text, generator=generator)}
    if pooled:
        prompt["pooled_output"] = torch.randn(1, pooled, generator=generator)
    return by_class.call(sizes, prompt)


def _widths(described: Any, model: nn.Module) -> list[int]:
    """Return possible widths of the text, the likeliest first: from the configuration, then from the layers' input widths."""
    named = [
        value
        for name, value in described.unet_config.items()
        if isinstance(value, int) and not isinstance(value, bool) and value > 3 and any(mark in name for mark in MARKS)
    ]
    layers = {name: module.weight.shape[1] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    marked = [width for name, width in layers.items() if any(mark in name for mark in MARKS)]
    return [*dict.fromkeys((*named, *marked, *layers.values()))]
