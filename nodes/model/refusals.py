"""Refusals of everything that the backend cannot do. Each refusal names the feature, and no feature is silently ignored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...parallel_backend.conditioning import BRANCHES, SIGMAS
from ...parallel_backend.errors import Refused
from ...parallel_backend.models.comfyui.content.model_code import options_read_by
from .conditioning import NUMBERS, is_plain, is_plain_dict_option
from .own_code import name_of

TRANSFORMER_OPTIONS = {
    "patches": "attention and block patches ({names})",
    "patches_replace": "replaced attention or blocks ({names})",
    "optimized_attention_override": "an attention override ({names})",
    **{name: f"{what} that are not numbers" for name, what in NUMBERS.items()},
}
"""Options that change the inside of the model, with their descriptions for the user."""

PROMPT_KEYS = {
    "gligen": "GLIGEN",
    "hooks": "hooks on conditioning (LoRA hooks, hook keyframes)",
}
"""Entries of a CONDITIONING that change the inside of the model, with their descriptions for the user."""


@dataclass(frozen=True)
class Guarded:
    """The names that messages use for a MODEL or VAE whose weights the workers hold.

    Attributes:
        name: the proxy's type in the graph.
        inside: the attribute that holds the proxy.
        loader: ComfyUI's own loader node, whose MODEL or VAE refuses nothing.
    """

    name: str
    inside: str
    loader: str

    @property
    def way_out(self) -> str:
        """Return the last part of each message, which says what the user can do."""
        return f"the weights live in the workers; remove that node, or use {self.loader}"

    def refusal(self, what: str) -> Refused:
        """Return the refusal of an operation that needs the weights in this process."""
        return Refused(f"{what} cannot be done with a parallel {self.name}: {self.way_out}.")

    def refuse_replaced(self, name: str, by: str) -> Refused:
        """Return the refusal of a run because another pack has replaced a function or class of ComfyUI's.

        Args:
            name: the dotted name of the function or class.
            by: the file of the other pack's code; may be empty.
        """
        file = f" ({by})" if by else ""
        return Refused(
            f"{name} is replaced by other code{file}, which cannot take effect on a parallel {self.name}, because the workers "
            f"run ComfyUI without other packs: remove the pack that replaces it, or use {self.loader}."
        )


MODEL = Guarded("MODEL", "diffusion_model", "Load Diffusion Model")

VAE = Guarded("VAE", "first_stage_model", "Load VAE")

CLIP = Guarded("CLIP", "cond_stage_model", "Load CLIP")

WAY_OUT = MODEL.way_out
"""The last part of each message about a MODEL, which says what the user can do."""

HANDLED = frozenset({*TRANSFORMER_OPTIONS, *SIGMAS, BRANCHES, "wrappers"})
"""Options that `refuse_transformer_options` does not refuse as unknown: other code sends, runs or refuses them."""


def refuse_transformer_options(options: Mapping[str, Any], model: nn.Module) -> None:
    """Raise Refused if a transformer option would change the inside of the model.

    The options of `TRANSFORMER_OPTIONS` always would. Any other option would if the model's own code reads it and the option is
    not sent.
    """
    for key, description in TRANSFORMER_OPTIONS.items():
        if (value := options.get(key)) and not (key in NUMBERS and _numbers(value)):
            names = ", ".join(map(str, value)) if isinstance(value, Mapping) else name_of(value)
            raise Refused(f"{description.format(names=names)} cannot be applied to a parallel MODEL: {WAY_OUT}.")
    strange = {
        name: value
        for name, value in options.items()
        if name not in HANDLED and not is_plain(value) and not is_plain_dict_option(name, value)
    }
    for name in sorted(strange.keys() & options_read_by(model)) if strange else ():
        kind = type(strange[name]).__name__
        raise Refused(f"the option {name} (a {kind}) cannot be applied to a parallel MODEL: {WAY_OUT}.")


def _numbers(option: Any) -> bool:
    return isinstance(option, Mapping) and all(isinstance(value, (int, float)) for value in option.values())


def refuse_prompts(prompts: Mapping[str, list[Mapping[str, Any]]]) -> None:
    """Raise Refused if a prompt has an entry that the workers cannot use."""
    for entries in prompts.values():
        for entry in entries:
            for key, description in PROMPT_KEYS.items():
                if entry.get(key) is not None:
                    raise Refused(f"{description} cannot be used with a parallel MODEL yet: {WAY_OUT}.")


def refuse_weights(what: str) -> Refused:
    """Return the refusal of an operation that needs a MODEL's weights in this process."""
    return MODEL.refusal(what)
