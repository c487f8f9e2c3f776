"""A prompt of the user's own, at any size: what a kind of call is derived for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .call_kind import CallKind, kind_of
from .calls import FAILS, ByClass, ModelCall, Sizes, Subject
from .deriving import unit_of
from .rules import Undescribed
from .small import Small

TEXT = "cross_attn"
"""ComfyUI's name of a prompt's text."""

COLOURS = 3
"""So many a picture has: no other dimension is told from them."""

SMALL_TEXT = 7
"""Tokens of a text that is looked at first; where the model takes no such text, the prompt's own."""


@dataclass(frozen=True)
class PromptExample:
    """A prompt of ComfyUI's, by its own names, with the latent that it is for.

    Attributes:
        entries: what nodes have put there, objects as dicts (`objects.py`), and the mask of the latent; of tensors of fractions
            the values do not matter.
        latent: the shape of that latent.
        kind: of the call that ComfyUI makes of it.
    """

    entries: Mapping[str, Any]
    latent: tuple[int, ...]
    kind: CallKind

    @property
    def text(self) -> int:
        """How many tokens its text has."""
        text = self.entries.get(TEXT)
        return text.shape[1] if isinstance(text, Tensor) and text.ndim == 3 else 0

    def at(self, sizes: Sizes) -> dict[str, Any]:
        """The same with another latent and another text, for ComfyUI's class."""
        own = Sizes(self.latent[2:], self.text)
        resized: dict[str, Any] = tree_map_only(Tensor, lambda tensor: _resized(tensor, own, sizes), dict(self.entries))
        return as_objects(resized)  # type: ignore[no-any-return]


def subject_of_prompt(small: Small, prompt: PromptExample) -> tuple[Subject, CallKind]:
    """A small model with calls of a prompt's kind, and that kind with what goes with sizes.

    Raises:
        Undescribed: such calls cannot be made, or are of another kind than the prompt's.
    """
    by_class, model = ByClass(small.base), small.base.diffusion_model

    def call(sizes: Sizes) -> ModelCall:
        return by_class.call(sizes, prompt.at(sizes))

    unit, several = unit_of(model), len(prompt.latent) > 4 and prompt.latent[2] > 1
    frames = (3 if several else 1,) if len(prompt.latent) > 4 else ()
    failed = ""
    for text in dict.fromkeys((min(SMALL_TEXT, prompt.text), prompt.text)):
        for rows in (4, 18):
            sizes = Sizes((*frames, rows * unit, (rows + 2) * unit), text)
            try:
                sample_call = call(sizes)
                sample_call.of(model)
                kinds = [_kind(by_class, prompt, each) for each in (sizes, *_other_sizes(sizes))]
            except FAILS as error:
                failed = failed or f"{type(error).__name__}: {error}".partition("\n")[0]
                continue
            kind = kinds[0].with_sizes(kinds[1:]).with_options(sample_call.options)
            if strange := kind.difference(prompt.kind):
                raise Undescribed(f"no small call has {strange}")
            return Subject(model, call, sizes, batches=True, lengths=small.lengths), kind
    raise Undescribed(f"its forward fails on every small call of this prompt ({failed})")


def _kind(by_class: ByClass, prompt: PromptExample, sizes: Sizes) -> CallKind:
    return kind_of(by_class.latent(sizes), by_class.conditioning(sizes, prompt.at(sizes)))


def _other_sizes(sizes: Sizes) -> list[Sizes]:
    """Of another picture, and of another text."""
    *frames, height, width = sizes.picture
    more = [each + 2 if each > 1 else each for each in frames]
    return [Sizes((*more, height + 8, width + 4), sizes.text), Sizes(sizes.picture, sizes.text + 2)]


def _resized(tensor: Tensor, own: Sizes, sizes: Sizes) -> Tensor:
    """Its last dimensions, if they are so many times the latent's; its second, if it is the text's or, where it has more
    than three, the frames'."""
    shape, dims = list(tensor.shape), len(own.picture)
    high, wide = own.picture[-2:]
    times = {size / was for size, was in zip(shape[-2:], (high, wide), strict=True)} if len(shape) > 3 else {0.0}
    if len(times) == 1 and (factor := times.pop()) >= 1 and factor == int(factor):
        shape[-2:] = [int(factor) * size for size in sizes.picture[-2:]]
    if dims == 3 and len(shape) > 4 and shape[-3] == own.picture[0]:  # of any height and width: classes scale these
        shape[-3] = sizes.picture[0]
    elif len(shape) in (2, 3) and own.text and shape[1] == own.text:
        shape[1] = sizes.text
    elif len(shape) > 3 and dims == 3 and shape[1] == own.picture[0] != COLOURS:  # sound, as HuMo has it
        shape[1] = sizes.picture[0]
    for dim, (was, size) in enumerate(zip(tensor.shape, shape, strict=True)):
        if size != was:  # masks go on hiding what they hide, and words stay words
            tensor = tensor.index_select(dim, torch.arange(size) * was // size)
    if tensor.is_floating_point():
        tensor = tensor.float()
    return tensor if _says_something(tensor) else _drawn(tensor)


def _says_something(tensor: Tensor) -> bool:
    """Whether its values may matter, as masks', words' and single numbers' do."""
    return not tensor.is_floating_point() or tensor.ndim < 2 or bool(((tensor == 0) | (tensor == 1)).all())


def _drawn(tensor: Tensor) -> Tensor:
    """Normal numbers of its shape in fp32: those of a large model's text are as large as they like."""
    generator = torch.Generator().manual_seed(tensor.numel())
    return torch.randn(tensor.shape, generator=generator)


ATTRIBUTES = "attributes of an object"
"""The key of the one entry of a dict that stands for an object; its value has the object's attributes."""


def as_dicts(tree: Any, kind: type) -> Any:
    """A tree of lists and dicts with a dict in the place of each object of a kind."""
    if isinstance(tree, kind):
        return {ATTRIBUTES: as_dicts(vars(tree), kind)}
    return _each(tree, lambda item: as_dicts(item, kind))


def as_objects(tree: Any) -> Any:
    """The same tree with objects of these attributes again."""
    if isinstance(tree, dict) and ATTRIBUTES in tree:
        return SimpleNamespace(**as_objects(tree[ATTRIBUTES]))
    return _each(tree, as_objects)


def _each(tree: Any, change: Callable[[Any], Any]) -> Any:
    if type(tree) in (list, tuple):
        return type(tree)(change(item) for item in tree)
    return {name: change(item) for name, item in tree.items()} if type(tree) is dict else tree
