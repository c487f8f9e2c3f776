"""Tests in several processes at once (pytest-xdist): which stay together, and which begin first."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

FAULTY = "a ComfyUI for faults"
PAGE = "a ComfyUI and its page"
MODELS = "a ComfyUI for its own models"
FILES = {
    f"tests/host/{file}.py": name
    for name, files in (
        (FAULTY, ("test_injected_faults", "test_faults")),
        (
            PAGE,
            (
                "test_conditioning",
                "test_doctor",
                "test_frontend",
                "test_notes",
                "test_odd_inputs",
                "test_other_packs",
                "test_panel",
                "test_panel_page",
                "test_refusals",
                "test_settings",
                "test_swap",
                "test_progress",
                "test_templates",
                "test_words",
            ),
        ),
        (
            MODELS,
            (
                "test_comfy_control",
                "test_comfy_families",
                "test_comfy_files",
                "test_comfy_images",
                "test_comfy_more_images",
                "test_comfy_more_videos",
                "test_comfy_products",
                "test_comfy_quantised",
                "test_comfy_refusals",
                "test_comfy_sound",
                "test_comfy_videos",
                "test_comfy_wide",
                "test_every_node",
                "test_whole",
                "test_whole_classes",
                "test_whole_nodes",
            ),
        ),
    )
    for file in files
}
"""The groups of files that do not go with their folder: another ComfyUI costs less than what waits for the only one.

What ends its ComfyUI comes last in its group: no other has to be started.
"""

LONGEST = ("tests/host", MODELS, "tests/engine", PAGE, FAULTY, "tests/models", "tests/faults")
"""The groups that begin first, so that the processes end at about the same time."""

LONGEST_OF_ALL = ("tests/host", "tests/faults", "tests/engine", FAULTY, PAGE, MODELS, "tests/models", "tests/machines")
"""The same with --all, where hundreds of deaths take longest."""


def group(nodeid: str) -> str:
    """A test's group."""
    file = nodeid.partition("::")[0]
    return FILES.get(file) or file.rpartition("/")[0]


def turn(nodeid: str, *, everything: bool) -> tuple[int, int]:
    """What tests are sorted by: the place of the group, and that of the file in it where it matters."""
    name, file = group(nodeid), nodeid.partition("::")[0]
    longest = LONGEST_OF_ALL if everything else LONGEST
    return (
        longest.index(name) if name in longest else len(longest),
        list(FILES).index(file) if file in FILES else 0,
    )


class Groups(LoadScopeScheduling):  # type: ignore[misc]
    """Tests of one group run one after another in one process, so that what they share is started once."""

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid)
