"""The interface of an autoencoder family: how its files are read, and its network over the rows of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from torch import nn

from ..errors import Refused
from ..weights.files.checkpoint import Checkpoint
from ..weights.files.keymap import KeyMap, Piece
from .rows import Slab

SCHEDULES = ("original", "comfyui")
"""Ways to divide a clip's frames into batches: as the model's authors do, or as ComfyUI's VAE Decode does."""


class OnProgress(Protocol):
    """A callback that is called whenever some layers are done. Every rank calls it equally often."""

    def __call__(self, layers: int = 1) -> None:
        """Report that `layers` more layers, such as convolutions, are done."""


ENCODING = ("encoder", "quant_conv", "conv1")
"""Names of the submodules that an autoencoder uses for encoding only."""

Give = Callable[[Slab], None]
"""A callback that receives a picture, or the next frames of a clip."""


class Autoencoder(Protocol):
    """A loaded autoencoder on one rank.

    Attributes:
        module: the network.
        scale: number of pixel rows for each row of the latent.
    """

    module: nn.Module
    scale: int

    def decode(self, latent: Slab, schedule: str, on_progress: OnProgress, give: Give) -> None:
        """Decode one item of a batch and pass its frames to `give` as they come. This is a collective.

        An exception that `on_progress` or `give` raises ends the decoding.

        Args:
            latent: this rank's rows of the item, `[1, channels, (frames,) rows, width]`.
            schedule: one of SCHEDULES.
        """

    def encode(self, pixels: Slab, schedule: str, on_progress: OnProgress) -> Iterator[Slab]:
        """Encode one item of a batch and yield the means of its latent, piece by piece along its frames.

        Args:
            pixels: this rank's rows of the item, `[1, 3, (frames,) rows, width]`, with values from -1 to 1.
            schedule: one of SCHEDULES.
        """


class AutoencoderFamily(Protocol):
    """A kind of autoencoder.

    Attributes:
        imports: modules that the autoencoder is made of and that take seconds to import.
    """

    imports: tuple[str, ...]

    def recognises(self, checkpoint: Checkpoint) -> bool:
        """Return True if the tensors, named without prefix, are of this kind. Some tensors may be missing."""

    def configure(self, checkpoint: Checkpoint) -> Any:
        """Return the configuration, derived from the checkpoint's tensors.

        Raises:
            KeyError: a tensor is missing.
            Refused: the tensors belong to a variant that is not supported.
        """

    def kind(self, config: Any) -> str:
        """Return the autoencoder's name, as it appears in messages to the user."""

    def dims(self, config: Any) -> int:
        """Return the number of dimensions of a latent."""

    def channels(self, config: Any) -> int:
        """Return the number of channels of a latent."""

    def missing(self, config: Any) -> str:
        """Return the name of the first tensor that encoding needs and the file lacks, or an empty string."""

    def keys(self, config: Any, checkpoint: Checkpoint) -> KeyMap:
        """Return the key map: the file's tensor for each parameter."""

    def decoded_shape(self, config: Any, latent: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the pixels of a latent.

        The shape is `[batch, 3, (frames,) height, width]`. Some decoders give another number of channels.
        """

    def build(self, config: Any) -> Autoencoder:
        """Return the autoencoder on the meta device."""


def without_encoder(model: nn.Module, name_in_file: Callable[[str], str], checkpoint: Checkpoint) -> str:
    """Remove submodules that only encode from an autoencoder. A submodule stays if the file has all of its tensors.

    Returns:
        The file's name of the first missing tensor, or an empty string.
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
    """Return the key map of a module on the meta device whose parameters are one whole tensor of the file each.

    Trailing sizes of 1 do not count, so a linear layer's weight fits a 1x1 convolution.

    Raises:
        Refused: a tensor is missing, is quantised or not floating-point, or has another shape.
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
