"""Host memory that cannot be pinned, as on a machine without a GPU, is used unpinned, and a warning says so."""

from __future__ import annotations

import pytest
import torch

from parallel_backend.transfers import empty_pinned


@pytest.mark.skipif(torch.cuda.is_available(), reason="memory can be pinned")
def test_memory_that_cannot_be_pinned_is_ordinary_and_a_warning_says_so() -> None:
    with pytest.warns(RuntimeWarning, match="host memory could not be pinned"):
        buffer = empty_pinned((3, 5), torch.bfloat16)
    assert (buffer.shape, buffer.dtype, buffer.is_pinned()) == ((3, 5), torch.bfloat16, False)
