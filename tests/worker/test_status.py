"""What a rank's pulses say of it while its main thread compiles."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel_backend.worker.process import status as module
from parallel_backend.worker.process.status import Status


def pulse(status: Status) -> int:
    """The marks, as the link's thread sends them."""
    thread = threading.Thread(target=status.mark_compiling)
    thread.start()
    thread.join()
    return status.progress


@pytest.mark.parametrize(("longest", "moved"), [(module.LONGEST_COMPILE, [1, 2]), (0.0, [0, 0])])
def test_a_long_compile_counts_as_getting_on_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch, longest: float, moved: list[int]
) -> None:
    monkeypatch.setattr(module, "LONGEST_COMPILE", longest)
    status, seen, run = Status(), [], []

    def backend(graph: Any, _: Any) -> Any:
        seen.extend([pulse(status), pulse(status)])

        def compiled(*args: Tensor) -> Any:
            run.append(pulse(status))
            return graph.forward(*args)

        return compiled

    torch._dynamo.reset()
    before = pulse(status)
    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert (before, seen, run) == (0, moved, moved[1:])
    assert pulse(status) == moved[1]
