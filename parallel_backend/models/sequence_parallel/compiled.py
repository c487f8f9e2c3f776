"""Blocks compiled by torch.compile, each kind once for all sizes.

What the compiler sees is the block's own code with this rank's tokens, which are plain tensors. Attention, with the exchanges
between ranks in it, is one operator that it does not look into, and so is a quantised layer (layer_operator.py). A kind
of block that it cannot take whole runs as it is.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ...declaration import ReplicatedKeys
from .arguments import Arguments
from .attentions import LOW_PRECISION, SCALE, Attentions
from .layer_operator import RUNNING

OVERRIDE = "optimized_attention_override"
"""Where ComfyUI looks for what stands in for its attention."""

RECORDS = "cudagraphs"
"""The compiler that records what is started on a GPU, to be started again at once."""

ANY_SIZE = {"use_duck_shape": False}
"""Sizes that are equal when a kind is compiled may differ later: a batch of two has nothing to do with positions' two columns."""

EXACT_NUMBERS = {"specialize_float": True}
"""A block's own numbers, such as a norm's epsilon, are constants: taken for variables at first, each kind is traced twice."""

GRAPHS = "unique_graphs"
"""What torch counts the graphs under that it has compiled."""

ANSWERING: ContextVar[Attentions] = ContextVar("attentions")
"""What answers the calls of attention of the block that runs: an operator can be given tensors and plain values only."""


@torch.library.custom_op("comfyui_parallel::attention", mutates_args=())
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    heads: int,
    kernel: str,
    ordinal: int,
    attn_precision: torch.dtype | None,
    skip_reshape: bool,
    skip_output_reshape: bool,
    enable_gqa: bool,
    low_precision: bool,
    scale: float | None,
) -> Tensor:
    """A call of attention: `kernel` is the module and name of ComfyUI's, if any, `ordinal` the calls before it in the block."""
    attentions = ANSWERING.get()
    assert attentions.block is not None
    assert attentions.block.done == ordinal, "the compiler has changed the order of attentions"
    module, _, name = kernel.partition(":")
    keywords: dict[str, Any] = {"enable_gqa": True} if enable_gqa else {}
    keywords |= {} if low_precision else {LOW_PRECISION: False}
    keywords |= {} if scale is None else {SCALE: scale}
    out = attentions(
        getattr(sys.modules[module], name) if kernel else None, q, k, v, heads, mask, attn_precision, skip_reshape,
        skip_output_reshape, _inside_attn_wrapper=True, **keywords,
    )  # fmt: skip
    return out.contiguous()


