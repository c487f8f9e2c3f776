"""The digest of the pack's own code, which must be the same in ComfyUI and in every worker."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

ROOT = Path(__file__).parent


@functools.cache
def code_digest() -> str:
    """Return the digest of the names and bytes of this package's source files, as eight hexadecimal digits."""
    digest = hashlib.sha256()
    for path in sorted(ROOT.rglob("*.py")):
        text = path.read_bytes()
        digest.update(f"{path.relative_to(ROOT).as_posix()} {len(text)}\n".encode() + text)
    return digest.hexdigest()[:8]
