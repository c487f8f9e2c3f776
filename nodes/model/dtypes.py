"""Names of dtypes in messages."""

from __future__ import annotations

import torch


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name in messages, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")
