"""Declarations that fit what was seen of a model, the likeliest first."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import Refused
from ..models.spread import declaration as d
from ..models.spread.picture import as_patch_size
from .calls import ModelCall, Sizes, Subject, noise_like
from .describing import Described, Place, Site, describe
from .looking import Run, look
from .tokens import Tokens, find_tokens, moved
from .values import tensors_in
from .writing import Chosen, constant

SIZES = (((2, 4, 6), 7), ((3, 6, 8), 10), ((4, 7, 3), 5))
"""Frames, and units of height and width, and tokens of text: no two lengths of these are alike."""

MOST = 16
"""So many declarations that fit are proved at most."""


@dataclass(frozen=True)
class Parts:
    """The modules of a model that are looked at: its blocks, and what turns tokens into the output, in the order of their calls."""

    blocks: tuple[str, ...]
    heads: tuple[str, ...]


@torch.inference_mode()
def candidates(subject: Subject) -> Iterator[d.Declaration]:
    """Declarations that fit what is seen of a model.

    Raises:
        Refused: none does, and why.
    """
    unit = _unit(subject)
    sizes = [_sizes(subject.sizes, unit, factors, text) for factors, text in SIZES]
    calls = [subject.call(each) for each in sizes]
    parts = _parts(subject.model, calls[0])
    first = _first_sites(subject.model, calls[0], parts)
    seen = [first, *(_more_sites(subject.model, call, parts, first) for call in calls[1:])]
    pictured = [path for path in parts.blocks if first[path].tokens]
    if not pictured:
        raise Refused("no block of the model with attention in it is given the picture's tokens one by one.")
    groups = _grouped(subject.model, pictured)
    described = {path: [describe([each[member] for each in seen]) for member in members] for path, members in groups.items()}
    every = [[*_groups(subject.model, path, groups[path], found)] for path, found in described.items()]
    heads = [*_heads(parts.heads, seen)]
    steps = {tokens.step for site in seen[0].values() for tokens in site.tokens.values()}
    if len(steps) > 1:
        raise Refused(f"the model's blocks have tokens of several sizes ({', '.join(map(str, sorted(steps)))}).")
    step = steps.pop()
    spread = next((each.heads for found in described.values() for each in found if each.heads), None)
    if spread is None:
        raise Refused("no attention of the model goes over the picture's tokens.")
    joint = any(isinstance(kind, d.Beside) for found in described.values() for each in found for kinds in each.streams.values() for kind in kinds)
    more = any(tokens.length > tokens.count for site in seen[0].values() for tokens in site.tokens.values())
    named: dict[str, Any] = {}
    if not _named_patch_size(subject.model, step):
        named["patch_size"] = constant(step)
    if not _takes_odd(subject, sizes[0], step):
        named["divides"] = True
    text = calls[0].arguments.get("context")
    width = text.shape[-1] if isinstance(text, Tensor) else 0
    for chosen in itertools.islice(itertools.product(*every), MOST):
        yield d.Declaration(
            groups=tuple(chosen),
            heads=tuple(heads),
            heads_of=constant(spread),
            text_width=constant(width),
            joint_text=joint or more,
            **named,
        )


def _unit(subject: Subject) -> int:
    """A size that divides into tokens: by what the model calls its patch size, if it does."""
    named = getattr(subject.model, "patch_size", None)
    sizes = [named] if isinstance(named, int) else named if isinstance(named, (list, tuple)) else []
    return max([2, *(size for size in sizes if isinstance(size, int))])


def _sizes(given: Sizes, unit: int, factors: Sequence[int], text: int) -> Sizes:
    """Even ones, of as many dimensions as are given; a single frame stays one."""
    *frames, _, _ = given.picture
    return Sizes((*(factors[0] if each > 1 else 1 for each in frames), unit * factors[1], unit * factors[2]), text)


def _parts(model: nn.Module, call: ModelCall) -> Parts:
    seen = look(model, call)
    outside = [each for each in seen.attentions if not each.within]
    if outside:
        raise Refused("the model calls attention outside of its blocks, which cannot be spread.")
    lists = {path for path, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    attending = {_block(each.within, lists) for each in seen.attentions}
    blocks = tuple(dict.fromkeys(path for within in seen.entered for path in within if path in attending))
    last = max(number for number, within in enumerate(seen.entered) if {*within} & attending) if attending else -1
    around = {path.rpartition(".")[0] for path in attending} | {""}
    around |= {parent for path in attending for parent in _parents(path)}
    behind = [next((path for path in within if path not in around), "") for within in seen.entered[last + 1 :]]
    return Parts(blocks, tuple(dict.fromkeys(filter(None, behind))))


def _block(within: Sequence[str], lists: set[str]) -> str:
    """The outermost member of a list, or, in none, the outermost module."""
    return next((path for path in within if path.rpartition(".")[0] in lists), within[0])


def _parents(path: str) -> Iterator[str]:
    while path := path.rpartition(".")[0]:
        yield path


def _first_sites(model: nn.Module, call: ModelCall, parts: Parts) -> dict[str, Site]:
    """What each part is given, and where the picture's tokens are in it: each row, column and frame is disturbed once."""
    base = _first_runs(model, call, parts)
    changes = [
        [_changes(base, _first_runs(model, call.disturbed(axis, slice(at, at + 1)), parts)) for at in range(size)]
        for axis, size in enumerate(call.latent.shape[2:])
    ]
    tokens = {place: find_tokens([torch.stack([each[place] for each in axis]) for axis in changes]) for place in changes[0][0]}
    return _as_sites(base, {place: found for place, found in tokens.items() if found}, _reached(model, call, parts, base), call)


