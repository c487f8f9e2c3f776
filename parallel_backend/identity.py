"""What must be the same in ComfyUI and in every worker: the pack's own code."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

ROOT = Path(__file__).parent


@functools.cache
def code_digest() -> str:
    """Eight hexadecimal digits of this package's source files, by their names and bytes."""
    digest = hashlib.sha256()
    for path in sorted(ROOT.rglob("*.py")):
        text = path.read_bytes()
        digest.update(f"{path.relative_to(ROOT).as_posix()} {len(text)}\n".encode() + text)
    return digest.hexdigest()[:8]
