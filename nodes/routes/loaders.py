"""The check of a graph's loaders: a loader's file says whether this pack's loader can replace the loader, and should."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Annotated

import msgspec
from aiohttp import web

from ...parallel_backend.errors import Refused
from ...parallel_backend.host.planning.devices import DeviceMemory
from ...parallel_backend.host.runs.encoder_room import EncoderRoom, emptiest_gpu
from ...parallel_backend.models.comfyui.divided_blocks import bytes_by_rank, bytes_of
from ...parallel_backend.vae import recognise
from ...parallel_backend.weights.files.checkpoint import read_header
from .. import load_clip, load_vae
from ..clip.clip import read_encoder
from ..memory.devices import devices_and_memory
from ..model.build import judge_model
from ..model.checkpoint import refuse_another_class
from ..model.files import CHECKPOINTS, path_in, path_of
from ..runtime import backend
from ..without_plan import DEVICES
from .body import Name, check_name
from .route import as_json


class Loader(msgspec.Struct, frozen=True):
    """A loader node of ComfyUI's, or of a pack that loads GGUF files.

    Attributes:
        kind: the node's class.
        file: the node's file.
        further_files: the further files of a text encoder.
        type: the type of a text encoder.
        devices: the devices that the replacement would use.
    """

    kind: str
    file: Name
    further_files: Annotated[tuple[Name, ...], msgspec.Meta(max_length=3)] = ()
    type: Name = ""
    devices: Name = DEVICES

    def __post_init__(self) -> None:
        """Raise ValueError for an invalid file name."""
        for name in self.files:
            check_name(name)

    @property
    def files(self) -> tuple[str, ...]:
        """Return the names of the node's files."""
        return (self.file, *self.further_files)


LoaderList = Annotated[list[Loader], msgspec.Meta(max_length=1000)]
"""The loaders of a graph. The route reads the headers of the loaders' files, so their number is limited."""


class Judgement(msgspec.Struct, frozen=True):
    """The answer about a loader.

    Attributes:
        swap: True if this pack's loader replaces the loader.
        why: the reason, in a sentence; empty for a loader that is replaced as usual, or stays as usual.
    """

    swap: bool
    why: str = ""


STAYS = Judgement(swap=False)

LTX = "LTXAVTextEncoderLoader"
"""ComfyUI's loader of a text encoder with a file of models/checkpoints as its second file."""

TEXT_ENCODER_LOADERS = ("CLIPLoader", "DualCLIPLoader", "TripleCLIPLoader", "QuadrupleCLIPLoader", LTX)
"""ComfyUI's loaders that Load Parallel CLIP replaces."""

MemoryOf = Callable[[str], tuple[tuple[str, ...], list[DeviceMemory]]]
"""Returns the workers' devices and the memory of this machine's devices, given the devices as a plan names them."""


def judge_loaders(loaders: list[Loader]) -> web.Response:
    """Reply with a Judgement for each loader. Load nothing."""
    memory_of = functools.cache(functools.partial(devices_and_memory, backend()))
    judgements = {loader: judge(loader, memory_of) for loader in set(loaders)}
    return as_json([judgements[loader] for loader in loaders])


def judge(loader: Loader, memory_of: MemoryOf) -> Judgement:
    """Decide about a loader."""
    if loader.kind in TEXT_ENCODER_LOADERS:
        try:
            return _judge_text_encoder(loader, *memory_of(loader.devices))
        except Refused as refusal:
            return Judgement(swap=False, why=str(refusal))
    why = why_not(loader)
    return Judgement(swap=not why, why=why)


def why_not(loader: Loader) -> str:
    """Return the reason why the loader of a model or VAE must stay; empty if this pack can run its file."""
    try:
        match loader.kind:
            case "UNETLoader" | "UnetLoaderGGUF":
                judge_model(path_of(loader.file))
            case "CheckpointLoaderSimple":
                path = path_of(f"{CHECKPOINTS}/{loader.file}")
                refuse_another_class(read_header(path), judge_model(path))
            case "VAELoader":
                recognise(read_header(path_in(load_vae.FOLDER, loader.file)))
            case kind:
                return f"this pack has no loader to replace {kind}."
    except Refused as refusal:
        return str(refusal)
    return ""


def _judge_text_encoder(loader: Loader, devices: Sequence[str], memory: Sequence[DeviceMemory]) -> Judgement:
    """Decide about the loader of a text encoder. Load Parallel CLIP replaces it only if no GPU has room for the encoder.

    Args:
        loader: the loader.
        devices: the workers' devices.
        memory: the memory of this machine's devices.

    Raises:
        Refused: the encoder is too large for one GPU, and the workers cannot run it.
    """
    gpu = emptiest_gpu(devices, memory)
    if gpu is None or len({*devices}) == 1:
        return STAYS
    folder = CHECKPOINTS if loader.kind == LTX else load_clip.FOLDER
    places = [(load_clip.FOLDER, loader.file), *((folder, name) for name in loader.further_files)]
    paths = [path_in(*place) for place in places]
    if gpu.holds(sum(map(os.path.getsize, paths))):  # the tensors are no larger than their files
        return STAYS
    encoder = read_encoder([*map(read_header, paths)], loader.type)
    nbytes = bytes_of(encoder.module)
    if gpu.holds(nbytes):
        return STAYS
    if load_clip.places_of(loader.file, loader.further_files) != places:
        raise Refused(
            f"{loader.further_files[0]} is the name of a file in models/{load_clip.FOLDER} and in models/{CHECKPOINTS}: rename "
            "one of the two."
        )
    EncoderRoom(tuple(devices), tuple(bytes_by_rank(encoder.module, len(devices))), nbytes, memory).check()
    return Judgement(swap=True, why=gpu.why_too_small(" with ".join(loader.files), nbytes))
