"""LoRA and related adapters: the changes of tensors as plain data, and the arithmetic on rows of a tensor.

The numbers are those of ComfyUI 0.30 (comfy/lora.py and comfy/weight_adapter). Differences are in fp32 and are added in the
weight's dtype, one adapter after the other. For a whole tensor the bits equal ComfyUI's. Every kind except OFT and column-wise
DoRA computes any rows of a tensor without the other rows. So a rank computes only the rows that it holds.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import msgspec
import torch
from torch import Tensor

from ...diffusion import Value

Kind = Literal["lora", "loha", "lokr", "glora", "oft", "diff", "set"]
"""Kinds of adapters.

They are LoRA (arXiv 2106.09685), LoHa (2108.06098), LoKr (2309.14859), GLoRA (2306.07967), OFT (2306.07280), the difference
itself, and the new value itself.
"""


class Adapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One change of one tensor.

    Attributes:
        tensors: part of the adapter -> id of the part's values. With a part `dora_scale`, the norms of the result are set to
            its values (DoRA, arXiv 2402.09353).
        strength: factor of the change.
        scale: factor that the tensor itself is multiplied by beforehand. Without `tensors` this is the whole change.
        alpha: alpha as in the file.
        offset: (dim, start, length) of the part of the tensor that changes, or None for the whole tensor.
        function: name in FUNCTIONS of a function that is applied to the difference.
    """

    kind: Kind
    tensors: dict[str, str]
    strength: float
    scale: float = 1.0
    alpha: float | None = None
    offset: tuple[int, int, int] | None = None
    function: str | None = None


Recipe = dict[str, list[Adapter]]
"""Name of a tensor in ComfyUI's model -> the tensor's changes, in order."""


class Changes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The additions of a MODEL to its file: changes of weights, and networks in the order in which they run."""

    recipe: Recipe
    networks: tuple[NetworkPatch, ...] = ()


Values = Mapping[str, Tensor]
"""The tensors of adapters, by id."""


@dataclass(frozen=True)
class AdapterSet:
    """All changes to a model.

    Attributes:
        tensors: the tensors that the changes need, by id.
        left_out: messages about the changes that ComfyUI does not make.
    """

    recipe: Recipe
    tensors: Values
    networks: tuple[NetworkPatch, ...] = ()
    left_out: tuple[str, ...] = ()

    @cached_property
    def encoded(self) -> bytes:
        """Return everything but the tensors, as msgpack."""
        return msgspec.msgpack.encode(Changes(self.recipe, self.networks))

    @cached_property
    def id(self) -> str:
        """Return an id that is equal for equal changes and strengths, or an empty string if there are no changes."""
        return hashlib.blake2b(self.encoded, digest_size=16).hexdigest() if self.recipe or self.networks else ""


NONE = AdapterSet({}, {})


def decode_changes(data: bytes) -> Changes:
    """Decode the bytes of `AdapterSet.encoded`.

    Raises:
        msgspec.ValidationError: the bytes are something else.
    """
    return msgspec.msgpack.decode(data, type=Changes)


def content_id(tensor: Tensor) -> str:
    """Return an id that equal tensors share."""
    data = tensor.detach().to("cpu").contiguous()
    digest = hashlib.blake2b(f"{data.dtype} {tuple(data.shape)}".encode(), digest_size=16)
    digest.update(data.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _swapped_halves(rows: slice, size: int) -> Iterator[slice]:
    """Yield the rows from which the given rows of (second half, first half) come."""
    half = (size + 1) // 2  # as torch.chunk does it
    for start, stop, shift in ((0, size - half, half), (size - half, size, half - size)):
        begin, end = max(rows.start, start), min(rows.stop, stop)
        if begin < end:
            yield slice(begin + shift, end + shift)


FUNCTIONS: Mapping[str, Callable[[slice, int], Iterator[slice]]] = {"swap_scale_shift": _swapped_halves}
"""Name of a function of ComfyUI's on differences -> a function that yields the rows from which rows of the result come.

