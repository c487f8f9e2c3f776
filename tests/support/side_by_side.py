"""Groups of tests that stay in one process (pytest-xdist), and the order in which the groups begin."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

FEATURES = "a ComfyUI for features"
MODELS = "a ComfyUI for its own models and its page"
FAULTY = "a ComfyUI for faults"

FOLDERS = {
    "tests/features": FEATURES,
    "tests/host": FEATURES,
    "tests/newer": FEATURES,
    "tests/families": MODELS,
    "tests/families/unsharded": MODELS,
    "tests/page": MODELS,
    "tests/refusals": MODELS,
}
"""Groups of the folders whose tests share a ComfyUI. Any other folder is a group of its own."""

FILES = {
    f"tests/{file}.py": name
    for name, files in (
        (FAULTY, ("host/test_injected_faults", "host/test_faults")),
        (
            MODELS,
            (
                "features/test_controlnet_on_qwen_and_sd3",
                "features/test_every_node",
                "features/test_files_of_comfyui_models",
                "features/test_other_packs",
                "features/test_quantised",
                "features/test_saved_prompts",
                "features/test_video_inputs",
            ),
        ),
        (
            FEATURES,
            (
                "families/test_diffusers",
                "families/test_infinite_talk",
                "families/test_reduced",
                "page/test_bench",
                "page/test_templates_queued",
            ),
        ),
    )
    for file in files
}
"""Groups of the files that do not go with their folder, so that all groups take about as long.

Files that end their ComfyUI come last in their group, so that no other ComfyUI has to start.
"""

CLASSES = {"TestImages": MODELS, "TestVideos": MODELS, "TestSized": FEATURES}
"""Groups of the test classes that do not go with their file. They run after all files; one has a ComfyUI of its own."""

PLACES = [*FILES, *CLASSES, "tests/host/test_endings.py"]  # the last one kills its ComfyUI

LONGEST = (MODELS, FEATURES, "tests/engine", "tests/models", "tests/faults")
"""Groups that begin first, so that the processes end at about the same time."""

LONGEST_OF_ALL = (FEATURES, "tests/faults", "tests/engine", FAULTY, MODELS, "tests/models", "tests/machines")
"""Groups that begin first with --all, in which hundreds of killed processes take longest."""


def group(nodeid: str) -> str:
    """Return the group of a test."""
    file, of_class = _file_and_class(nodeid)
    folder = file.rpartition("/")[0]
    return CLASSES.get(of_class) or FILES.get(file) or FOLDERS.get(folder, folder)


def turn(nodeid: str, *, everything: bool) -> tuple[int, int]:
    """Return the sort key of a test: the rank of its group, then that of its class or file if the order matters."""
    name, (file, of_class) = group(nodeid), _file_and_class(nodeid)
    longest = LONGEST_OF_ALL if everything else LONGEST
    place = of_class if of_class in CLASSES else file
    return (
        longest.index(name) if name in longest else len(longest),
        PLACES.index(place) if place in PLACES else 0,
    )


def _file_and_class(nodeid: str) -> tuple[str, str]:
    file, _, test = nodeid.partition("::")
    return file, test.partition("::")[0]


class Groups(LoadScopeScheduling):  # type: ignore[misc]
    """A scheduler that runs the tests of one group one after another in one process, so that they share what they start."""

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid)
