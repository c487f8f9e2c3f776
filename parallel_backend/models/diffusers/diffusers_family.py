"""The base class of the families on diffusers' modules, and the check of diffusers' version."""

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
    """A model's configuration, read from its tensors."""

    @property
    def patch_size(self) -> tuple[int, ...]:
        """Return the latent values of one token in each dimension."""


C = TypeVar("C", bound=DiffusersConfig)


class DiffusersFamily(ABC, Generic[C]):
    """A family of models of one diffusers class.

    Attributes:
        declaration: the token positions of its models.
        conditioning_names: the conditioning that its models read.
        called_methods: empty, because no class of ComfyUI is involved.
        imports: Python modules that its models need and whose import takes seconds.
    """

    declaration: Declaration
    conditioning_names: frozenset[str] | None
    called_methods: frozenset[str] = frozenset()
    imports: tuple[str, ...] = ("diffusers.models.transformers",)

    @abstractmethod
    def make(self, config: C) -> nn.Module:
        """Make diffusers' module of the whole model, on the meta device."""

    @abstractmethod
    def call(self, config: C) -> Call:
        """Return the function that runs the module with a forward's inputs."""

    @abstractmethod
    def keys(self, config: C) -> KeyMap:
        """Return the key map in ComfyUI's names: for each parameter, the tensor and rows that it is made of."""

    def couples_rows(self, config: C, conditioning: Conditioning) -> str:
        """Return no reason, because diffusers computes each row of a batch separately."""
        return ""

    def comfyui_keys(self, config: C) -> KeyMap:
        """Return the same key map as `keys`, which has ComfyUI's names."""
        return self.keys(config)

    def token_rows(self, config: C, latent_shape: Sequence[int]) -> int:
        """Return the largest number of patches. A patch is whole rows or whole frames of tokens."""
        return Picture(tuple(latent_shape), config.patch_size).most_patches

    def image_tokens(self, config: C, latent_shape: Sequence[int]) -> int:
        """Return the number of latent tokens of one batch item."""
        return Picture(tuple(latent_shape), config.patch_size).tokens

    def item_bytes(
        self, config: C, latent_shape: Sequence[int], conditioning: Conditioning, dtype: torch.dtype
    ) -> float:
        """Return 0, because the plan predicts the memory."""
        return 0.0

    def context_tokens(self, config: C, conditioning: Conditioning) -> int:
        """Return the number of tokens of the text."""
        return conditioning["context"].shape[1]

    def exact(self, config: C) -> frozenset[str]:
        """Return no names, because all parameters have the chosen dtype."""
        return frozenset()

    def control_blocks(self, config: C) -> Mapping[str, range]:
        """Return no blocks, because these models support no ControlNet."""
        return {}

    def build(self, config: C, stage: Stage) -> DiffusersModel:
        """Return one stage of the model on the meta device.

        Raises:
            Refused: diffusers' class has other parameters than this pack knows.
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
                f"diffusers {version('diffusers')} has a {type(module).__name__} with other weights than this pack "
                f"supports ({differing[0]}): update the pack, or install an older diffusers."
            )


def padded(latent: Tensor, size: int) -> Tensor:
    """Pad a latent circularly, as ComfyUI does, so that its last two sizes are multiples of `size`."""
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
    """Raise Refused if this Python has no diffusers, or an unsupported version."""
    if not in_range(installed := own_diffusers()):
        raise Refused(f"{NEEDED}, and {installed or 'none'} is installed: {REMEDY}.")


def own_diffusers() -> str:
    """Return the installed version of diffusers; empty if there is none."""
    try:
        return version("diffusers")
    except PackageNotFoundError:
        return ""


def in_range(installed: str) -> bool:
    """Return True for a supported version; False for an empty text, which stands for no diffusers."""
    return OLDEST <= tuple(int(number) for number in re.findall(r"\d+", installed)[:2]) <= NEWEST
