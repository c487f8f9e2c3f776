"""A small model's call with a graph's inputs: kept conditioning, put together until ComfyUI makes the same of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from ....conditioning import NAMES, TEXT_PREPARATION
from ....errors import Refused
from ..own_call import LATENT_SHAPES, MASK, conditioning_of, own_class
from ..reduced import draw
from .case import HIDING, TEXT, Case, Example

GraphInputs: TypeAlias = Mapping[str, bool | str | None]
"""What a class has made of a prompt: the model's arguments by name, entries of dicts as `name.entry`, with what chooses code.

A switch or a word is the value of its name; all others have None.
"""

OTHERWISE = frozenset({"c_concat", LATENT_SHAPES, "control", "crossattn_controlnet", TEXT_PREPARATION})
"""What goes into the latent, what is a ControlNet's, and how workers prepare the text, which a small call has prepared."""


def graph_inputs_of(conditioning: Mapping[str, Any]) -> GraphInputs:
    """Return what a graph gives.

    Args:
        conditioning: what ComfyUI's class has made of a prompt, without the objects around it.
    """
    inputs: dict[str, bool | str | None] = {}
    for name, value in conditioning.items():
        if name in OTHERWISE or value is None:
            continue
        own = NAMES.get(name, name)
        inputs[own] = value if isinstance(value, bool | str) else None
        if isinstance(value, dict):
            inputs |= {f"{own}.{entry}": None for entry, item in value.items() if item is not None}
    return inputs


def case_with_inputs(
    examples: Sequence[Example], kind: str, configuration: Mapping[str, Any], inputs: GraphInputs
) -> Case:
    """Return the call of a small model that has these inputs and no others.

    It is that of the example with the most of them, with entries of the others' prompts for the rest.

    Args:
        examples: all that are kept of a class.
        kind, configuration: as in `Example.case`.

    Raises:
        Refused: nothing that is kept makes one of them.
    """
    fits = [_Fitting(candidate, kind, configuration) for candidate in examples]
    best = max(
        fits,
        key=lambda candidate: (
            len(candidate.inputs.items() & inputs.items()),
            -len(candidate.inputs.keys() - inputs.keys()),
        ),
    )
    for name in inputs.keys() - best.inputs.keys():
        best.take(next((entry for entry in _entries(best.example, examples) if name in best.of(entry)), {}))
    for name in [*best.prompt]:
        if inputs.keys() <= best.without(name).keys() < best.inputs.keys():
            del best.prompt[name]
            best.take({})
    for name, chosen in inputs.items():
        if chosen is not None and best.inputs.get(name) != chosen:
            switches = ({entry: chosen} for entry, value in best.prompt.items() if type(value) is type(chosen))
            best.take(next((entry for entry in switches if best.of(entry).get(name) == chosen), {}))
    if strange := sorted(name for name, _ in best.inputs.items() ^ inputs.items()):
        raise Refused(f"this pack keeps no small call with {strange[0]} as this graph has it")
    return replace(best.example, prompt=best.prompt).case(kind, configuration)


class _Fitting:
    """An example whose prompt is being changed, and what its class makes of it."""

    def __init__(self, example: Example, kind: str, configuration: Mapping[str, Any]) -> None:
        self.example, self.prompt = example, dict(example.prompt)
        self._base = own_class(kind, example.model, configuration)
        self.inputs = self.of({})

    def take(self, entries: Mapping[str, Any]) -> None:
        """Add entries to the prompt."""
        self.prompt |= entries
        self.inputs = self.of({})

    def of(self, entries: Mapping[str, Any]) -> GraphInputs:
        """Return what the class makes with more entries."""
        return self._inputs_of({**self.prompt, **entries})

    def without(self, name: str) -> GraphInputs:
        """Return what the class makes without an entry."""
        return self._inputs_of({entry: value for entry, value in self.prompt.items() if entry != name})

    def _inputs_of(self, prompt: Mapping[str, Any]) -> GraphInputs:
        """Return what the class makes of a prompt; nothing if it fails."""
        try:
            with torch.inference_mode():
                conditioning = conditioning_of(self._base, self.example.noise, prompt)
        except Exception:  # whatever a class raises of entries that do not go together
            return {}
        return graph_inputs_of({name: each.cond for name, each in conditioning.items()})


def _entries(example: Example, examples: Sequence[Example]) -> Iterator[Mapping[str, Any]]:
    """Yield the entries of all prompts one by one, and what any class may be given: a pooled text, masks of text and latent."""
    for latent in examples:
        for name, value in latent.prompt.items():
            yield {name: value}
    yield {"pooled_output": draw(1, TEXT, seed=3)}
    yield {"attention_mask": HIDING}
    yield {
        MASK: [
            torch.linspace(0.1, 0.9, latent.shape[2])
            .view(1, 1, -1, *[1] * (latent.ndim - 3))
            .expand(1, 1, *latent.shape[2:])
            for latent in example.noise
        ]
    }
