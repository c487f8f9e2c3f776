"""What a key map is: for each parameter of the module, the rows of file tensors that it is made of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ...errors import Refused
from .entry import Checkpoint, Run, join


@dataclass(frozen=True)
class Piece:
    """A contiguous run of rows (dim 0) of one file tensor, and the tensor's other sizes."""

    name: str
    start: int
    stop: int
    row_shape: tuple[int, ...]


KeyMap = Mapping[str, tuple[Piece, ...]]
"""Parameter name -> the pieces that, joined along dim 0, are its value."""


def under_map_names(checkpoint: Checkpoint, keys: KeyMap) -> Checkpoint:
    """A checkpoint that names its tensors as the module its parameters, under the names of the key map's tensors.

    Raises:
        Refused: a parameter is missing, or does not fit to those it is joined with.
    """
    pieces: dict[str, list[tuple[int, str, int]]] = defaultdict(list)
    rows: dict[str, int] = {}
    for parameter, parts in keys.items():
        if parameter not in checkpoint.entries:
            raise Refused(f"{checkpoint.path.name} lacks the tensor {parameter}: choose a complete checkpoint.")
        offset = 0
        for piece in parts:
            pieces[piece.name].append((piece.start, parameter, offset))
            offset += piece.stop - piece.start
        rows[parameter] = offset
    sizes = {(piece.name, piece.start): piece.stop - piece.start for parts in keys.values() for piece in parts}
    entries = {}
    for name, found in pieces.items():
        runs: list[Run] = []
        for start, parameter, offset in sorted(found):
            entry = checkpoint.entries[parameter]
            if entry.shape[:1] != (rows[parameter],):
                raise Refused(
                    f"{checkpoint.path.name} holds {parameter} with the shape {list(entry.shape)} and {rows[parameter]} "
                    "rows are needed: choose a complete checkpoint."
                )
            runs.append((entry, offset, offset + sizes[name, start]))
        try:
            entries[name] = join(tuple(runs))
        except ValueError as error:
            raise Refused(f"{checkpoint.path.name} has damaged tensors ({name}: {error}); download it again.") from None
    return replace(checkpoint, entries=entries)


def tensor_sizes(keys: KeyMap) -> dict[str, tuple[int, ...]]:
    """The sizes of the file's tensors, as far as the map uses them."""
    sizes: dict[str, tuple[int, ...]] = {}
    for pieces in keys.values():
        for piece in pieces:
            rows = max(piece.stop, sizes.get(piece.name, (0,))[0])
            sizes[piece.name] = (rows, *piece.row_shape)
    return sizes
