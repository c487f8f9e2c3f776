"""A fault for mutation testing, which is planted in a copy of the repository."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from scripts.comfyui import REPO


@dataclass(frozen=True)
class Mutant:
    """A fault in one file.

    Attributes:
        name: says what is wrong, in words.
        file: the file, from the root of the repository.
        code: the right code, which occurs once in the file.
        fault: the code that takes its place.
        tests: the tests of the quick run that should fail: arguments for pytest.
    """

    name: str
    file: str
    code: str
    fault: str
    tests: tuple[str, ...]

    def plant(self, folder: Path) -> None:
        """Change the file in a copy of the repository."""
        path = folder / self.file
        source = path.read_text(encoding="utf-8")
        assert source.count(self.code) == 1, f"{self.file} has the code of {self.name} {source.count(self.code)} times"
        path.write_text(source.replace(self.code, self.fault), encoding="utf-8")

    def remove(self, folder: Path) -> None:
        """Restore the file in a copy of the repository."""
        shutil.copyfile(REPO / self.file, folder / self.file)