def _more_sites(model: nn.Module, call: ModelCall, parts: Parts, first: Mapping[str, Site]) -> dict[str, Site]:
    """The same at another size, where the whole latent is disturbed once."""
    base = _first_runs(model, call, parts)
    changed = _changes(base, _first_runs(model, call.disturbed(0, slice(None)), parts))
    known = {(path, place): found for path, site in first.items() for place, found in site.tokens.items()}
    tokens = {place: moved(found, changed[place], call.latent.shape[2:]) for place, found in known.items()}
    return _as_sites(base, {place: found for place, found in tokens.items() if found}, frozenset(), call)


def _as_sites(
    base: Mapping[str, Run],
    tokens: Mapping[tuple[str, Place], Tokens],
    text: frozenset[tuple[str, Place]],
    call: ModelCall,
) -> dict[str, Site]:
    return {
        path: Site(
            run,
            {place: found for (each, place), found in tokens.items() if each == path},
            frozenset(place for each, place in text if each == path),
            call.latent.shape[0],
        )
        for path, run in base.items()
    }


def _reached(model: nn.Module, call: ModelCall, parts: Parts, base: Mapping[str, Run]) -> frozenset[tuple[str, Place]]:
    """What changes with the text."""
    text = call.arguments.get("context")
    if not isinstance(text, Tensor):
        return frozenset()
    other = replace(call, arguments={**call.arguments, "context": text + noise_like(text)})
    changed = _changes(base, _first_runs(model, other, parts))
    return frozenset(place for place, each in changed.items() if bool(each.any()))


def _first_runs(model: nn.Module, call: ModelCall, parts: Parts) -> dict[str, Run]:
    runs: dict[str, Run] = {}
    for run in look(model, call, (*parts.blocks, *parts.heads)).runs:
        runs.setdefault(run.path, run)
    if len(runs) < len(parts.blocks) + len(parts.heads):
        raise Refused("the model calls other blocks for another latent, so what it does cannot be told from outside.")
    return runs


def _changes(base: Mapping[str, Run], runs: Mapping[str, Run]) -> dict[tuple[str, Place], Tensor]:
    """Where what a part is given is another."""
    changed = {}
    for path, run in base.items():
        for name, value in run.values.items():
            for number, (was, now) in enumerate(zip(tensors_in(value), tensors_in(runs[path].values[name]), strict=True)):
                if was.shape != now.shape:
                    raise Refused(f"what {path} is given as {name} has another shape for other values of the latent.")
                changed[path, (name, number)] = was != now
    return changed


