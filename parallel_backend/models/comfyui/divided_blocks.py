"""Blocks of a module that are divided over ranks: each block runs on the rank that owns it and sends its results to the others.

Everything outside the blocks runs on every rank. So every rank calls the same blocks in the same order.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ...comm.communicator import Communicator
from ...errors import Refused
from ...layout import parts_by_size
from .shared_decisions import SharedDecisions, broadcast


class BlockFailed(RuntimeError):
    """An error of a block, which every rank raises."""


class _SentTensor(msgspec.Struct, frozen=True, tag=True):
    """A tensor that the owner sends."""

    shape: tuple[int, ...]
    dtype: str
    on_host: bool


class _KeptTensor(msgspec.Struct, frozen=True, tag=True):
    """A tensor of the block's state, which stays with the owner."""

    shape: tuple[int, ...]
    dtype: str


class _SameArgument(msgspec.Struct, frozen=True, tag=True):
    """A tensor that is an argument of the block, by its number."""

    number: int


class _PlainValue(msgspec.Struct, frozen=True, tag=True):
    """A value that is no tensor."""

    value: bool | int | float | str | None


class _ResultItems(msgspec.Struct, frozen=True, tag=True):
    """A list or a tuple."""

    items: list[_Result]
    is_tuple: bool


class _ResultEntries(msgspec.Struct, frozen=True, tag=True):
    """A dict."""

    entries: dict[str, _Result]


_Result = _SentTensor | _KeptTensor | _SameArgument | _PlainValue | _ResultItems | _ResultEntries


STATE = "past_key_value"
"""Keyword of a block's state, which holds the keys and values of earlier tokens. The block's second result is its next state."""


SHARED = "shared_kv"
"""Keyword with which a block takes the keys and values of another block, which may be the other block's state (Gemma 4)."""


class _BlockReply(msgspec.Struct, frozen=True):
    """The owner's description of a block's results.

    Attributes:
        error: the error that the block has raised; empty if it has none.
        result: the structure of the results.
        changed: the numbers of the arguments that the block has changed in place.
    """

    error: str = ""
    result: _Result | None = None
    changed: dict[int, _SentTensor] = {}


def outermost_lists(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.ModuleList]]:
    """Yield the lists of blocks of a module that are in no other list, with their paths."""
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList):
            yield path + name, child
        else:
            yield from outermost_lists(child, f"{path}{name}.")


def owners(blocks: Sequence[nn.Module], ranks: int) -> list[int]:
    """Return the rank that owns each block. Ranks own runs of blocks of about equal bytes."""
    return parts_by_size([bytes_of(block) for block in blocks], ranks)


def bytes_of(module: nn.Module) -> int:
    """Return the bytes of a module's parameters."""
    return sum(parameter.nbytes for parameter in module.parameters())


def bytes_by_rank(module: nn.Module, ranks: int) -> list[int]:
    """Return the bytes of parameters that each rank holds of a module whose blocks are divided."""
    lists = [[*blocks] for _, blocks in outermost_lists(module)]
    found = [bytes_of(module) - sum(map(bytes_of, (block for blocks in lists for block in blocks)))] * ranks
    for blocks in lists:
        for block, owner in zip(blocks, owners(blocks, ranks), strict=True):
            found[owner] += bytes_of(block)
    return found


