"""Adapters in a module's weights: merged into the weights, and taken out again without a trace.

Merged weights cost nothing while sampling. Subtracting a difference again would leave rounding errors. So the original values
are kept in host memory as far as it has room, and are read from the file again otherwise. Weights that ComfyUI holds in fp8 are
changed whole and rounded as ComfyUI rounds them. Blocks of GGUF stay as they are (see `ExpandedAdapters`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..files.keymap import KeyMap, Piece, tensor_sizes
from ..formats import FLOAT8
from ..layers.cast import PackedLinear
from ..layers.packing import is_merged
from ..layers.quantised import PARTS, QuantisedLayer, quantised_layers
from ..stores.store import ParameterRun, WeightStore
from .lora import NONE, Adapter, AdapterSet, Values, apply, has_column_norms, needs_all_rows, needs_whole_rows

CHUNK_VALUES = 1 << 22
"""Number of values that are changed at a time, so that the fp32 copies stay small."""


@dataclass(frozen=True)
class Keep:
    """The limits on the memory for original weights.

    Attributes:
        fits: returns True if every rank can take that many more bytes of host memory.
        all_true: returns True on all ranks if all ranks pass True. This is a collective.
    """

    fits: Callable[[int], bool]
    all_true: Callable[[bool], bool]


@dataclass(frozen=True)
class Merging:
    """The rules by which ComfyUI puts adapters into weights.

    Attributes:
        dtype: dtype in which ComfyUI holds weights.
        exact: names of the parameters that have dtypes of their own.
        adds_in: returns the dtype in which ComfyUI adds on a device.
        rounded: rounds a sum, all of a weight, to an fp8 dtype. The arguments are the values, the dtype and the weight's name.
    """

    dtype: torch.dtype
    exact: Collection[str]
    adds_in: Callable[[torch.device], torch.dtype]
    rounded: Callable[[Tensor, torch.dtype, str], Tensor]


class Patching:
    """The weights of one loaded module and the adapters in them.

    Args:
        store: the store of the weights.
        device: the device that computes with the weights.
        keys: the module's key map, in the names that adapters use.
        reload: fills the named parameters from the file again. All ranks call it alike.
        keep: the limits on the memory for original weights.
        merging: ComfyUI's rules for adapters.
    """

    def __init__(
        self,
        module: nn.Module,
        store: WeightStore,
        device: torch.device,
        keys: KeyMap,
        reload: Callable[[Collection[str]], None],
        keep: Keep,
        merging: Merging,
    ) -> None:
        self._module = module
        self._merging = merging
        self._store = store
        self._device = device
        self._reload = reload
        self._where = keep
        self._originals: dict[str, Tensor] = {}
        self._merged = NONE
        self._placed: dict[str, list[tuple[str, Piece]]] = {}
        """Tensor of the file -> the parameters that have rows of it, and which rows."""
        self._sizes = tensor_sizes(keys)
        self._packed = {
            f"{name}.weight": child for name, child in module.named_modules() if isinstance(child, PackedLinear)
        }
        self._expanding = {
            name
            for name, layer in self._packed.items()
            if not is_merged(layer.storage, layer.weight_scale is not None, merging.dtype)
        }
        """Parameters to which adapters are applied each time they are expanded."""
        self._layers: dict[str, tuple[QuantisedLayer, dict[str, str]]] = {}
        for name, layer in quantised_layers(module):
            parts = {part: f"{name}.{PARTS}.{part}" for part, _ in layer.parts.named_parameters()}
            self._layers[f"{name}.weight"] = layer, parts
        parameter_names = {name for name, _ in module.named_parameters()}
        for name, piece in keys.items():
            if name in parameter_names:
                self._placed.setdefault(piece.name, []).append((name, piece))

    @torch.no_grad()
    def merge(self, adapters: AdapterSet) -> None:
        """Make the weights those of the file with `adapters` in them. This is a collective of all ranks."""
        if adapters.id == self._merged.id:
            return
        before, after = self._merged.recipe, adapters.recipe
        known = [*self._placed, *self._layers]
        changed = {name for name in known if before.get(name) != after.get(name)}
        names = [name for name in self._sizes if name in changed]
        self._restore(self._parameters_of(name for name in names if name in before))
        now = [name for name in names if name in after]
        for parameter in self._parameters_of(now):
            self._keep(parameter)
        for name in now:
            ids = {id for adapter in after[name] for id in adapter.tensors.values()}
            mine = {id: adapters.tensors[id].to(self._device) for id in ids}
            if name in self._layers:
                self._quantise_anew(name, after[name], mine)
            elif self._placed[name][0][0] in self._expanding:
                adds_in, _ = self._types(self._packed[self._placed[name][0][0]])
                norms = self._column_norms(name, after[name], mine, adds_in)
                for parameter, piece in self._placed[name]:
                    layer, rows = self._packed[parameter], slice(piece.start, piece.stop)
                    run = AdapterRows(rows, self._sizes[name], after[name], norms)
                    layer.change = ExpandedAdapters(run, mine, *self._types(layer))
            elif self._is_rounded(name):
                self._round_anew(name, after[name], mine)
            else:
                self._change(name, after[name], mine)
        self._merged = adapters

    def _types(self, layer: PackedLinear) -> tuple[torch.dtype, torch.dtype]:
        """Return the dtype in which adapters are added to an expanded weight, and the dtype to which the sum is rounded.

        For fp8 that ComfyUI expands when it loads, both are ComfyUI's. ComfyUI itself has no GGUF blocks, and no scales
        of other models: these weights are changed in fp32.
        """
        if layer.storage.dtype is None or layer.weight_scale is not None:
            return torch.float32, torch.float32
        return self._merging.adds_in(self._device), self._merging.dtype

    def _parameters_of(self, names: Iterable[str]) -> list[str]:
        parameters: dict[str, None] = {}
        for name in names:
            placed = [parameter for parameter, _ in self._placed.get(name, ())]
            parameters |= dict.fromkeys(self._layers[name][1].values() if name in self._layers else placed)
        return list(parameters)

    def _restore(self, names: Sequence[str]) -> None:
        lost = [name for name in names if name not in self._originals and name not in self._expanding]
        if not self._where.all_true(not lost):
            self._reload(lost)
        for name in names:
            if name in self._expanding:
                self._packed[name].change = None
            elif name in self._originals:
                self._store.run(name).values.copy_(self._originals.pop(name))

    def _keep(self, name: str) -> None:
        values = self._store.run(name).values
        if name not in self._expanding and self._where.fits(values.nbytes):
            self._originals[name] = values.to("cpu", copy=True)

    def _change(self, name: str, recipe: Sequence[Adapter], values: Values) -> None:
        size, adds_in = self._sizes[name], self._merging.adds_in(self._device)
        whole = None
        torn = self._store.shared and any(map(needs_whole_rows, recipe))
        if torn or any(needs_all_rows(adapter, values, size) for adapter in recipe):
            whole = self._whole(name).to(adds_in)
            apply(recipe, values, whole, slice(0, size[0]), size)
        for parameter, piece in self._placed[name]:
            run = self._store.run(parameter)
            for first, last in _chunks(piece, run):
                rows = slice(piece.start + first, piece.start + last)
                if whole is None:
                    part = _rows(run, first, last, piece.row_shape, self._device).to(adds_in)
                    apply(recipe, values, part, rows, size)
                else:
                    part = whole[rows]
                _put_rows(part, run, first)

    def _is_rounded(self, name: str) -> bool:
        """Return True if ComfyUI holds the tensor in fp8: a matrix, or a tensor that is held in a wider dtype and rounded."""
        parameter, _ = self._placed[name][0]
        return self._merging.dtype in FLOAT8 and parameter not in self._merging.exact

    def _round_anew(self, name: str, recipe: Sequence[Adapter], values: Values) -> None:
        """Change a whole weight and round it as ComfyUI does. This is a collective if ranks share the weights."""
        weight = self._whole(name).to(self._merging.adds_in(self._device))
        size = self._sizes[name]
        apply(recipe, values, weight, slice(0, size[0]), size)
        rounded = self._merging.rounded(weight, self._merging.dtype, name)
        for parameter, piece in self._placed[name]:
            rows = rounded[piece.start : piece.stop]
            packed = parameter in self._packed
            _put_rows(rows.view(torch.uint8) if packed else rows, self._store.run(parameter), 0)

    def _quantise_anew(self, name: str, recipe: Sequence[Adapter], values: Values) -> None:
        """Expand a whole weight, change it and quantise it as ComfyUI does. This is a collective if ranks share the weights."""
        layer, parameters = self._layers[name]
        parts = {part: self._store.full(parameter).to(self._device) for part, parameter in parameters.items()}
        weight = layer.values(parts)
        size = self._sizes[name]
        apply(recipe, values, weight, slice(0, size[0]), size)
        for part, changed in layer.quantised(parts, weight, name).items():
            run = self._store.run(parameters[part])
            run.values.copy_(changed[run.start : run.stop])

    def _column_norms(
        self, name: str, recipe: Sequence[Adapter], values: Values, adds_in: torch.dtype
    ) -> dict[int, Tensor]:
        """Return the column norms that DoRA needs. They span all rows, also those of other layers and ranks."""
        norms: dict[int, Tensor] = {}
        size = self._sizes[name]
        if any(has_column_norms(adapter, values, size) for adapter in recipe):
            apply(recipe, values, self._whole(name).to(adds_in), slice(0, size[0]), size, norms)
        return norms

    def _whole(self, name: str) -> Tensor:
        """Return all rows of a file's tensor in fp32. This is a collective if ranks share the weights."""
        pieces = self._placed[name]
        assert sum(piece.rows for _, piece in pieces) == self._sizes[name][0], f"{name} is in pieces"
        rows = {}
        for parameter, piece in pieces:
            full = self._store.full(parameter).to(self._device)
            packed = self._packed.get(parameter)
            if packed is not None:
                scale = None
                if packed.weight_scale is not None:
                    scale = self._store.full(f"{parameter}_scale").to(self._device)
                full = packed.expand(full, scale, torch.float32)
            rows[piece.start] = full.float()
        return torch.cat([rows[start] for start in sorted(rows)])


