"""Declarations on the wire: a declaration arrives unchanged, and a message that is no declaration is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from parallel_backend.declaration import Declaration, DistributedAttention, PythonFunction
from parallel_backend.derive.writing import written
from tests.derive.found import FOUND


def test_a_declaration_arrives_unchanged() -> None:
    arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(FOUND), type=Declaration)
    assert arrived == FOUND == FOUND.sent()
    assert written(arrived, "") == written(FOUND, "")
    assert hash(arrived) == hash(FOUND)


def test_a_field_with_its_default_is_not_sent() -> None:
    (default,) = (field.default for field in msgspec.structs.fields(Declaration) if field.name == "patch_size")
    plain = replace(FOUND, patch_size=default)
    assert "patch_size" in msgspec.to_builtins(FOUND)
    assert "patch_size" not in msgspec.to_builtins(plain)
    assert plain.sent().patch_size is plain.patch_size


OPTIONAL = (DistributedAttention(("x",), is_called=lambda options: True),)


@pytest.mark.parametrize(
    "change",
    [
        lambda: replace(FOUND, attention_heads=PythonFunction(lambda model: (1, 2))),
        lambda: replace(FOUND, sigmas=lambda model: True),
        lambda: replace(FOUND, groups=(replace(FOUND.groups[0], attentions=OPTIONAL),)),
        lambda: replace(FOUND, positions=("rope",) * 65),
    ],
)
def test_a_declaration_with_a_function_or_too_many_values_cannot_be_sent(change: Callable[[], Declaration]) -> None:
    with pytest.raises(ValueError, match="the declaration cannot be sent"):
        change().sent()


@pytest.mark.parametrize(
    "fields",
    [
        {"groups": [{"type": "Constant", "value": 1}]},
        {"attention_heads": {"type": "AttentionsBySubmodule", "submodule": "a", "present": [], "absent": []}},
        {"attention_heads": {"type": "Constant", "value": "lambda model: 1"}},
        {"attention_heads": {"type": "PythonFunction", "function": "len"}},
        {"attention_heads": {"type": "PythonFunction"}},
        {"text_width": {"type": "Constant", "value": -1}},
        {"compute": {"type": "Constant", "value": 1}},
        {"sigmas": "print"},
        {"output_layers": [msgspec.to_builtins(FOUND.output_layers[0])] * 65},
        {"output_layers": [{**msgspec.to_builtins(FOUND.output_layers[0]), "path": "a" * 257}]},
    ],
)
def test_functions_other_words_and_too_many_values_are_refused_on_arrival(fields: dict[str, Any]) -> None:
    right = msgspec.to_builtins(FOUND)
    assert msgspec.json.decode(msgspec.json.encode(right), type=Declaration) == FOUND
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode({**right, **fields}), type=Declaration)
