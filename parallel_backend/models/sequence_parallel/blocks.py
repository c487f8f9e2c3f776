"""Hooks that replace a model's blocks and pass each block only this rank's tokens."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from ...declaration import (
    Attention,
    BlockGroup,
    Declaration,
    HeadParallelAttention,
    InjectedAttention,
    PrefixedTokens,
    TokenPosition,
)
from ...errors import Refused
from ..family import Stage
from .arguments import OPTIONS, Arguments
from .attentions import BlockCall
from .call_layout import StageOver
from .compiled import CompiledBlocks, CompiledEntry
from .forward import RankForward
from .head_parallel import HeadParallelMethod
from .injected_attention import BlockOfSomeHeads, InjectedFunction, SomeHeads
from .layer_operator import LayerOperator, layer_operators
from .modulation import of_vectors
from .module_attention import answered, unknown_arguments
from .placement import Placement
from .stream import StagePosition, Stream


@dataclass(frozen=True)
class Block:
    """A block of the model.

    Attributes:
        module: the block's module.
        group: the block group that declares its arguments.
        path: its name in the model.
        unit: the number of its unit. A unit is the blocks that one stage must hold together.
        number: its number among the blocks of all stages.
        ends_unit: True for the last block of its unit.
    """

    module: nn.Module
    group: BlockGroup
    path: str
    unit: int
    number: int
    ends_unit: bool


def blocks_of(module: nn.Module, declaration: Declaration) -> list[Block]:
    """Return all blocks in the order in which they run.

    Raises:
        Refused: the model lacks a declared block.
    """
    groups = {path: group for group in declaration.groups for path in paths_of(module, group)}
    units = declaration.units(module) if declaration.units else [[path] for path in groups]
    named = [(unit, path, path == paths[-1]) for unit, paths in enumerate(units) for path in paths]
    assert sorted(path for _, path, _ in named) == sorted(groups), "every block is in one unit"
    return [
        Block(module.get_submodule(path), groups[path], path, unit, number, ends_unit)
        for number, (unit, path, ends_unit) in enumerate(named)
    ]


def control_blocks(blocks: Sequence[Block], declaration: Declaration) -> dict[str, range]:
    """Return the units after which the tensors of each of ComfyUI's lists of a ControlNet's output are added."""
    units = {
        kind: [block.unit for block in blocks if block.group.path == path] for kind, path in declaration.control.items()
    }
    return {kind: range(run[0], run[-1] + 1) if run else range(0) for kind, run in units.items()}


def paths_of(module: nn.Module, group: BlockGroup) -> list[str]:
    """Return the names of a group's blocks in the model.

    Raises:
        Refused: the model has no submodule of the group's name.
    """
    try:
        submodule = module.get_submodule(group.path)
    except AttributeError:
        raise Refused(
            f"the model's {type(module).__name__} has no {group.path}: this ComfyUI or diffusers is newer or older than this "
            "pack knows; update the pack, or use Load Diffusion Model."
        ) from None
    if isinstance(submodule, nn.ModuleList):
        return [f"{group.path}.{index}" for index in range(len(submodule))]
    return [group.path]


class BlockHook(nn.Module):
    """A module that replaces a block.

    Args:
        way: a function that replaces the block's forward.
        inside: the module whose attributes the hook has.
        ways: functions that replace other methods of the block.
    """

    def __init__(
        self,
        way: Callable[..., Any] | None,
        inside: nn.Module | None = None,
        ways: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        if way is not None:
            self.forward = way
        for method, function in ways.items():
            setattr(self, method, function)
        self.__dict__["inside"] = inside  # not registered as a submodule

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if self.inside is None else getattr(self.inside, name)


class ParallelModel:
    """A model whose blocks run on the tokens of one rank.

    Args:
        module: the model, on the meta device. Blocks of other stages are dropped from it. Output layers are dropped too unless
            this is the last stage.
        stage: the units that this rank's stage holds.
        entry: the function by which compiled blocks run.

    Attributes:
        module: the model, which holds the weights.
        entered: a copy of `module` that shares its weights and has hooks in place of blocks; its forward computes the model.
        blocks: the blocks of this stage.
        unknown: names of arguments that the source of a block of any stage passes to attention and that only ComfyUI's own
            kernels support.
    """

    def __init__(self, module: nn.Module, declaration: Declaration, stage: Stage, entry: CompiledEntry) -> None:
        self.module = module
        self._entry = entry
        self._compiled: dict[str, CompiledBlocks] = {}
        self.blocks: list[nn.Module] = []
        self.running: RankForward | None = None
        hooks: dict[str, BlockHook] = {}
        every = blocks_of(module, declaration)
        self._every = {block.path: block for block in every}
        unknown_names = (unknown_arguments(block.module, attentions_of(block.group, block.module)) for block in every)
        self.unknown = sorted({name for names in unknown_names for name in names})
        for block in every:
            if stage.start <= block.unit < stage.stop:
                through = functools.partial(_LocalBlock, self, index=len(self.blocks), last=block is every[-1])
                hooks[block.path] = _block_hook(block, through)
                self.blocks.append(block.module)
            else:
                hooks[block.path] = _block_hook(
                    block, functools.partial(_SkippedBlock, self, before=block.unit < stage.start)
                )
                module.set_submodule(block.path, nn.Identity())
        for group in declaration.embeddings:
            for path in paths_of(module, group):
                embedding = module.get_submodule(path)
                hooks[path] = BlockHook(_TokenWiseModule(self, path, group, Arguments(group, embedding), embedding))
        for group in declaration.between:
            for path in paths_of(module, group):
                adding = module.get_submodule(path)
                hooks[path] = BlockHook(_AddedTokens(self, path, group, Arguments(group, adding), adding))
        for path in declaration.positions:
            inside = module.get_submodule(path)
            hooks[path] = BlockHook(_CachedModule(self, path, inside), inside)
        for group in declaration.output_layers:
            for path in paths_of(module, group):
                head = module.get_submodule(path)
                if stage.last:
                    hooks[path] = BlockHook(_TokenWiseModule(self, path, group, Arguments(group, head), head), head)
                else:
                    hooks[path] = BlockHook(_stage_over, head)
                    module.set_submodule(path, nn.Identity())
        self.entered = _with_hooks(module, hooks)

    def entrance(self, *args: Any, **arguments: Any) -> Any:
        """Run the model's forward."""
        self.now.call.arguments = arguments
        return self.entered(*args, **arguments)

    def compiled_by(self, compiler: str) -> CompiledBlocks | None:
        """Return the blocks compiled by a backend of torch.compile, kept with the model; None if the name is empty."""
        if not compiler:
            return None
        return self._compiled.setdefault(compiler, CompiledBlocks(compiler, self._entry))

    def of_some_heads(self, path: str) -> BlockOfSomeHeads:
        """Return the block at a path as injected attention may see it: with this rank's heads only."""
        block = self._every[path]
        return BlockOfSomeHeads(
            {
                declared.module: SomeHeads(block.module.get_submodule(declared.module), declared, lambda: self.now)
                for declared in block.group.arguments.values()
                if isinstance(declared, InjectedAttention)
            }
        )

    @property
    def now(self) -> RankForward:
        """Return the running forward."""
        assert self.running is not None, "a block was called outside of a forward"
        return self.running


