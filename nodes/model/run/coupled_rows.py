"""Rows of a model call's batch that change one another, so that no worker can have some of them alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ....parallel_backend.conditioning import Conditioning, runs_alone
from ....parallel_backend.diffusion import FunctionRecipe
from ....parallel_backend.errors import Refused
from ....parallel_backend.plan import ParallelPlan
from ..remote_model import RemoteModel


def coupling_of(compared: Sequence[FunctionRecipe], prompts: Sequence[Conditioning], remote: RemoteModel) -> str:
    """Why the rows of a call change one another, as a sentence begins; empty where they do not.

    Args:
        compared: functions that compare the rows of an attention.
    """
    if compared:
        return f"{compared[0].node} compares both prompts in every attention"
    for call in shared_calls(prompts):
        if what := remote.family.couples_rows(remote.config, call):
            kind = remote.config.kind
            return f"the {what} of this batch differ, and {kind} models compute such rows from one another"
    return ""


def shared_calls(prompts: Sequence[Conditioning]) -> Iterator[Mapping[str, Tensor]]:
    """Yield the tensors of prompts that ComfyUI can run as one batch, joined along the batch."""
    groups: dict[object, list[Mapping[str, Tensor]]] = {}
    for number, prompt in enumerate(prompts):
        shapes = sorted((name, tensor.shape) for name, tensor in prompt.tensors.items())
        key = number if runs_alone(prompt.tensors, prompt.values) else (*shapes, *sorted(prompt.values.items()))
        groups.setdefault(key, []).append(prompt.tensors)
    for group in groups.values():
        yield {name: torch.cat([tensors[name] for tensors in group]) for name, first in group[0].items() if first.ndim}


def refuse_split(requested_plan: ParallelPlan, coupling: str) -> None:
    """Refuse a plan that computes rows separately which change one another.

    Args:
        requested_plan: the plan.
        coupling: the reason why the rows change one another, or an empty text.

    Raises:
        Refused: the plan has a degree of cfg or data above 1.
    """
    cfg, data = max(1, requested_plan.cfg), max(1, requested_plan.data)
    if coupling and (cfg > 1 or data > 1):
        raise Refused(
            f"{coupling}, so they cannot be computed apart, as cfg {cfg} and data {data} would: choose "
            "cfg 1 and data 1 in Parallel Plan, and ulysses, ring or pipefusion."
        )