@attention.register_fake
def _shape_of_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    heads: int,
    kernel: str,
    ordinal: int,
    attn_precision: torch.dtype | None,
    skip_reshape: bool,
    skip_output_reshape: bool,
    enable_gqa: bool,
    low_precision: bool,
    scale: float | None,
) -> Tensor:
    tokens, width = (q.shape[2], v.shape[3]) if skip_reshape else (q.shape[1], q.shape[2] // heads)
    if skip_output_reshape:
        return q.new_empty(q.shape[0], heads, tokens, width)
    return q.new_empty(q.shape[0], tokens, heads * width)


@dataclass(frozen=True)
class CompiledEntry:
    """How a block is run with its attention as an operator.

    Attributes:
        run: the block's forward, given the block, its options, an empty list that has one more element for each attention, and
            its other arguments. This is what is compiled.
        options: the argument through which attention is replaced; empty where it takes none.
    """

    run: Callable[..., Any]
    options: str


class CompiledBlocks:
    """The blocks of a model, compiled by one of torch.compile's backends as they come."""

    def __init__(self, backend: str, entry: CompiledEntry) -> None:
        from torch._dynamo import config, exc, utils  # takes a while, and few compile
        from torch.fx.experimental import _config

        self._compile_errors = exc.TorchDynamoException, exc.FailOnRecompileLimitHit
        self._tracing, self._shapes = config, _config
        self._counted = utils.counters["stats"]
        self._backend = backend
        self._entry = entry
        self._kinds: dict[tuple[type, tuple[str, ...]], Callable[..., Any] | None] = {}
        self._warnings: list[str] = []
        self._seconds = 0.0

    def takes(self, module: nn.Module, method: str, injected: Collection[str]) -> bool:
        """Whether blocks that are called so are compiled at all, by a method and with attention `injected` to them as arguments.

        By another method than forward, and with a node's attention, they run as they are.
        """
        variant = (method,) if method != "forward" else tuple(injected)
        if variant and (type(module), variant) not in self._kinds:
            self._kinds[type(module), variant] = None
            reason = "a node hands it attention of its own, which is not compiled"
            if method != "forward":
                reason = f"ComfyUI calls its {method}, and only what a block's forward does is compiled"
            self._give_up(module, reason)
        return not variant

    def seconds(self) -> float:
        """Seconds that compiling has taken since this was asked for last, the first run of what was compiled among them."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def warnings(self) -> tuple[str, ...]:
        """Of kinds that could not be compiled since this was asked for last, why not."""
        warnings, self._warnings = tuple(self._warnings), []
        return warnings

    def __call__(
        self,
        module: nn.Module,
        traced_module: nn.Module,
        arguments: Arguments,
        local: Mapping[str, Any],
        attentions: Attentions,
    ) -> Any:
        """What a block gives for its arguments on this rank; `traced_module` is what the compiler sees of it."""
        kind = type(module), tuple(local)
        if kind not in self._kinds:
            self._kinds[kind] = self._compiled(module, local, attentions)
        run = self._kinds[kind]
        if run is None:
            return arguments.call(module.forward, local)
        options = local.get(self._entry.options)
        answering, running = ANSWERING.set(attentions), RUNNING.set(module)
        graphs, started = self._counted[GRAPHS], time.perf_counter()

        def compiled(*args: Any, **named: Any) -> Any:
            return run(traced_module, options, [], args, named)

        try:
            with self._shapes.patch(**ANY_SIZE), self._tracing.patch(EXACT_NUMBERS):  # type: ignore[attr-defined]
                local_arguments = {name: value for name, value in local.items() if name != self._entry.options}
                return arguments.call(compiled, local_arguments)
        except self._compile_errors as error:  # a block is compiled whole, so nothing of it has run yet
            self._give_up(module, error)
            self._kinds[kind] = None
        finally:
            if self._counted[GRAPHS] > graphs:
                self._seconds += time.perf_counter() - started
            RUNNING.reset(running)
            ANSWERING.reset(answering)
        return arguments.call(module.forward, local)

    def _compiled(
        self, module: nn.Module, local: Mapping[str, Any], attentions: Attentions
    ) -> Callable[..., Any] | None:
        assert attentions.block is not None
        exchanging = sum(not isinstance(each, ReplicatedKeys) for each in attentions.block.attentions)
        if self._backend == RECORDS and attentions.device.type != "cpu":
            self._give_up(module, f"{RECORDS} cannot record the exchanges between GPUs; choose inductor")
        elif attentions.block.prefix is not None:
            self._give_up(module, "ComfyUI hands it attention as a function made for each call")
        elif exchanging > 1:
            self._give_up(module, f"it has {exchanging} attentions over all tokens, whose order must stay")
        elif self._entry.options and self._entry.options not in local:
            self._give_up(module, "its attention cannot be replaced")
        else:
            # What is compiled is kept with the code, so each model has a copy: it goes with the model.
            run = self._entry.run
            assert isinstance(run, FunctionType)
            own = FunctionType(run.__code__.replace(), run.__globals__)
            try:
                return torch.compile(own, backend=self._backend, fullgraph=True, dynamic=True)
            except self._compile_errors as error:
                self._give_up(module, error)
        return None

    def _give_up(self, module: nn.Module, reason: object) -> None:
        first, _, _ = str(reason).partition("\n")
        self._warnings.append(f"{type(module).__name__} is not compiled: {first.rstrip('.')}.")
