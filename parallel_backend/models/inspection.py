"""Functions that find a model's kind and shape in the names and shapes of a checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import Refused
from ..weights.files.checkpoint import Checkpoint
from ..weights.files.keymap import KeyMap
from ..weights.layers.packing import can_be_held


def find_prefix(checkpoint: Checkpoint, prefixes: Sequence[str], names: Sequence[str], least: int = 1) -> str | None:
    """Return the first prefix under which a file has at least `least` of the tensors in `names`; None if there is none."""
    for prefix in prefixes:
        if sum(prefix + name in checkpoint.entries for name in names) >= least:
            return prefix
    return None


def count_blocks(part: Checkpoint, stem: str) -> int:
    """Return the number of different block numbers that follow `stem.` in the tensors' names."""
    return len({name.removeprefix(f"{stem}.").split(".")[0] for name in part.entries if name.startswith(f"{stem}.")})


def sizes(part: Checkpoint, name: str, *dims: int) -> tuple[int, ...]:
    """Return the shape of a tensor, which must have 2 dimensions or one of the numbers `dims`, and no dimension of size 0.

    Raises:
        Refused: the tensor has another number of dimensions, or an empty one.
        KeyError: the file has no tensor of this name.
    """
    shape = part.entries[name].shape
    if len(shape) not in (dims or (2,)) or 0 in shape:
        raise Refused(
            f"{part.path.name} holds {name} with the shape {list(shape)}, which no model of this kind has: choose another "
            "file."
        )
    return shape


def check_tensors(part: Checkpoint, keys: KeyMap, model: str, hidden: int | None = None) -> None:
    """Check that the file has every tensor of a key map, in a supported format and with the expected shape.

    Raises:
        Refused: a tensor is missing or does not fit; the message names the tensor.
    """
    name = part.path.name
    for piece in keys.values():
        entry = part.entries.get(piece.name)
        if entry is None:
            raise Refused(f"{name} lacks the tensor {piece.name}: choose a complete {model} file.")
        if not piece.start < piece.stop <= entry.rows or entry.shape[1:] != piece.row_shape:
            raise Refused(
                f"{name} holds {piece.name} with the shape {list(entry.shape)}, which does not fit "
                f"{'the others' if hidden is None else f'a model of {hidden} features'}: choose another {model} file."
            )
        for run, _, _ in entry.runs(piece.start, piece.stop):
            if not run.storage.readable:
                raise Refused(
                    f"{name} holds {piece.name} as {run.storage.name}, a type not supported: choose a file in fp32, fp16, bf16 "
                    "or fp8, or a GGUF file of Q2_K to Q8_0."
                )
            integers = run.dtype is not None and not run.dtype.is_floating_point
            if integers or not can_be_held(run):
                raise Refused(
                    f"{name} holds {piece.name} as {run.storage.name} in rows of {run.row_bytes} bytes, which is not "
                    "supported: choose a file with weights in fp32, fp16, bf16 or fp8, or a GGUF file."
                )
