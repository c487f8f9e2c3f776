"""A comparison of the functions and values that a model's code reaches with the sources of their modules.

Workers import ComfyUI without any pack. So a function that a pack has replaced in ComfyUI's process would not run there.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch

from ....source_code import layers_of, uses_of
from .bindings import Binding, Computed, Defined, Imported, Literal, bound, methods
from .source_digests import LIBRARIES

FOLLOWED = (
    "comfy.ldm.", "comfy.ops", "comfy.quant_ops", "comfy.float", "comfy.rmsnorm", "comfy.text_encoders.", "comfy_kitchen",
    "torch.nn.",
)  # fmt: skip
"""Modules whose functions are followed to everything that they use. Functions of other modules are only compared."""

OWN = __name__.partition(".")[0]
"""The name of this pack in this process."""

CONSTANT = tuple(name for name in FOLLOWED if name.startswith("comfy."))
"""Modules whose constants are compared."""

COMFYUI = frozenset({"comfy", "comfy_extras", "comfy_api", "comfy_kitchen", "comfy_aimdo"})

BINDERS = frozenset({"nanobind"})
"""Packages that make the functions of compiled modules callable from Python."""

KNOWN = LIBRARIES | COMFYUI | {OWN, "builtins", "triton", "typing_extensions"}
"""Packages whose code may be bound to a name that the source computes."""

DEVICE_FUNCTIONS = frozenset(
    f"comfy.model_management.{name}"
    for name in (
        "get_torch_device", "get_free_memory", "get_total_memory", "soft_empty_cache",
        "throw_exception_if_processing_interrupted",
    )
)  # fmt: skip
"""Functions about devices, free memory and Cancel, which are not compared: workers ask their own devices."""

OPERATORS = frozenset(name for name in vars(operator) if name.startswith("__"))
"""Methods that Python calls for an operator."""

DISPLAY_METHODS = frozenset({"__repr__", "__str__", "__format__", "__dir__", "__doc__"})
"""Methods that describe an object to people, which are not compared."""

MISSING = object()


@dataclass(frozen=True)
class ReplacedName:
    """A name that is bound to another object than in the source of its module.

    Attributes:
        name: the dotted name, with its module.
        by: the file that defines the bound object; empty if it is unknown.
    """

    name: str
    by: str


class ReachedCode:
    """All names that the code of some classes reaches in this process."""

    def __init__(self, classes: Iterable[type]) -> None:
        self._classes = tuple(dict.fromkeys(classes))
        self._found: _Bindings | None = None

    def replaced(self) -> ReplacedName | None:
        """Return the first name that is bound to another object than in its source; None if there is none.

        Each call compares all bindings. It takes about a millisecond if none has changed since the last call.
        """
        if self._found is None or not self._found.unchanged():
            self._found = None
            walk = _Walk()
            try:
                walk.follow(self._classes)
            except _Other as difference:
                return difference.replaced
            self._found = walk.bindings
        return None

    def names(self) -> frozenset[str]:
        """Return the dotted names that the last comparison found to be bound as in their sources."""
        return frozenset() if self._found is None else frozenset(self._found.dotted)


@dataclass
class _Bindings:
    """The bindings that equal those in their modules' sources.

    Attributes:
        names: tuples of a namespace, a name in it, and the name's value.
        codes: tuples of a function, its code and its defaults.
        literals: lists and dicts that a source writes out, with their values in the source.
        sizes: the attributes of classes, with their number, because an added attribute may hide an inherited one.
        dotted: the names, with their modules.
    """

    names: list[tuple[Mapping[str, Any], str, Any]] = field(default_factory=list)
    codes: list[tuple[FunctionType, CodeType, Any, Any]] = field(default_factory=list)
    literals: list[tuple[Any, Any]] = field(default_factory=list)
    sizes: list[tuple[Mapping[str, Any], int]] = field(default_factory=list)
    dotted: set[str] = field(default_factory=set)

    def unchanged(self) -> bool:
        """Return True if every recorded binding still has its recorded value."""
        return (
            all(names.get(name, MISSING) is value for names, name, value in self.names)
            and all(
                each.__code__ is code and each.__defaults__ is defaults and each.__kwdefaults__ is named
                for each, code, defaults, named in self.codes
            )
            and all(value == written for value, written in self.literals)
            and all(len(names) == size for names, size in self.sizes)
        )


class _Other(Exception):
    """Raised for a name that is bound to another object than in its source."""

    def __init__(self, name: str, value: Any) -> None:
        self.replaced = ReplacedName(name, _file_of(value))


class _Walk:
    """A walk from code to everything that it uses, which compares each value with the source."""

    def __init__(self) -> None:
        self.bindings = _Bindings()
        self._seen: set[int] = set()
        self._named: set[tuple[int, str]] = set()
        self._attributes: set[str] = set()
        self._waiting: list[Any] = []

    def follow(self, classes: Iterable[type]) -> None:
        """Follow everything that classes use. Raise _Other at the first difference."""
        self._waiting = [*classes]
        while self._waiting:
            value = self._waiting.pop()
            if id(value) in self._seen:
                continue
            self._seen.add(id(value))
            if isinstance(value, type):
                if value is not torch.Tensor:  # only the methods that code uses are compared, below
                    self._class(value)
            else:
                for function in layers_of(value):
                    self._function(function)
        for name in sorted(self._attributes | OPERATORS):
            value = vars(torch.Tensor).get(name, MISSING)
            if any(_package(each) != "torch" for each in layers_of(value)):
                raise _Other(f"torch.Tensor.{name}", value)
            self._note(vars(torch.Tensor), name, value)

    def _class(self, kind: type) -> None:
        """Compare the functions of a class with those of its source, and follow them and the classes that it inherits from."""
        self._waiting += [base for base in kind.__bases__ if base is not object]
        if kind.__module__.partition(".")[0] not in KNOWN and any(map(_is_code, vars(kind).values())):
            raise _Other(f"{kind.__module__}.{kind.__qualname__}", kind)
        written = methods(kind.__module__, kind.__qualname__)
        self.bindings.sizes.append((vars(kind), len(vars(kind))))
        for name, value in [*vars(kind).items()]:
            if not any(True for _ in layers_of(value)):
                continue
            if written.get(name):
                expected = any(_is(value, each, name) for each in written[name])
            else:
                added = name not in written and not _takes_effect(kind, name)
                expected = added or _known(value, kind.__module__)
            if not expected:
                raise _Other(f"{kind.__module__}.{kind.__qualname__}.{name}", value)
            self.bindings.dotted.add(f"{kind.__module__}.{kind.__qualname__}.{name}")
            self._note(vars(kind), name, value)
            self._waiting.append(value)

    def _function(self, function: FunctionType) -> None:
        """Record a function's code, and compare the names that it uses."""
        self.bindings.codes.append((function, function.__code__, function.__defaults__, function.__kwdefaults__))
        module = function.__globals__.get("__name__", "")
        if not module.startswith(FOLLOWED):
            return
        uses = uses_of(function.__code__)
        self._attributes |= uses.attributes - DISPLAY_METHODS
        for chain in uses.chains:
            self._chain(function.__globals__, module, chain, uses.attributes)
        package = function.__globals__.get("__package__")
        for name in uses.imports:
            for imported in (name, f"{package}.{name}"):
                if imported in sys.modules:
                    self._parts(sys.modules[imported], uses.attributes)

    def _chain(self, names: Mapping[str, Any], module: str, chain: Sequence[str], attributes: frozenset[str]) -> None:
        for name in chain:
            value = self._value(names, module, name)
            if not isinstance(value, ModuleType):
                return
            names, module = vars(value), value.__name__
        self._parts(value, attributes)

    def _parts(self, module: ModuleType, attributes: frozenset[str]) -> None:
        """Compare all names that code may read from a module object."""
        for name in sorted(attributes & vars(module).keys()):
            if not isinstance(vars(module)[name], ModuleType):
                self._value(vars(module), module.__name__, name)

    def _value(self, names: Mapping[str, Any], module: str, name: str) -> Any:
        """Return the object that a module's name is bound to. Raise _Other if the source binds another object."""
        value, full = names.get(name, MISSING), f"{module}.{name}"
        if (id(names), name) in self._named or full in DEVICE_FUNCTIONS:
            return value
        self._named.add((id(names), name))
        candidates = [_as_compared(binding) for binding in bound(module, name)]
        if value is not MISSING:
            fits = [binding for binding in candidates if _is(value, binding, name)]
            if not fits and (candidates or not _known(value, module) or _misnamed(value, module, name)):
                raise _Other(full, value)
            self.bindings.dotted.add(full)
            self.bindings.literals += [(value, binding.value) for binding in fits if isinstance(binding, Literal)]
        if len(candidates) > 1:  # ComfyUI's options choose one of the candidates
            for binding in candidates:
                if (
                    isinstance(binding, Defined)
                    and (owner := sys.modules.get(binding.module))
                    and binding.name in vars(owner)
                ):
                    self._value(vars(owner), binding.module, binding.name)
        if callable(value) or not any(isinstance(binding, Computed) for binding in candidates):
            self._note(names, name, value)
        if _is_code(value) and not (isinstance(value, type) and not value.__module__.startswith(FOLLOWED)):
            self._waiting.append(value)
        return value

    def _note(self, names: Mapping[str, Any], name: str, value: Any) -> None:
        self.bindings.names.append((names, name, value))


