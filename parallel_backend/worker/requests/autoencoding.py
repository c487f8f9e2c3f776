"""Decoding and encoding on one rank: a VAE's weights, and the rows of pictures that the ranks divide."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...comm.communicator import Communicator
from ...diffusion import ModelSpec
from ...errors import Cancelled
from ...vae import AUTOENCODERS, Autoencoder, recognise
from ...vae.autoencoder import Give, OnProgress
from ...vae.rows import Slab, slab_of
from ...weights.files.checkpoint import read_header
from ...weights.loading.loader import WeightSource, load_weights
from ...weights.loading.reading import Neighbours, Watch
from ...weights.stores.replicated import ReplicatedStore
from ...weights.stores.store import WeightStore
from ...wire.to_host import DecodedPixelsReply, DoneReply
from ...wire.to_worker import DecodeRequest, EncodeRequest
from ..memory.stage_part import STORAGE_DTYPES
from .rank import WorkerRank

LAYERS_BETWEEN_WORDS = 64
"""The number of an autoencoder's layers between two checks of all ranks for a cancelled request."""


class AutoencoderPart:
    """A whole autoencoder, built on the meta device; a Part for the ModelHolder. Every rank holds all weights.

    Args:
        sharers: a communicator of the ranks of this machine.
        neighbours: the ranks that load the weights together.
        watch: observes and cancels the loading.
    """

    def __init__(
        self, spec: ModelSpec, device: torch.device, sharers: Communicator, neighbours: Neighbours, watch: Watch
    ) -> None:
        name, checkpoint, config = recognise(read_header(spec.path))
        family = AUTOENCODERS[name]
        self._source = WeightSource(checkpoint, family.keys(config, checkpoint), STORAGE_DTYPES[spec.dtype])
        self._device = device
        self._neighbours = neighbours
        self._watch = watch
        self.autoencoder: Autoencoder = family.build(config)
        self.module = self.autoencoder.module.to(self._source.dtype)
        self.store: WeightStore = ReplicatedStore(self.module, sharers)

    def fill(self) -> None:
        """Give the weights memory and load them by byte ranges of the file."""
        self.store.materialise(self._device)
        load_weights(self.module, self.store, self._source, self._neighbours, self._watch)


class Autoencoding:
    """One rank's share of decoding and encoding. The first rank sends the replies."""

    def __init__(self, rank: WorkerRank) -> None:
        self._rank = rank

    def execute(self, message: DecodeRequest | EncodeRequest, tensors: Mapping[str, Tensor]) -> None:
        """Decode or encode a batch. The tensors are on the CPU; each rank moves its rows to its device."""
        rank, first = self._rank, self._rank.group.rank == 0
        watch = rank.watch(message.request, first)
        axis = rank.everyone("rows", message.plan.transport)  # before weights take the memory that connections need
        answer = {}
        try:
            part = rank.holder.hold(
                message.model,
                None,
                lambda: self._part(message, watch),
                rank.allowance(message.plan, message.working_bytes),
            )
            started = rank.start()
            if isinstance(message, DecodeRequest):
                self._decode(message, tensors["latent"], part.autoencoder, axis)
            else:
                answer = {"latent": self._encode(message, tensors["pixels"], part.autoencoder, axis)}
        except Cancelled:
            rank.cancelled(message, first)
            return
        rank.report(message.request, message.model, started)
        if first:
            rank.host.send(DoneReply(message.request), answer)

    def _part(self, message: DecodeRequest | EncodeRequest, watch: Watch) -> AutoencoderPart:
        """Return this rank's part of the autoencoder. A collective."""
        rank = self._rank
        model, sharers = rank.files.find(message.model), rank.group.split_by_value(rank.neighbours.machines, rank.meter)
        return AutoencoderPart(model, rank.device, sharers, rank.linked(message.plan.transport), watch)

    def _decode(self, message: DecodeRequest, latent: Tensor, autoencoder: Autoencoder, axis: Communicator) -> None:
        """Decode a latent `[batch, channels, (frames,) height, width]` and send the pixels piece by piece. A collective.

        Raises:
            Cancelled: the request was cancelled.
        """
        self._rank.status.enter("decoding")
        on_progress = self._beat(message.request)
        for item in range(latent.shape[0]):
            slab = slab_of(latent[item : item + 1].to(self._rank.device), axis)
            autoencoder.decode(slab, message.schedule, on_progress, self._sender(message, item))

    def _sender(self, message: DecodeRequest, item: int) -> Give:
        """Return the function that sends an item's pieces in order. Each call is a collective."""
        start = 0

        def send(piece: Slab) -> None:
            nonlocal start
            pixels = piece.whole()[0]
            if self._rank.group.rank == 0:
                dtype = str(pixels.dtype).removeprefix("torch.")
                answer = DecodedPixelsReply(message.request, item, start, dtype, tuple(pixels.shape))
                if message.shared:
                    self._rank.host.hand_over(answer, pixels)
                else:
                    self._rank.host.send(answer, {"pixels": pixels})
            start += pixels.shape[1]  # an image has one piece, and nothing starts after it
            self._next(message.request, "decoding")

        return send

    def _encode(self, message: EncodeRequest, pixels: Tensor, autoencoder: Autoencoder, axis: Communicator) -> Tensor:
        """Return the means of the latent on the first rank, and no rows on the others. A collective.

        If the picture is too small to be cut, every rank has all means.

        Args:
            pixels: `[batch, 3, (frames,) height, width]` from -1 to 1.

        Raises:
            Cancelled: the request was cancelled.
        """
        self._rank.status.enter("encoding")
        on_progress = self._beat(message.request)
        items = []
        for item in range(pixels.shape[0]):
            slab = slab_of(pixels[item : item + 1], axis, autoencoder.scale)
            pieces = []
            for piece in autoencoder.encode(
                slab.with_values(slab.values.to(self._rank.device)), message.schedule, on_progress
            ):
                pieces.append(piece.whole())
                self._next(message.request, "encoding")
            items.append(torch.cat(pieces, dim=2))
        return torch.cat(items)

    def _beat(self, request: int) -> OnProgress:
        """Return a function that reports an autoencoder's progress. Some of its calls raise Cancelled if the host cancels."""
        since = 0

        def on_progress(layers: int = 1) -> None:
            nonlocal since
            self._rank.status.on_progress()
            since += layers
            if since >= LAYERS_BETWEEN_WORDS:
                since = 0
                self._raise_if_cancelled(request)

        return on_progress

    def _next(self, request: int, phase: str) -> None:
        self._rank.status.enter(phase, self._rank.status.step + 1)
        self._raise_if_cancelled(request)

    def _raise_if_cancelled(self, request: int) -> None:
        """Raise Cancelled on all ranks if the request was cancelled. A collective."""
        if self._rank.group.broadcast_flag(self._rank.host.cancelled(request)):
            raise Cancelled
