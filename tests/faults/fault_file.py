"""The file in which workers under test look for the fault that is to strike them."""

from __future__ import annotations

import time
from pathlib import Path


class FaultFile:
    """A file that is armed with one fault at a time. `path` is for the workers' environment."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "fault"
        self._struck = folder / "fault.struck"

    def arm(self, text: str) -> None:
        """Arm the file with a fault. Its text is as parallel_backend/worker/process/faults.py reads it."""
        self._struck.unlink(missing_ok=True)
        whole = self.path.with_suffix(".new")
        whole.write_text(text)
        whole.rename(self.path)  # a worker that is still at its previous job must not read half a fault

    def disarm(self) -> None:
        """Remove the fault if it has not struck."""
        self.path.unlink(missing_ok=True)

    def struck(self) -> bool:
        """Return True if the fault has struck."""
        return self._struck.exists()

    def seconds(self) -> float:
        """Return the seconds since the fault struck."""
        return time.time() - self._struck.stat().st_ctime