def _is(value: Any, binding: Binding, name: str) -> bool:
    """Return True if a value is the object that the source binds the name to."""
    match binding:
        case Imported(module):
            return isinstance(value, ModuleType) and value is sys.modules.get(module)
        case Literal(_, written):
            return type(value) is type(written) and bool(value == written)
        case Computed(module):
            return _known(value, module) and not _misnamed(value, module, name)
        case Defined(module, _, qualified, True, _):
            library = module.partition(".")[0] in LIBRARIES
            named = isinstance(value, type) and value.__qualname__ == qualified
            return named and (value.__module__ == module or (library and _known(value, module)))
        case Defined(module, file, qualified, False, decorated):
            functions = [*layers_of(value)]
            if not functions or not _is_defined(functions[-1].__code__, file, qualified):
                return (decorated and _known(value, module)) or _is_compilers(functions)
            package = module.partition(".")[0]
            wrappers = {_package(each) for each in functions[:-1]}
            within = package not in COMFYUI and wrappers <= {package}  # torch wraps its own functions at run time
            return within or ((not wrappers or decorated) and wrappers <= KNOWN | {package})
    raise AssertionError(binding)


def _is_compilers(functions: Sequence[FunctionType]) -> bool:
    """Return True if torch.compile has replaced a function by its own, which watches modules."""
    return bool(functions) and all(
        each.__globals__.get("__name__", "").startswith("torch._dynamo.") for each in functions
    )


