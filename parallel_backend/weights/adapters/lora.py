"""LoRA and its kin: what changes which tensor, as plain data, and the arithmetic on rows of that tensor.

Numerically as ComfyUI 0.30 (comfy/lora.py and comfy/weight_adapter): differences in fp32, added in the weight's type, one
adapter after the other; of a whole tensor the bits are ComfyUI's. Every kind but OFT and column-wise DoRA computes any rows
of a tensor without the others, so a rank computes what it holds.
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
"""LoRA (arXiv 2106.09685), LoHa (2108.06098), LoKr (2309.14859), GLoRA (2306.07967), OFT (2306.07280), the difference
itself, and the new value itself."""


class Adapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One change of one tensor.

    `tensors` maps the parts of its kind to the ids of their values; with `dora_scale` among them the result's norms are
    set to it (DoRA, arXiv 2402.09353). `alpha` as in the file; `scale` multiplies the tensor itself beforehand, which is all
    where there are no tensors. `offset` (dim, start, length) names the part of the tensor that is meant; `function` is one of
    FUNCTIONS, applied to the difference.
    """

    kind: Kind
    tensors: dict[str, str]
    strength: float
    scale: float = 1.0
    alpha: float | None = None
    offset: tuple[int, int, int] | None = None
    function: str | None = None


Recipe = dict[str, list[Adapter]]
"""A tensor, by its name in ComfyUI's model -> its changes, in order."""


class Changes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a MODEL adds to its file: changes of weights, and networks in the order in which they run."""

    recipe: Recipe
    networks: tuple[NetworkPatch, ...] = ()


Values = Mapping[str, Tensor]
"""The tensors of adapters, by their ids."""


@dataclass(frozen=True)
class AdapterSet:
    """All changes to a model, with the tensors they need by id; `left_out` says which changes ComfyUI does not make."""

    recipe: Recipe
    tensors: Values
    networks: tuple[NetworkPatch, ...] = ()
    left_out: tuple[str, ...] = ()

    @cached_property
    def encoded(self) -> bytes:
        """All but the tensors as msgpack."""
        return msgspec.msgpack.encode(Changes(self.recipe, self.networks))

    @cached_property
    def id(self) -> str:
        """Equal for equal changes, strengths included; empty for none."""
        return hashlib.blake2b(self.encoded, digest_size=16).hexdigest() if self.recipe or self.networks else ""


NONE = AdapterSet({}, {})


def decode_changes(data: bytes) -> Changes:
    """What `AdapterSet.encoded` holds; raises msgspec.ValidationError where it is something else."""
    return msgspec.msgpack.decode(data, type=Changes)


def content_id(tensor: Tensor) -> str:
    """An id that equal tensors share."""
    data = tensor.detach().to("cpu").contiguous()
    digest = hashlib.blake2b(f"{data.dtype} {tuple(data.shape)}".encode(), digest_size=16)
    digest.update(data.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _swapped_halves(rows: slice, size: int) -> Iterator[slice]:
    """Where rows of (second half, first half) come from."""
    half = (size + 1) // 2  # as chunk has it
    for start, stop, shift in ((0, size - half, half), (size - half, size, half - size)):
        begin, end = max(rows.start, start), min(rows.stop, stop)
        if begin < end:
            yield slice(begin + shift, end + shift)


FUNCTIONS: Mapping[str, Callable[[slice, int], Iterator[slice]]] = {"swap_scale_shift": _swapped_halves}
"""ComfyUI's functions on differences, all of which move rows: the runs of rows that rows of the result come from."""


def needs_all_rows(adapter: Adapter, values: Values, size: Sequence[int]) -> bool:
    """Whether rows of a tensor of `size` cannot be computed without the others."""
    mixes = adapter.kind == "oft" or (adapter.kind == "glora" and adapter.function is not None)
    return mixes or has_column_norms(adapter, values, size)


def needs_whole_rows(adapter: Adapter) -> bool:
    """Whether values of a row cannot be computed without the others of the row."""
    return adapter.kind == "glora" or "dora_scale" in adapter.tensors


def has_column_norms(adapter: Adapter, values: Values, size: Sequence[int]) -> bool:
    """Whether it is DoRA whose norms are those of columns, which span all rows."""
    scale = adapter.tensors.get("dora_scale")
    return scale is not None and values[scale].shape[0] != _region_size(adapter, size)[0]