def _width(shape: Sequence[int]) -> int:
    return max(1, math.prod(shape))


def _chunks(piece: Piece, run: ParameterRun) -> Iterator[tuple[int, int]]:
    """Yield ranges of the parameter's rows that the run has values of, a limited number of rows at a time."""
    width = _width(piece.row_shape)
    begin = run.start // width
    end = min(piece.rows, -(-run.stop // width))
    step = max(1, CHUNK_VALUES // width)
    for first in range(begin, end, step):
        yield first, min(first + step, end)


def _rows(run: ParameterRun, first: int, last: int, row_shape: Sequence[int], device: torch.device) -> Tensor:
    """Return rows of a parameter in fp32. Values of the outer rows that the run does not have are zero."""
    width = _width(row_shape)
    rows = torch.zeros((last - first) * width, device=device)
    begin, end = max(run.start, first * width), min(run.stop, last * width)
    rows[begin - first * width : end - first * width] = run.values[begin - run.start : end - run.start]
    return rows.view(last - first, *row_shape)


def _put_rows(rows: Tensor, run: ParameterRun, first: int) -> None:
    """Write those values of the rows that the run has. The first of the rows is the parameter's row `first`."""
    flat = rows.reshape(-1)
    offset = first * (flat.numel() // rows.shape[0])
    begin, end = max(run.start, offset), min(run.stop, offset + flat.numel())
    run.values[begin - run.start : end - run.start] = flat[begin - offset : end - offset]


@dataclass(frozen=True)
class AdapterRows:
    """The adapters of a file's tensor, for a weight that has some rows of the tensor.

    Attributes:
        rows: the rows of the tensor that the weight has.
        size: shape of the tensor.
        column_norms: as in `apply`.
    """

    rows: slice
    size: Sequence[int]
    adapters: Sequence[Adapter]
    column_norms: Mapping[int, Tensor]


class ExpandedAdapters(nn.Module):
    """A module that applies adapters to the values of an expanded weight.

    The adapters' tensors are buffers, so they move with the layer.

    Args:
        values: the adapters' tensors, on the weight's device.
        adds_in: the dtype in which adapters are added.
        stored_dtype: the dtype to which ComfyUI rounds the sum.
    """

    def __init__(self, rows: AdapterRows, values: Values, adds_in: torch.dtype, stored_dtype: torch.dtype) -> None:
        super().__init__()
        self._rows = rows
        self._adds_in = adds_in
        self._stored_dtype = stored_dtype
        for name in {name for adapter in rows.adapters for name in adapter.tensors.values()}:
            self.register_buffer(name, values[name], persistent=False)
        for number, norms in rows.column_norms.items():
            self.register_buffer(f"norms {number}", norms, persistent=False)

    def forward(self, weight: Tensor) -> Tensor:
        """Return the changed weight. The change may be in place."""
        weight, rows = weight.to(self._adds_in), self._rows
        buffers = dict(self.named_buffers(remove_duplicate=False))  # adapters may share norms
        norms = {number: buffers[f"norms {number}"] for number in rows.column_norms}
        apply(rows.adapters, buffers, weight, rows.rows, rows.size, norms)
        return weight.to(self._stored_dtype)
