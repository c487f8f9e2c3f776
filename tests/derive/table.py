"""Prints a table of the tests' small models that are derived and proved.

python -m tests.derive.table [NAME …]
"""

from __future__ import annotations

import resource
import sys
import time

import torch

from parallel_backend.derive.derive import derive
from parallel_backend.errors import Refused
from tests.derive.subjects import SUBJECTS
from tests.support.comfy_oracle import comfy_on_path


def row(name: str) -> str:
    """Return a table row: class, input, CPU seconds, memory, and the worst error or the reason for a refusal."""
    with torch.inference_mode():
        subject = SUBJECTS[name]()
    begun = _spent()
    try:
        found = derive([subject])
        proved = "without patches" if found.declaration.whole_picture else "yes"
        told = f"{proved} | {max(found.proof.errors.values()):.1e}"
    except Refused as refusal:
        told = f"no | {refusal}"
    spent = _spent() - begun
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return f"| {type(subject.model).__name__} | {name} | {spent:.1f} s | {memory:.2f} GiB | {told} |"


def _spent() -> float:
    return time.process_time() + resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime


if __name__ == "__main__":
    comfy_on_path()
    torch.set_num_threads(1)
    for name in sys.argv[1:] or SUBJECTS:
        print(row(name), flush=True)