def _block_hook(block: Block, way: Callable[[Block], Callable[..., Any]]) -> BlockHook:
    """Return the hook of a block, with a replacement of each method that the model calls.

    The block counts as done when its group's own method has run.
    """
    other_blocks = [replace(block, group=group, ends_unit=False) for group in block.group.other_methods]
    ways = {each.group.method: way(each) for each in (block, *other_blocks)}
    return BlockHook(ways.pop("forward", None), ways=ways)


def _with_hooks(module: nn.Module, hooks: Mapping[str, nn.Module]) -> nn.Module:
    """Return a copy of the model that shares its tensors and has hooks in place of some submodules."""
    shallow = copy.copy(module)
    shallow._modules = dict(module._modules)
    inner: dict[str, dict[str, nn.Module]] = {}
    for path, hook in hooks.items():
        first, _, rest = path.partition(".")
        if rest:
            inner.setdefault(first, {})[rest] = hook
        else:
            shallow._modules[first] = hook
    for first, some in inner.items():
        child = module._modules[first]
        assert child is not None
        shallow._modules[first] = _with_hooks(child, some)
    return shallow


def _stage_over(*_: Any, **__: Any) -> Any:
    raise StageOver


class _LocalBlock:
    """A block of this stage, which runs on the rank's local tokens. `last` is True for the last block of the model."""

    def __init__(self, model: ParallelModel, block: Block, index: int, last: bool) -> None:
        self._model = model
        self._block = block
        self._arguments = Arguments(block.group, block.module)
        self._index = index
        self._last = last
        self._attentions = attentions_of(block.group, block.module)
        entrance = _with_hooks(block.module, _modulations(model, block) | _by_heads(model, block, self._attentions))
        self._run = getattr(entrance, block.group.method)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        now, block = self._model.now, self._block
        values = self._arguments.bind(args, kwargs)
        streams = {
            name: now.received(stream)
            for name, stream in _streams(block.path, block.group, self._arguments, values, now).items()
        }
        local = self._arguments.local(values, streams, now.call)
        placements = {name: stream.placement for name, stream in streams.items()}
        absent = {name for name in block.group.arguments if values.get(name) is None}
        name = type(block.module).__name__
        options = values.get(OPTIONS) or {}
        passes_options = not block.group.attention_module
        injected = _injected_functions(block, values, placements, now)
        local |= injected
        attentions = () if injected else self._attentions
        expected = BlockCall(
            block.number, now.turn(block.number), name, attentions, placements, absent, options, passes_options
        )
        now.attentions.block = expected
        with now.access.block(self._index), answered(block.group.attention_module, now.attentions):
            if now.compiled is None or not now.compiled.takes(block.module, block.group.method, injected):
                out = self._arguments.call(self._run, local)
            else:
                traced_module = now.once_a_run((block.path, LayerOperator), (), self._traced_module)
                # The first block may get a view of a larger tensor, whose strides would need another graph.
                local |= {name: local[name].contiguous() for name in streams}
                out = now.compiled(block.module, traced_module, self._arguments, local, now.attentions)
        expected.finish()
        now.attentions.block = None
        if block.ends_unit:
            now.on_progress()
        now.call.blocks_done |= self._last
        return _returned(block.group, out, streams)

    def _traced_module(self) -> nn.Module:
        """Return the block as a compiler sees it. It is computed again for each run, because adapters may change."""
        return _with_hooks(self._block.module, layer_operators(self._block.module))


