"""A model that is narrower than its file's: fewer heads, of the file's width, and what of its configuration goes with them.

How a model is split does not depend on how many heads it has. So it is looked at, and declarations are chosen, with a few of
them; what is found is proved once more with all.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass

import torch
from msgspec.structs import replace

from .. import declaration as d
from .calls import FAILS, Subject
from .derive import LIMIT, Derived, first_proved, proved
from .rules import Undescribed
from .small import MARKS, Small, narrowed
from .tracing import trace

LARGE = 100_000_000
"""Weights of a small model that is worth it: one of fewer is looked at within seconds."""

HEADS, KV_HEADS = 4, 2
"""So many are left at least, of queries, and of keys where these have fewer."""

OF_A_HEAD = ("dim", "channel", "width", "size")
"""In the names of what has "head" in it and says how wide one is."""

INNER = ("ffn", "ff_", "mlp", "inter")
"""In the names of what says how wide a block is inside."""


@dataclass(frozen=True)
class ReducedConfig:
    """`changes` of ComfyUI's configuration of a model; `heads` that it then has, so many `times` fewer, and their width."""

    changes: Mapping[str, int]
    times: int
    heads: tuple[int, int]


@torch.inference_mode()
def derived_reduced(
    small: Small,
    subjects: Sequence[Subject],
    make_subjects: Callable[[Small], Sequence[Subject]],
    limit: float = LIMIT,
    least: int = LARGE,
) -> Derived | None:
    """A declaration that is found with fewer heads, and proved with as many as the file has; None if none is.

    Args:
        small: the model.
        subjects: with calls of some kinds.
        made: makes such calls of another small model.
        limit: seconds for a plan's proof.
        least: weights that the model has at least.
    """
    if sum(parameter.numel() for parameter in subjects[0].model.parameters()) < least:
        return None
    with suppress(Undescribed, *FAILS):  # what fails with a few heads may hold with all
        for config in reduced_configs(small, subjects[0]):
            if not (reduced_subjects := _subjects(small, config, make_subjects)):
                continue
            declaration = first_proved(reduced_subjects, limit).declaration
            if declaration.attention_heads == d.Constant(config.heads):
                wide = proved(subjects, widened(declaration, config.times), limit)
                return wide if wide.proof.holds else None
            return None
    return None


def _subjects(
    small: Small, config: ReducedConfig, make_subjects: Callable[[Small], Sequence[Subject]]
) -> Sequence[Subject]:
    """Its calls; none where these widths do not go together, or with them."""
    try:
        return make_subjects(narrowed(small, config.changes))
    except (Undescribed, *FAILS):
        return ()


def reduced_configs(small: Small, subject: Subject) -> Iterator[ReducedConfig]:
    """What may make a model narrower, by the heads of its attention to the most tokens, the narrowest first."""
    seen = [each.operands for each in trace(subject.model, subject.call(subject.sizes)).attentions]
    if not seen:
        return
    _, heads, _, width = max((each.q for each in seen), key=lambda q: q.shape[2]).shape
    settings = _configuration(small)
    counts = [name for name, value in settings.items() if _counts_heads(name) and value > 1 and heads % value == 0]
    kv_heads = {each.k.shape[1] for each in seen if each.q.shape[1] == heads}  # some classes repeat them before
    times = _times(heads, kv_heads | {settings[name] for name in counts})
    if times == 1:
        return
    widths = [name for name, value in settings.items() if value == heads * width]
    own = [name for name in widths if not any(mark in name for mark in MARKS)]
    inner = [name for name, value in settings.items() if value > width and any(mark in name for mark in INNER)]
    tried = ((*counts, *these, *more) for these, more in itertools.product((own, widths), (inner, [])))
    for names in filter(None, dict.fromkeys(tuple(sorted({*each})) for each in tried)):
        yield ReducedConfig({name: settings[name] // times for name in names}, times, (heads // times, width))


def widened(declaration: d.Declaration, times: int) -> d.Declaration:
    """The declaration of a model with so many times more heads."""
    assert isinstance(declaration.attention_heads, d.Constant) and isinstance(declaration.attention_heads.value, tuple)
    heads = declaration.attention_heads.value
    return replace(
        declaration,
        attention_heads=d.Constant((heads[0] * times, *heads[1:])),
        groups=tuple(_group(each, times) for each in declaration.groups),
        between=tuple(_group(each, times) for each in declaration.between),
    )


def _group(group: d.BlockGroup, times: int) -> d.BlockGroup:
    attentions = group.attentions
    assert not isinstance(attentions, d.PythonFunction)
    if isinstance(attentions, d.AttentionsBySubmodule):
        having, without = _attentions(attentions.present, times), _attentions(attentions.absent, times)
        return replace(group, attentions=replace(attentions, present=having, absent=without))
    return replace(group, attentions=_attentions(attentions, times))


def _attentions(attentions: d.Attentions, times: int) -> d.Attentions:
    return tuple(
        replace(each, kv_heads=each.kv_heads * times) if isinstance(each, d.DistributedAttention) else each
        for each in attentions
    )


def _times(heads: int, kv_heads: AbstractSet[int]) -> int:
    """How many times fewer there may be."""
    common = math.gcd(heads, *kv_heads)
    fewest = min(kv_heads)
    least = KV_HEADS if fewest < heads else HEADS
    fits = [n for n in range(1, common + 1) if common % n == 0 and heads // n >= HEADS and fewest // n >= least]
    return max(fits, default=1)


def _counts_heads(name: str) -> bool:
    return "head" in name and not any(mark in name for mark in OF_A_HEAD)


def _configuration(small: Small) -> dict[str, int]:
    """The whole numbers of it: what ComfyUI has found, and what its class takes where nothing is said."""
    parameters = inspect.signature(type(small.base.diffusion_model).__init__).parameters.values()
    defaults = {each.name: each.default for each in parameters}
    settings = {**defaults, **small.described.unet_config}
    return {name: value for name, value in settings.items() if type(value) is int}
