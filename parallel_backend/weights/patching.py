"""Adapters on a module's weights: merged into them, and taken out again without a trace.

Merged weights cost nothing while sampling. What they were is kept in host memory as far as there is room and read from
the file again otherwise, because subtracting a difference would leave rounding errors behind. Quantised weights stay as
they are (see `adapted`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .adapted import Adapted, AdaptedRows
from .adapters import NONE, Adapter, AdapterSet, Values, apply, has_column_norms, needs_all_rows
from .keymap import KeyMap, Piece, tensor_sizes
from .layers import PackedLinear
from .loader import local_rows

CHUNK_VALUES = 1 << 22
"""Values changed at a time, so that the fp32 copies stay small."""


@dataclass(frozen=True)
class PlacedPiece:
    """A piece of a file's tensor inside a parameter, which has it from row `offset` on."""

    parameter: str
    offset: int
    piece: Piece


@dataclass(frozen=True)
class Keep:
    """Where the weights as they were are kept.

    `room` says whether every rank could take so many more bytes of host memory; `agree` is True on all ranks if it was
    given True on all of them (a collective).
    """

    room: Callable[[int], bool]
    agree: Callable[[bool], bool]


class Patching:
    """The weights of one loaded module and the adapters in them.

    Args:
        keys: the module's key map, in the names that adapters use.
        reload: fills the named parameters from the file again; called on all ranks alike.
    """

    def __init__(
        self,
        module: nn.Module,
        keys: KeyMap,
        reload: Callable[[Collection[str]], None],
        keep: Keep,
    ) -> None:
        self._module = module
        self._reload = reload
        self._where = keep
        self._originals: dict[str, Tensor] = {}
        self._merged = NONE
        self._placed: dict[str, list[PlacedPiece]] = {}
        self._sizes = tensor_sizes(keys)
        self._packed = {
            f"{name}.weight": child for name, child in module.named_modules() if isinstance(child, PackedLinear)
        }
        held = {name for name, _ in module.named_parameters()}
        for name, pieces in keys.items():
            offset = 0
            for piece in pieces:
                if name in held:
                    self._placed.setdefault(piece.name, []).append(PlacedPiece(name, offset, piece))
                offset += piece.stop - piece.start

    @torch.no_grad()
    def merge(self, adapters: AdapterSet) -> None:
        """Make the weights those of the file with `adapters` in them. A collective of all ranks."""
        if adapters.id == self._merged.id:
            return
        before, after = self._merged.recipe, adapters.recipe
        names = self._closed({name for name in self._placed if before.get(name) != after.get(name)})
        parameters = dict(self._module.named_parameters())
        self._restore(self._parameters_of(name for name in names if name in before), parameters)
        now = [name for name in names if name in after]
        for parameter in self._parameters_of(now):
            self._keep(parameter, local_rows(parameters[parameter])[0])
        expanding: dict[str, list[AdaptedRows]] = {}
        values: dict[str, Tensor] = {}
        for name in now:
            device = local_rows(parameters[self._placed[name][0].parameter])[0].device
            ids = {id for adapter in after[name] for id in adapter.tensors.values()}
            mine = {id: adapters.tensors[id].to(device) for id in ids}
            if self._placed[name][0].parameter in self._packed:
                values |= mine
                norms = self._column_norms(name, after[name], mine, parameters)
                for placed in self._placed[name]:
                    rows = slice(placed.piece.start, placed.piece.stop)
                    run = AdaptedRows(placed.offset, rows, self._sizes[name], after[name], norms)
                    expanding.setdefault(placed.parameter, []).append(run)
            else:
                self._change(name, after[name], mine, parameters)
        for parameter, runs in expanding.items():
            self._packed[parameter].change = Adapted(runs, values)
        self._merged = adapters

    def _parameters_of(self, names: Iterable[str]) -> list[str]:
        return list(dict.fromkeys(placed.parameter for name in names for placed in self._placed[name]))

    def _closed(self, names: set[str]) -> list[str]:
        """The tensors that share a parameter, directly or not, with one of these; in the key map's order."""
        while True:
            touched = {placed.parameter for name in names for placed in self._placed[name]}
            more = {
                name for name, places in self._placed.items() if any(placed.parameter in touched for placed in places)
            }
            if more == names:
                return [name for name in self._placed if name in names]
            names = more

    def _restore(self, names: Sequence[str], parameters: Mapping[str, nn.Parameter]) -> None:
        lost = [name for name in names if name not in self._originals and name not in self._packed]
        if not self._where.agree(not lost):
            self._reload(lost)
        for name in names:
            if name in self._packed:
                self._packed[name].change = None
            elif name in self._originals:
                local_rows(parameters[name])[0].copy_(self._originals.pop(name))

    def _keep(self, name: str, weight: Tensor) -> None:
        if name not in self._packed and self._where.room(weight.nbytes):
            self._originals[name] = weight.to("cpu", copy=True)

    def _change(
        self, name: str, recipe: Sequence[Adapter], values: Values, parameters: Mapping[str, nn.Parameter]
    ) -> None:
        size = self._sizes[name]
        whole = None
        if any(needs_all_rows(adapter, values, size) for adapter in recipe):
            whole = self._whole(name, parameters)
            apply(recipe, values, whole, slice(0, size[0]), size)
        for placed in self._placed[name]:
            for local, rows in _held(placed, parameters[placed.parameter]):
                weight = local.float() if whole is None else whole[rows]
                if whole is None:
                    apply(recipe, values, weight, rows, size)
                local.copy_(weight)

    def _column_norms(
        self, name: str, recipe: Sequence[Adapter], values: Values, parameters: Mapping[str, nn.Parameter]
    ) -> dict[int, Tensor]:
        """What DoRA needs to know of all rows, also those of other layers and ranks."""
        norms: dict[int, Tensor] = {}
        size = self._sizes[name]
        if any(has_column_norms(adapter, values, size) for adapter in recipe):
            apply(recipe, values, self._whole(name, parameters), slice(0, size[0]), size, norms)
        return norms

    def _whole(self, name: str, parameters: Mapping[str, nn.Parameter]) -> Tensor:
        """All rows of a file's tensor, fp32. A collective where the weights are sharded."""
        places = self._placed[name]
        assert sum(placed.piece.stop - placed.piece.start for placed in places) == self._sizes[name][0], (
            f"{name} is in pieces"
        )
        rows = {}
        for placed in places:
            full = _full(parameters[placed.parameter])
            packed = self._packed.get(placed.parameter)
            if packed is not None:
                scale = None if packed.weight_scale is None else _full(packed.weight_scale)
                full = packed.expand(full, scale, torch.float32)
            rows[placed.piece.start] = full[placed.offset :][: placed.piece.stop - placed.piece.start].float()
        return torch.cat([rows[start] for start in sorted(rows)])


def _full(parameter: nn.Parameter) -> Tensor:
    return parameter.data.full_tensor() if isinstance(parameter.data, DTensor) else parameter.data


def _held(placed: PlacedPiece, parameter: nn.Parameter) -> Iterator[tuple[Tensor, slice]]:
    """This rank's rows of a placed piece, chunk by chunk, and which rows of the file's tensor they are."""
    local, wanted = local_rows(parameter)
    begin = max(placed.offset, wanted.start)
    end = min(placed.offset + placed.piece.stop - placed.piece.start, wanted.stop)
    step = max(1, CHUNK_VALUES // max(1, math.prod(placed.piece.row_shape)))
    for first in range(begin, end, step):
        last = min(first + step, end)
        start = placed.piece.start + first - placed.offset
        yield local[first - wanted.start : last - wanted.start], slice(start, start + last - first)
