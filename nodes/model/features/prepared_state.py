"""ComfyUI's callbacks before each step: those that change nothing need not be called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from comfy.patcher_extension import copy_nested_dicts
from torch.utils._pytree import tree_leaves

from ..own_code import own


def changes_nothing(callback: Any, model_options: Mapping[str, Any]) -> bool:
    """Whether a callback is ComfyUI's own, looks at neither model nor timestep, and leaves a run's model options as they are.

    BlockSparseAttention's puts its function back in attention's place, where it already is.
    """
    if not own(callback):
        return False
    options = copy_nested_dicts(model_options)
    try:
        for _ in range(2):
            callback(_Unseen(), _Unseen(), options)
    except Exception:  # it looks at what it is not shown
        return False
    return _same(options, model_options)


def _same(ours: Any, theirs: Any) -> bool:
    """Return True if two trees of dicts hold identical objects."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(_same(ours[name], theirs[name]) for name in ours)
    our_leaves, their_leaves = tree_leaves(ours), tree_leaves(theirs)
    return len(our_leaves) == len(their_leaves) and all(
        first is second for first, second in zip(our_leaves, their_leaves, strict=True)
    )


class _Unseen:
    """What a callback is given and must not look at."""

    def _seen(self, *_: Any) -> NoReturn:
        raise LookupError

    __getattr__ = __getitem__ = __bool__ = __float__ = __iter__ = __len__ = __eq__ = __hash__ = _seen  # type: ignore[assignment]
