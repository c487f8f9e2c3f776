"""A declaration that was derived, as data: what is kept on disk and sent to workers, checked by its schema on arrival.

It has the words of `models/spread/declaration.py` that `derive` finds, under their names; `models/spread/data.py` turns one into
the other.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

Name = Annotated[str, msgspec.Meta(max_length=256)]
Names = Annotated[tuple[Name, ...], msgspec.Meta(max_length=64)]
Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 24)]
Measured = Annotated[float, msgspec.Meta(ge=0, le=1 << 24)]
Numbers = Annotated[tuple[Number, ...], msgspec.Meta(max_length=64)]


class Word(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """A word of the vocabulary, by its name; see there."""


class Constant(Word, frozen=True):
    """The same for every model."""

    value: Number | Numbers


class StartAt(Word, frozen=True):
    """A fixed place."""

    place: Number


class LengthLess(Word, frozen=True):
    """The end, less the picture."""

    multiple: Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]


class Turns(Word, frozen=True):
    """Blocks of one list behind those of another."""

    path: Name
    beside: Name
    places: Annotated[tuple[Number, ...], msgspec.Meta(max_length=256)]


class Beside(Word, frozen=True):
    """A stream of text."""


class Behind(Word, frozen=True):
    """Tokens of latents of these names."""

    names: Names
    step: Numbers


class Pictured(Word, frozen=True):
    """A stream with the picture; `start` is the vocabulary's own where there is none."""

    start: StartAt | LengthLess | None = None
    behind: Behind | None = None
    grid: bool = False
    dim: Number = 1
    parts: Number = 0


class Along(Word, frozen=True):
    """Goes along streams."""

    streams: Names
    dim: Number


class Segments(Word, frozen=True):
    """Runs of tokens."""

    stream: Name


class Boundary(Word, frozen=True):
    """A position."""

    stream: Name


class ByFrame(Word, frozen=True):
    """Rows of frames."""

    stream: Name
    dims: Number


class ByPart(Word, frozen=True):
    """Values of parts of frames."""

    stream: Name
    each: Annotated[int, msgspec.Meta(ge=1, le=1 << 24)] = 1
    whole: bool = False


class TextMask(Word, frozen=True):
    """A mask of text."""

    stream: Name
    behind: Names = ()
    before: Names = ()


class TextLength(Word, frozen=True):
    """How much text there is."""

    stream: Name


class Same(Word, frozen=True):
    """The same for all tokens."""

    rows: Numbers = (1,)


class Attended(Word, frozen=True):
    """The same on all ranks."""


class Spread(Word, frozen=True):
    """Attention to keys of all ranks."""

    streams: Names
    kv_heads: Number = 0


class Local(Word, frozen=True):
    """Attention to keys that every rank has."""


Attentions = Annotated[tuple[Spread | Local, ...], msgspec.Meta(max_length=64)]


class Chosen(Word, frozen=True):
    """Attentions by a submodule that some blocks have."""

    mark: Name
    having: Attentions
    without: Attentions


StreamKind = Beside | Pictured
Argument = Along | Segments | Boundary | ByFrame | ByPart | TextMask | TextLength | Same | Attended


class Group(Word, frozen=True):
    """Blocks of one kind."""

    path: Name
    streams: Annotated[tuple[tuple[Name, StreamKind], ...], msgspec.Meta(max_length=64)]
    returns: Names
    arguments: Annotated[tuple[tuple[Name, Argument], ...], msgspec.Meta(max_length=64)] = ()
    attentions: Attentions | Chosen = ()
    attends_in: Name = ""
    operations: Number = 0
    applied: Measured = 0.0
    copies: Measured = 0.0


Groups = Annotated[tuple[Group, ...], msgspec.Meta(max_length=64)]


class Declaration(Word, frozen=True):
    """The whole; `patch_size` is what the model calls so where there is none."""

    groups: Groups
    heads: Groups
    heads_of: Constant
    text_width: Constant
    joint_text: bool = True
    patch_size: Constant | None = None
    units: Turns | None = None
    between: Groups = ()
    divides: bool = False
    whole_picture: bool = False
    references: Names = ()
