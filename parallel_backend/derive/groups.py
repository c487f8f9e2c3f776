"""Block groups and output layers that fit the traces of each of their members."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from msgspec.structs import replace
from torch import nn

from .. import declaration as d
from ..declaration import AttentionsBySubmodule
from .call_sites import Sites
from .describing import Description
from .kinds import argument_kinds
from .rules import Undescribed


def grouped(model: nn.Module, blocks: Sequence[str]) -> Mapping[str, list[str]]:
    """Return the blocks by the list that contains them, in the order in which they run. Other blocks are their own groups.

    All members of the first list must run. Of a later list, only the first members may run, because the list may take turns
    with a list that the small model has shortened.

    Raises:
        Undescribed: the blocks run in another order, or other members of a list run.
    """
    groups: dict[str, list[str]] = {}
    for path in blocks:
        parent = path.rpartition(".")[0]
        group = parent if parent and isinstance(model.get_submodule(parent), nn.ModuleList) else path
        groups.setdefault(group, []).append(path)
    for number, (group, members) in enumerate(groups.items()):
        listed = members_of(model, group)
        if members != (listed[: len(members)] if number else listed):
            raise not_apart(group)
    return groups


def members_of(model: nn.Module, group: str) -> list[str]:
    """Return the paths of a list's members, or the path itself for a single block."""
    submodule = model.get_submodule(group)
    return (
        [f"{group}.{name}" for name, _ in submodule.named_children()]
        if isinstance(submodule, nn.ModuleList)
        else [group]
    )


def not_apart(group: str) -> Undescribed:
    """Return the reason for a list of which only some blocks are known."""
    return Undescribed(f"its blocks of {group} do not all get the picture's tokens separately, one after the other")


def fitting_groups(model: nn.Module, path: str, members: Sequence[Description]) -> Iterator[d.BlockGroup]:
    """Yield block groups that fit all blocks of a list, the likeliest first.

    Raises:
        Undescribed: no block group fits.
    """
    first = members[0]
    streams: dict[str, list[d.StreamKind]] = {}
    for member in members:
        for name in member.streams:
            kinds = [*member.kinds(name)]
            if streams.setdefault(name, kinds) != kinds:
                raise Undescribed(f"its blocks of {path} have different streams")
    if any(member.attends_in != first.attends_in for member in members):
        raise Undescribed(f"its blocks of {path} call attention in several ways")
    arguments: dict[str, list[d.Argument]] = {}
    for member in members:
        for name, value in member.sites[0].run.values.items():
            if name not in streams and value is not None:
                fitting = argument_kinds(member, name)
                arguments[name] = [kind for kind in arguments.get(name, fitting) if kind in fitting]
                if not arguments[name]:
                    raise Undescribed(f"the argument {name} of its blocks of {path} is of no known kind")
    returns = max((member.returns for member in members), key=lambda names: len({*names}))
    if any(len(member.returns) != len(returns) for member in members):
        raise Undescribed(f"its blocks of {path} return different numbers of values")
    attentions = _attentions(model, path, members)
    parts = max(member.parts for member in members)
    for placed in itertools.product(*streams.values()):
        for chosen in itertools.product(*arguments.values()):
            yield d.BlockGroup(
                path,
                streams=cut_by(dict(zip(streams, placed, strict=True)), parts),
                arguments=dict(zip(arguments, chosen, strict=True)),
                attentions=attentions,
                returns=returns,
                attention_module=first.attends_in,
            )


def cut_by(streams: Mapping[str, d.StreamKind], parts: int) -> Mapping[str, d.StreamKind]:
    """Return the streams with the picture's tokens cut between this many parts of a frame."""
    return {
        name: replace(kind, parts_per_frame=parts) if isinstance(kind, d.LatentTokens) else kind
        for name, kind in streams.items()
    }


def fitting_additions(model: nn.Module, path: str, seen: Sequence[Sites]) -> list[d.BlockGroup | None]:
    """Return block groups that fit a module that adds to the tokens between blocks.

    The last entry is None: the module gathers all tokens.
    """
    fitting: list[d.BlockGroup | None] = []
    with suppress(Undescribed):
        for group in fitting_groups(model, path, [Description([each[path] for each in seen])]):
            if not callable(group.attentions) and not any(
                isinstance(each, d.DistributedAttention) for each in group.attentions
            ):
                fitting.append(replace(group, attentions=(), attention_module=""))
    return [*fitting, None]


def fitting_heads(paths: Sequence[str], seen: Sequence[Sites]) -> Iterator[d.BlockGroup]:
    """Yield block groups for the modules that turn the last tokens into the output token by token, until one does not."""
    for path in paths:
        if not seen[0][path].tokens:
            continue
        try:
            head = Description([each[path] for each in seen])
            if len(head.streams) != 1 or len(head.returns) != 1 or head.attentions:
                return
            names = [
                name
                for name, value in head.sites[0].run.values.items()
                if value is not None and name not in head.streams
            ]
            yield d.BlockGroup(
                path,
                streams={name: next(head.kinds(name)) for name in head.streams},
                arguments={name: argument_kinds(head, name)[0] for name in names},
                returns=head.returns,
            )
        except Undescribed:
            return


def _attentions(
    model: nn.Module, path: str, members: Sequence[Description]
) -> tuple[d.Attention, ...] | AttentionsBySubmodule:
    """Return the attentions of the blocks. If the blocks differ, a submodule that only some blocks have tells them apart."""
    kinds = [*dict.fromkeys(tuple(each.attentions) for each in members)]
    if len(kinds) == 1:
        return kinds[0]
    inside = [{name for name, _ in model.get_submodule(each.path).named_modules()} for each in members]
    for first, second in itertools.permutations(kinds[:2]):
        own = [names for names, each in zip(inside, members, strict=True) if tuple(each.attentions) == first]
        other_modules = [names for names, each in zip(inside, members, strict=True) if tuple(each.attentions) != first]
        marks = set.intersection(*own) - set.union(*other_modules)
        if marks and len(kinds) == 2:
            return AttentionsBySubmodule(min(marks, key=lambda name: (len(name), name)), first, second)
    raise Undescribed(f"its blocks of {path} call attention in several ways, which no submodule distinguishes")
