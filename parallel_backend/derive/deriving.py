"""Candidate declarations that fit the traces of a model, the likeliest first."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from .. import declaration as d
from ..declaration import Constant
from ..models.sequence_parallel.picture import as_patch_size
from .call_sites import ModelParts, Sites, find_parts, look_again, look_closely
from .calls import FAILS, Sizes, Subject
from .describing import Description
from .groups import cut_by, fitting_additions, fitting_groups, fitting_heads, grouped
from .interleaved_blocks import interleaved_blocks_of
from .rules import Undescribed
from .tracing import trace

SIZES = (((4, 4, 6), 7), ((6, 6, 8), 10), ((2, 7, 3), 5))
"""Frames and units of height and width, and text tokens. All lengths that result from these sizes differ."""

LARGER = 4
"""The factor of the larger sizes for a model that fails on the normal ones."""

MOST = 16
"""Largest number of candidates."""


@torch.inference_mode()
def candidates(subject: Subject) -> Iterator[d.Declaration]:
    """Yield declarations that fit the traces of a model.

    Raises:
        Undescribed: no declaration fits, with the reason.
    """
    model, unit = subject.model, unit_of(subject.model)
    sizes, parts = _first_that_runs(subject, unit)
    calls = [subject.call(each) for each in sizes]
    first = look_closely(model, calls[0], parts)
    seen = [first, *(look_again(model, call, parts, first) for call in calls[1:])]
    order = [path for path in parts.blocks if first[path].tokens]
    groups = grouped(model, order)
    blocks = {
        path: [Description([each[member] for each in seen]) for member in members] for path, members in groups.items()
    }
    heads = next((block.heads for members in blocks.values() for block in members if block.heads), None)
    if heads is None:
        raise Undescribed("no attention of it has tokens that follow the latent's rows, columns and frames")
    step = _step(first)
    named: dict[str, Any] = {} if _names(model, step) else {"patch_size": Constant(step)}
    if not _pads(subject, sizes[0], step):
        named["divisible_latent"] = True
    if turns := interleaved_blocks_of(subject, calls[0], blocks, order):
        named["units"] = turns
    text = calls[0].arguments.get("context")
    every = [[*fitting_groups(model, path, members)] for path, members in blocks.items()]
    between = [[*fitting_additions(model, path, seen)] for path in _adding(parts, first, order)]
    for chosen in itertools.islice(itertools.product(*every, *between), MOST):
        fitting = tuple(_cut_equally(chosen))
        yield d.Declaration(
            groups=fitting[: len(every)],
            between=fitting[len(every) :],
            output_layers=tuple(fitting_heads(parts.after_blocks, seen)),
            attention_heads=Constant(heads),
            text_width=Constant(text.shape[-1] if isinstance(text, Tensor) else 0),
            joint_text=_has_text(fitting, first),
            **named,
        )


def _adding(parts: ModelParts, sites: Sites, order: Sequence[str]) -> list[str]:
    """Return the modules that add to the tokens between blocks through an attention in which tokens cannot be told apart."""
    return [
        path for path in parts.around if sites[path].tokens and not any(block.startswith(f"{path}.") for block in order)
    ]


def _cut_equally(groups: Sequence[d.BlockGroup | None]) -> list[d.BlockGroup]:
    """Return the known groups, all with the same parts per frame, because blocks pass tokens to each other in one layout."""
    present = [group for group in groups if group is not None]
    kinds = [kind for group in present for kind in group.streams.values() if isinstance(kind, d.LatentTokens)]
    parts = {kind.parts_per_frame for kind in kinds if kind.parts_per_frame}
    if len(parts) > 1:
        raise Undescribed(
            f"its blocks divide frames into parts of several sizes ({', '.join(map(str, sorted(parts)))})"
        )
    return [replace(group, streams=cut_by(group.streams, *parts)) for group in present] if parts else present


def _first_that_runs(subject: Subject, unit: int) -> tuple[list[Sizes], ModelParts]:
    """Return the sizes at which to trace a model, and its modules. Some models need a larger picture or a longer text."""
    failed: Undescribed | None = None
    for longer, larger in itertools.product((0, subject.sizes.text), (1, LARGER)):
        sizes = [_sizes(subject.sizes, larger * unit, factors, text + longer) for factors, text in SIZES]
        try:
            parts = find_parts(subject.model, subject.call(sizes[0]))
            for size in sizes[1:]:
                trace(subject.model, subject.call(size))
            return sizes, parts
        except Undescribed as error:
            failed = failed or error
    assert failed is not None
    raise failed


def unit_of(model: nn.Module) -> int:
    """Return a latent size that divides into tokens: the model's `patch_size` if it has one, and at least 2."""
    named = getattr(model, "patch_size", None)
    return max(
        [2, *(size for size in (named if isinstance(named, (list, tuple)) else [named]) if isinstance(size, int))]
    )


def _sizes(example: Sizes, unit: int, factors: Sequence[int], text: int) -> Sizes:
    """Return sizes with even height and width and the example's number of dimensions. A single frame stays single."""
    *frames, _, _ = example.picture
    return Sizes(
        (*(factors[0] if frame_count > 1 else 1 for frame_count in frames), unit * factors[1], unit * factors[2]), text
    )


def _step(sites: Sites) -> tuple[int, ...]:
    """Return the number of latent values along each axis that make one token."""
    steps = {tokens.step for site in sites.values() for tokens in site.tokens.values()}
    if len(steps) > 1:
        raise Undescribed(f"its blocks have tokens of several sizes ({', '.join(map(str, sorted(steps)))})")
    return steps.pop()


def _has_text(groups: Sequence[d.BlockGroup], sites: Sites) -> bool:
    """Return True if text is in the sequence: in its own stream, or in the picture's stream, which is then longer."""
    kinds = [kind for group in groups for kind in group.streams.values()]
    longer = (tokens.length > tokens.count for site in sites.values() for tokens in site.tokens.values())
    return any(isinstance(kind, d.FirstPatchTokens) for kind in kinds) or any(longer)


def _names(model: nn.Module, step: tuple[int, ...]) -> bool:
    """Return True if the model's `patch_size` says how large its tokens are."""
    named = getattr(model, "patch_size", None)
    sizes = isinstance(named, (int, list, tuple))
    return sizes and as_patch_size(named, len(step) + 2) == step  # type: ignore[arg-type]


def _pads(subject: Subject, sizes: Sizes, step: Sequence[int]) -> bool:
    """Return True if the model accepts a latent that does not divide into tokens, and returns the same size."""
    if all(stride == 1 for stride in step):
        return True
    odd = tuple(size + (stride > 1) for size, stride in zip(sizes.picture, step, strict=True))
    try:
        call = subject.make(Sizes(odd, sizes.text))
        return call.of(subject.model).shape[2:] == call.latent.shape[2:]
    except FAILS:
        return False
