"""Tests in several processes at once (pytest-xdist): which stay together, and which begin first."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

FAULTY = "a ComfyUI for faults"
FILES = {f"tests/host/{name}.py": FAULTY for name in ("test_injected_faults", "test_faults")}
"""The groups of files that do not go with their folder. What ends its ComfyUI comes last: no other has to be started."""

LONGEST = ("tests/host", FAULTY, "tests/engine", "tests/models", "tests/faults")
"""The groups that begin first, so that two processes end at about the same time."""


def group(nodeid: str) -> str:
    """A test's group."""
    file = nodeid.partition("::")[0]
    return FILES.get(file) or file.rpartition("/")[0]


def turn(nodeid: str) -> tuple[int, int]:
    """What tests are sorted by: the place of the group, and that of the file in it where it matters."""
    name, file = group(nodeid), nodeid.partition("::")[0]
    return (
        LONGEST.index(name) if name in LONGEST else len(LONGEST),
        list(FILES).index(file) if file in FILES else 0,
    )


class Groups(LoadScopeScheduling):  # type: ignore[misc]
    """Tests of one group run one after another in one process, so that what they share is started once."""

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid)