def crosses_layers(adapter: Adapter, values: Values, starts: Sequence[int]) -> bool:
    """Whether a layer's rows cannot be computed without another's, where layers begin at these rows of the tensor."""
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
        weight: the rows, in the type in which they are changed.
        rows: which rows of the tensor they are; all of them where an adapter `needs_all_rows`.
        size: of the whole tensor.
        column_norms: by an adapter's place, the norms that DoRA found in all rows; found ones are added.
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
            if "value" not in parts:  # which is as large as the weight: only its rows are converted
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
    """Change rows of the part of a tensor that an adapter means; returns the column norms, if there are any."""
    if adapter.scale != 1.0:
        weight *= adapter.scale
    if not parts:  # UNetCrossAttentionMultiply and its like
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
            weight_norms = weight.reshape(weight.shape[0], -1).norm(dim=1)  # of the weight before: so does ComfyUI
            weight_norms = weight_norms.view(-1, *[1] * (weight.dim() - 1))
        else:
            column_norms = _column_norms(changed, rows, size) if column_norms is None else column_norms
            weight_norms = column_norms
        changed *= (norms / (weight_norms + torch.finfo(weight.dtype).eps)).to(weight.dtype)
        if adapter.strength == 1.0:
            weight.copy_(changed)
        else:
            weight += adapter.strength * (changed - weight)
    else:  # not one fused step, whose last bit is not ComfyUI's
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
    """The difference's rows of the given runs, joined, and the factor that alpha gives."""
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
    """The given runs of rows of a difference that ComfyUI reshapes to `size`.

    `make` gives rows of the difference, which has `row_count` rows before the reshape. All rows are needed where these are not
    the weight's own rows, or where no rows can be made alone (None).
    """
    if row_count == size[0]:
        return _joined([make(run) for run in runs])
    whole = make(slice(None)).reshape(tuple(size))
    return _joined([whole[run] for run in runs])


def _kronecker(w1: Tensor, w2: Tensor) -> tuple[Callable[[slice], Tensor], int | None]:
    """What gives rows of a Kronecker product, and how many it has; None where rows of it are in another order."""
    if w1.dim() == 2 and w2.dim() in (2, 4):
        return lambda run: _kronecker_rows(w1, w2, run), w1.shape[0] * w2.shape[0]
    # in ComfyUI's order, which takes the last dimensions of other kernels for the matrix's
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
    """GLoRA's change of some rows of a weight W: W a1 a2 + b1 b2; of a convolution a1 a2 may be of its channels alone."""
    a1, a2, b1, b2 = (parts[name].flatten(1) for name in ("a1", "a2", "b1", "b2"))
    values = _among(weight.float(), rows, runs)
    if a1.shape[0] != values[0].numel():
        turned = torch.einsum("o i ..., i j, j k -> o k ...", values, a1, a2)
    else:
        turned = values.flatten(1) @ a1 @ a2
    if b1.shape[0] * b2.shape[1] != math.prod(size):
        b1 = b1.expand(size[0], -1)  # one row, which ComfyUI adds to all
    added = _rows_of(lambda run: b1[run] @ b2, runs, b1.shape[0], size).flatten(1)
    return added + turned.reshape(added.shape[0], -1)


def _among(values: Tensor, rows: slice, runs: Sequence[slice]) -> Tensor:
    """The given runs of rows out of `values`, which are the rows `rows`."""
    assert all(rows.start <= run.start and run.stop <= rows.stop for run in runs), "crosses_layers was not asked"
    return _joined([values[run.start - rows.start : run.stop - rows.start] for run in runs])


def _joined(runs: Sequence[Tensor]) -> Tensor:
    """One after the other along dim 0; a single one is not copied."""
    return runs[0] if len(runs) == 1 else torch.cat(list(runs))


def _oft(blocks: Tensor, constraint: float, strength: float, weight: Tensor, rows: slice) -> Tensor:
    """(R - 1) W times a strength, with R the Cayley transform of the blocks' skew-symmetric parts, as LyCORIS defines it."""
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
"""Which of LLLite's modules changes what an attention is given, as ComfyUI's node has it."""


class NetworkPatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A network beside the model's blocks, a model patch of ComfyUI's (`models/comfyui/features/networks.py`).

    `weights` maps its parameters, and `inputs` what it is given (a picture, a mask, speech), to the ids of their values;
    `values` are its settings.
    """

    kind: Literal["AnimaLLLite", "QwenDiffSynth", "ZImageControl", "InfiniteTalk"]
    weights: dict[str, str]
    inputs: dict[str, str]
    values: dict[str, Value]