All of ComfyUI's functions only move rows. The arguments are the rows of the result and the number of all rows.
"""


def needs_all_rows(adapter: Adapter, values: Values, size: Sequence[int]) -> bool:
    """Return True if rows of a tensor of `size` cannot be computed without the other rows."""
    mixes = adapter.kind == "oft" or (adapter.kind == "glora" and adapter.function is not None)
    return mixes or has_column_norms(adapter, values, size)


def needs_whole_rows(adapter: Adapter) -> bool:
    """Return True if values of a row cannot be computed without the other values of the row."""
    return adapter.kind == "glora" or "dora_scale" in adapter.tensors


def has_column_norms(adapter: Adapter, values: Values, size: Sequence[int]) -> bool:
    """Return True for DoRA whose norms are those of columns, which span all rows."""
    scale = adapter.tensors.get("dora_scale")
    return scale is not None and values[scale].shape[0] != _region_size(adapter, size)[0]


def crosses_layers(adapter: Adapter, values: Values, starts: Sequence[int]) -> bool:
    """Return True if a layer's rows cannot be computed without another layer's rows.

    Args:
        starts: the rows of the tensor at which layers begin.
    """
    first = adapter.offset[1] if adapter.offset is not None and adapter.offset[0] == 0 else 0
    if adapter.kind == "oft":
        return any((start - first) % values[adapter.tensors["blocks"]].shape[1] for start in starts)
    return adapter.kind == "glora" and adapter.function is not None and len(starts) > 1


def apply(
    adapters: Sequence[Adapter],
    values: Values,
    weight: Tensor,
    rows: slice,
    size: Sequence[int],
    column_norms: dict[int, Tensor] | None = None,
) -> None:
    """Change rows of a tensor in place.

    Args:
        values: the adapters' tensors, on the weight's device.
        weight: the rows, in the dtype in which they are changed.
        rows: the position of these rows in the tensor. If an adapter `needs_all_rows`, these are all rows.
        size: shape of the whole tensor.
        column_norms: norms that DoRA found in all rows, by the adapter's position. Newly found norms are added.
    """
    norms = {} if column_norms is None else column_norms
    for number, adapter in enumerate(adapters):
        region, mine = weight, rows
        if adapter.offset is not None:
            dim, start, length = adapter.offset
            if dim == 0:
                begin, end = max(rows.start, start), max(rows.start, min(rows.stop, start + length))
                region = weight[begin - rows.start : end - rows.start]
                mine = slice(begin - start, end - start)
            else:
                region = weight.narrow(dim, start, length)
        if region.numel():
            parts = {part: values[name] for part, name in adapter.tensors.items()}
            if "value" not in parts:  # "value" is as large as the weight: only its rows are converted
                parts = {part: tensor.float() for part, tensor in parts.items()}
            adapter_norms = _change(adapter, parts, region, mine, _region_size(adapter, size), norms.get(number))
            if adapter_norms is not None:
                norms[number] = adapter_norms


def _region_size(adapter: Adapter, size: Sequence[int]) -> tuple[int, ...]:
    if adapter.offset is None:
        return tuple(size)
    dim, _, length = adapter.offset
    return (*size[:dim], length, *size[dim + 1 :])


def _change(
    adapter: Adapter,
    parts: Mapping[str, Tensor],
    weight: Tensor,
    rows: slice,
    size: Sequence[int],
    column_norms: Tensor | None,
) -> Tensor | None:
    """Change rows of the part of a tensor that an adapter covers. Return the column norms, if there are any."""
    if adapter.scale != 1.0:
        weight *= adapter.scale
    if not parts:  # UNetCrossAttentionMultiply and similar nodes
        return None
    if adapter.kind == "set":
        weight.copy_(parts["value"].expand(size)[rows])
        return None
    runs = [rows] if adapter.function is None else FUNCTIONS[adapter.function](rows, size[0])
    difference, alpha = _difference(adapter, parts, weight, rows, list(runs), size)
    difference = difference.reshape(weight.shape)
    if "dora_scale" in parts:
        changed, norms = weight + (difference * alpha).to(weight.dtype), parts["dora_scale"]
        if norms.shape[0] == size[0]:
            norms = norms[rows] if norms.dim() == weight.dim() else norms  # fewer dimensions are the weight's last ones
            weight_norms = weight.reshape(weight.shape[0], -1).norm(dim=1)  # of the old weight, as in ComfyUI
            weight_norms = weight_norms.view(-1, *[1] * (weight.dim() - 1))
        else:
            column_norms = _column_norms(changed, rows, size) if column_norms is None else column_norms
            weight_norms = column_norms
        changed *= (norms / (weight_norms + torch.finfo(weight.dtype).eps)).to(weight.dtype)
        if adapter.strength == 1.0:
            weight.copy_(changed)
        else:
            weight += adapter.strength * (changed - weight)
    else:  # not one fused step: its last bit would differ from ComfyUI's
        weight += ((adapter.strength * alpha) * difference).to(weight.dtype)
    return column_norms


def _difference(
    adapter: Adapter,
    parts: Mapping[str, Tensor],
    weight: Tensor,
    rows: slice,
    runs: Sequence[slice],
    size: Sequence[int],
) -> tuple[Tensor, float]:
    """Return the given runs of rows of the difference, joined, and the factor that alpha gives."""
    match adapter.kind:
        case "lora":
            up, down = parts["up"].flatten(1), parts["down"].flatten(1)
            return _rows_of(lambda run: up[run] @ down, runs, up.shape[0], size), _over(adapter.alpha, down.shape[0])
        case "loha":
            w1_a, w1_b, w2_a, w2_b = (parts[name] for name in ("w1_a", "w1_b", "w2_a", "w2_b"))
            difference = _rows_of(
                lambda run: (w1_a[run] @ w1_b) * (w2_a[run] @ w2_b),
                runs,
                w1_a.shape[0] if w1_a.shape[0] == w2_a.shape[0] else None,
                size,
            )
            return difference, _over(adapter.alpha, w1_b.shape[0])
        case "lokr":
            w1 = parts["w1"] if "w1" in parts else parts["w1_a"] @ parts["w1_b"]
            w2 = parts["w2"] if "w2" in parts else parts["w2_a"] @ parts["w2_b"]
            ranks = [parts[name].shape[0] for name in ("w2_b", "w1_b") if name in parts]
            alpha = _over(adapter.alpha, ranks[0]) if ranks else 1.0
            make, row_count = _kronecker(w1, w2)
            return _rows_of(make, runs, row_count, size), alpha
        case "glora":
            return _glora(parts, weight, rows, runs, size), _over(adapter.alpha, parts["a2"].shape[0])
        case "oft":
            turned = _oft(parts["blocks"], adapter.alpha or 0.0, adapter.strength, weight, rows)
            return _among(turned, rows, runs), 1.0
        case _:
            assert adapter.kind == "diff"
            return _joined([parts["value"][run].to(weight.dtype) for run in runs]), 1.0


def _over(alpha: float | None, rank: int) -> float:
    return 1.0 if alpha is None else alpha / rank


def _rows_of(
    make: Callable[[slice], Tensor], runs: Sequence[slice], row_count: int | None, size: Sequence[int]
) -> Tensor:
    """Return the given runs of rows of a difference that ComfyUI reshapes to `size`.

    Args:
        make: returns rows of the difference before the reshape.
        row_count: number of rows before the reshape, or None if no rows can be made alone. All rows are made if the number is
            not that of the weight's rows.
    """
    if row_count == size[0]:
        return _joined([make(run) for run in runs])
    whole = make(slice(None)).reshape(tuple(size))
    return _joined([whole[run] for run in runs])


def _kronecker(w1: Tensor, w2: Tensor) -> tuple[Callable[[slice], Tensor], int | None]:
    """Return a function that makes rows of a Kronecker product, and the number of rows (None if they are in another order)."""
    if w1.dim() == 2 and w2.dim() in (2, 4):
        return lambda run: _kronecker_rows(w1, w2, run), w1.shape[0] * w2.shape[0]
    # As ComfyUI does it: torch.kron aligns the last dimensions, so a matrix meets the last dimensions of other kernels.
    return lambda _: torch.kron(w1[..., None, None] if w2.dim() == 4 else w1, w2), None


def _kronecker_rows(w1: Tensor, w2: Tensor, rows: slice) -> Tensor:
    height = w2.shape[0]
    start, stop, _ = rows.indices(w1.shape[0] * height)
    first = start // height
    blocks = torch.kron(w1[first : math.ceil(stop / height)], w2.flatten(1))
    return blocks[start - first * height : stop - first * height]


def _glora(
    parts: Mapping[str, Tensor], weight: Tensor, rows: slice, runs: Sequence[slice], size: Sequence[int]
) -> Tensor:
    """Return GLoRA's change of some rows of a weight W: W a1 a2 + b1 b2.

    In a convolution, a1 a2 may act on the channels alone.
    """
    a1, a2, b1, b2 = (parts[name].flatten(1) for name in ("a1", "a2", "b1", "b2"))
    values = _among(weight.float(), rows, runs)
    if a1.shape[0] != values[0].numel():
        turned = torch.einsum("o i ..., i j, j k -> o k ...", values, a1, a2)
    else:
        turned = values.flatten(1) @ a1 @ a2
    if b1.shape[0] * b2.shape[1] != math.prod(size):
        b1 = b1.expand(size[0], -1)  # a single row, which ComfyUI adds to all rows
    added = _rows_of(lambda run: b1[run] @ b2, runs, b1.shape[0], size).flatten(1)
    return added + turned.reshape(added.shape[0], -1)


def _among(values: Tensor, rows: slice, runs: Sequence[slice]) -> Tensor:
    """Return the given runs of rows out of `values`, which holds the rows `rows`."""
    assert all(rows.start <= run.start and run.stop <= rows.stop for run in runs), "crosses_layers was not asked"
    return _joined([values[run.start - rows.start : run.stop - rows.start] for run in runs])


def _joined(runs: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors along dim 0. A single tensor is not copied."""
    return runs[0] if len(runs) == 1 else torch.cat(list(runs))


