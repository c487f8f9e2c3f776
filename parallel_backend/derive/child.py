"""The process that derives a declaration for the command: `python -m parallel_backend.derive.child FILE BYTES`."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import re
import sys
from pathlib import Path

import torch

from ..comfyui_folder import FOLDER, comfyui_version
from ..errors import Refused
from ..models.comfyui.importing import import_comfyui
from .calls import Subject
from .derive import Derived, derive
from .measuring import with_costs
from .reduced_config import derived_reduced
from .small import Small, small_of, subjects_of
from .writing import source_of


def main(path: Path, limit: float) -> int:
    """Print a declaration, and its proof on stderr. Without a declaration, print the reason on stderr and return 1."""
    try:
        import_comfyui()
        logging.getLogger().setLevel(logging.WARNING)
        torch.set_num_threads(1)  # ranks are forked from this process
        small = small_of(path, limit)
        subject, derived = _first(small)
    except Refused as error:
        print(error, file=sys.stderr)
        return 1
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", small.kind).upper()
    arguments = ", ".join(
        sorted(name for name, value in subject.call(subject.sizes).arguments.items() if value is not None)
    )
    remarks = (
        f"{small.kind}, derived from the class of ComfyUI {comfyui_version(os.environ[FOLDER])} for calls with {arguments}; "
        f"proved under {', '.join(derived.proof.errors)}."
    )
    print(source_of(name, derived.declaration, remarks), end="")
    plans = "every plan" if not derived.declaration.whole_picture else "every plan without PipeFusion"
    print(f"{small.kind} was derived and proved for {plans}: {derived.proof.in_words()}.", file=sys.stderr)
    return 0


def _first(small: Small) -> tuple[Subject, Derived]:
    """Return the first call that the model accepts and for which a declaration is proved, with this declaration."""
    refused: Refused | None = None
    for number, subject in enumerate(subjects_of(small)):
        again = functools.partial(_numbered, number)
        try:
            derived = derived_reduced(small, [subject], again) or derive([subject])
            return subject, with_costs(small, [subject], derived)
        except Refused as error:
            refused = refused or error
    assert refused is not None
    raise refused


def _numbered(number: int, small: Small) -> list[Subject]:
    """Return the call with the same number, for another small model."""
    return [*itertools.islice(subjects_of(small), number, number + 1)]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), float(sys.argv[2])))
