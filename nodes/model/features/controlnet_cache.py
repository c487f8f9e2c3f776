"""A cache of ControlNets' outputs for a step that runs twice, so that no ControlNet runs twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..recorded_answers import RecordedAnswers, compared_leaves
from .controlnet_costs import ControlCosts


class CachedControl:
    """A replacement of a ControlNet during one step. The second pass gets the cached outputs of the first pass.

    ComfyUI asks a prompt's ControlNet for its output once per model call. A call that the first pass did not make runs the
    ControlNet itself.
    """

    def __init__(self, control: Any, costs: ControlCosts) -> None:
        self._control = control
        self._costs = costs
        self._outputs: RecordedAnswers[Any] = RecordedAnswers()
        self._again = False

    def get_control(self, *args: Any) -> Any:
        """Return the ControlNet's output for a call: lists of tensors. Every caller gets copies of the lists."""
        question = compared_leaves(args)
        if self._again:
            return self._outputs.take(question, lambda: self._get_control(args))
        output = self._get_control(args)
        self._outputs.add(question, output)
        return output and {kind: list(tensors) for kind, tensors in output.items()}

    def begin_again(self) -> None:
        """Start the second pass, which reads the cached outputs."""
        self._again = True

    def _get_control(self, args: Sequence[Any]) -> Any:
        with self._costs.made():
            return self._control.get_control(*args)


def with_cached_controls(
    conds: Sequence[Sequence[Mapping[str, Any]] | None], costs: ControlCosts
) -> tuple[list[list[dict[str, Any]] | None], list[CachedControl]]:
    """Replace the ControlNets in the prompts of all branches. Prompts that share a ControlNet share its replacement."""
    stand_ins: dict[int, CachedControl] = {}

    def changed(entry: Mapping[str, Any]) -> dict[str, Any]:
        control = entry.get("control")
        return {
            **entry,
            "control": None if control is None else stand_ins.setdefault(id(control), CachedControl(control, costs)),
        }

    branches = [None if branch is None else [changed(entry) for entry in branch] for branch in conds]
    return branches, list(stand_ins.values())
