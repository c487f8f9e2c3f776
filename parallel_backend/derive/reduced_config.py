"""A model with fewer attention heads than its file's, of the same head width, with a configuration that fits.

How a model is split does not depend on its number of heads. So the search for declarations uses a model with few heads, and the
result is proved once more with all heads.
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
"""Weights of a small model from which a search with fewer heads pays off. A search with fewer weights takes seconds."""

HEADS, KV_HEADS = 4, 2
"""The least number of query heads to keep, and the least number of key heads in models with fewer key heads."""

OF_A_HEAD = ("dim", "channel", "width", "size")
"""Parts of configuration names that contain "head" and give the width of one head."""

INNER = ("ffn", "ff_", "mlp", "inter")
"""Parts of configuration names that give the inner width of a block."""


@dataclass(frozen=True)
class ReducedConfig:
    """Changes of ComfyUI's model configuration that divide the number of heads.

    Attributes:
        changes: the new values, by the configuration's names.
        times: the divisor.
        heads: the new number of heads, and their width.
    """

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
    """Return a declaration that was found with fewer heads and proved with all heads, or None.

    Args:
        small: the model with all heads.
        subjects: calls of some kinds for it.
        make_subjects: makes the same calls of another small model.
        limit: seconds for the proof of one plan.
        least: weights that the model must have.
    """
    if sum(parameter.numel() for parameter in subjects[0].model.parameters()) < least:
        return None
    with suppress(Undescribed, *FAILS):  # a declaration that fails with few heads may hold with all
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
    """Return the calls of the reduced model; none if ComfyUI cannot build or run the model with these widths."""
    try:
        return make_subjects(narrowed(small, config.changes))
    except (Undescribed, *FAILS):
        return ()


def reduced_configs(small: Small, subject: Subject) -> Iterator[ReducedConfig]:
    """Yield changes that may make the model narrower, the narrowest first, judged by the attention with the most tokens."""
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
    """Return the declaration of a model with `times` as many heads."""
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
    """Return the largest factor by which the number of heads may be divided."""
    common = math.gcd(heads, *kv_heads)
    fewest = min(kv_heads)
    least = KV_HEADS if fewest < heads else HEADS
    fits = [n for n in range(1, common + 1) if common % n == 0 and heads // n >= HEADS and fewest // n >= least]
    return max(fits, default=1)


def _counts_heads(name: str) -> bool:
    return "head" in name and not any(mark in name for mark in OF_A_HEAD)


def _configuration(small: Small) -> dict[str, int]:
    """Return the whole numbers of the configuration: ComfyUI's detected values, and the class's defaults for the rest."""
    parameters = inspect.signature(type(small.base.diffusion_model).__init__).parameters.values()
    defaults = {each.name: each.default for each in parameters}
    settings = {**defaults, **small.described.unet_config}
    return {name: value for name, value in settings.items() if type(value) is int}
