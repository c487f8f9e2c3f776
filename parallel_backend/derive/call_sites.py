"""The tensors that a model's modules receive at several sizes, and the positions of the picture's tokens in these tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from .calls import ModelCall, noise_like
from .describing import ArgumentTensor, CallSite
from .rules import Undescribed
from .tokens import Tokens, differs, find_tokens, moved
from .tracing import ModuleCall, trace
from .values import tensors_in

LEAST = 1e-2
"""Least relative change of a forward's output that token-by-token attention must cause."""

Sites = Mapping[str, CallSite]
"""Call sites by the module's path."""

Placed = tuple[str, ArgumentTensor]
"""A module's path, and a tensor that this module receives."""


@dataclass(frozen=True)
class ModelParts:
    """The modules to trace, by path.

    Attributes:
        blocks: the modules that call attention.
        after_blocks: the modules that the model calls after the last block.
        around: the modules that the model calls and that contain blocks.
    """

    blocks: tuple[str, ...]
    after_blocks: tuple[str, ...]
    around: tuple[str, ...]

    @property
    def every(self) -> tuple[str, ...]:
        """Return the paths of all these modules."""
        return self.blocks + self.after_blocks + self.around


def find_parts(model: nn.Module, call: ModelCall) -> ModelParts:
    """Return the modules of a model to trace, in the order of their calls.

    Raises:
        Undescribed: the model calls attention outside of all modules, or attention changes almost nothing, so that a proof
            would show nothing.
    """
    seen = trace(model, call)
    plain = call.of(model)
    if not float((seen.out - plain).norm() / plain.norm()) > LEAST:
        raise Undescribed("attention hardly changes its output with random weights")
    if not all(each.within for each in seen.attentions):
        raise Undescribed("the model calls attention outside of its blocks")
    lists = {path for path, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    attending = {_block(each.within, lists) for each in seen.attentions}
    blocks = dict.fromkeys(path for within in seen.entered for path in within if path in attending)
    last = max((number for number, within in enumerate(seen.entered) if {*within} & attending), default=-1)
    around = {parent for path in attending for parent in _parents(path)}
    after_blocks = (next((path for path in within if path not in around), "") for within in seen.entered[last + 1 :])
    calling = dict.fromkeys(each.within[0] for each in seen.attentions if each.within[0] not in attending)
    return ModelParts(tuple(blocks), tuple(dict.fromkeys(filter(None, after_blocks))), tuple(calling))


def look_closely(model: nn.Module, call: ModelCall, parts: ModelParts) -> Sites:
    """Return the call site of each module, with all of the picture's tokens and the tensors that the text reaches.

    The function disturbs each row, column and frame of the latent once, then of each argument that has the picture's axes, and
    then the text.

    Raises:
        Undescribed: the inputs of a module differ between equal calls, or a forward fails.
    """
    base = first_runs(model, call, parts.every)
    if any(bool(each.any()) for each in changed_locations(base, first_runs(model, call, parts.every)).values()):
        raise Undescribed("its blocks get other inputs in each call, as if it drew random numbers")
    tokens = _tokens(model, call, parts, base, "")
    for of in call.pictured:
        with suppress(Undescribed):  # an argument that controls the model's branches, such as a mask, has no tokens
            more = changed_locations(base, first_runs(model, call.disturbed(0, slice(None), of), parts.every))
            if any(bool(each.any()) for location, each in more.items() if not tokens[location]):
                tokens |= {
                    location: location_tokens
                    for location, location_tokens in _tokens(model, call, parts, base, of).items()
                    if location_tokens and not tokens[location]
                }
    text = call.arguments.get("context")
    reached: frozenset[Placed] = frozenset()
    if isinstance(text, Tensor):
        changed_call = replace(call, arguments={**call.arguments, "context": text + noise_like(text)})
        changed = changed_locations(base, first_runs(model, changed_call, parts.every))
        reached = frozenset(location for location, each in changed.items() if bool(each.any()))
    return _sites(base, tokens, reached, call)


def _tokens(
    model: nn.Module, call: ModelCall, parts: ModelParts, base: Mapping[str, ModuleCall], of: str
) -> dict[Placed, Tokens | None]:
    """Find the tokens of the latent, or of the argument `of`, at each location."""
    changes = [
        [
            changed_locations(base, first_runs(model, call.disturbed(axis, slice(at, at + 1), of), parts.every))
            for at in range(size)
        ]
        for axis, size in enumerate(call.latent.shape[2:])
    ]
    tokens = {
        location: find_tokens([torch.stack([each[location] for each in axis]) for axis in changes])
        for location in changes[0][0]
    }
    return {location: each and replace(each, of=of) for location, each in tokens.items()}


def look_again(model: nn.Module, call: ModelCall, parts: ModelParts, known: Sites) -> Sites:
    """Return the call sites at another size, by disturbing the whole latent once, and each whole argument with known tokens."""
    base = first_runs(model, call, parts.every)
    sources = {site_tokens.of for site in known.values() for site_tokens in site.tokens.values()}
    changed = {
        of: changed_locations(base, first_runs(model, call.disturbed(0, slice(None), of), parts.every))
        for of in sources
    }
    tokens = {
        (path, location): moved(site_tokens, changed[site_tokens.of][path, location], call.latent.shape[2:])
        for path, site in known.items()
        for location, site_tokens in site.tokens.items()
    }
    return _sites(base, tokens, frozenset(), call)


def _sites(
    base: Mapping[str, ModuleCall], tokens: Mapping[Placed, Tokens | None], reached: frozenset[Placed], call: ModelCall
) -> Sites:
    return {
        path: CallSite(
            run,
            {location: site_tokens for (each, location), site_tokens in tokens.items() if each == path and site_tokens},
            frozenset(location for each, location in reached if each == path),
            call.latent.shape[0],
            call.latent.shape[2] if call.latent.ndim > 4 else 1,
            call.latents,
        )
        for path, run in base.items()
    }


def first_runs(model: nn.Module, call: ModelCall, paths: Sequence[str]) -> dict[str, ModuleCall]:
    """Return the first call of each module. Raises Undescribed if a module is not called or the forward fails."""
    runs: dict[str, ModuleCall] = {}
    for run in trace(model, call, paths).runs:
        runs.setdefault(run.path, run)
    if len(runs) < len(paths):
        raise Undescribed("the model calls other modules for another latent")
    return runs


def changed_locations(base: Mapping[str, ModuleCall], runs: Mapping[str, ModuleCall]) -> dict[Placed, Tensor]:
    """Return a bool tensor of the changed elements for each tensor that a module receives, by location.

    Raises:
        Undescribed: the shape of a tensor has changed.
    """
    changed = {}
    for path, run in base.items():
        for name, value in run.values.items():
            were, are = tensors_in(value), tensors_in(runs[path].values.get(name))
            if [each.shape for each in were] != [each.shape for each in are]:
                raise Undescribed(f"{name} of {path} has another shape for other values of the latent")
            for number, (was, now) in enumerate(zip(were, are, strict=True)):
                changed[path, (name, number)] = differs(was, now)
    return changed


def _block(parents: Sequence[str], lists: set[str]) -> str:
    """Return the outermost path that is a member of a list, or else the outermost module."""
    return next((path for path in parents if path.rpartition(".")[0] in lists), parents[0])


def _parents(path: str) -> Iterator[str]:
    while path := path.rpartition(".")[0]:
        yield path
