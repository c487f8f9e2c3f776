"""Imports between the code's packages have no cycle, and a package imports only packages of lower levels."""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections.abc import Iterator, Mapping, Set
from pathlib import Path

from scripts.comfyui import REPO

ENGINE = "parallel_backend"
FLOORS = (
    ("declaration", "source_code"),
    (
        "errors",
        "cache",
        "clock",
        "diffusion",
        "distance",
        "gpus",
        "identity",
        "layout",
        "markdown",
        "mesh_axes",
        "snapshot",
        "sprites",
        "temporary",
        "transfers",
        "distributed_tensor",
    ),
    ("comfyui_folder", "conditioning", "comm"),
    ("plan",),
    ("mesh", "weights", "wire"),
    ("attention",),
    ("models",),
    ("denoise", "derive", "vae"),
    ("worker",),
    ("host",),
    ("doctor",),
    ("bench",),
    ("nodes",),
)
"""Packages by level, lowest first. A package imports only packages of lower levels."""

Arrows = Mapping[str, Set[str]]


def name_of(path: Path) -> str:
    """Return a file's module name, from its path in the repository."""
    return ".".join(path.relative_to(REPO).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def modules() -> Mapping[str, Path]:
    """Return all modules that run in ComfyUI and in the workers."""
    return {name_of(path): path for folder in ("nodes", ENGINE) for path in sorted((REPO / folder).rglob("*.py"))}


def imported(name: str) -> Iterator[str]:
    """Yield every module of the code that a module imports, also late imports and imports for types alone."""
    path = modules()[name]
    package = path.parent.relative_to(REPO).parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])
            for alias in node.names:
                yield from (each for each in (f"{base}.{alias.name}", base) if each in modules())


@functools.cache
def arrows() -> Arrows:
    """Return the imports of each module. A parent package that a module passes through is not counted."""
    found = {name: set(imported(name)) - {name} for name in modules()}
    return {name: {t for t in to if not name.startswith(f"{t}.")} for name, to in found.items()}


def between(folder: str) -> Arrows:
    """Return the imports among the files and packages of a folder; a package stands for all of its files."""

    def room(name: str) -> str:
        return name.removeprefix(f"{folder}.").partition(".")[0] if name.startswith(f"{folder}.") else ""

    found: dict[str, set[str]] = {}
    for name, to in arrows().items():
        if start := room(name):
            found.setdefault(start, set()).update({room(each) for each in to} - {start, ""})
    return found


def circle(graph: Arrows) -> list[str]:
    """Return one cycle of the graph; empty if there is none."""
    done: set[str] = set()

    def walk(place: str, way: list[str]) -> list[str]:
        if place in way:
            return [*way[way.index(place) :], place]
        if place in done:
            return []
        for end in sorted(graph.get(place, ())):
            if found := walk(end, [*way, place]):
                return found
        done.add(place)
        return []

    return next(filter(None, (walk(place, []) for place in sorted(graph))), [])


def test_imports_of_modules_have_no_cycle() -> None:
    assert len(modules()) > 400 and sum(map(len, arrows().values())) > 1500
    assert not circle(arrows())


def test_imports_among_packages_of_a_folder_have_no_cycle() -> None:
    found = {folder: between(folder) for folder in {name.rpartition(".")[0] for name in modules()} - {""}}
    assert sum(any(rooms.values()) for rooms in found.values()) > 30
    assert {folder: way for folder, rooms in found.items() if (way := circle(rooms))} == {}


def test_a_planted_cycle_is_found() -> None:
    assert circle({"a": {"b"}, "b": {"c", "d"}, "d": {"a"}}) == ["a", "b", "d", "a"]
    assert not circle({"a": {"b", "c"}, "b": {"c"}})


def room_of(name: str) -> str:
    return "nodes" if name.partition(".")[0] == "nodes" else name.split(".")[1]


def going_up(graph: Arrows) -> set[tuple[str, str]]:
    """Return imports between packages that do not lead to a lower level."""
    floor = {name: number for number, names in enumerate(FLOORS) for name in names}
    rooms = {(name, end): (room_of(name), room_of(end)) for name, to in graph.items() for end in to}
    return {arrow for arrow, (room, end) in rooms.items() if room != end and floor[end] >= floor[room]}


def test_packages_import_only_lower_levels() -> None:
    inside = {name: {each for each in to if each != ENGINE} for name, to in arrows().items() if name != ENGINE}
    assert {*map(room_of, inside)} == {name for names in FLOORS for name in names}, "each room has its floor"
    assert not going_up(inside)
    planted = (f"{ENGINE}.wire.frames", f"{ENGINE}.host.backend")
    assert going_up(inside | {planted[0]: {planted[1]}}) == {planted}


def test_both_halves_of_a_feature_have_the_same_file_name() -> None:
    here, there = (
        {path.name for path in (REPO / folder).glob("*.py")}
        for folder in ("nodes/model/features", f"{ENGINE}/models/comfyui/features")
    )
    assert len(there) > 5 and there <= here


def named_in(text: str) -> list[str]:
    """Return the files of this repository that a page names."""
    return re.findall(r"`(?!comfy/)([\w/]+/[\w/]+\.(?:py|sh))`", text)


def missing(names: list[str]) -> list[str]:
    """Return the names that no file has."""
    folders = ("nodes", ENGINE, "tests", "scripts")
    files = {f"/{path.relative_to(REPO)}" for folder in folders for path in (REPO / folder).rglob("*.*")}
    return [name for name in names if not any(file.endswith(f"/{name}") for file in files)]


def test_pages_name_existing_files() -> None:
    pages = [REPO / "CONTRIBUTING.md", *REPO.glob("docs/develop/*.md")]
    named = {page.name: named_in(page.read_text(encoding="utf-8")) for page in pages}
    assert len(named) > 10 and all(named.values())
    assert missing(list(itertools.chain(*named.values()))) == []
    assert missing(named_in("`worker/launch.py` and `scripts/test.sh`")) == ["worker/launch.py"]
