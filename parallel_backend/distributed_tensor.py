"""Tensors with the shape of the whole; each rank holds a part along one dimension.

Code that knows nothing of ranks runs on them unchanged: what needs no other rank's values stays local, and any other operation
gathers the whole first, so that what is unknown is slow and not wrong.
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
"""Operations that torch does not tag as element-wise although they are."""

Rule = Callable[..., Any]
"""Given an operation and its arguments: its result, or NotImplemented where that needs the whole."""

D = TypeVar("D", bound="DistributedTensor")


@dataclass(frozen=True)
class DispatchRules:
    """What does not gather: `known` operations by a rule of their own, and `element_wise` ones by one for all."""

    known: Mapping[Any, Rule]
    element_wise: Rule


class DistributedTensor(torch.Tensor):
    """`local` is this rank's part along dimension `along`."""

    local: Tensor
    along: int

    @classmethod
    def of_part(cls: type[D], local: Tensor, along: int, sizes: Sequence[int], device: torch.device) -> D:
        """A tensor without storage of its own, which has these sizes in the place of the part's along its dimension."""
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
        """What stays local of the operations on these arguments."""
        raise NotImplementedError

    def whole(self) -> Tensor:
        """All ranks' values. A collective."""
        raise NotImplementedError

    def own(self, tensor: Tensor, dim: int) -> Tensor:
        """Of a tensor that every rank has, what goes with this rank's part."""
        raise NotImplementedError

    def part_of(self, tensor: Tensor) -> Tensor:
        """Of a tensor that every rank has, what is broadcast with this rank's part."""
        from_end = self.ndim - self.along
        if tensor.ndim < from_end or tensor.shape[-from_end] == 1:
            return tensor
        return self.own(tensor, tensor.ndim - from_end)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Stay local where that gives the same, else gather."""
        kwargs = kwargs or {}
        rules = cls.rules(args, kwargs)
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
        changed = func._schema.is_mutable and isinstance(args[0], cls)
        assert not changed, f"{func} changes a {cls.__name__} in place and is not an element-wise operation"
        return cls.gathered(func, args, kwargs)

    @classmethod
    def gathered(cls, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """An operation on the whole. A collective.

        The whole is contiguous, as the part says of itself: torch has chosen a view or a copy by that.
        """
        whole = tree_map_only(cls, lambda part: part.whole().contiguous(), (tuple(args), dict(kwargs)))
        return func(*whole[0], **whole[1])


def is_element_wise(operation: Any) -> bool:
    """Whether an `OpOverload` gives each value of its result by the values in its place alone.

    What draws random numbers does not, as ranks would draw other ones.
    """
    tags = operation.tags
    return operation in COPIES or (torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags)


def of_parts(func: Any, part: Callable[[Tensor], Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """An element-wise operation on what `part` makes of its tensors."""
    return func(*(tree_map_only(Tensor, part, tuple(args))), **tree_map_only(Tensor, part, dict(kwargs)))
