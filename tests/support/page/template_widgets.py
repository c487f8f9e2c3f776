"""Values of the widgets of a workflow's nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

DYNAMIC = "COMFY_DYNAMICCOMBO_V3"
WIDGETS = ("COMBO", "INT", "FLOAT", "STRING", "BOOLEAN", DYNAMIC)


def widgets_of(inputs: Mapping[str, Any], values: Iterator[Any], within: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the inputs that are widgets, with a node's values in order. A dynamic choice may have widgets of its own."""
    for part in ("required", "optional"):
        for name, (kind, *options) in inputs.get(part, {}).items():
            given = options[0] if options else {}
            kinds = WIDGETS if isinstance(kind, list) else kind.split(",")
            if not {*kinds} & {*WIDGETS} or given.get("forceInput"):
                continue
            value = next(values, None)
            if value is not None:
                yield within + name, value
            if given.get("control_after_generate"):
                next(values)
            if kind == DYNAMIC:
                for option in given["options"]:
                    if option["key"] == value:
                        yield from widgets_of(option["inputs"], values, f"{within}{name}.")