def _as_compared(binding: Binding) -> Binding:
    """Return a binding without its constant, except in a model's code. ComfyUI sets other constants, such as flags."""
    if isinstance(binding, Literal) and not binding.module.startswith(CONSTANT):
        return Computed(binding.module)
    return binding


def _is_defined(code: CodeType, file: str, qualified: str) -> bool:
    name = getattr(code, "co_qualname", qualified)  # from Python 3.11
    return code.co_filename == file and name == qualified and code.co_name == qualified.rpartition(".")[2]


def _known(value: Any, module: str) -> bool:
    """Return True if a value is data, or code defined by ComfyUI, a known library or the module's own package."""
    packages = KNOWN | {module.partition(".")[0]}
    if isinstance(value, ModuleType):
        return value is sys.modules.get(value.__name__) or type(value).__module__.startswith("torch.")
    if isinstance(value, type):
        return value.__module__.partition(".")[0] in packages
    functions = [*layers_of(value)]
    if functions:
        return all(_package(each) in packages for each in functions)
    return not callable(value) or type(value).__module__.partition(".")[0] in packages | BINDERS


def _misnamed(value: Any, module: str, name: str) -> bool:
    """Return True if a name of torch's is bound to a torch function of another name."""
    if module.partition(".")[0] != "torch":
        return False
    if isinstance(value, FunctionType):
        at_top = value.__globals__["__name__"] == module and "<" not in value.__qualname__
        return at_top and value.__code__.co_name != name
    if not isinstance(value, BuiltinFunctionType):
        return False
    return not f"_{value.__name__.strip('_')}".endswith(f"_{name.strip('_')}")


def _takes_effect(kind: type, name: str) -> bool:
    """Return True if a function added to a class can run: it hides an inherited one, or ComfyUI defines the class."""
    return kind.__module__.startswith("comfy") or any(hasattr(base, name) for base in kind.__mro__[1:])


def _is_code(value: Any) -> bool:
    return isinstance(value, type) or any(True for _ in layers_of(value))


def _package(function: FunctionType) -> str:
    module = str(function.__globals__.get("__name__", ""))
    return "collections" if module.startswith("namedtuple_") else module.partition(".")[0]


def _file_of(value: Any) -> str:
    if isinstance(value, type):
        return getattr(sys.modules.get(value.__module__), "__file__", None) or ""
    return next((each.__code__.co_filename for each in layers_of(value)), "")
