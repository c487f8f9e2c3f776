"""Derived declarations as data: what they say survives the wire, and what is no declaration is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from parallel_backend import derived
from parallel_backend.derive.writing import written
from parallel_backend.models.spread.data import data_of, declaration_of
from parallel_backend.models.spread.declaration import (
    Along,
    Attended,
    Beside,
    Boundary,
    ByFrame,
    Declaration,
    Group,
    Local,
    Pictured,
    Same,
    Segments,
    Spread,
    TextLength,
    TextMask,
)
from parallel_backend.models.spread.functions import Chosen, Constant, LengthLess, StartAt

FOUND = Declaration(
    groups=(
        Group(
            "blocks",
            streams={"x": Pictured(start=LengthLess(32)), "context": Beside()},
            returns=("x", "context"),
            arguments={
                "pe": Along(("x", "context"), dim=2),
                "runs": Segments("x"),
                "edge": Boundary("x"),
                "e": ByFrame("x", 4),
                "mask": TextMask("context", before=("x",)),
                "length": TextLength("context"),
                "vec": Same((1, 2)),
                "clip": Attended(),
            },
            attentions=Chosen("cross", (Spread(("x", "context"), kv_heads=2), Local()), (Spread(("x",)),)),
            attends_in="comfy.ldm.some.model",
            operations=43,
        ),
        Group("tail", streams={"x": Pictured(grid=True, dim=2, start=StartAt(3))}, returns=("x",)),
    ),
    heads=(Group("head", streams={"x": Pictured()}, returns=("x",)),),
    heads_of=Constant((24, 128)),
    text_width=Constant(4096),
    patch_size=Constant((1, 2, 2)),
    joint_text=False,
    divides=True,
    whole_picture=True,
)
"""With every word that data has."""


def test_a_declaration_comes_back_from_the_wire_as_it_was() -> None:
    sent = msgspec.msgpack.encode(data_of(FOUND))
    arrived = declaration_of(msgspec.msgpack.decode(sent, type=derived.Declaration))
    assert arrived == FOUND
    assert written(arrived, "") == written(FOUND, "")
    assert hash(data_of(FOUND)) == hash(data_of(arrived))


def test_what_has_its_default_is_left_out() -> None:
    plain = replace(FOUND, patch_size=Declaration.patch_size)
    assert data_of(plain).patch_size is None
    assert declaration_of(data_of(plain)).patch_size is Declaration.patch_size


@pytest.mark.parametrize(
    "change",
    [
        lambda: replace(FOUND, positions=("rope",)),
        lambda: replace(FOUND, heads_of=lambda model: (1, 2)),
        lambda: replace(FOUND, groups=(replace(FOUND.groups[0], attentions=(Spread(("x",), weighed=True),)),)),
    ],
)
def test_what_is_no_data_is_not_lost_in_silence(change: Callable[[], Declaration]) -> None:
    with pytest.raises(ValueError, match="a declaration is no data"):
        data_of(change())


def spoilt(**fields: Any) -> bytes:
    return msgspec.json.encode({**msgspec.to_builtins(data_of(FOUND)), **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {"groups": [{"type": "Constant", "value": 1}]},
        {"heads_of": {"type": "Chosen", "mark": "a", "having": [], "without": []}},
        {"heads_of": {"type": "Constant", "value": "lambda model: 1"}},
        {"text_width": {"type": "Constant", "value": -1}},
        {"compute": {"type": "Constant", "value": 1}},
        {"heads": [msgspec.to_builtins(data_of(FOUND).heads[0])] * 65},
        {"heads": [{**msgspec.to_builtins(data_of(FOUND).heads[0]), "path": "a" * 257}]},
    ],
)
def test_other_words_and_too_many_are_refused_on_arrival(fields: dict[str, Any]) -> None:
    assert msgspec.json.decode(spoilt(), type=derived.Declaration) == data_of(FOUND)
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(spoilt(**fields), type=derived.Declaration)
