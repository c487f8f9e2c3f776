"""What the families over diffusers' modules have in common."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...declaration import Declaration
from ...errors import Refused
from ...weights.files.keymap import KeyMap
from ..family import Conditioning, Stage
from ..sequence_parallel.picture import Picture
from .model import Call, DiffusersModel


class DiffusersConfig(Protocol):
    """A model's configuration, read off its tensors."""

    @property
    def patch_size(self) -> tuple[int, ...]:
        """Latent values that are one token."""


C = TypeVar("C", bound=DiffusersConfig)


class DiffusersFamily(ABC, Generic[C]):
    """Of one class of diffusers'.

    Attributes:
        declaration: where the tokens of its model are.
        takes: the conditioning that its models are told of.
    """

    declaration: Declaration
    conditioning_names: frozenset[str] | None
    called_methods: frozenset[str] = frozenset()
    imports: tuple[str, ...] = ("diffusers.models.transformers",)

    @abstractmethod
    def make(self, config: C) -> nn.Module:
        """The whole model on the meta device, as diffusers makes it."""

    @abstractmethod
    def call(self, config: C) -> Call:
        """What calls the module with a forward's inputs."""

    @abstractmethod
    def keys(self, config: C) -> KeyMap:
        """Which rows of the file make each parameter, in ComfyUI's names."""

    def couples_rows(self, config: C, conditioning: Conditioning) -> str:
        """Nothing: diffusers computes each row for itself."""
        return ""

    def comfyui_keys(self, config: C) -> KeyMap:
        """As `keys`: no file has other names."""
        return self.keys(config)

    def token_rows(self, config: C, latent_shape: Sequence[int]) -> int:
        """Patches are whole rows, or whole frames, of tokens."""
        return Picture(tuple(latent_shape), config.patch_size).most_patches

    def image_tokens(self, config: C, latent_shape: Sequence[int]) -> int:
        """Image tokens of one batch item."""
        return Picture(tuple(latent_shape), config.patch_size).tokens

    def item_bytes(
        self, config: C, latent_shape: Sequence[int], conditioning: Conditioning, dtype: torch.dtype
    ) -> float:
        """0: plans predict it."""
        return 0.0

    def context_tokens(self, config: C, conditioning: Conditioning) -> int:
        """Tokens of the text."""
        return conditioning["context"].shape[1]

    def exact(self, config: C) -> frozenset[str]:
        """None: all parameters have the type that is chosen."""
        return frozenset()

    def control_blocks(self, config: C) -> Mapping[str, range]:
        """No ControlNet is supported."""
        return {}

    def build(self, config: C, stage: Stage) -> DiffusersModel:
        """One stage of the model on the meta device.

        Raises:
            Refused: diffusers' class is not the one that is known.
        """
        with torch.device("meta"):
            module = self.make(config)
        self._check_parameters(module, config)
        return DiffusersModel(module, self.declaration, stage, self.call(config))

    def _check_parameters(self, module: nn.Module, config: C) -> None:
        known = {name: (piece.rows, *piece.row_shape) for name, piece in self.keys(config).items()}
        actual = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
        if differing := sorted(name for name in known.keys() | actual.keys() if known.get(name) != actual.get(name)):
            raise Refused(
                f"diffusers {version('diffusers')} has a {type(module).__name__} of other weights than this pack knows "
                f"({differing[0]}): update the pack, or install an older diffusers."
            )


def padded(latent: Tensor, size: int) -> Tensor:
    """A latent whose last two sizes are made multiples of `size`, circularly, as ComfyUI pads."""
    padding = (0, -latent.shape[-1] % size, 0, -latent.shape[-2] % size)
    if not any(padding):
        return latent
    flat = F.pad(latent.flatten(0, -4), padding, mode="circular")
    return flat.view(*latent.shape[:-2], *flat.shape[-2:])


OLDEST = (0, 35)
NEWEST = (0, 42)
SUPPORTED = "{}.{} to {}.{}".format(*OLDEST, *NEWEST)
NEEDED = f"CogVideoX and PixArt need diffusers {SUPPORTED}"
REMEDY = "run pip install -r requirements.txt in the pack's folder with ComfyUI's Python"


def of_diffusers(imports: Iterable[str]) -> bool:
    """Return True if the imports of a kind of model or autoencoder include diffusers."""
    return any(module.partition(".")[0] == "diffusers" for module in imports)


def check_diffusers() -> None:
    """Raises Refused where this Python has no diffusers, or one out of range."""
    if not in_range(installed := own_diffusers()):
        raise Refused(f"{NEEDED}, and {installed or 'none'} is installed: {REMEDY}.")


def own_diffusers() -> str:
    """The installed version; empty for none."""
    try:
        return version("diffusers")
    except PackageNotFoundError:
        return ""


def in_range(installed: str) -> bool:
    """Return True for a supported version; False for an empty text, which stands for no diffusers."""
    return OLDEST <= tuple(int(number) for number in re.findall(r"\d+", installed)[:2]) <= NEWEST
