"""A prompt of the user at any size: the example from which a declaration for this kind of call is derived."""

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
"""ComfyUI's name of a prompt's text embedding."""

COLOURS = 3
"""Number of colours of an image. A dimension of this length counts as colours and not as frames."""

SMALL_TEXT = 7
"""Tokens of the text that is tried first. If the model does not accept this length, the prompt's own length is next."""


@dataclass(frozen=True)
class PromptExample:
    """A ComfyUI prompt, by ComfyUI's own names, with the shape of its latent.

    Attributes:
        entries: the values that nodes have put into the prompt, with objects as dicts (`objects.py`), and the latent's mask.
            The values of float tensors do not matter.
        latent: the shape of the latent.
        kind: the kind of call that ComfyUI makes of the prompt.
    """

    entries: Mapping[str, Any]
    latent: tuple[int, ...]
    kind: CallKind

    @property
    def text(self) -> int:
        """Return the number of text tokens."""
        text = self.entries.get(TEXT)
        return text.shape[1] if isinstance(text, Tensor) and text.ndim == 3 else 0

    def at(self, sizes: Sizes) -> dict[str, Any]:
        """Return the prompt's entries resized to another latent and another text, for ComfyUI's class."""
        own = Sizes(self.latent[2:], self.text)
        resized: dict[str, Any] = tree_map_only(Tensor, lambda tensor: _resized(tensor, own, sizes), dict(self.entries))
        return as_objects(resized)  # type: ignore[no-any-return]


def subject_of_prompt(small: Small, prompt: PromptExample) -> tuple[Subject, CallKind]:
    """Return a small model with calls of a prompt's kind, and this kind with its sizes marked.

    Raises:
        Undescribed: small calls fail, or have another kind than the prompt.
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
                raise Undescribed(f"no test call has {strange}")
            return Subject(model, call, sizes, batches=True, lengths=small.lengths), kind
    raise Undescribed(f"its forward fails on every test call of this prompt ({failed})")


def _kind(by_class: ByClass, prompt: PromptExample, sizes: Sizes) -> CallKind:
    return kind_of(by_class.latent(sizes), by_class.conditioning(sizes, prompt.at(sizes)))


def _other_sizes(sizes: Sizes) -> list[Sizes]:
    """Return two other sizes: one with another picture, one with another text."""
    *frames, height, width = sizes.picture
    more = [each + 2 if each > 1 else each for each in frames]
    return [Sizes((*more, height + 8, width + 4), sizes.text), Sizes(sizes.picture, sizes.text + 2)]


def _resized(tensor: Tensor, own: Sizes, sizes: Sizes) -> Tensor:
    """Return a tensor resized from the sizes `own` to `sizes`, with new random values if the old values do not matter.

    In a tensor with more than three dimensions, the last two change if both are the same whole multiple of the latent's. For a
    video, the third dimension from the end or else the second changes if its length is the number of frames. In a tensor with
    two or three dimensions, the second changes if its length is the text's.
    """
    shape, dims = list(tensor.shape), len(own.picture)
    high, wide = own.picture[-2:]
    times = {size / was for size, was in zip(shape[-2:], (high, wide), strict=True)} if len(shape) > 3 else {0.0}
    if len(times) == 1 and (factor := times.pop()) >= 1 and factor == int(factor):
        shape[-2:] = [int(factor) * size for size in sizes.picture[-2:]]
    if dims == 3 and len(shape) > 4 and shape[-3] == own.picture[0]:  # at any height and width: classes rescale these
        shape[-3] = sizes.picture[0]
    elif len(shape) in (2, 3) and own.text and shape[1] == own.text:
        shape[1] = sizes.text
    elif len(shape) > 3 and dims == 3 and shape[1] == own.picture[0] != COLOURS:  # sound, in HuMo's layout
        shape[1] = sizes.picture[0]
    for dim, (was, size) in enumerate(zip(tensor.shape, shape, strict=True)):
        if size != was:  # nearest indices: masks hide the same parts, and token ids stay valid
            tensor = tensor.index_select(dim, torch.arange(size) * was // size)
    if tensor.is_floating_point():
        tensor = tensor.float()
    return tensor if _says_something(tensor) else _drawn(tensor)


def _says_something(tensor: Tensor) -> bool:
    """Return True if the tensor's values may matter, as in masks, token ids and single numbers."""
    return not tensor.is_floating_point() or tensor.ndim < 2 or bool(((tensor == 0) | (tensor == 1)).all())


def _drawn(tensor: Tensor) -> Tensor:
    """Return normal random numbers in fp32 with the tensor's shape: the text values of a large model have no known scale."""
    generator = torch.Generator().manual_seed(tensor.numel())
    return torch.randn(tensor.shape, generator=generator)


ATTRIBUTES = "attributes of an object"
"""The key of the only entry of a dict that replaces an object. The entry's value holds the object's attributes."""


def as_dicts(tree: Any, kind: type) -> Any:
    """Return a tree of lists and dicts in which a dict replaces each object of the class `kind`."""
    if isinstance(tree, kind):
        return {ATTRIBUTES: as_dicts(vars(tree), kind)}
    return _each(tree, lambda item: as_dicts(item, kind))


def as_objects(tree: Any) -> Any:
    """Return the tree that `as_dicts` made, with an object in the place of each such dict."""
    if isinstance(tree, dict) and ATTRIBUTES in tree:
        return SimpleNamespace(**as_objects(tree[ATTRIBUTES]))
    return _each(tree, as_objects)


def _each(tree: Any, change: Callable[[Any], Any]) -> Any:
    if type(tree) in (list, tuple):
        return type(tree)(change(item) for item in tree)
    return {name: change(item) for name, item in tree.items()} if type(tree) is dict else tree
