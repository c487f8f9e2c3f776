"""Measures the cost of a derived model's blocks on the small model, for the predictions of run time and memory.

The small model is built as workers build it, in bf16 on the meta device. Nothing is computed there, so any size works.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from msgspec.structs import replace as redeclare
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ..declaration import BlockGroup, Declaration, LatentTokens
from .call_sites import changed_locations, first_runs
from .calls import FAILS, ModelCall, Sizes, Subject, noise_like
from .derive import Derived
from .deriving import unit_of
from .groups import members_of
from .rules import Undescribed
from .small import Small, unfilled
from .tracing import ModuleCall
from .values import called, mapped, tensors_in

SIZES = ((32, 32), (32, 64))
"""Units of height and width, large enough that the memory that grows with the tokens exceeds the memory that they share."""

NOTHING = ("detach", "empty", "_unsafe_view", "_reshape_alias", "lift_fresh")
"""Beginnings of the names of operators that launch no kernel. Views do not launch kernels either."""


@torch.inference_mode()
def with_costs(small: Small, subjects: Sequence[Subject], derived: Derived) -> Derived:
    """Return the derived declaration with the costs of its blocks and the names of latents that become tokens in some calls.

    A cost that cannot be measured is left out, and formulas predict it instead. An example is a class that reads tensor values.
    """
    subject, model = subjects[0], small.base.diffusion_model
    blocks = [members_of(model, group.path)[0] for group in derived.declaration.groups]
    with suppress(Undescribed, *FAILS):
        names = {name for each in subjects for name in references_of(each, blocks, derived.declaration)}
        references = derived.declaration.references | names
        derived = replace(derived, declaration=redeclare(derived.declaration, references=references).sent())
    with suppress(Undescribed, *FAILS):
        costing = unfilled(small)
        unit, (*frames, _, _) = unit_of(model), subject.sizes.picture
        sizes = [Sizes((*frames, high * unit, wide * unit), subject.sizes.text) for high, wide in SIZES]
        less, more = (first_runs(costing, subject.call(each).unfilled(), blocks) for each in sizes)
        hidden = math.prod(derived.declaration.attention_heads(model))
        measured = zip(derived.declaration.groups, blocks, strict=True)
        groups = tuple(_costing(group, less[path], more[path], hidden) for group, path in measured)
        derived = replace(derived, declaration=redeclare(derived.declaration, groups=groups).sent())
    return derived


@dataclass(frozen=True)
class BlockCost:
    """The cost of one call of a block.

    Attributes:
        operations: operations on the device, where an attention counts as one.
        products: multiplications in the block's layers.
        resident_bytes: peak bytes during the call, the input included.
    """

    operations: int
    products: int
    resident_bytes: int


class _Counting(TorchDispatchMode):
    """A dispatch mode that counts device operations, products and the peak bytes of live tensors, `tensors` included."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.operations = self.products = 0
        self.alive = self.peak = 0
        self._known: set[int] = set()
        for tensor in tensors:
            self._born(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before, packet = self.operations, func.overloadpacket
        starts = not (func.is_view or packet.__name__.startswith(NOTHING))
        if torch.is_inference_mode_enabled():  # inference mode does not decompose composite operators
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                self.operations = before + starts
                return out
        input_storages = {
            leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)
        }
        out = func(*args, **kwargs)
        self.operations += starts
        if packet in flop_registry:
            self.products += flop_registry[packet](*args, **kwargs, out_val=out) // 2
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in input_storages:
                self._born(leaf)
        return out

    def _born(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.alive += size
            self.peak = max(self.peak, self.alive)
            weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.alive -= size


def cost_of(run: ModuleCall) -> BlockCost:
    """Return the cost of a block's call without the work of its attention."""
    with (
        run.unseen() as inputs,
        _Counting([tensor for value in inputs.values() for tensor in tensors_in(value)]) as counting,
    ):
        called(run.module, inputs)
    return BlockCost(counting.operations, counting.products, counting.peak)


def _costing(group: BlockGroup, less: ModuleCall, more: ModuleCall, hidden: int) -> BlockGroup:
    """Return the group with the cost of one call of a block. The costs per token come from the difference of two sizes."""
    first, second = cost_of(less), cost_of(more)
    tokens = _tokens(group, more) - _tokens(group, less)
    weights = sum(parameter.numel() for parameter in less.module.parameters())
    return redeclare(
        group,
        kernels=first.operations,
        active_weights=round((second.products - first.products) / tokens / weights, 4),
        activation_copies=round(
            (second.resident_bytes - first.resident_bytes) / tokens / hidden / torch.bfloat16.itemsize, 2
        ),
    )


def _tokens(group: BlockGroup, run: ModuleCall) -> int:
    """Return the number of tokens, over all rows, of the stream that has the picture's tokens."""
    name, kind = next((name, kind) for name, kind in group.streams.items() if isinstance(kind, LatentTokens))
    value = run.values[name]
    dims = value.shape[kind.dim : -1] if kind.grid else value.shape[kind.dim : kind.dim + 1]
    return int(value.shape[0] * math.prod(dims))


def references_of(subject: Subject, blocks: Sequence[str], declaration: Declaration) -> list[str]:
    """Return the names of latents that reach block tokens which the sampled latent does not reach."""
    call = subject.call(subject.sizes)
    base = first_runs(subject.model, call, blocks)

    def followed(changed_call: ModelCall) -> dict[Any, Tensor]:
        return changed_locations(base, first_runs(subject.model, changed_call, blocks))

    own = followed(call.disturbed(0, slice(None)))
    streams = {(block, name) for block, group in zip(blocks, declaration.groups, strict=True) for name in group.streams}
    names = []
    for name in call.latents_and_frames:
        with suppress(Undescribed):
            moved = followed(replace(call, arguments={**call.arguments, name: mapped(call.arguments[name], _other)}))
            elsewhere = (
                each & ~own[block, location]
                for (block, location), each in moved.items()
                if (block, location[0]) in streams
            )
            if any(bool(each.any()) for each in elsewhere):
                names.append(name)
    return names


def _other(tensor: Tensor) -> Tensor:
    return tensor + noise_like(tensor) if tensor.is_floating_point() else tensor
