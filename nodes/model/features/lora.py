"""Translate the weight patches that ComfyUI records on a MODEL (LoRA and its kin) into the workers' adapters."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import comfy.lora
import comfy.utils
import comfy.weight_adapter as kinds
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ....parallel_backend.errors import Refused
from ....parallel_backend.weights.adapters.lora import Adapter, AdapterSet, Recipe, apply, content_id, crosses_layers
from ....parallel_backend.wire.frames import DTYPES
from ..refusals import WAY_OUT
from ..trials import random, verdicts
from .adapter_requests import AdapterRequests

PREFIX = "diffusion_model."
FUNCTION_NAMES: Mapping[Callable[..., Any], str] = {comfy.utils.swap_scale_shift: "swap_scale_shift"}

SIZES = (6, 4), (6,), (6, 2, 2), (6, 2, 3, 2), (6, 2, 1, 2, 2)
"""Shapes of the weights in trials of adapters: a matrix, a vector, and convolutions of one to three dimensions."""

OF_ALL = frozenset({"comfy.lora.calculate_weight", "comfy.utils.swap_scale_shift"})
"""The replaced functions that take part in every kind of adapter."""

ADAPTERS: Mapping[str, str] = {name.lower(): f"{name}Adapter" for name in ("LoRA", "LoHa", "LoKr", "GLoRA", "OFT")}
"""ComfyUI's class of each kind of adapter, by the workers' name of the kind."""

WeightPatch: TypeAlias = tuple[float, Any, float, tuple[int, int, int] | None, Callable[..., Any] | None]
"""A weight patch as ComfyUI records it: strength, adapter or (type, values), factor on the weight itself, offset, function."""


class AdapterReader:
    """A translator of weight patches that names tensors by content, and hashes each tensor once."""

    def __init__(
        self, sizes: Mapping[str, Sequence[int]], packed: Mapping[str, Sequence[int]], prefix: str = PREFIX
    ) -> None:
        """Create the translator for a model.

        Args:
            sizes: the shapes of the model's tensors, by ComfyUI's names.
            packed: the result of `packed_starts`.
            prefix: the start of ComfyUI's keys, before ComfyUI's names.
        """
        self._sizes = sizes
        self._packed = packed
        self._prefix = prefix
        self._ids = WeakIdKeyDictionary()
        self._last: tuple[object, AdapterSet] | None = None
        self._questions = AdapterRequests()

    def read(
        self, patches: Mapping[str, Sequence[WeightPatch]], version: object, patched: Callable[[], Collection[str]]
    ) -> AdapterSet:
        """Translate a ModelPatcher's `patches`.

        Args:
            patches: the weight patches by key.
            version: an id that changes whenever the patches do.
            patched: returns the keys that ComfyUI patches.

        Raises:
            Refused: the workers cannot apply a patch; the message names the patch.
        """
        if self._last is None or self._last[0] != version:
            keys = patched() if patches else ()
            unpatched = [key for key in patches if key not in keys]
            adapters = self.translate({key: entries for key, entries in patches.items() if key in keys})
            _refuse_unknown({adapter.kind for changes in adapters.recipe.values() for adapter in changes})
            self._last = version, replace(adapters, left_out=(*_never_patched(unpatched), *adapters.left_out))
        return self._last[1]

    def translate(self, patches: Mapping[str, Sequence[WeightPatch]]) -> AdapterSet:
        """Translate patches of keys that ComfyUI patches, without comparing ComfyUI's adapter code with the workers'."""
        recipe: Recipe = {}
        tensors: dict[str, Tensor] = {}
        logged: list[str] = []
        for key, entries in patches.items():
            name = key.removeprefix(self._prefix)
            if not key.startswith(self._prefix) or name not in self._sizes:
                raise _refused(f"a change of {key}")
            changes = [self._adapter(name, entry, tensors, logged) for entry in entries]
            if known := [adapter for adapter in changes if adapter is not None]:
                recipe[name] = known
        return AdapterSet(recipe, tensors, left_out=_misfits(logged))

    def _adapter(self, name: str, patch: WeightPatch, tensors: dict[str, Tensor], logged: list[str]) -> Adapter | None:
        """Translate a patch.

        If ComfyUI leaves it out, add ComfyUI's log lines to `logged`, and return None or only the scale.
        """
        strength, value, scale, offset, function = patch
        left_out = self._questions.left_out(f"{self._prefix}{name}", self._sizes[name], patch)
        if left_out is not None:
            logged += left_out
            return None if scale == 1.0 else Adapter("diff", {}, float(strength), float(scale), offset=offset)
        size = list(self._sizes[name])
        if offset is not None:
            size[offset[0]] = offset[2]
        kind, parts, alpha = _parts(value, size)
        if function is not None and function not in FUNCTION_NAMES:
            raise _refused(f"the function {getattr(function, '__name__', function)} on {name}")
        adapter = Adapter(
            kind=kind,  # type: ignore[arg-type]
            tensors={part: self.add(tensor, tensors) for part, tensor in parts.items()},
            strength=float(strength),
            scale=float(scale),
            alpha=None if alpha is None else float(alpha),
            offset=None if offset is None else (*offset,),
            function=None if function is None else FUNCTION_NAMES[function],
        )
        if crosses_layers(adapter, tensors, self._packed.get(name, ())):
            raise Refused(
                f"an adapter of the type {kind} mixes rows of {name}, which the workers split into several quantised layers: "
                "use a file that is not quantised, or Load Diffusion Model."
            )
        return adapter

    def add(self, tensor: Tensor, tensors: dict[str, Tensor]) -> str:
        """Add a tensor to `tensors` under its id, and return the id."""
        if tensor not in self._ids:
            self._ids[tensor] = content_id(tensor)
        name: str = self._ids[tensor]
        tensors[name] = tensor.detach() if tensor.dtype in DTYPES.values() else tensor.float()
        return name


def _never_patched(keys: Sequence[str]) -> tuple[str, ...]:
    """Return the sentence that ComfyUI patches none of these parameters; none without parameters."""
    if not keys:
        return ()
    return (
        f"{len(keys)} of the LoRA's changes have no effect, as with ComfyUI's own loader, which never patches {_first(keys)}.",
    )


def _misfits(logged: Sequence[str]) -> tuple[str, ...]:
    """Return the sentence about adapters that ComfyUI leaves out, from its log lines; none without log lines."""
    if not logged:
        return ()
    return (
        f"{len(logged)} of the LoRA's changes do not fit the model, and ComfyUI leaves them out: {_first(logged)}.",
    )


def _first(of: Sequence[str]) -> str:
    return of[0] if len(of) == 1 else f"{of[0]}, and {len(of) - 1} more"


def _refuse_unknown(kinds: Iterable[str]) -> None:
    """Raise Refused for kinds of adapter that this ComfyUI applies differently from the workers."""
    for kind in sorted(kinds):
        if what := verdicts().mismatch("adapter", functools.partial(adapter_results, kind), functions_of(kind)):
            raise _refused(f"an adapter of the type {kind} ({what})")


def functions_of(kind: str) -> frozenset[str]:
    """Return the names of the replaced functions that a kind of adapter depends on."""
    return OF_ALL | ({f"comfy.weight_adapter.{kind}.{ADAPTERS[kind]}.calculate_weight"} if kind in ADAPTERS else set())


def adapter_results(kind: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of small weights with adapters of a kind, applied by the workers' code and by ComfyUI."""
    for size in SIZES:
        for value in _adapters(kind, size):
            for patch in _patches(value):
                before = random(0, size)
                expected = comfy.lora.calculate_weight([patch], before.clone(), "w")
                adapters = AdapterReader({"w": size}, {}).translate({f"{PREFIX}w": [patch]})
                ours = before.clone()
                apply(adapters.recipe["w"], adapters.tensors, ours, slice(0, size[0]), size)
                yield ours, expected


