"""Prints which of the tests' small models are derived and proved: name, seconds, worst error or why not."""

from __future__ import annotations

import sys
import time

import torch

from parallel_backend.derive.derive import derive
from parallel_backend.errors import Refused
from tests.derive.subjects import subject_of
from tests.models.test_spread import CASES

if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:] or CASES:
        with torch.inference_mode(), torch.no_grad():
            subject = subject_of(CASES[name]())
        begun = time.perf_counter()
        try:
            derived = derive(subject, "FOUND", name)
            print(derived.source)
            told = ("whole " if derived.declaration.whole_picture else "") + derived.proof.told()
        except Refused as error:
            told = str(error)
        print(f"## {name} | {time.perf_counter() - begun:.1f} s | {told}", flush=True)
