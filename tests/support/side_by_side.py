"""Tests in several processes at once (pytest-xdist): which stay together, and which begin first."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

FEATURES = "a ComfyUI for features"
MODELS = "a ComfyUI for its own models"
PAGE = "a ComfyUI and its page"
FAULTY = "a ComfyUI for faults"

FOLDERS = {
    "tests/features": FEATURES,
    "tests/host": FEATURES,
    "tests/newer": FEATURES,
    "tests/families": MODELS,
    "tests/families/unsharded": MODELS,
    "tests/page": PAGE,
    "tests/refusals": PAGE,
}
"""The groups of folders whose tests share a ComfyUI. Any other folder is a group of its own."""

FILES = {
    f"tests/{file}.py": name
    for name, files in (
        (FAULTY, ("host/test_injected_faults", "host/test_faults")),
        (
            MODELS,
            (
                "features/test_controlnet_on_qwen_and_sd3",
                "features/test_every_node",
                "features/test_every_product",
                "features/test_files_of_comfyui_models",
                "features/test_quantised",
                "features/test_video_inputs",
            ),
        ),
        (PAGE, ("features/test_other_packs", "features/test_saved_prompts")),
        (
            FEATURES,
            (
                "families/test_cogvideox",
                "families/test_hunyuan_image",
                "families/test_hunyuan_video15",
                "families/test_infinite_talk",
                "families/test_ltxv",
                "families/test_pixart",
                "families/test_scail",
                "families/test_wan_dancer",
                "families/test_wan_s2v",
                "page/test_bench",
                "page/test_templates_queued",
                "refusals/test_sizes",
            ),
        ),
    )
    for file in files
}
"""The groups of files that do not go with their folder, so that the groups take about as long as each other.

What ends its ComfyUI comes last in its group: no other has to be started.
"""

CLASSES = {"TestImages": MODELS, "TestVideos": MODELS, "TestSized": FEATURES}
"""The groups of classes of tests that do not go with their file, after all files of the group: one has a ComfyUI of its own."""

PLACES = [*FILES, *CLASSES]

LONGEST = (FEATURES, MODELS, "tests/engine", PAGE, FAULTY, "tests/models", "tests/faults")
"""The groups that begin first, so that the processes end at about the same time."""

LONGEST_OF_ALL = (FEATURES, "tests/faults", "tests/engine", FAULTY, PAGE, MODELS, "tests/models", "tests/machines")
"""The same with --all, where hundreds of deaths take longest."""


def group(nodeid: str) -> str:
    """A test's group."""
    file, of_class = _file_and_class(nodeid)
    folder = file.rpartition("/")[0]
    return CLASSES.get(of_class) or FILES.get(file) or FOLDERS.get(folder, folder)


def turn(nodeid: str, *, everything: bool) -> tuple[int, int]:
    """What tests are sorted by: the place of the group, and that of the class or the file in it where it matters."""
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
    """Tests of one group run one after another in one process, so that what they share is started once."""

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid)
