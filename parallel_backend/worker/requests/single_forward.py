"""Model calls of a denoise loop that stays in ComfyUI: one forward for each call."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch
from torch import Tensor

from ...diffusion import Value
from ...errors import Cancelled
from ...layout import cut, length
from ...mesh import Mesh
from ...models.comfyui.features.controlnet import distribute, shares
from ...models.comfyui.model import ComfyForward, ComfyModel
from ...models.comfyui.rows import rows_a_unit, rows_of, run_of
from ...models.family import ModelForward as ModelForward
from ...models.inputs import Inputs
from ...wire.to_host import DoneReply
from ...wire.to_worker import ForwardRequest
from ..memory.stage_part import stages
from .rank import WorkerRank


def single_forward(
    rank: WorkerRank, message: ForwardRequest, tensors: Mapping[str, Tensor], residuals: Mapping[str, Tensor]
) -> None:
    """Run one forward of the whole sequence for each call, and reply with the outputs.

    The data and cfg axes divide the calls, or the batch of a single call.

    Args:
        tensors: the inputs of all calls, by the number of the call and their names ("0.x").
        residuals: a ControlNet's output, on the CPU of rank 0. Its batch is the calls' batches, concatenated.
    """
    mesh = rank.mesh(message.plan)
    try:
        prepared = rank.prepare(message, mesh)
    except Cancelled:
        rank.cancelled(message, mesh.replies_to_host)
        return
    model, forward = prepared.model, prepared.forward
    started = rank.start()
    rank.status.enter("running the model once")
    groups = mesh.data.size * mesh.cfg.size
    pieces = _pieces(message, tensors)
    parts = cut(len(pieces), groups) if len(pieces) > 1 else [slice(0, 1)] * groups
    run = parts[mesh.data.rank * mesh.cfg.size + mesh.cfg.rank]
    every = message.values if message.calls > 1 else message.values * len(pieces)
    mine = list(zip(pieces[run], every[run], strict=True))
    added: dict[int, Tensor] = {}
    sizes = [piece["x"].shape[0] for piece in pieces]
    edges = [0, *itertools.accumulate(sizes)]
    if message.residuals is not None:
        rows = [slice(edges[part.start], edges[part.stop]) for part in parts]
        assert isinstance(model, ComfyModel) and isinstance(forward, ComfyForward), "no other family takes residuals"
        tokens = forward.picture_tokens(pieces[0]["x"].shape, pieces[0], every[0])
        split = shares(message.residuals, message.plan, stages(message.plan), tokens, rows)
        residual_parts = distribute(rank.neighbours.everyone, split, residuals, message.residuals, model.features)
        added = {block: tensor.to(rank.device) for block, tensor in residual_parts.items()}
    start, outputs = edges[run.start], []
    with prepared.access.model_call(len(mine)):
        for number, (piece, values) in enumerate(mine):
            first = edges[run.start + number] - start
            own = {block: _rows(tensor, first, piece["x"].shape[0]) for block, tensor in added.items()}
            outputs.append(_forward_piece(rank, number, piece, values, forward, own))
    mesh.finish_sending()
    output = None
    if mesh.is_last_stage:
        output = torch.cat([tensors["0.x"][:0], *(result for result in outputs if result is not None)])
        if len(pieces) > 1:
            output = _from_groups(output, [sum(sizes[part]) for part in parts], mesh)
    rank.report(message.request, message.model, started, forward.cache_bytes)
    if mesh.replies_to_host:
        assert output is not None
        rank.host.send(DoneReply(message.request), {"result": output})


def _rows(tensor: Tensor, first: int, count: int) -> Tensor:
    """Return some rows of a tensor. A tensor with one row applies to the whole batch and stays."""
    return tensor if tensor.shape[0] == 1 else tensor.narrow(0, first, count)


def _forward_piece(
    rank: WorkerRank,
    number: int,
    tensors: Mapping[str, Tensor],
    values: Mapping[str, Value],
    forward: ModelForward,
    residuals: Mapping[int, Tensor],
) -> Tensor | None:
    conditioning = {name: tensor for name, tensor in tensors.items() if name not in ("x", "timestep")}
    x, timestep = tensors["x"], tensors.get("timestep")
    inputs = Inputs(
        number, x.shape, x.dtype, rank.device, timestep, conditioning, residuals, values=values, processed=True
    )
    return forward(inputs, x, None)


def _pieces(message: ForwardRequest, tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return the tensors of each call. A single call with a large enough batch is divided into rows for each group.

    A call whose rows change one another is not divided, and frames of a video that are rows stay together.
    """
    calls, values = message.calls, message.values[0]
    calls_tensors = [
        {name.removeprefix(f"{call}."): tensor for name, tensor in tensors.items() if name.startswith(f"{call}.")}
        for call in range(calls)
    ]
    batch = calls_tensors[0]["x"].shape[0]
    unit = rows_a_unit(values)
    runs = message.plan.groups(batch // unit)
    if calls > 1 or not all(map(length, runs)) or message.couples_rows or batch % unit:
        return calls_tensors
    return [rows_of(calls_tensors[0], values, run_of(slice(unit * run.start, unit * run.stop))) for run in runs]


def _from_groups(local: Tensor, counts: list[int], mesh: Mesh) -> Tensor:
    """Return the rows of all groups of the data and cfg axes, joined in order. Each has `counts[group]` rows. A collective."""
    cfg = mesh.cfg.size
    inner = counts[mesh.data.rank * cfg : (mesh.data.rank + 1) * cfg]
    joined = mesh.cfg.all_gather(local.flatten(1)[None], inner)
    outer = [sum(counts[group * cfg : (group + 1) * cfg]) for group in range(mesh.data.size)]
    return mesh.data.all_gather(joined, outer).view(sum(counts), *local.shape[1:])
