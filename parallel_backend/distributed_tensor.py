"""Tensors with the shape of the whole, of which each rank holds a part along one dimension.

Code that knows nothing of ranks runs on these tensors unchanged. An operation that needs no other rank's values stays local.
Any other operation gathers the whole tensor first, so an unknown operation is slow and not wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten

COPIES = (
    aten._to_copy.default,
    aten.clone.default,
    aten.detach.default,
    aten.alias.default,
    aten.copy_.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.empty_like.default,
)
"""Element-wise operations that torch does not tag as element-wise."""

Rule = Callable[..., Any]
"""A function of an operation and its arguments. It returns the result, or NotImplemented if that needs the whole tensor."""

D = TypeVar("D", bound="DistributedTensor")


@dataclass(frozen=True)
class DispatchRules:
    """The rules of operations that need not gather: one for each of the `known` operations, one for all element-wise ones."""

    known: Mapping[Any, Rule]
    element_wise: Rule


class DistributedTensor(torch.Tensor):
    """A tensor with the shape of the whole, of which this rank holds a part.

    Attributes:
        local: this rank's part.
        along: the dimension along which the part is cut.
    """

    local: Tensor
    along: int

    @classmethod
    def of_part(cls: type[D], local: Tensor, along: int, sizes: Sequence[int], device: torch.device) -> D:
        """Return a tensor without storage of its own, whose shape has `sizes` in place of the part's size along `along`."""
        shape = (*local.shape[:along], *sizes, *local.shape[along + 1 :])
        tensor = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=device)  # type: ignore[attr-defined]
        tensor.local, tensor.along = local, along
        return tensor  # type: ignore[no-any-return]

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({list(self.shape)}, local {list(self.local.shape)})"

    @classmethod
    def rules(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> DispatchRules:
        """Return the rules of the operations that stay local with these arguments."""
        raise NotImplementedError

    def whole(self) -> Tensor:
        """Return the whole tensor with all ranks' values. A collective."""
        raise NotImplementedError

    def own(self, tensor: Tensor, dim: int) -> Tensor:
        """Return the entries along `dim` that belong to this rank's part, of a tensor that every rank has."""
        raise NotImplementedError

    def part_of(self, tensor: Tensor) -> Tensor:
        """Return the entries that broadcast with this rank's part, of a tensor that every rank has."""
        from_end = self.ndim - self.along
        if tensor.ndim < from_end or tensor.shape[-from_end] == 1:
            return tensor
        return self.own(tensor, tensor.ndim - from_end)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Compute an operation on the local parts if a rule allows that; otherwise gather the whole tensors first."""
        kwargs = kwargs or {}
        rules = cls.rules(args, kwargs)
        rule = rules.known.get(func)
        if rule is None:
            # In inference mode, in which workers run, composite operations arrive here before torch decomposes them.
            out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
            rule = rules.element_wise if is_element_wise(func) else None
        if rule is not None:
            out = rule(func, *args, **kwargs)
            if out is not NotImplemented:
                return out
        changed = func._schema.is_mutable and isinstance(args[0], cls)
        assert not changed, f"{func} changes a {cls.__name__} in place and is not an element-wise operation"
        return cls.gathered(func, args, kwargs)

    @classmethod
    def gathered(cls, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Compute an operation on the whole tensors. A collective.

        The whole is made contiguous, because the part reports that it is: torch has chosen a view or a copy by that report.
        """
        whole = tree_map_only(cls, lambda part: part.whole().contiguous(), (tuple(args), dict(kwargs)))
        return func(*whole[0], **whole[1])


def is_element_wise(operation: Any) -> bool:
    """Return True if each value of an `OpOverload`'s result depends only on the arguments' values at the same position.

    Operations that draw random numbers do not count, because ranks would draw different numbers.
    """
    tags = operation.tags
    return operation in COPIES or (torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags)


def of_parts(func: Any, part: Callable[[Tensor], Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Compute an element-wise operation after applying `part` to each of its tensors."""
    return func(*(tree_map_only(Tensor, part, tuple(args))), **tree_map_only(Tensor, part, dict(kwargs)))
