"""What the backend cannot do at all, refused everywhere by name: nothing is silently ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...parallel_backend.errors import Refused
from .given import NUMBERS

TRANSFORMER_OPTIONS = {
    "patches": "attention and block patches ({names})",
    "patches_replace": "replaced attention or blocks ({names})",
    "optimized_attention_override": "an attention override",
    **{name: f"{what} that are no numbers" for name, what in NUMBERS.items()},
}
"""Options that reach into the model, and how the user knows them."""

PROMPT_KEYS = {
    "gligen": "GLIGEN",
    "hooks": "hooks on conditioning (LoRA hooks, hook keyframes)",
}
"""Entries of a CONDITIONING that reach into the model."""

WAY_OUT = "the weights live in the workers; remove that node, or use Load Diffusion Model"


def refuse_transformer_options(options: Mapping[str, Any]) -> None:
    """Raise Refused if anything in transformer_options would change the model from within."""
    for key, description in TRANSFORMER_OPTIONS.items():
        if (value := options.get(key)) and not (key in NUMBERS and _numbers(value)):
            names = ", ".join(map(str, value)) if isinstance(value, Mapping) else ""
            raise Refused(f"{description.format(names=names)} cannot be applied to a parallel MODEL: {WAY_OUT}.")


def _numbers(given: Any) -> bool:
    return isinstance(given, Mapping) and all(isinstance(value, (int, float)) for value in given.values())


def refuse_prompts(prompts: Mapping[str, list[Mapping[str, Any]]]) -> None:
    """Raise Refused if a prompt has something the workers cannot do."""
    for entries in prompts.values():
        for entry in entries:
            for key, description in PROMPT_KEYS.items():
                if entry.get(key) is not None:
                    raise Refused(f"{description} cannot be used with a parallel MODEL yet: {WAY_OUT}.")


def refuse_weights(what: str) -> Refused:
    """The refusal of something that needs the weights in this process."""
    return Refused(f"{what} cannot be done with a parallel MODEL: {WAY_OUT}.")
