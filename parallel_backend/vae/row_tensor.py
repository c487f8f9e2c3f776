"""RowTensor: a picture that has the shape of the whole and of which each rank holds a run of rows.

An autoencoder's own code runs on it unchanged. Element-wise operations, views, reductions along other dimensions,
convolutions, group normalisation, padding and enlarging stay local, with rows of the neighbours where an operation sees them
(`row_rules`); any other operation first gathers the whole, so that what is unknown is slow and not wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map_only

from ..comm.communicator import Communicator
from ..element_wise import is_element_wise
from .rows import Slab

Runs = tuple[slice, ...]
Rule = Callable[..., Any]


@dataclass(frozen=True)
class Rules:
    """What does not gather: `known` operations by a rule of their own, and `element_wise` ones by one for all."""

    known: Mapping[Any, Rule]
    element_wise: Rule


class RowTensor(torch.Tensor):
    """`local` are this rank's rows along dimension `along`; `runs` are all ranks' rows, in rank order.

    `copied` tells that it was made as a view whose values had to be copied: what is written into it is not seen elsewhere.
    """

    local: Tensor
    runs: Runs
    along: int
    axis: Communicator
    rules: Rules
    copied: bool

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, local: Tensor, runs: Runs, along: int, axis: Communicator, rules: Rules, copied: bool = False
    ) -> RowTensor:
        """A tensor of the shape of the whole, without storage of its own."""
        run = runs[axis.rank]
        assert local.shape[along] == run.stop - run.start
        shape = (*local.shape[:along], runs[-1].stop, *local.shape[along + 1 :])
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)  # type: ignore[attr-defined]
        made.local, made.runs, made.along, made.axis, made.copied = local, runs, along, axis, copied
        made.rules = rules
        return made  # type: ignore[no-any-return]

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"RowTensor({list(self.shape)}, local {list(self.local.shape)})"

    @classmethod
    def of(cls, slab: Slab, rules: Rules) -> RowTensor:
        """A picture `[batch, channels, (frames,) height, width]`."""
        return cls(slab.values, slab.runs, slab.values.dim() - 2, slab.axis, rules)

    @property
    def slab(self) -> Slab:
        """The rows as `[..., rows, what is behind them]`."""
        behind = torch.Size(self.local.shape[self.along + 1 :]).numel()
        values = self.local.reshape(*self.local.shape[: self.along], self.local.shape[self.along], behind)
        return Slab(values, self.runs, self.axis)

    def like(
        self, local: Tensor, runs: Runs | None = None, along: int | None = None, copied: bool = False
    ) -> RowTensor:
        """Other rows, by default in the same places."""
        return RowTensor(
            local,
            self.runs if runs is None else runs,
            self.along if along is None else along,
            self.axis,
            self.rules,
            copied,
        )

    def at(self, runs: Runs) -> Tensor:
        """The rows of another cut. A collective, unless it is the same."""
        return self.local if runs == self.runs else self._fetch(runs)

    def whole(self) -> Tensor:
        """All rows. A collective."""
        return self._fetch([slice(0, self.shape[self.along])] * self.axis.size)

    def own(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's rows of a tensor that every rank has whole."""
        run = self.runs[self.axis.rank]
        return tensor.narrow(dim, run.start, run.stop - run.start)

    def _fetch(self, want: Sequence[slice]) -> Tensor:
        mine = want[self.axis.rank]
        shape = (*self.local.shape[: self.along], mine.stop - mine.start, *self.local.shape[self.along + 1 :])
        return self.slab.fetch(want).reshape(shape)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Stay local where that gives the same, else gather."""
        kwargs = kwargs or {}
        rules = next(x.rules for x in tree_iter((args, kwargs)) if isinstance(x, RowTensor))
        rule = rules.known.get(func)
        if rule is None:
            # In inference mode, in which workers run, operations that consist of others come as they are called.
            out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
            rule = rules.element_wise if is_element_wise(func) else None
        if rule is not None:
            out = rule(func, *args, **kwargs)
            if out is not NotImplemented:
                return out
        assert torch.Tag.nondeterministic_seeded not in func.tags, (
            f"{func} draws random numbers, other ones on each rank"
        )
        changed = func._schema.is_mutable and isinstance(args[0], RowTensor)
        assert not changed, f"{func} changes a picture in place and is not an element-wise operation"
        whole = tree_map_only(RowTensor, lambda x: x.whole(), (tuple(args), dict(kwargs)))
        return func(*whole[0], **whole[1])