def _oft(blocks: Tensor, constraint: float, strength: float, weight: Tensor, rows: slice) -> Tensor:
    """Return (R - 1) W times a strength, as LyCORIS defines it.

    R is the Cayley transform of the blocks' skew-symmetric parts.
    """
    size = blocks.shape[1]
    assert rows.start % size == rows.stop % size == 0, "crosses_layers was not asked"
    identity = torch.eye(size, device=blocks.device)
    skew = blocks - blocks.transpose(1, 2)
    if constraint > 0:
        norm = skew.norm() + 1e-8
        if norm > constraint:
            skew = skew * constraint / norm
    skew = skew[rows.start // size : rows.stop // size]
    turn = ((identity + skew) @ (identity - skew).inverse()).to(weight.dtype)
    change = turn * strength - strength * torch.eye(size, device=weight.device, dtype=weight.dtype)
    turned = torch.einsum("k n m, k n i -> k m i", change, weight.reshape(-1, size, weight[0].numel()))
    return turned.reshape(weight.shape)


def _column_norms(weight: Tensor, rows: slice, size: Sequence[int]) -> Tensor:
    assert rows == slice(0, size[0]), "column norms need all rows"
    return weight.transpose(0, 1).flatten(1).norm(dim=1).view(1, -1, *[1] * (weight.dim() - 2))


SELF_ATTENTION = {"q": "self_attn_q_proj", "k": "self_attn_k_proj", "v": "self_attn_v_proj"}
CROSS_ATTENTION = {"q": "cross_attn_q_proj"}
"""Input of an attention -> LLLite's module that changes the input, as in ComfyUI's node."""


class NetworkPatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A network next to the model's blocks: a model patch of ComfyUI's (`models/comfyui/features/networks.py`).

    Attributes:
        weights: parameter of the network -> id of its values.
        inputs: input of the network (a picture, a mask, speech) -> id of its values.
        values: the network's settings.
    """

    kind: Literal["AnimaLLLite", "QwenDiffSynth", "ZImageControl", "InfiniteTalk"]
    weights: dict[str, str]
    inputs: dict[str, str]
    values: dict[str, Value]