def _grouped(model: nn.Module, blocks: Sequence[str]) -> dict[str, list[str]]:
    """The blocks of each list, or by itself, in the order in which they run.

    Raises:
        Refused: they take turns.
    """
    groups: dict[str, list[str]] = {}
    order: list[str] = []
    for path in blocks:
        parent = path.rpartition(".")[0]
        group = parent if isinstance(model.get_submodule(parent), nn.ModuleList) and parent else path
        groups.setdefault(group, []).append(path)
        if order[-1:] != [group]:
            order.append(group)
    if len(order) > len(groups):
        raise Refused(f"the model's blocks of {' and '.join(groups)} take turns, which cannot be told from outside yet.")
    for group, members in groups.items():
        if members != [group] and members != sorted(members, key=lambda path: int(path.rpartition(".")[2])):
            raise Refused(f"the model's blocks of {group} do not run in their order.")
        if members != [group] and len(members) < len(model.get_submodule(group)):  # type: ignore[arg-type]
            raise Refused(f"the model does not call every block of {group}.")
    return groups


def _groups(model: nn.Module, path: str, members: Sequence[str], found: Sequence[Described]) -> Iterator[d.Group]:
    """What fits all blocks of a list."""
    first = found[0]
    if any((each.streams, each.attends_in) != (first.streams, first.attends_in) for each in found):
        raise Refused(f"the model's blocks of {path} are given different streams.")
    arguments: dict[str, list[d.Argument]] = {}
    for each in found:
        for name, kinds in each.arguments.items():
            before = arguments.get(name, [*kinds])
            arguments[name] = [kind for kind in before if kind in kinds]
            if not arguments[name]:
                raise Refused(f"what {path} is given as {name} goes with nothing that there is a word for.")
    attentions = _attentions(model, path, members, found)
    returns = max((each.returns for each in found), key=lambda names: len({*names}))
    if any(len(each.returns) != len(returns) for each in found):
        raise Refused(f"the model's blocks of {path} return different numbers of values.")
    names, kinds = [*first.streams, *arguments], [*first.streams.values(), *arguments.values()]
    for chosen in itertools.product(*kinds):
        by_name = dict(zip(names, chosen, strict=True))
        yield d.Group(
            path,
            streams={name: by_name[name] for name in first.streams},
            arguments={name: by_name[name] for name in arguments},
            attentions=attentions,
            returns=returns,
            attends_in=first.attends_in,
        )


def _attentions(model: nn.Module, path: str, members: Sequence[str], found: Sequence[Described]) -> Any:
    """The blocks' own; where these differ, told apart by a submodule that only some have."""
    kinds = [*dict.fromkeys(each.attentions for each in found)]
    if len(kinds) == 1:
        return kinds[0]
    having = [{name for name, _ in model.get_submodule(member).named_modules()} for member in members]
    if len(kinds) == 2:
        some = [names for names, each in zip(having, found, strict=True) if each.attentions == kinds[0]]
        others = [names for names, each in zip(having, found, strict=True) if each.attentions == kinds[1]]
        for one, two, (yes, no) in ((some, others, kinds), (others, some, kinds[::-1])):
            if only := set.intersection(*one) - set.union(*two):
                mark = min(only, key=lambda name: (len(name), name))
                return Chosen(mark, yes, no)
    raise Refused(f"the model's blocks of {path} call attention in ways that their modules do not tell apart.")


def _heads(paths: Sequence[str], seen: Sequence[Mapping[str, Site]]) -> Iterator[d.Group]:
    """What turns the last tokens into the output token by token."""
    for path in paths:
        if not seen[0][path].tokens:
            continue
        try:
            found = describe([each[path] for each in seen])
        except Refused:
            return
        if len(found.streams) != 1 or len(found.returns) != 1 or found.attentions:
            return
        yield d.Group(
            path,
            streams={name: kinds[0] for name, kinds in found.streams.items()},
            arguments={name: kinds[0] for name, kinds in found.arguments.items()},
            returns=found.returns,
        )


def _named_patch_size(model: nn.Module, step: tuple[int, ...]) -> bool:
    """Whether the model says it by the name that declarations go by."""
    named = getattr(model, "patch_size", None)
    try:
        return named is not None and as_patch_size(named, len(step) + 2) == step
    except TypeError:
        return False


def _takes_odd(subject: Subject, sizes: Sizes, step: tuple[int, ...]) -> bool:
    """Whether the model pads a latent that does not divide into tokens."""
    if all(each == 1 for each in step):
        return True
    odd = Sizes(tuple(size + (each > 1) for size, each in zip(sizes.picture, step, strict=True)), sizes.text)
    call = subject.call(odd)
    try:
        out = call.of(subject.model)
    except (RuntimeError, ValueError, AssertionError):
        return False
    return out.shape[2:] == call.latent.shape[2:]
