"""A latent without data that writes down what is done to it, and refuses what is not done to each element for itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....parallel_backend.denoise.operations import ELEMENTWISE
from ....parallel_backend.denoise.program import Along, Argument, Ref
from .tape import Cell, NotLocal, Tape

ONE_MEMORY = ("detach", "alias", "lift_fresh", "view", "_unsafe_view", "reshape", "expand", "slice")
"""What gives the same values in the same memory, if it gives the same shape."""

COPIES = ("clone", "_to_copy")

FILLED = {"zeros_like": 0.0, "ones_like": 1.0, "new_zeros": 0.0, "new_ones": 1.0, "full_like": None, "new_full": None}
"""What makes a tensor of one number, and the number."""

READS = "reads values of the latent"

WORDS = {
    **dict.fromkeys(
        ("_local_scalar_dense", "is_nonzero", "equal", "__float__", "__int__", "__index__", "__bool__", "item"), READS
    ),
    **dict.fromkeys(("numpy", "tolist", "__array__", "data_ptr", "untyped_storage", "storage", "__reduce_ex__"), READS),
    **dict.fromkeys(("linalg_vector_norm", "norm"), "takes a norm of the latent"),
    **dict.fromkeys(("slice", "select", "index", "unbind", "split", "narrow"), "takes a part of the latent"),
    **dict.fromkeys(("std", "var", "mean", "sum", "max", "min", "amax", "amin"), "takes a statistic of the latent"),
}
"""What is refused, in the user's words; anything else by torch's name."""

OWN_NOISE = "draws noise of its own"


class Recorded(torch.Tensor):
    """A tensor of a shape and type whose values are those of a program that is being written."""

    tape: Tape
    cell: Cell

    @staticmethod
    def __new__(cls, tape: Tape, cell: Cell, shape: Sequence[int], dtype: torch.dtype) -> Recorded:
        made = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=torch.device("cpu"))
        made.tape, made.cell = tape, cell
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Recorded({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in (torch.tensordot, torch.einsum) and (made := _combined(func, args, kwargs)) is not None:
                return made
            try:
                return func(*args, **kwargs)
            except NotLocal:
                raise
            except Exception:
                raise _tape_of(args, kwargs).refuse(_word(getattr(func, "__name__", str(func)))) from None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tape = _tape_of(args, kwargs)
        tape.look()
        return _done(tape, func, args, kwargs)


class Deviation(torch.Tensor):
    """So many standard deviations of fresh noise, 0-dim: good for clamping that noise, and for nothing else."""

    tape: Tape
    cell: Cell
    times: float

    @staticmethod
    def __new__(cls, tape: Tape, cell: Cell, times: float, dtype: torch.dtype) -> Deviation:
        made = torch.Tensor._make_wrapper_subclass(cls, (), dtype=dtype, device=torch.device("cpu"))
        made.tape, made.cell, made.times = tape, cell, times
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tape, name = _tape_of(args, kwargs), func.overloadpacket.__name__
        ours = [each for each in args if isinstance(each, cls)]
        numbers = [number for each in args if (number := _plain_number(each)) is not None]
        if any(isinstance(each, Recorded) for each in args):
            return _done(tape, func, args, kwargs)
        if len(ours) == 1 and len(ours) + len(numbers) == len(args) and not kwargs:
            this = ours[0]
            if name == "neg":
                return cls(tape, this.cell, -this.times, this.dtype)
            if name == "mul" and numbers:
                return cls(tape, this.cell, this.times * numbers[0], this.dtype)
            if name in ("detach", "alias", "clone"):
                return this
        raise tape.refuse(_word("std"))


def spoilt(tape: Tape, word: str, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None) -> Recorded:
    """What may be held, and is refused with this word where it would show."""
    return Recorded(tape, Cell(-1, spoilt=word), tape.shape if shape is None else shape, dtype or tape.dtype)


def value_of(latent: Any, what: str) -> int:
    """The number of the value that a whole latent of the run's type is.

    Raises:
        NotLocal: it is not recorded, not of the run's shape, or must not be used.
    """
    if not isinstance(latent, Recorded):
        raise NotLocal(f"{what} what is not made of the latent")
    tape, cell = latent.tape, latent.cell
    if cell.spoilt:
        raise tape.refuse(cell.spoilt)
    if latent.shape != tape.shape or cell.count:
        raise tape.refuse(f"{what} a latent of another shape")
    return tape.cast(cell.value, latent.dtype, tape.dtype)


def number_of(value: Any) -> float | int | bool | None:
    """The one number that a plain value or a plain tensor has everywhere; None if there is none."""
    if isinstance(value, Tensor):
        if isinstance(value, Recorded | Deviation) or value.numel() == 0:
            return None
        first = value.detach().flatten()[0]
        one = value.numel() == 1 or bool(((value == first) | (value.isnan() & first.isnan())).all())
        return first.item() if one else None  # type: ignore[no-any-return]
    return _plain_number(value)


def _plain_number(value: Any) -> float | int | bool | None:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Tensor) and not isinstance(value, Recorded | Deviation) and value.numel() == 1:
        value = value.item()
    return value if isinstance(value, bool | int | float) else None


def _tape_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tape:
    for each in (*args, *kwargs.values()):
        for one in each if isinstance(each, list | tuple) else (each,):
            if isinstance(one, Recorded | Deviation):
                return one.tape
    raise AssertionError("torch asks a recorded latent about others")


def _word(name: str) -> str:
    return WORDS.get(name.rstrip("_") if name not in WORDS else name, f"calls torch's {name} on the latent")


def _done(tape: Tape, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What an operation of torch's makes, once it has been written down."""
    name = func.overloadpacket.__name__
    this = args[0] if args else None
    if torch.Tag.nondeterministic_seeded in func.tags:
        if isinstance(this, Recorded) and not name.endswith("_"):
            return spoilt(tape, OWN_NOISE, this.shape, this.dtype)
        raise tape.refuse(OWN_NOISE)
    if name == "stack":
        return _stacked(tape, *args, **kwargs)
    if isinstance(this, Recorded):
        if name in ONE_MEMORY:
            return _same_memory(tape, func, name, args, kwargs)
        if name in COPIES:
            return _copied(tape, this, kwargs.get("dtype") or this.dtype)
        if name in FILLED or name in ("new_empty", "empty_like", "new_empty_strided"):
            return _filled(tape, this, name, args, kwargs)
        if name in ("copy_", "fill_", "zero_"):
            return _overwritten(tape, this, args[1] if len(args) > 1 else 0.0)
        if name == "std" and this.cell.drawn is not None and not set(kwargs) - {"correction"} and len(args) == 1:
            return Deviation(tape, this.cell, 1.0, this.dtype)
        if this.cell.count and not this.cell.spoilt and (made := _of_stack(tape, this, name, args, kwargs)) is not None:
            return made
        if name == "clamp" and any(isinstance(each, Deviation) for each in args):
            return _clipped(tape, this, *args[1:])
    if name.rstrip("_") in ELEMENTWISE and func._overloadname != "out":
        return _elementwise(tape, func, name, args, kwargs)
    made = func.decompose(*args, **kwargs) if torch._C._dispatch_has_kernel_for_dispatch_key(
        func.name(), "CompositeImplicitAutograd"
    ) else NotImplemented  # fmt: skip
    if made is NotImplemented:
        raise tape.refuse(_word(name))
    return made


