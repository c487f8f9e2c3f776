"""Measures the arguments of ComfyUI's forwards, and the lines, that the proofs of classes reach.

Prints a section of docs/measured/proof-reach.md.

python -m tests.proof.reach [KIND …]
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import coverage
import torch
from coverage.regions import code_regions

from parallel_backend.comfyui_folder import comfyui_version
from parallel_backend.models.comfyui.small import small
from parallel_backend.models.comfyui.small.kinds import KINDS, all_cases
from tests.support.classes import lacks
from tests.support.comfy_oracle import FOLDER, comfy_on_path

comfy_on_path()

LDM = Path(FOLDER, "comfy", "ldm")
MAKES = ("__", "_init_", "init_", "reset_", "build_")
"""Beginnings of the names of functions that build a model and do not run in its forward."""

OF_EVERY_CALL = frozenset({"self", "x", "timestep", "timesteps", "t", "transformer_options", "kwargs", "control"})
"""Arguments that do not depend on a prompt."""


@dataclass
class Reach:
    """The code that the calls of one class reach.

    Attributes:
        arguments: arguments of its forward, each with True if a call gives it.
        lines: lines of the functions of its modules, by file, number and function, each with True if a call runs it.
    """

    arguments: dict[str, bool] = field(default_factory=dict)
    lines: dict[tuple[str, int, str], bool] = field(default_factory=dict)

    def missing(self) -> Iterator[str]:
        """Yield each function with the numbers of its lines that no call runs, as `file.py: function 12, 13`."""
        found: dict[tuple[str, str], list[int]] = {}
        for (file, line, name), ran in sorted(self.lines.items()):
            if not ran:
                found.setdefault((file, name), []).append(line)
        for (file, name), numbers in found.items():
            yield f"{file}: {name} {_ranges(numbers)}"


def reach_of(kind: str, cases: Sequence[str]) -> Reach:
    """Return the code that some calls of a class reach.

    Args:
        kind: the class in comfy.supported_models.
        cases: the names of small models.
    """
    reach, of_modules = Reach(), dict[str, set[str]]()
    watch = coverage.Coverage(data_file=None, include=[f"{LDM}/*"], messages=False)
    for name in cases:
        case = small(name, kind=kind)
        with watch.collect(), torch.no_grad():
            case.stock()
        for argument in _arguments(case.model):
            given = case.arguments.get(argument) is not None
            reach.arguments[argument] = reach.arguments.get(argument, False) or given
        for file, names in _functions(case.model).items():
            of_modules.setdefault(file, set()).update(names)
    for file, names in of_modules.items():
        short = str(Path(file).relative_to(LDM))
        _, statements, _, missed, _ = watch.analysis2(file)
        functions = [each for each in code_regions(Path(file).read_text("utf-8")) if each.kind == "function"]
        for function in functions:
            method = ".".join(function.name.split(".")[:2])  # of a function inside a method, the method
            if method in names and not method.partition(".")[2].startswith(MAKES):
                for line in function.lines & {*statements} - {each.start for each in functions}:
                    reach.lines[short, line, method] = line not in missed
    return reach


def _arguments(model: Any) -> list[str]:
    forwards = [getattr(type(model), name) for name in ("forward", "_forward") if hasattr(model, name)]
    names = (name for each in forwards for name in inspect.signature(each).parameters)
    return [name for name in dict.fromkeys(names) if name not in OF_EVERY_CALL]


def _functions(model: Any) -> Mapping[str, set[str]]:
    """Return by file the names of the functions of a model's modules in comfy.ldm."""
    found: dict[str, set[str]] = {}
    for kind in {type(module) for module in model.modules()}:
        for name in dir(kind):
            function = inspect.unwrap(getattr(kind, name))
            if inspect.isfunction(function) and function.__module__.startswith("comfy.ldm."):
                found.setdefault(function.__code__.co_filename, set()).add(function.__qualname__)
    return found


def _ranges(numbers: Sequence[int]) -> str:
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number <= parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def row(kind: str, reach: Reach) -> str:
    """Return a row of the table."""
    given = [name for name, used in reach.arguments.items() if used]
    never = [name for name, used in reach.arguments.items() if not used]
    lines = f"{sum(reach.lines.values())} of {len(reach.lines)}"
    return f"| {kind} | {', '.join(given)} | {', '.join(never) or '-'} | {lines} |"


def heading() -> str:
    """Return the heading of this ComfyUI's section."""
    return f"## ComfyUI {comfyui_version(FOLDER)}"


def section(kinds: Sequence[str]) -> Iterator[str]:
    """Yield the lines of the table, and of the list of lines that no call reaches."""
    yield "| class | arguments that a call gives | others of the forward | lines reached |"
    yield "| --- | --- | --- | --- |"
    lost: dict[str, list[str]] = {}
    for kind in kinds:
        if lacks(kind):
            continue
        reach = reach_of(kind, all_cases(kind))
        yield row(kind, reach)
        for line in reach.missing():
            lost.setdefault(line, []).append(kind)
    yield ""
    for line, of in lost.items():
        yield f"- {line} ({', '.join(of)})"


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(f"{heading()}\n")
    for text in section(sys.argv[1:] or tuple(KINDS)):
        print(text, flush=True)
