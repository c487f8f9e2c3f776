"""Key maps: for each parameter of a module, the rows of file tensors that make the parameter."""

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

    @property
    def rows(self) -> int:
        """Return the number of rows of the piece."""
        return self.stop - self.start


KeyMap = Mapping[str, Piece]
"""Parameter name -> the piece that is its value."""


def under_map_names(checkpoint: Checkpoint, keys: KeyMap) -> Checkpoint:
    """Rename a checkpoint's tensors from the module's parameter names to the key map's tensor names.

    Parameters that are rows of one tensor are joined.

    Raises:
        Refused: a parameter is missing, or does not have the rows that are needed.
    """
    pieces: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for parameter, piece in keys.items():
        if parameter not in checkpoint.entries:
            raise Refused(f"{checkpoint.path.name} lacks the tensor {parameter}: choose a complete checkpoint.")
        pieces[piece.name].append((piece.start, parameter))
    entries = {}
    for name, parts in pieces.items():
        runs: list[Run] = []
        for _, parameter in sorted(parts):
            entry, rows = checkpoint.entries[parameter], keys[parameter].rows
            if entry.shape[:1] != (rows,):
                raise Refused(
                    f"{checkpoint.path.name} holds {parameter} with the shape {list(entry.shape)} and {rows} "
                    "rows are needed: choose another checkpoint."
                )
            runs.append((entry, 0, rows))
        try:
            entries[name] = join(tuple(runs))
        except ValueError as error:
            raise Refused(f"{checkpoint.path.name} has damaged tensors ({name}: {error}); download it again.") from None
    return replace(checkpoint, entries=entries)


def tensor_sizes(keys: KeyMap) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the file's tensors, as far as the map uses the tensors."""
    sizes: dict[str, tuple[int, ...]] = {}
    for piece in keys.values():
        rows = max(piece.stop, sizes.get(piece.name, (0,))[0])
        sizes[piece.name] = (rows, *piece.row_shape)
    return sizes