def _same_memory(tape: Tape, func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Recorded:
    this: Recorded = args[0]
    meta = torch.empty(this.shape, dtype=this.dtype, device="meta")
    if func(meta, *args[1:], **kwargs).shape != this.shape:
        raise tape.refuse(_word(name) if name == "slice" else f"changes the shape of the latent (torch's {name})")
    return Recorded(tape, this.cell, this.shape, this.dtype)


def _copied(tape: Tape, this: Recorded, dtype: torch.dtype) -> Recorded:
    cell = this.cell
    if cell.spoilt:
        return spoilt(tape, cell.spoilt, this.shape, dtype)
    value = tape.cast(cell.value, this.dtype, dtype)
    drawn = cell.drawn if value == cell.value else None
    return Recorded(tape, Cell(value, drawn=drawn, count=cell.count, dim=cell.dim), this.shape, dtype)


def _filled(tape: Tape, this: Recorded, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    dtype = kwargs.get("dtype") or this.dtype
    shape = tuple(args[1]) if name.startswith("new") else tuple(this.shape)
    number = FILLED.get(name)
    if number is None:
        number = args[-1] if name in ("full_like", "new_full") else 0.0
    if shape != tuple(tape.shape):
        return torch.full(shape, number, dtype=dtype)
    return Recorded(
        tape, Cell(tape.cast(tape.operation("full_like", (Ref(0), number)), tape.dtype, dtype)), shape, dtype
    )


def _overwritten(tape: Tape, this: Recorded, given: Any) -> Recorded:
    number = number_of(given)
    if isinstance(given, Recorded) and given.shape == this.shape:
        copy = _copied(tape, given, this.dtype).cell
    elif number is not None:
        value = tape.operation("full_like", (Ref(0), number))
        copy = Cell(tape.cast(value, tape.dtype, this.dtype))
    else:
        raise tape.refuse("puts other values into the latent")
    this.cell.__dict__.update(vars(copy))
    return this


def _stacked(tape: Tape, parts: Sequence[Any], dim: int = 0) -> Recorded:
    if not all(isinstance(part, Recorded) and not part.cell.count for part in parts):
        raise tape.refuse("stacks the latent with others")
    first = parts[0]
    dim %= first.ndim + 1
    shape = [*first.shape[:dim], len(parts), *first.shape[dim:]]
    if any(part.shape != tape.shape or part.dtype != first.dtype for part in parts):
        raise tape.refuse("stacks latents of several shapes or types")
    if word := next((part.cell.spoilt for part in parts if part.cell.spoilt), ""):
        return spoilt(tape, word, shape, first.dtype)
    value = tape.operation("stack", [Ref(part.cell.value) for part in parts], {"dim": dim})
    return Recorded(tape, Cell(value, count=len(parts), dim=dim), shape, first.dtype)


def _of_stack(tape: Tape, this: Recorded, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """One latent, or all of them, of a stack; None if it is something else that is asked for."""
    stack, ndim = this.cell, this.ndim

    def latent(name: str, *arguments: Argument) -> Recorded:
        return Recorded(tape, Cell(tape.operation(name, (Ref(stack.value), *arguments))), tape.shape, this.dtype)

    if name == "select" and args[1] % ndim == stack.dim:
        return latent("select", stack.dim, args[2] % stack.count)
    if name == "unbind" and (args[1] if len(args) > 1 else 0) % ndim == stack.dim:
        return [latent("select", stack.dim, index) for index in range(stack.count)]
    if name == "sum" and len(args) == 2 and not kwargs and [dim % ndim for dim in args[1]] == [stack.dim]:
        return latent("sum", stack.dim)
    return None


def _combined(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Recorded | None:
    """A sum of stacked latents with plain weights; None if it is something else."""
    if func is torch.einsum:
        formula, *operands = args
        operands = list(operands[0]) if len(operands) == 1 else operands
        places = _einsum_places(formula, operands)
    else:
        operands = list(args[:2])
        dims = kwargs.get("dims", args[2] if len(args) > 2 else None)
        pairs = [list(each) for each in dims] if isinstance(dims, list | tuple) and len(dims) == 2 else []
        places = [each[0] for each in pairs] if all(len(each) == 1 for each in pairs) else []
    if len(operands) != 2 or len(places) != 2:
        return None
    (stack, dim), (weights, _) = sorted(
        zip(operands, places, strict=True), key=lambda pair: not isinstance(pair[0], Recorded)
    )
    if not isinstance(stack, Recorded) or isinstance(weights, Recorded | Deviation) or weights.ndim != 1:
        return None
    tape, cell = stack.tape, stack.cell
    if not cell.count or dim % stack.ndim != cell.dim or len(weights) != cell.count or weights.dtype != stack.dtype:
        return None
    if cell.spoilt:
        return spoilt(tape, cell.spoilt, tape.shape, stack.dtype)
    along = Along(tape.weigh(weights.tolist(), weights.dtype), cell.dim)
    return Recorded(tape, Cell(tape.operation("combine", (Ref(cell.value), cell.dim, along))), tape.shape, stack.dtype)


def _einsum_places(formula: Any, operands: Sequence[Any]) -> list[int]:
    """Where in each of two operands the one letter is that is summed over, all others keeping their order; else nothing."""
    if not isinstance(formula, str) or len(operands) != 2:
        return []
    given, _, kept = formula.replace(" ", "").partition("->")
    letters = given.split(",")
    vector = min(letters, key=len)
    if len(letters) != 2 or len(vector) != 1 or max(letters, key=len).replace(vector, "", 1) != kept:
        return []
    return [each.index(vector) for each in letters]


def _clipped(tape: Tape, noise: Recorded, low: Any = None, high: Any = None) -> Recorded:
    bounds = low, high
    if not all(isinstance(each, Deviation) and each.cell is noise.cell for each in bounds) or -low.times != high.times:
        raise tape.refuse(_word("std"))
    if not high.times > 0:
        raise tape.refuse("clamps noise to nothing")
    return Recorded(tape, tape.clip(noise.cell, high.times), noise.shape, noise.dtype)


def _elementwise(tape: Tape, func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Recorded:
    latents = [each for each in (*args, *kwargs.values()) if isinstance(each, Recorded)]
    if not latents:
        raise tape.refuse(_word("std"))
    like = latents[0]
    in_place = name.endswith("_")
    if any(each.cell.count != like.cell.count or each.cell.dim != like.cell.dim for each in latents):
        raise tape.refuse("computes with stacked latents and others")
    if any(each.shape != like.shape for each in latents) or (in_place and args[0] is not like):
        raise tape.refuse("computes with latents of several shapes")
    dtype = _dtype(tape, func, args, kwargs)
    word = next((each.cell.spoilt for each in latents if each.cell.spoilt), "")
    if word:
        made = spoilt(tape, word, like.shape, dtype)
    else:
        promoted = dtype if dtype.is_floating_point and _promotes(like, args, dtype) else None
        argument = _Argument(tape, like, promoted)
        arguments = [argument(each) for each in args]
        keywords = {key: argument(each) for key, each in kwargs.items()}
        if name.rstrip("_") == "lerp" and not all(isinstance(each, Ref) for each in arguments[:2]):
            raise tape.refuse("interpolates between the latent and a number")
        value = tape.operation(name.rstrip("_"), arguments, keywords)
        made = Recorded(tape, Cell(value, count=like.cell.count, dim=like.cell.dim), like.shape, dtype)
    if not in_place:
        return made
    target: Recorded = args[0]
    target.cell.__dict__.update(vars(_copied(tape, made, target.dtype).cell))
    return target


class _Argument:
    """What stands for an operand in a program: a value, a number, weights over a stack."""

    def __init__(self, tape: Tape, like: Recorded, promoted: torch.dtype | None) -> None:
        self._tape = tape
        self._like = like
        self._promoted = promoted

    def __call__(self, operand: Any) -> Argument:
        tape = self._tape
        if isinstance(operand, Recorded):
            value = operand.cell.value
            return Ref(tape.cast(value, operand.dtype, self._promoted) if self._promoted else value)
        if isinstance(operand, Deviation):
            raise tape.refuse(_word("std"))
        if isinstance(operand, Tensor):
            if _broadcast(operand, self._like) and (number := number_of(operand)) is not None:
                return number
            return self._along(operand)
        if operand is None or isinstance(operand, bool | int | float | str):
            return operand  # type: ignore[no-any-return]
        if isinstance(operand, np.generic):
            return operand.item()  # type: ignore[no-any-return]
        raise tape.refuse("computes with the latent and something that is no number")

    def _along(self, weights: Tensor) -> Along:
        stack, ndim = self._like.cell, self._like.ndim
        shape = (1,) * (ndim - weights.ndim) + tuple(weights.shape)
        wanted = tuple(stack.count if place == stack.dim else 1 for place in range(ndim))
        if not stack.count or shape != wanted:
            raise self._tape.refuse("computes with a tensor that is not made of the latent")
        return Along(self._tape.weigh(weights.flatten().tolist(), weights.dtype), stack.dim)


def _broadcast(plain: Tensor, like: Recorded) -> bool:
    """Whether a result has the latent's shape."""
    try:
        return torch.broadcast_shapes(plain.shape, like.shape) == like.shape
    except RuntimeError:
        return False


def _promotes(like: Recorded, args: Sequence[Any], dtype: torch.dtype) -> bool:
    """Whether a plain tensor with dimensions makes the result wider, which a number would not."""
    plain = any(isinstance(each, Tensor) and not isinstance(each, Recorded) and each.ndim for each in args)
    return plain and like.dtype.is_floating_point and dtype != like.dtype


def _dtype(tape: Tape, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.dtype:
    """Of a result, by what torch makes of tensors of these types."""

    def described(each: Any) -> object:
        return (each.dtype, min(each.ndim, 1)) if isinstance(each, Tensor) else type(each)

    key = func, *map(described, args), *((name, described(each)) for name, each in kwargs.items())
    if key not in tape.dtypes:

        def small(each: Any) -> Any:
            if not isinstance(each, Tensor):
                return each
            return torch.ones((1,) * min(each.ndim, 1), dtype=each.dtype)

        made = func(*map(small, args), **{name: small(each) for name, each in kwargs.items()})
        tape.dtypes[key] = made.dtype
    return tape.dtypes[key]
