"""Combines the prompts of examples until ComfyUI's class makes the same inputs of a small model as of the user's graph."""

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
"""The model's arguments that a class makes of a prompt, by name; entries of dicts are `name.entry`.

A switch or a word has its value. All other arguments have None.
"""

OTHERWISE = frozenset({"c_concat", LATENT_SHAPES, "control", "crossattn_controlnet", TEXT_PREPARATION})
"""Conditioning that is no input here: parts of the latent, ControlNet data, and the preparation of the text."""


def graph_inputs_of(conditioning: Mapping[str, Any]) -> GraphInputs:
    """Return the inputs that a graph gives the model.

    Args:
        conditioning: ComfyUI's conditioning of a prompt, as plain values without the wrapper objects.
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
    """Return the call of a small model that has exactly these inputs.

    The function starts from the example with the most matching inputs, and adds entries of the other examples' prompts.

    Args:
        examples: all examples of a class.
        kind, configuration: as in `Example.case`.
        inputs: the inputs to reach.

    Raises:
        Refused: no combination of the examples has one of the inputs.
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
        raise Refused(f"this pack has no test call with {strange[0]} as in this graph")
    return replace(best.example, prompt=best.prompt).case(kind, configuration)


class _Fitting:
    """An example with a prompt under change, and the inputs that its class makes of the prompt."""

    def __init__(self, example: Example, kind: str, configuration: Mapping[str, Any]) -> None:
        self.example, self.prompt = example, dict(example.prompt)
        self._base = own_class(kind, example.model, configuration)
        self.inputs = self.of({})

    def take(self, entries: Mapping[str, Any]) -> None:
        """Add entries to the prompt."""
        self.prompt |= entries
        self.inputs = self.of({})

    def of(self, entries: Mapping[str, Any]) -> GraphInputs:
        """Return the inputs with these entries added."""
        return self._inputs_of({**self.prompt, **entries})

    def without(self, name: str) -> GraphInputs:
        """Return the inputs without one entry."""
        return self._inputs_of({entry: value for entry, value in self.prompt.items() if entry != name})

    def _inputs_of(self, prompt: Mapping[str, Any]) -> GraphInputs:
        """Return the inputs that the class makes of a prompt; empty if the class raises an error."""
        try:
            with torch.inference_mode():
                conditioning = conditioning_of(self._base, self.example.noise, prompt)
        except Exception:  # a class may raise anything for entries that do not fit together
            return {}
        return graph_inputs_of({name: each.cond for name, each in conditioning.items()})


def _entries(example: Example, examples: Sequence[Example]) -> Iterator[Mapping[str, Any]]:
    """Yield the entries of all prompts one by one, and entries that any class may accept: a pooled text and two masks."""
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
