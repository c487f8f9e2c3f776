"""Region: the part of a latent that a patch stands for."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Region:
    """`span` along dimension `dim` of a latent."""

    dim: int
    span: slice

    def of(self, latent: Tensor) -> Tensor:
        """The part (a view); a dimension of size 1, as a mask may have, is left alone."""
        if latent.shape[self.dim] == 1:
            return latent
        return latent.narrow(self.dim, self.span.start, self.span.stop - self.span.start)