def _patches(value: Any) -> Iterator[WeightPatch]:
    """Yield weight patches as ComfyUI records them: plain, with other strengths, and with swapped scale and shift."""
    yield 1.0, value, 1.0, None, None
    yield 0.7, value, 0.9, None, None
    if isinstance(value, tuple) or getattr(value, "name", "") != "oft":
        yield 0.7, value, 1.0, None, comfy.utils.swap_scale_shift


def _adapters(kind: str, size: tuple[int, ...]) -> Iterator[Any]:
    """Yield adapters of a kind for a weight of `size`, with random factors."""
    rows, columns, rank = size[0], math.prod(size[1:]), 2
    channels = math.prod(size[1:2])
    up, down, left, right = (random(seed, shape) for seed, shape in enumerate([(rows, rank), (rank, columns)] * 2, 1))
    dora = random(9, (rows, *[1] * (len(size) - 1))).abs() + 0.5
    match kind:
        case "lora":
            yield from (kinds.LoRAAdapter(set(), (up, down, alpha, None, None, None)) for alpha in (None, 1.5))
            yield kinds.LoRAAdapter(set(), (up, down, 1.5, None, dora, None))
        case "loha":
            yield kinds.LoHaAdapter(set(), (up, down, 1.5, left, right, None, None, None))
            yield kinds.LoHaAdapter(set(), (up, down, None, left, right, None, None, dora))
        case "lokr":
            wide = min(channels, 2)
            first, second = random(5, (2, wide)), random(6, (3, channels // wide, *size[2:]))
            yield kinds.LoKrAdapter(set(), (first, second, None, None, None, None, None, None, None))
            factors = random(7, (3, 1)), random(8, (1, columns // wide))
            yield kinds.LoKrAdapter(set(), (first, None, 1.5, None, None, *factors, None, dora))
        case "glora":
            if len(size) > 1:  # ComfyUI has no GLoRA for a vector
                a1, a2 = random(5, (channels, rank)), random(6, (rank, channels))
                yield kinds.GLoRAAdapter(set(), (a1, a2, up, down, 1.5, None))
        case "oft":
            yield from (
                kinds.OFTAdapter(set(), (0.1 * random(5, (3, 2, 2)), None, alpha, None)) for alpha in (0.0, 0.05)
            )
        case _:
            yield kind, (random(5, size),)


def _refused(what: str) -> Refused:
    return Refused(f"{what} cannot be applied to a parallel MODEL: {WAY_OUT}.")


def _parts(value: Any, size: Sequence[int]) -> tuple[str, dict[str, Tensor], float | None]:
    """Return the kind, the tensors by part, and alpha, of a patch of a weight of shape `size`."""
    if isinstance(value, kinds.WeightAdapterBase):
        kind, parts, alpha = _adapter_parts(value, size)
        return kind, {part: tensor for part, tensor in parts.items() if tensor is not None}, alpha
    name, values = value if len(value) == 2 else ("diff", value)
    if name not in ("diff", "set"):
        raise _refused(f"a patch of the type {name}")
    if len(values) > 1 and values[1].get("pad_weight"):
        raise _refused("a LoRA that enlarges a weight (FLUX.1 Canny and Depth LoRAs do)")
    return name, {"value": values[0]}, None


def _adapter_parts(
    adapter: kinds.WeightAdapterBase, size: Sequence[int]
) -> tuple[str, dict[str, Tensor | None], float | None]:
    v = adapter.weights
    match adapter:
        case kinds.LoRAAdapter():
            up, down, alpha, middle, dora, reshaped = v
            if reshaped is not None:
                raise _refused("a LoRA that enlarges a weight (FLUX.1 Canny and Depth LoRAs do)")
            _refuse_tucker(middle)
            return "lora", {"up": up, "down": down, "dora_scale": dora}, alpha
        case kinds.LoHaAdapter():
            w1_a, w1_b, alpha, w2_a, w2_b, t1, t2, dora = v
            _refuse_tucker(t1, t2)
            return "loha", {"w1_a": w1_a, "w1_b": w1_b, "w2_a": w2_a, "w2_b": w2_b, "dora_scale": dora}, alpha
        case kinds.LoKrAdapter():
            w1, w2, alpha, w1_a, w1_b, w2_a, w2_b, t2, dora = v
            _refuse_tucker(t2)
            first = {"w1": w1} if w1 is not None else {"w1_a": w1_a, "w1_b": w1_b}
            second = {"w2": w2} if w2 is not None else {"w2_a": w2_a, "w2_b": w2_b}
            return "lokr", first | second | {"dora_scale": dora}, alpha
        case kinds.GLoRAAdapter():
            a1, a2, b1, b2, alpha, dora = v
            newer = b2.shape[0] == b1.shape[1] == a1.shape[1] == a2.shape[0]
            older = b2.shape[1] == b1.shape[0] == a1.shape[0] == a2.shape[1]
            if older and (not newer or a2.shape[0] == size[0] == size[1]):  # ComfyUI's test for LyCORIS' older layout
                a1, a2, b1, b2 = a2, a1, b2, b1  # the older layout has the factors in the other order
            return "glora", {"a1": a1, "a2": a2, "b1": b1, "b2": b2, "dora_scale": dora}, alpha
        case kinds.OFTAdapter():
            blocks, _, constraint, dora = v
            if dora is not None:
                raise _refused("DoRA on an OFT adapter")
            return "oft", {"blocks": blocks}, constraint
    raise _refused(f"an adapter of the type {adapter.name}")


def _refuse_tucker(*cores: Tensor | None) -> None:
    if any(core is not None for core in cores):
        raise _refused("a Tucker-decomposed adapter (for convolutions)")
