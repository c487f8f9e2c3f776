"""What a key map is: for each parameter of the module, the rows of file tensors that it is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """A contiguous run of rows (dim 0) of one file tensor, and the tensor's other sizes."""

    name: str
    start: int
    stop: int
    row_shape: tuple[int, ...]


KeyMap = Mapping[str, tuple[Piece, ...]]
"""Parameter name -> the pieces that, joined along dim 0, are its value."""
