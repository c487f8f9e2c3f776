"""The inside of the diffusion model as other packs find it: to be looked at, and refused when it was changed.

Nothing that is changed there reaches the workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .own_code import foreign_class, put_back
from .refusals import refuse_weights

VIEWS = {"data", "real", "imag", "T", "H", "mT", "mH"}
"""Attributes of a tensor that are its values."""

ASKED = {"size", "dim", "numel", "nelement", "element_size", "stride", "is_contiguous", "is_floating_point", "is_complex"} | {
    "__repr__", "__hash__", "__len__", "requires_grad_"
}  # fmt: skip
"""Methods that ask for no values."""


class RemoteWeight(nn.Parameter):
    """A weight whose values are in the workers: has a shape and a dtype, and refuses to be read or changed."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.detach:  # as state_dict does
            return args[0]
        attribute = getattr(getattr(func, "__self__", None), "__name__", None)  # of a descriptor's __get__ or __set__
        if func.__name__ not in ASKED and (attribute is None or attribute in VIEWS):
            raise refuse_weights("Reading or changing the weights")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class SkeletonSnapshot:
    """What a diffusion model is made of."""

    def __init__(self, skeleton: nn.Module) -> None:
        """Takes `skeleton` as it should be; its weights become RemoteWeights."""
        for module in skeleton.modules():
            for name, weight in module._parameters.items():
                if weight is not None:
                    module._parameters[name] = torch.Tensor._make_subclass(RemoteWeight, weight.data)  # type: ignore[assignment]
        self._made = [
            (name, module, _signature(module), dict(_parts(module))) for name, module in skeleton.named_modules()
        ]

    def refuse_changes(self) -> None:
        """Raise Refused if a module, a weight, a hook or a method is another one than it was."""
        for kind in {type(module): None for _, module, _, _ in self._made}:
            if what := next(foreign_class(kind), None):
                raise refuse_weights(f"Changing {kind.__name__} ({what})")
        for name, module, signature, made in self._made:
            for part in _differing(module, made) if _signature(module) != signature else ():
                where = ".".join(filter(None, ("diffusion_model", name, part)))
                raise refuse_weights(f"Changing {where}")


def _signature(module: nn.Module) -> list[int]:
    """Differs where a part is another object; quick, as it is looked at before every forward."""
    tables = vars(module).values()
    return [*map(id, tables), *(id(part) for table in tables if isinstance(table, dict) for part in table.values())]


def _parts(module: nn.Module) -> Iterator[tuple[tuple[str, str], Any]]:
    """All that a module has, by names; entries of torch's own tables one by one."""
    for name, value in vars(module).items():
        if name.startswith("_") and isinstance(value, dict):
            yield from (((name, str(key)), part) for key, part in value.items())
        elif name != "training":
            yield (name, ""), value


def _differing(module: nn.Module, made: dict[tuple[str, str], Any]) -> Iterator[str]:
    parts = dict(_parts(module))
    for (table, name), value in parts.items():
        if (table, name) in made:
            same = value is made[table, name]
        else:  # data that no code of the model's reads, or a method that was put back
            same = not name and (not hasattr(type(module), table) or put_back(module, table))
        if not same:
            yield "forward" if "hooks" in table else name or table
    yield from (name or table for table, name in made.keys() - parts.keys())
