"""Mutation testing: faults that are planted one at a time, and the tests of the quick run that catch each.

python -m tests.mutants [NAME ...]
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.comfyui import REPO
from tests.planted_faults import MUTANTS
from tests.support.mutant import Mutant

SECONDS = 90
"""Seconds after which a test fails. A planted fault may make ranks wait for each other."""

NOT_COPIED = shutil.ignore_patterns(".git", "__pycache__", ".pytest_cache", ".hypothesis", "images")


@dataclass(frozen=True)
class Verdict:
    """The result of running the tests with a mutant: the test that failed first, or an empty text, and the seconds."""

    mutant: Mutant
    caught_by: str
    seconds: float


def run(mutant: Mutant, folder: Path) -> Verdict:
    """Run a mutant's tests in a copy of the repository, until one fails.

    Raises:
        RuntimeError: the tests neither passed nor failed, for example because none was found.
    """
    begin = time.monotonic()
    mutant.plant(folder)
    options = ["-qx", "-p", "no:cacheprovider", f"--timeout={SECONDS}"]
    variables = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    try:
        command = [sys.executable, "-m", "pytest", *options, *mutant.tests]
        done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    finally:
        mutant.remove(folder)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{mutant.name}: pytest ended with {done.returncode}:\n{done.stdout[-2000:]}")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return Verdict(mutant, failed[1] if failed else "", time.monotonic() - begin)


def copy_of_the_repository(folder: str) -> Path:
    """Copy the repository to a folder, without its history."""
    return Path(shutil.copytree(REPO, Path(folder) / "repository", ignore=NOT_COPIED, symlinks=True))


def main(names: Sequence[str]) -> int:
    """Print a row for each mutant, and return 1 if one survived."""
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        copied = copy_of_the_repository(folder)
        print("| fault | file | caught by | s |\n| --- | --- | --- | --- |", flush=True)
        for mutant in MUTANTS:
            if names and mutant.name not in names:
                continue
            verdict = run(mutant, copied)
            survivors += not verdict.caught_by
            caught_by = verdict.caught_by or "**no test**"
            print(f"| {mutant.name} | {mutant.file} | {caught_by} | {verdict.seconds:.0f} |", flush=True)
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
