"""Names of models, cards and text encoders as users write them on a command line."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Sequence

from .predict.cards import FOR_ALL

NEAR = 0.5
"""The least similarity of names that are proposed, between 0 and 1."""


def named(kind: str, names: Sequence[str]) -> Callable[[str], str]:
    """Return a parser of one of the names, whatever its case, spaces and hyphens, and with the maker's words or without them.

    Args:
        kind: what the names are of, for errors.
        names: the known names.
    """
    known = {_plain(name): name for name in names}

    def parse(text: str) -> str:
        plain = _plain(text)
        if plain in known:
            return known[plain]
        near = [known[each] for each in difflib.get_close_matches(plain, known, n=4, cutoff=NEAR)]
        near += [name for each, name in known.items() if plain and plain in each and name not in near]
        proposed = f"did you mean {', '.join(near)}?" if near else f"use one of {', '.join(names)}"
        raise argparse.ArgumentTypeError(f"{text!r} is not a known {kind}: {proposed}")

    return parse


def _plain(name: str) -> str:
    """Return a name's letters and digits, without words for all cards, such as RTX. FLUX.1 is written FLUX."""
    tokens = re.findall(r"[a-z0-9]+", name.lower())
    plain = "".join(token.removeprefix("rtx") for token in tokens if not FOR_ALL.fullmatch(token))
    return re.sub(r"^flux1(?=[a-z])", "flux", plain)
