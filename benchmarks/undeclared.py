"""Lists the declared classes that a user would also get without declarations, derived by ComfyUI's own calls in a real ComfyUI.

    COMFYUI_PATH=... python -m benchmarks.undeclared [NAME ...]

ComfyUI has a copy of this pack with an empty table of declarations, and the tests' small files (tests/families). The metadata
of some files tells ComfyUI that they are small (tests/support/copies/sized.py). Each graph runs with the stock loader, then
under a plan that waits for the derivation, and then in patches. NAMEs choose inputs. An input takes seconds to minutes.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.undeclared_inputs import Job, inputs
from parallel_backend.markdown import table
from parallel_backend.models.comfyui.detection import detect
from parallel_backend.weights.files.checkpoint import read_header
from scripts.comfyui import PACKS, REPO, ComfyUI, Graph
from tests.support.copies.sized import sized_copy
from tests.support.graphs.comfyui import TOLERANCE, spread
from tests.support.graphs.family_tests import ONE_CALL
from tests.support.latents import relative_error, saved_latent

PLAN: Mapping[str, Any] = {"devices": "cpu:2", "cfg": 1, "ulysses": 2}
PATCHES: Mapping[str, Any] = {"devices": "cpu:2", "cfg": 1, "pipefusion": 2, "warmup_steps": 99}

PATIENCE = 1800.0
"""Seconds allowed for one derivation."""

TOOK = re.compile(r"Parallel: deriving (\w+) took ([\d.]+) s")
WHY = re.compile(r".* cannot be run under this plan, because (.*): use a plan without .*")
EMPTY = "\nDECLARATIONS = MappingProxyType({})\n"
UNCOPIED = (".*", "__pycache__", "docs", "tests", "benchmarks")


def without_declarations(folder: Path) -> ComfyUI:
    """Return a ComfyUI with this pack, in which no class is declared."""
    server = sized_copy(folder)
    (name,) = PACKS
    pack = server.base_dir / "custom_nodes" / name
    pack.unlink()
    shutil.copytree(REPO, pack, ignore=shutil.ignore_patterns(*UNCOPIED))
    with (pack / "parallel_backend" / "models" / "declared" / "__init__.py").open("a") as declared:
        declared.write(EMPTY)
    server.env |= {"PARALLEL_DEADLINES": f"derive={PATIENCE}"}
    return server


@dataclass(frozen=True)
class Found:
    """The result of an input.

    Attributes:
        kind: the model's class.
        name: the input's name.
        errors: by plan, the error against the stock result, or the reason why there is none.
        seconds: seconds of the derivation.
    """

    kind: str
    name: str
    errors: Mapping[str, float | str]
    seconds: float

    @property
    def derived(self) -> bool:
        """Return True if the model was split and gives the stock result."""
        error = self.errors["ulysses"]
        return isinstance(error, float) and error <= TOLERANCE

    def row(self) -> list[str]:
        """Return the input's line in the table."""
        told = [each if isinstance(each, str) else f"{each:.1e}" for each in self.errors.values()]
        return [self.kind, self.name, "yes" if self.derived else "**no**", f"{self.seconds:.0f}", *told]


def found(server: ComfyUI, name: str, make: Job, kinds: dict[str, str]) -> Found:
    """Run an input and return its result. `kinds` has the known classes of files, and gets this file's class."""
    graph, began = make(server), len(server.log)
    file = graph["model"]["inputs"]["unet_name"]
    expected = outputs(server, graph)
    assert not isinstance(expected, str), expected
    strict = file.partition(".")[0] not in ONE_CALL
    errors: dict[str, float | str] = {}
    for plan in (PLAN, PATCHES):
        split = next(name for name in ("ulysses", "pipefusion") if name in plan)
        got = outputs(server, spread(graph, strict=strict, **plan))
        errors[split] = got if isinstance(got, str) else max(map(relative_error, got, expected))
        if isinstance(got, str):
            break
    if took := TOOK.findall(server.log[began:]):
        kinds[file] = took[0][0]
    elif file not in kinds:
        *_, described = detect(read_header(server.base_dir / "models" / "diffusion_models" / file))
        kinds[file] = type(described).__name__
    return Found(kinds[file], name, errors, sum(float(seconds) for _, seconds in took))


def outputs(server: ComfyUI, graph: Graph) -> list[Tensor] | str:
    """Return the latents that a graph saves, or the reason of its refusal."""
    run = server.queue(graph, timeout=2 * PATIENCE)
    if run.error is not None:
        said = " ".join(run.error.exception_message.split())
        return WHY.sub(r"\1", said)
    return [saved_latent(server, run.check(), name) for name in graph if graph[name]["class_type"] == "SaveLatent"]


def main() -> None:
    """Print a line for each input as soon as it is found, then the count."""
    chosen = {name: make for name, make in inputs() if name in sys.argv[1:] or not sys.argv[1:]}
    rows: list[Found] = []
    kinds: dict[str, str] = {}
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, without_declarations(Path(folder)) as server:
        for name, make in chosen.items():
            rows.append(found(server, name, make, kinds))
            print(*rows[-1].row(), sep=" | ", flush=True)
    head = ("class", "input", "derived", "s", "ulysses 2: error", "2 stages: error")
    print(table(head, [each.row() for each in rows]))
    classes = {each.kind for each in rows}
    derived = {each.kind for each in rows if each.derived}
    print(
        f"{len(derived)} of {len(classes)} classes and {sum(e.derived for e in rows)} of {len(rows)} inputs are derived."
    )


if __name__ == "__main__":
    main()
