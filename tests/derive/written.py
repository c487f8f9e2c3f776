"""Prints a table of the facts in each written declaration that no derivation finds.

python -m tests.derive.written
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import torch
from msgspec.structs import fields

from parallel_backend.declaration import Declaration
from parallel_backend.derive.deriving import candidates
from parallel_backend.derive.rules import Undescribed
from parallel_backend.derive.writing import is_default
from parallel_backend.models.comfyui.small import SMALL, small
from tests.derive.subjects import SUBJECTS
from tests.support.comfy_oracle import comfy_on_path

DERIVED = ("groups", "output_layers", "between", "units", "joint_text", "divisible_latent")
FOR_ANY_WIDTH = ("attention_heads", "text_width", "patch_size")
"""Functions of the model in written declarations, and numbers of one file in derived ones."""


def rows() -> Iterator[str]:
    """Yield a row for each class: the number of inputs, the number of distinct declarations derived, and the written one's
    further facts.
    """
    said: dict[str, set[str]] = {}
    found: dict[str, list[Declaration | None]] = defaultdict(list)
    for name in SMALL:
        if name not in SUBJECTS:
            continue
        case = small(name)
        try:
            with torch.inference_mode():
                declaration = next(candidates(SUBJECTS[name]()))
        except Undescribed:
            found[case.kind].append(None)
            continue
        found[case.kind].append(declaration)
        more = {*_more(case.declaration, declaration)}
        said[case.kind] = said.get(case.kind, more) & more  # facts that no input shows
    for kind, each in sorted(found.items()):
        words = ", ".join(sorted(said.get(kind, {"all of it"}))) or "nothing"
        yield f"| {kind} | {len(each)} | {len({*each} - {None})} | {words} |"


def _more(written: Declaration, other: Declaration) -> Iterator[str]:
    for field in fields(written):
        value = getattr(written, field.name)
        simple = field.name not in (*DERIVED, *FOR_ANY_WIDTH)
        if simple and not is_default(field, value) and value != getattr(other, field.name):
            yield field.name
    its = {group.path: group for group in other.groups}
    for group in written.groups:
        same = its.get(group.path)
        if same is None:
            yield f"blocks of {group.path}"
            continue
        if group.modulations:
            yield "modulations"
        yield from {*group.arguments} - {*same.arguments}
    for name in ("output_layers", "between"):
        if len(getattr(written, name)) > len(getattr(other, name)):
            yield name


if __name__ == "__main__":
    comfy_on_path()
    torch.set_num_threads(1)
    for row in rows():
        print(row, flush=True)
