"""Real values of a file's tensors for code of ComfyUI that gets these tensors on the meta device.

ComfyUI decides some things by values: it measures the spread of a norm, or reads a mark. Inside `file_values`, a request for
values reads only this tensor's bytes from the file. The code gets the same values as with the whole file in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from traceback import extract_stack
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ...weights.files.entry import TensorEntry
from ...weights.values import values_of

CPU = torch.device("cpu")

TORCH = str(Path(torch.__file__).parent)

TO_HOST = (Tensor.numpy, Tensor.tolist, Tensor.__array__)
"""Functions that convert values to Python objects without running an operator."""


class ValueUnknown(RuntimeError):
    """Raised if code asks for the values of a meta tensor that no file has."""

    def __init__(self, tensor: Tensor) -> None:
        asking = next(frame for frame in reversed(extract_stack()) if not frame.filename.startswith((TORCH, __file__)))
        super().__init__(
            f"line {asking.lineno} of {Path(asking.filename).name} asks for the values of a meta tensor of the shape "
            f"{list(tensor.shape)} that is not in the file"
        )


@contextmanager
def file_values(pairs: Iterable[tuple[Tensor, TensorEntry]]) -> Iterator[FileValues]:
    """Provide the values of tensors on the meta device while this context is active.

    A request for unknown values fails. If the asking code swallows the failure, it has continued without the value, so the
    error is raised again at the end of the context.

    Args:
        pairs: tensors, with the entries that locate them in a file. Tensors that are not on the meta device are ignored.

    Raises:
        ValueUnknown: code asked for unknown values.
        Refused: the file could not be read.
    """
    values = FileValues({storage_number(tensor): (tensor, entry) for tensor, entry in pairs if on_meta(tensor)})
    with values, _ToHost(values):
        yield values
    if values.failure is not None:
        raise values.failure


def named_values(
    tensors: Mapping[str, Tensor], entries: Mapping[str, TensorEntry]
) -> Iterator[tuple[Tensor, TensorEntry]]:
    """Return the pairs for `file_values` from tensors and entries of the same names."""
    return ((tensor, entries[name]) for name, tensor in tensors.items() if name in entries)


@dataclass(frozen=True)
class _Operation:
    """The operation that made a tensor. The tensor is number `number` of its `outputs`."""

    function: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    outputs: Sequence[Any]
    number: int


class FileValues(TorchDispatchMode):
    """A dispatch mode that runs operations on the meta device, or with values from files if the operation needs values."""

    def __init__(self, filed: Mapping[int, tuple[Tensor, TensorEntry]]) -> None:
        super().__init__()
        self.failure: Exception | None = None
        self._filed = filed
        self._operations: dict[int, _Operation] = {}
        self._read: dict[int, Tensor] = {}
        self._changed: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Return the operation's result, and record the tensors that it changes."""
        kwargs = kwargs or {}
        written = _written(func, args, kwargs)
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            if not _needs_values(error) or any(map(on_meta, written)):
                raise
            result = func(*self.valued(args), **self.valued(kwargs))
        changed = [storage_number(tensor) for tensor in written if on_meta(tensor)]
        # The storages of other tensors may be freed, and their numbers used again.
        self._changed.update(filter(self.known, changed))
        self._note(func, args, kwargs, result)
        return result

    def valued(self, arguments: Any) -> Any:
        """Return arguments with real values in place of tensors on the meta device.

        Raises:
            ValueUnknown: a tensor is not from a file, or was changed.
            Refused: the file cannot be read.
        """
        try:
            return tree_map(lambda argument: self._value(argument) if on_meta(argument) else argument, arguments)
        except Exception as error:
            self.failure = self.failure or error
            raise

    def _note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Record the operation by which new meta tensors are made from the file's tensors."""
        inputs = {storage_number(tensor) for tensor in tree_leaves((args, kwargs)) if on_meta(tensor)}
        if not any(map(self.known, inputs)):
            return
        outputs = tree_leaves(result)
        for number, output in enumerate(outputs):
            if on_meta(output) and storage_number(output) not in inputs:  # a tensor that shares a storage is a view
                self._operations[storage_number(output)] = _Operation(func, args, kwargs, outputs, number)

    def known(self, key: int) -> bool:
        """Return True if the values of a storage come from a file, given the storage's number."""
        return key in self._filed or key in self._operations

    def _value(self, tensor: Tensor) -> Tensor:
        key = storage_number(tensor)
        if key in self._changed or not self.known(key):
            raise ValueUnknown(tensor)
        if key in self._filed:
            whole, entry = self._filed[key]
            if key not in self._read:
                self._read[key] = values_of(entry)
        else:
            operation = self._operations[key]
            whole = operation.outputs[operation.number]
            if key not in self._read:
                args, kwargs = self.valued(_on_cpu((operation.args, operation.kwargs)))
                self._read[key] = tree_leaves(operation.function(*args, **kwargs))[operation.number]
        values = self._read[key]
        if tensor.dtype != whole.dtype or values.stride() != whole.stride():
            raise ValueUnknown(tensor)
        return values.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).clone()


class _ToHost(TorchFunctionMode):
    """A function mode that passes tensors with values to the functions in `TO_HOST`."""

    def __init__(self, values: FileValues) -> None:
        super().__init__()
        self._values = values

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Return the function's result."""
        if func in TO_HOST and on_meta(args[0]):
            args = (self._values.valued(args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


def on_meta(value: Any) -> bool:
    """Return True if a value is a plain tensor on the meta device."""
    return type(value) in (Tensor, nn.Parameter) and value.is_meta


def _needs_values(error: Exception) -> bool:
    """Return True if torch raised the error because an operation needs values and the tensor is on the meta device."""
    return isinstance(error, NotImplementedError) or (isinstance(error, RuntimeError) and "meta" in str(error))


def storage_number(tensor: Tensor) -> int:
    """Return a number that a meta tensor shares with its views."""
    return int(tensor.untyped_storage()._cdata)


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the tensors that an operation changes."""
    if not func._schema.is_mutable:
        return []
    changed = [argument for argument in func._schema.arguments if argument.alias_info and argument.alias_info.is_write]
    positions = {argument.name: position for position, argument in enumerate(func._schema.arguments)}
    written_values = (
        args[positions[argument.name]] if positions[argument.name] < len(args) else kwargs.get(argument.name)
        for argument in changed
    )
    return tree_leaves(list(written_values))


def _on_cpu(arguments: Any) -> Any:
    """Return arguments with the CPU in place of the meta device."""
    return tree_map(
        lambda argument: CPU if isinstance(argument, torch.device) and argument.type == "meta" else argument, arguments
    )
