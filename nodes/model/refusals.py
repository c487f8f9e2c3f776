"""What the backend cannot do at all, refused everywhere by name: nothing is silently ignored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...parallel_backend.conditioning import SIDES, SIGMAS
from ...parallel_backend.errors import Refused
from ...parallel_backend.models.comfyui.content.model_code import options_read_by
from .conditioning import NUMBERS, is_plain, is_plain_dict_option
from .own_code import name_of

TRANSFORMER_OPTIONS = {
    "patches": "attention and block patches ({names})",
    "patches_replace": "replaced attention or blocks ({names})",
    "optimized_attention_override": "an attention override ({names})",
    **{name: f"{what} that are no numbers" for name, what in NUMBERS.items()},
}
"""Options that reach into the model, and how the user knows them."""

PROMPT_KEYS = {
    "gligen": "GLIGEN",
    "hooks": "hooks on conditioning (LoRA hooks, hook keyframes)",
}
"""Entries of a CONDITIONING that reach into the model."""


@dataclass(frozen=True)
class Guarded:
    """The names that messages use for a MODEL or VAE whose weights are in the workers.

    Attributes:
        name: the proxy's type in the graph.
        inside: the attribute that holds the proxy.
        loader: ComfyUI's own node, which refuses nothing.
    """

    name: str
    inside: str
    loader: str

    @property
    def way_out(self) -> str:
        """The last part of each message: what the user can do."""
        return f"the weights live in the workers; remove that node, or use {self.loader}"

    def refusal(self, what: str) -> Refused:
        """The refusal of something that needs the weights in this process."""
        return Refused(f"{what} cannot be done with a parallel {self.name}: {self.way_out}.")

    def refuse_replaced(self, name: str, by: str) -> Refused:
        """The refusal of a run while another pack's code stands in a place of ComfyUI's.

        Args:
            name: the place, dotted.
            by: the file of that code; may be empty.
        """
        file = f" ({by})" if by else ""
        return Refused(
            f"{name} is replaced by other code{file}, which cannot take effect on a parallel {self.name}, because the workers "
            f"run ComfyUI without other packs: remove the pack that replaces it, or use {self.loader}."
        )


MODEL = Guarded("MODEL", "diffusion_model", "Load Diffusion Model")

VAE = Guarded("VAE", "first_stage_model", "Load VAE")

WAY_OUT = MODEL.way_out
"""The last part of each message about a MODEL: what the user can do."""

HANDLED = frozenset({*TRANSFORMER_OPTIONS, *SIGMAS, SIDES, "wrappers"})
"""Options that models read and that are carried, refused or run elsewhere."""


def refuse_transformer_options(options: Mapping[str, Any], model: nn.Module) -> None:
    """Raise Refused if anything in transformer_options would change the model from within.

    That is known of some options; of any other, if the model's own code names it and it is nothing that is sent.
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
    """Raise Refused if a prompt has something the workers cannot do."""
    for entries in prompts.values():
        for entry in entries:
            for key, description in PROMPT_KEYS.items():
                if entry.get(key) is not None:
                    raise Refused(f"{description} cannot be used with a parallel MODEL yet: {WAY_OUT}.")


def refuse_weights(what: str) -> Refused:
    """The refusal of something that needs a MODEL's weights in this process."""
    return MODEL.refusal(what)
