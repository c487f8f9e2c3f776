"""Text encoding on one rank: the rank's blocks of a text encoder, and the code around the blocks, which every rank runs."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from ...comm.communicator import Communicator
from ...diffusion import ModelSpec
from ...errors import Cancelled
from ...models.comfyui.comfy_family import whole_piece
from ...models.comfyui.divided_blocks import DividedBlocks
from ...models.comfyui.features.lora import merging_dtype, rounded
from ...models.comfyui.features.recipe import packed, unpacked
from ...models.comfyui.text_encoder import TextEncoder, read_text_encoder
from ...weights.adapters.lora import AdapterSet
from ...weights.adapters.merging import Keep, Merging, Patching
from ...weights.files.checkpoint import read_header
from ...weights.loading.loader import WeightSource, load_weights
from ...weights.loading.reading import Neighbours, Watch
from ...weights.stores.replicated import ReplicatedStore
from ...weights.stores.store import WeightStore
from ...wire.to_host import DoneReply
from ...wire.to_worker import TOKENS, EncodeTextRequest
from .rank import WorkerRank


class TextEncoderPart:
    """One rank's blocks of a text encoder, and everything outside the blocks; a Part for the ModelHolder.

    Args:
        device: the rank's device.
        axis: all ranks, on their devices.
        neighbours: the ranks that load the weights together.
        watch: observes and cancels the loading.
        keep: decides which original weights stay in memory when adapters change them.
    """

    def __init__(
        self,
        spec: ModelSpec,
        device: torch.device,
        axis: Communicator,
        neighbours: Neighbours,
        watch: Watch,
        keep: Keep,
    ) -> None:
        encoder = text_encoder_of(spec, device)
        self._encoder = encoder
        self._device = device
        self._neighbours = neighbours
        self._watch = watch
        self.module: nn.Module = encoder.module
        self.blocks = DividedBlocks(self.module, axis, neighbours.everyone, lambda: None)
        self.store: WeightStore = ReplicatedStore(self.module)
        names = {name: whole_piece(name, parameter) for name, parameter in self.module.named_parameters()}
        merging = Merging(torch.float32, (), functools.partial(merging_dtype, spec.dynamic), rounded)
        self._patching = Patching(self.module, self.store, device, names, self._load, keep, merging)

    def fill(self) -> None:
        """Give the weights memory, load them by byte ranges of the files, and set the values that no file holds."""
        self.store.materialise(self._device)
        self._load([name for name, _ in self.module.named_parameters()])

    def adapt(self, adapters: AdapterSet, watch: Watch) -> None:
        """Set the weights to the files' weights with `adapters` applied. A collective."""
        self._watch = replace(watch, is_cancelled=lambda: False)  # half-restored weights would be useless
        self._patching.merge(adapters)

    def _load(self, names: Collection[str]) -> None:
        encoder = self._encoder
        source = WeightSource(encoder.checkpoint, encoder.keys, torch.float32)
        filed = [name for name in names if name in encoder.keys]
        load_weights(self.module, self.store, source, self._neighbours, self._watch, filed)
        for name in encoder.constants.keys() & set(names):
            self.store.run(name).values.copy_(encoder.constants[name]().reshape(-1))


def text_encoder_of(spec: ModelSpec, device: torch.device) -> TextEncoder:
    """Return the text encoder of a spec on the meta device. Raise Refused as `read_text_encoder` does."""
    assert spec.text is not None
    paths = [spec.path, *(further.path for further in spec.text.further)]
    return read_text_encoder([read_header(path) for path in paths], spec.text.kind, device, spec.dynamic)


def encode_text(rank: WorkerRank, message: EncodeTextRequest, tensors: Mapping[str, Tensor]) -> None:
    """Encode a prompt, or write text, with ComfyUI's own code on all ranks. The first rank replies. A collective."""
    first = rank.group.rank == 0
    watch = rank.watch(message.request, first)
    axis = rank.everyone("text", message.plan.transport)  # before weights take the memory that connections need

    def on_block() -> None:
        rank.status.on_progress()
        if rank.group.broadcast_flag(rank.host.cancelled(message.request)):
            raise Cancelled

    try:
        part = rank.holder.hold(
            message.model,
            None,
            lambda: TextEncoderPart(
                rank.files.find(message.model),
                rank.device,
                axis,
                rank.neighbours,
                watch,
                Keep(rank.memory.has_host_room, rank.group.all_true),
            ),
            rank.allowance(message.plan, message.working_bytes),
        )
        started = rank.start()
        rank.status.enter("encoding the prompt")
        part.blocks.on_block = on_block
        part.adapt(rank.adapters.named(message.adapters), watch)
        # tensors of inference mode do not count changes
        with torch.inference_mode(False), torch.no_grad(), part.blocks.decisions:
            result = _encoded(part.module, rank.device, message, tensors)
    except Cancelled:
        rank.cancelled(message, first)
        return
    rank.report(message.request, message.model, started)
    if first:
        answer: dict[str, Tensor] = {}
        value = packed(result, answer)
        on_host = {name: tensor.cpu() for name, tensor in answer.items()}
        rank.host.send(DoneReply(message.request, value=value), on_host)


def _encoded(encoder: Any, device: torch.device, message: EncodeTextRequest, tensors: Mapping[str, Tensor]) -> object:
    """Return the conditioning, the pooled output and further entries of ComfyUI's encoder, or the tokens that it writes."""
    tokens = unpacked(msgspec.msgpack.decode(tensors[TOKENS].numpy().tobytes()), tensors)
    encoder.reset_clip_options()
    for options in unpacked(message.options, tensors):
        encoder.set_clip_options(options)
    encoder.set_clip_options({"execution_device": device})
    return (
        encoder.encode_token_weights(tokens) if message.writing is None else encoder.generate(tokens, **message.writing)
    )