class _SkippedBlock:
    """A replacement of a block of another stage, which returns streams without data.

    `before` is True if the other stage comes before this one.
    """

    def __init__(self, model: ParallelModel, block: Block, before: bool) -> None:
        self._model = model
        self._block = block
        self._arguments = Arguments(block.group, block.module)
        self._before = before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        now, group = self._model.now, self._block.group
        values = self._arguments.bind(args, kwargs)
        streams = _streams(self._block.path, group, self._arguments, values, now)
        if not self._before:
            for name, stream in streams.items():
                if isinstance(values[name], Stream):  # the other stage computes plain tensors itself
                    now.hand_on(stream)
        shells = [
            streams[name].at(StagePosition.BEFORE if self._before else StagePosition.AFTER) for name in group.returns
        ]
        return shells[0] if len(shells) == 1 else tuple(shells)


class _TokenWiseModule:
    """A module that computes each token separately, such as an embedding or an output layer, on the rank's local tokens."""

    def __init__(
        self, model: ParallelModel, path: str, group: BlockGroup, arguments: Arguments, module: nn.Module
    ) -> None:
        self._model = model
        self._path = path
        self._group = group
        self._arguments = arguments
        self._module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        now = self._model.now
        values = self._arguments.bind(args, kwargs)
        streams = _streams(self._path, self._group, self._arguments, values, now)
        out = self._arguments.call(self._module.forward, self._arguments.local(values, streams, now.call))
        return _returned(self._group, out, streams)


class _SharedModulation:
    """A block's modulation, which is computed once for all patches of a model call."""

    def __init__(self, model: ParallelModel, path: str, module: nn.Module) -> None:
        self._model = model
        self._path = path
        self._make = of_vectors(module)

    def __call__(self, tensor: Tensor) -> Any:
        return self._model.now.modulation(self._path, tensor, self._make)