class DividedBlocks:
    """The blocks of a module on the meta device, each on one of the ranks.

    The parameters of other ranks' blocks are removed from the module.

    Args:
        module: the module whose outermost lists of blocks are divided.
        axis: all ranks, on their devices.
        host: all ranks, on CPU tensors.
        on_block: called on all ranks before each block. It may raise an exception on all of them.
    """

    def __init__(self, module: nn.Module, axis: Communicator, host: Communicator, on_block: Callable[[], None]) -> None:
        self._axis = axis
        self._host = host
        self.on_block = on_block
        self.decisions = SharedDecisions(axis, host)
        every = [block for _, blocks in outermost_lists(module) for block in blocks]
        self._keeps_states = not any(SHARED in inspect.signature(block.forward).parameters for block in every)
        for path, blocks in outermost_lists(module):
            for number, (block, owner) in enumerate(zip(blocks, owners([*blocks], axis.size), strict=True)):
                run = functools.partial(self._run, f"{path}.{number}", block.forward, owner)
                block.forward = run  # type: ignore[method-assign]
                if owner != axis.rank:
                    remove_parameters(block)

    def _run(self, name: str, forward: Callable[..., Any], owner: int, *args: Any, **kwargs: Any) -> Any:
        """Return a block's results. A collective of all ranks.

        The tensors of a block's next state are on the meta device, except on the owner, unless blocks share their states.

        Raises:
            BlockFailed: the block has raised an error on its rank.
        """
        with self.decisions.suspended():
            self.on_block()
            if self._axis.size == 1:
                return forward(*args, **kwargs)
            arguments = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            if owner == self._axis.rank:
                return self._computed(name, forward, arguments, args, kwargs)
            reply = msgspec.msgpack.decode(self._broadcast_bytes(None, owner), type=_BlockReply)
            if reply.error:
                raise BlockFailed(reply.error)
            assert reply.result is not None
            for number, sent in reply.changed.items():
                arguments[number].copy_(self._receive(sent, owner))
            return self._rebuilt(reply.result, arguments, owner)

    def _computed(
        self, name: str, forward: Callable[..., Any], arguments: Sequence[Tensor], args: Any, kwargs: Any
    ) -> Any:
        """Run a block on its own rank, and send its results. A collective of all ranks."""
        keeps_state = self._keeps_states and kwargs.get(STATE) is not None
        state = {id(leaf) for leaf in tree_leaves(kwargs[STATE])} if keeps_state else set()
        versions = [_version(argument) for argument in arguments]
        sent: list[Tensor] = []
        try:
            result = forward(*args, **kwargs)
            changed = [
                number
                for number, (argument, version) in enumerate(zip(arguments, versions, strict=True))
                if _version(argument) != version and id(argument) not in state
            ]
            described = {number: _described(arguments[number], sent) for number in changed}
            if not keeps_state or not isinstance(result, tuple):
                structure = _structure(name, result, arguments, sent)
            else:
                first, following, *further = result
                parts = [_structure(name, part, arguments, sent) for part in (first, *further)]
                structure = _ResultItems([parts[0], _structure(name, following, (), None), *parts[1:]], is_tuple=True)
            reply = _BlockReply("", structure, described)
        except (torch.OutOfMemoryError, OSError, dist.DistError):
            raise  # the workers end
        except Exception as error:
            failure = f"{name}: {type(error).__name__}: {error}"
            self._broadcast_bytes(msgspec.msgpack.encode(_BlockReply(failure)), self._axis.rank)
            raise BlockFailed(failure) from error
        self._broadcast_bytes(msgspec.msgpack.encode(reply), self._axis.rank)
        for tensor in sent:
            broadcast(self._axis, tensor.to(self._axis.device), self._axis.rank, tensor.numel(), tensor.dtype)
        return result

    def _rebuilt(self, result: _Result, arguments: Sequence[Tensor], owner: int) -> Any:
        """Return the results that a structure describes. Receive the tensors that the owner sends."""
        match result:
            case _SentTensor():
                return self._receive(result, owner)
            case _KeptTensor():
                return torch.empty(result.shape, dtype=getattr(torch, result.dtype), device="meta")
            case _SameArgument(number=number):
                return arguments[number]
            case _PlainValue(value=value):
                return value
            case _ResultItems(items=items, is_tuple=is_tuple):
                rebuilt = [self._rebuilt(item, arguments, owner) for item in items]
                return tuple(rebuilt) if is_tuple else rebuilt
            case _ResultEntries(entries=entries):
                return {name: self._rebuilt(item, arguments, owner) for name, item in entries.items()}

    def _receive(self, sent: _SentTensor, owner: int) -> Tensor:
        dtype = getattr(torch, sent.dtype)
        flat = broadcast(self._axis, None, owner, torch.Size(sent.shape).numel(), dtype)
        return (flat.cpu() if sent.on_host else flat).view(sent.shape)

    def _broadcast_bytes(self, data: bytes | None, owner: int) -> bytes:
        """Return the owner's bytes on every rank. A collective."""
        length = None if data is None else torch.tensor([len(data)])
        count = int(broadcast(self._host, length, owner, 1, torch.int64))
        message = None if data is None else torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return bytes(broadcast(self._host, message, owner, count, torch.uint8).numpy())


def remove_parameters(block: nn.Module) -> None:
    """Remove the parameters of a block. Code that reads one of them finds None."""
    for part in block.modules():
        for name in part._parameters:
            part._parameters[name] = None


def _version(tensor: Tensor) -> int:
    """Return a number that changes when a tensor is changed in place; 0 for a tensor that cannot be changed here."""
    return 0 if tensor.is_inference() else tensor._version


def _described(tensor: Tensor, sent: list[Tensor]) -> _SentTensor:
    """Return the description of a tensor that is sent, and add the tensor to `sent`."""
    sent.append(tensor)
    return _SentTensor(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.device.type == "cpu")


def _structure(name: str, result: Any, arguments: Sequence[Tensor], sent: list[Tensor] | None) -> _Result:
    """Return the structure of a block's results, and add the tensors to send to `sent`, in the order of receiving.

    Without `sent`, all tensors stay with the owner.

    Raises:
        Refused: the results hold an object of another kind.
    """
    match result:
        case Tensor():
            if sent is None:
                return _KeptTensor(tuple(result.shape), str(result.dtype).removeprefix("torch."))
            number = next((number for number, argument in enumerate(arguments) if argument is result), None)
            return _described(result, sent) if number is None else _SameArgument(number)
        case None | bool() | int() | float() | str():
            return _PlainValue(result)
        case list() | tuple() if type(result) in (list, tuple):
            return _ResultItems([_structure(name, item, arguments, sent) for item in result], isinstance(result, tuple))
        case dict() if all(isinstance(key, str) for key in result):
            return _ResultEntries({key: _structure(name, item, arguments, sent) for key, item in result.items()})
    raise Refused(f"{name} of the text encoder returns a {type(result).__name__}, which cannot be sent: use Load CLIP.")
