"""RowTensor: a picture with the shape of the whole, of which each rank holds a run of rows.

An autoencoder's own code runs on a RowTensor unchanged. Element-wise operations, views, reductions along other dimensions,
convolutions, group normalisation, padding and enlarging stay local. They fetch rows of the neighbours where they see them
(`row_rules`). Any other operation gathers the whole picture first, so that an unknown operation is slow and not wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter

from ..comm.communicator import Communicator
from ..distributed_tensor import DispatchRules, DistributedTensor
from .rows import Slab

Runs = tuple[slice, ...]


class RowTensor(DistributedTensor):
    """A picture with the shape of the whole, of which this rank holds the rows `local` along dimension `along`.

    Attributes:
        runs: all ranks' rows, in rank order.
        axis: the ranks that share the picture.
        local_rules: the operations that do not gather.
        copied: True for a view whose values had to be copied. Values written into such a view are not seen elsewhere.
    """

    runs: Runs
    axis: Communicator
    local_rules: DispatchRules
    copied: bool

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, local: Tensor, runs: Runs, along: int, axis: Communicator, rules: DispatchRules, copied: bool = False
    ) -> RowTensor:
        """Return a tensor with the shape of the whole and without storage of its own."""
        run = runs[axis.rank]
        assert local.shape[along] == run.stop - run.start
        tensor = cls.of_part(local, along, (runs[-1].stop,), local.device)
        tensor.runs, tensor.axis, tensor.local_rules, tensor.copied = runs, axis, rules, copied
        return tensor

    @classmethod
    def of(cls, slab: Slab, rules: DispatchRules) -> RowTensor:
        """Return a RowTensor of a picture `[batch, channels, (frames,) height, width]`."""
        return cls(slab.values, slab.runs, slab.values.dim() - 2, slab.axis, rules)

    @property
    def slab(self) -> Slab:
        """Return the rows as a slab `[..., rows, trailing]`, with all dimensions after the rows joined into one."""
        trailing = torch.Size(self.local.shape[self.along + 1 :]).numel()
        values = self.local.reshape(*self.local.shape[: self.along], self.local.shape[self.along], trailing)
        return Slab(values, self.runs, self.axis)

    def like(
        self, local: Tensor, runs: Runs | None = None, along: int | None = None, copied: bool = False
    ) -> RowTensor:
        """Return a RowTensor of other local rows, by default with the same runs and along the same dimension."""
        return RowTensor(
            local,
            self.runs if runs is None else runs,
            self.along if along is None else along,
            self.axis,
            self.local_rules,
            copied,
        )

    def at(self, runs: Runs) -> Tensor:
        """Return this rank's rows of another cut. This is a collective, unless the cut is the same."""
        return self.local if runs == self.runs else self._fetch(runs)

    def whole(self) -> Tensor:
        """Return all rows. This is a collective."""
        return self._fetch([slice(0, self.shape[self.along])] * self.axis.size)

    def own(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this rank's rows of a tensor that every rank holds whole."""
        run = self.runs[self.axis.rank]
        return tensor.narrow(dim, run.start, run.stop - run.start)

    def _fetch(self, want: Sequence[slice]) -> Tensor:
        mine = want[self.axis.rank]
        shape = (*self.local.shape[: self.along], mine.stop - mine.start, *self.local.shape[self.along + 1 :])
        return self.slab.fetch(want).reshape(shape)

    @classmethod
    def rules(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> DispatchRules:
        """Return the rules of the first RowTensor among the arguments."""
        return next(x.local_rules for x in tree_iter((args, kwargs)) if isinstance(x, RowTensor))

    @classmethod
    def gathered(cls, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Apply an operation to the whole picture. This is a collective."""
        random = torch.Tag.nondeterministic_seeded in func.tags
        assert not random, f"{func} draws random numbers, other ones on each rank"
        return super().gathered(func, args, kwargs)