class _AddedTokens(_TokenWiseModule):
    """A module that adds something to tokens between blocks. It runs on the stage and the ranks that have these tokens."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        values = self._arguments.bind(args, kwargs)
        streams = {name: values[name] for name in self._group.streams}
        assert all(isinstance(stream, Stream) for stream in streams.values()), "it comes after a block"
        local = self._arguments.local(values, streams, self._model.now.call)
        (returned,) = self._group.returns
        boundaries = [name for name, argument in self._group.arguments.items() if isinstance(argument, TokenPosition)]
        if streams[returned].stage_position != StagePosition.LOCAL or any(local[name] == 0 for name in boundaries):
            return streams[returned]
        return _returned(self._group, self._arguments.call(self._module.forward, local), streams)


class _CachedModule:
    """A module that computes positions. It runs once a run."""

    def __init__(self, model: ParallelModel, path: str, module: nn.Module) -> None:
        self._model = model
        self._path = path
        self._module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inputs = (args, kwargs)
        return self._model.now.once_a_run(self._path, inputs, lambda: self._module.forward(*args, **kwargs))


def _injected_functions(
    block: Block, values: Mapping[str, Any], placements: Mapping[str, Placement], now: RankForward
) -> dict[str, InjectedFunction]:
    """Return the functions that a block calls instead of its attention, by argument name."""
    return {
        name: InjectedFunction(
            block.module.get_submodule(declared.module),
            declared,
            values[name],
            values,
            placements[declared.stream],
            now,
        )
        for name, declared in block.group.arguments.items()
        if isinstance(declared, InjectedAttention) and values.get(name) is not None
    }


def _modulations(model: ParallelModel, block: Block) -> dict[str, BlockHook]:
    """Return hooks for the modulation modules that the block has. In some models, blocks have no modulation of their own."""
    inside = dict(block.module.named_modules())
    paths = [path for path in block.group.modulations if path in inside]
    return {path: BlockHook(_SharedModulation(model, f"{block.path}.{path}", inside[path])) for path in paths}


def _by_heads(model: ParallelModel, block: Block, attentions: Sequence[Attention]) -> dict[str, BlockHook]:
    """Return hooks for submodules whose attention runs on all tokens and some of the heads."""
    hooks = {}
    for attention in attentions:
        if isinstance(attention, HeadParallelAttention):
            inside = block.module.get_submodule(attention.module)
            way = HeadParallelMethod(inside, attention, lambda: model.now)
            hooks[attention.module] = BlockHook(inside.forward, inside, {attention.method: way})
    return hooks


def attentions_of(group: BlockGroup, block: nn.Module) -> Sequence[Attention]:
    """Return the declared calls of attention of one block."""
    return group.attentions(block) if callable(group.attentions) else group.attentions


def _streams(
    path: str, group: BlockGroup, arguments: Arguments, values: Mapping[str, Any], now: RankForward
) -> dict[str, Stream]:
    streams = {}
    for name, kind in group.streams.items():
        value = values.get(name)
        if value is None:
            continue
        prefix = int(values[kind.length]) if isinstance(kind, PrefixedTokens) else 0
        if not isinstance(value, Stream):
            find = functools.partial(arguments.unmasked, values, name)
            value = now.call.stream(value, kind, now.once_a_run((path, name), (value,), find), prefix=prefix)
        elif isinstance(kind, PrefixedTokens) and value.placement.replicated != prefix:
            raise Refused(
                f"the model's block {path} was given a prefix of {prefix} tokens and expects "
                f"{value.placement.replicated}: update the pack, or use Load Diffusion Model."
            )
        streams[name] = value
    return streams


def _returned(group: BlockGroup, out: Any, streams: Mapping[str, Stream]) -> Any:
    """Wrap the tensors that a block returned as streams."""
    several = isinstance(out, (tuple, list))
    values = list(out) if several else [out]
    if len(values) != len(group.returns):
        raise Refused(
            f"a block of the model's {group.path} returned {len(values)} values and this pack expects "
            f"{len(group.returns)}: update the pack, or use Load Diffusion Model."
        )
    wrapped = [
        None if value is None else _as_stream(value, streams[name])
        for value, name in zip(values, group.returns, strict=True)
    ]
    return tuple(wrapped) if several else wrapped[0]


def _as_stream(value: Tensor, stream: Stream) -> Stream:
    value = stream.with_tokens(value)
    count = stream.placement.counts[stream.call.rank]
    if count == 0 and value.shape[stream.along] == 1:
        value = value.narrow(stream.along, 0, 0)
    if value.shape[stream.along] != count:
        raise Refused(
            f"a block of the model was given {count} tokens and returned {value.shape[stream.along]}: update the "
            "pack, or use Load Diffusion Model."
        )
    return stream.like(value)
