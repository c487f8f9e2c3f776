"""What a kind of autoencoder provides: reading its files, its modules, and its network over the rows of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from torch import nn

from ..errors import Refused
from ..weights.files.checkpoint import Checkpoint
from ..weights.files.keymap import KeyMap, Piece
from .rows import Slab

SCHEDULES = ("original", "comfyui")
"""How a clip's frames are put into batches: as its authors do, or as ComfyUI's VAE Decode does."""


class OnProgress(Protocol):
    """What is called whenever something got done, on every rank as often."""

    def __call__(self, layers: int = 1) -> None:
        """So many layers, such as convolutions, are done."""


ENCODING = ("encoder", "quant_conv", "conv1")
"""What the autoencoders call the parts that only encode."""

Give = Callable[[Slab], None]
"""Told a picture, or the next frames of a clip."""


class Autoencoder(Protocol):
    """A loaded autoencoder on one rank. `scale` is the number of pixel rows of a row of the latent."""

    module: nn.Module
    scale: int

    def decode(self, latent: Slab, schedule: str, on_progress: OnProgress, give: Give) -> None:
        """Decode one item of a batch, `[1, channels, (frames,) rows, width]`, and give its frames as they come. A collective.

        What `on_progress` and `give` raise ends it.
        """

    def encode(self, pixels: Slab, schedule: str, on_progress: OnProgress) -> Iterator[Slab]:
        """The means of one item, `[1, 3, (frames,) rows, width]` from -1 to 1, piece by piece along its frames."""


class AutoencoderFamily(Protocol):
    """A kind of autoencoder. `imports` are the modules that it is made of and that take seconds to import."""

    imports: tuple[str, ...]

    def recognises(self, checkpoint: Checkpoint) -> bool:
        """Whether the tensors, names without prefix, are of this kind, possibly incomplete."""

    def configure(self, checkpoint: Checkpoint) -> Any:
        """The configuration, read off the tensors. Raises KeyError for a missing tensor and Refused for another variant."""

    def kind(self, config: Any) -> str:
        """The autoencoder's name in sentences for the user."""

    def dims(self, config: Any) -> int:
        """Dimensions of a latent."""

    def channels(self, config: Any) -> int:
        """Channels of a latent."""

    def missing(self, config: Any) -> str:
        """The first tensor that encoding needs and the file lacks; empty if it has them all."""

    def keys(self, config: Any, checkpoint: Checkpoint) -> KeyMap:
        """Which tensors of the file make each parameter."""

    def decoded_shape(self, config: Any, latent: Sequence[int]) -> tuple[int, ...]:
        """The shape of the pixels of a latent: `[batch, 3, (frames,) height, width]`, of other decoders other channels."""

    def build(self, config: Any) -> Autoencoder:
        """The autoencoder on the meta device."""


def without_encoder(model: nn.Module, name_in_file: Callable[[str], str], checkpoint: Checkpoint) -> str:
    """Take the parts that encode out of an autoencoder whose file lacks some of their tensors.

    Returns:
        The file's name of the first such tensor, or an empty text.
    """
    first = ""
    for part in ENCODING:
        module = getattr(model, part, None)
        needed = [name_in_file(f"{part}.{name}") for name, _ in module.named_parameters()] if module is not None else []
        missing = [name for name in needed if name not in checkpoint.entries]
        if missing:
            model._modules[part] = None
            first = first or missing[0]
    return first


def whole_tensors(module: nn.Module, name_in_file: Callable[[str], str], checkpoint: Checkpoint) -> KeyMap:
    """The key map of a module on the meta device each of whose parameters is one whole tensor of the file.

    A linear layer's weight may stand for a 1x1 convolution's: trailing sizes of 1 do not count.

    Raises:
        Refused: a tensor is missing or has another shape.
    """
    keys = {}
    for name, parameter in module.named_parameters():
        source = name_in_file(name)
        entry, file = checkpoint.entries.get(source), checkpoint.path.name
        if entry is None:
            raise Refused(f"{file} lacks the tensor {source}: choose a complete VAE file.")
        if entry.dtype is None or not entry.dtype.is_floating_point or entry.storage.quantised:
            raise Refused(f"{file} holds {source} as {entry.storage.name}: choose a VAE file in fp32, fp16 or bf16.")
        shape = tuple(parameter.shape)
        if _trimmed(entry.shape) != _trimmed(shape):
            raise Refused(
                f"{file} holds {source} with the shape {list(entry.shape)} where {list(shape)} is needed: choose "
                "another VAE file."
            )
        keys[name] = Piece(source, 0, entry.rows, entry.shape[1:])
    return keys


def _trimmed(shape: tuple[int, ...]) -> tuple[int, ...]:
    while shape[-1:] == (1,):
        shape = shape[:-1]
    return shape
