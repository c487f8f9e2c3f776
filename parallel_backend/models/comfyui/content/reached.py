"""What a function or class of ComfyUI's consists of, in place: itself, and all that it calls where sampling lives."""

from __future__ import annotations

import dis
import functools
import inspect
import sys
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from .replaced_functions import REPLACED_FUNCTIONS, ReplacedFunction

WALKED = ("comfy.samplers", "comfy.k_diffusion", "comfy.extra_samplers", "comfy.model_sampling", "comfy.weight_adapter")
"""Where what is called is a part of what calls it; elsewhere only what is of the same file."""

LIBRARIES = frozenset({"torch", "einops", "numpy", "scipy", "torchsde", "tqdm", *sys.stdlib_module_names})
"""Whose functions are themselves, whatever their version."""

CONSTANT = bool, int, float, complex, str, type(None)


@dataclass(frozen=True)
class Reached:
    """What a thing consists of.

    Attributes:
        functions: by name, with the name of the module that they are found in.
        constants: numbers and words of modules that they use, written out.
        foreign: names under which another pack has put something there.
        missing: whether this ComfyUI has no such thing.
    """

    functions: dict[str, FunctionType] = field(default_factory=dict)
    constants: dict[str, str] = field(default_factory=dict)
    foreign: list[str] = field(default_factory=list)
    missing: bool = False


class Walk:
    """Finds what things of the ComfyUI in a folder consist of. Nothing is imported that is not there yet."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names = {str(function) for function in REPLACED_FUNCTIONS}

    def of(self, replaced: ReplacedFunction) -> Reached:
        """Return the code that a replaced function reaches, except other replaced functions."""
        reached = Reached()
        value = self._value_of(replaced)
        if value is None:
            return Reached(missing=True)
        seen: set[int] = set()
        waiting = [(str(replaced), value)]
        while waiting:
            name, value = waiting.pop()
            if id(value) in seen:
                continue
            seen.add(id(value))
            waiting.extend(self._parts_of(name, value, replaced, reached))
        return reached

    def module(self, name: str) -> ModuleType | None:
        """ComfyUI's module of this name; it loads those of nodes under names of its own."""
        if name in sys.modules:
            return sys.modules[name]
        file = str(self._folder.joinpath(*name.split(".")).with_suffix(".py"))
        return next((each for each in [*sys.modules.values()] if getattr(each, "__file__", None) == file), None)

    def _value_of(self, replaced: ReplacedFunction) -> Any:
        value: Any = self.module(replaced.module)
        for name in replaced.name.split("."):
            value = None if value is None else inspect.getattr_static(value, name, None)
        return value

    def _parts_of(
        self, name: str, value: Any, replaced: ReplacedFunction, reached: Reached
    ) -> Iterator[tuple[str, Any]]:
        """Note what a value is; gives what it consists of and uses."""
        if isinstance(value, type):
            yield from ((f"{name}.{part}", each) for part, each in vars(value).items() if _calls(each))
            yield from ((self._name_of(base), base) for base in value.__bases__ if self._walked(base, replaced))
            return
        for function in layers_of(value):
            module = self._module_of(function)
            if module is None:
                if function.__globals__.get("__name__", "").partition(".")[0] not in LIBRARIES:
                    reached.foreign.append(name)
                continue
            reached.functions[name] = function
            yield from self._used(function, replaced, reached)

    def _used(self, function: FunctionType, replaced: ReplacedFunction, reached: Reached) -> Iterator[tuple[str, Any]]:
        named, attributes = self._named(function.__code__)
        spaces: list[tuple[str, Mapping[str, Any], Set[str]]] = [
            (self._module_of(function) or "", function.__globals__, named)
        ]
        seen: set[str] = set()
        while spaces:
            space, names, used = spaces.pop()
            if space in seen:
                continue
            seen.add(space)
            for name in sorted(used & names.keys()):
                value, full = names[name], f"{space}.{name}"
                if isinstance(value, ModuleType):
                    if value.__name__.partition(".")[0] in ("comfy", "comfy_extras"):
                        spaces.append((value.__name__, vars(value), attributes))
                elif full not in self._names and _calls(value) and self._walked(value, replaced):
                    yield self._name_of(value), value
                elif isinstance(value, CONSTANT) and self._inside(space, replaced) and not name.startswith("__"):
                    reached.constants[full] = repr(value)
                elif _calls(value) and self._inside(space, replaced) and self._stranger(value):
                    reached.foreign.append(full)

    @functools.cache  # noqa: B019 (as many as there are functions)
    def _named(self, code: CodeType) -> tuple[Set[str], Set[str]]:
        return _names(code)

    def _walked(self, value: Any, replaced: ReplacedFunction) -> bool:
        module = self._comfyui_module(value)
        return module is not None and self._inside(module, replaced)

    def _inside(self, module: str, replaced: ReplacedFunction) -> bool:
        return module == replaced.module or module.startswith(WALKED)

    def _stranger(self, value: Any) -> bool:
        """Whether what ComfyUI's modules call is neither ComfyUI's nor a library's."""
        return self._comfyui_module(value) is None and _package(value) not in LIBRARIES | {"", "builtins"}

    def _comfyui_module(self, value: Any) -> str | None:
        """The module of ComfyUI's that a function or class is of; None for others."""
        if isinstance(value, type):
            module = sys.modules.get(value.__module__)
            return self._dotted(getattr(module, "__file__", None))
        functions = [*layers_of(value)]
        return self._module_of(functions[-1]) if functions else None

    def _name_of(self, value: Any) -> str:
        inner = value if isinstance(value, type) else [*layers_of(value)][-1]
        return f"{self._comfyui_module(value)}.{inner.__qualname__}"

    def _module_of(self, function: FunctionType) -> str | None:
        return self._dotted(function.__code__.co_filename)

    @functools.cache  # noqa: B019 (as many as there are files)
    def _dotted(self, file: str | None) -> str | None:
        """A file of ComfyUI's as the name of a module; None for any other."""
        if file is None or not file.startswith(f"{self._folder}/comfy"):
            return None
        return ".".join(Path(file).relative_to(self._folder).with_suffix("").parts).removesuffix(".__init__")


def _calls(value: Any) -> bool:
    return isinstance(value, type | staticmethod | classmethod | property) or callable(value)


def _package(value: Any) -> str:
    named = getattr(value, "__module__", None) or type(value).__module__
    return str(named).partition(".")[0]


def layers_of(value: Any) -> Iterator[FunctionType]:
    """The functions that something called consists of, from the outermost that has been put around it."""
    if isinstance(value, property):
        for accessor in (value.fget, value.fset):
            yield from layers_of(accessor)
        return
    while value is not None:
        if isinstance(value, staticmethod | classmethod) or inspect.ismethod(value):
            value = value.__func__
        elif isinstance(value, functools.partial):
            value = value.func
        elif isinstance(value, FunctionType):
            yield value
            value = getattr(value, "__wrapped__", None)
        else:
            return


def _names(code: CodeType) -> tuple[Set[str], Set[str]]:
    """What code takes from its module, and all other names that it uses, with what is defined in it."""
    globals_used = {each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    used = {*code.co_names}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner, names = _names(constant)
            globals_used |= inner
            used |= names
    return globals_used, used
