"""Texts that a model's own weights prepare before sampling. The workers prepare them, once per run."""

from __future__ import annotations

from typing import Any

import comfy.conds

from ....parallel_backend.conditioning import ASKED, TEXT_PREPARATION


class PreparedByWorkers:
    """A mixin for a ComfyUI model class whose `extra_conds` calls the diffusion model to prepare the text."""

    diffusion_model: Any

    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        """Return ComfyUI's conditions, with the arguments of the text preparation if ComfyUI's class called it."""
        proxy = self.diffusion_model
        proxy.text_arguments = None
        conds: dict[str, Any] = super().extra_conds(**kwargs)  # type: ignore[misc]
        if proxy.text_arguments is not None:
            conds[TEXT_PREPARATION] = comfy.conds.CONDConstant({ASKED: True, **proxy.text_arguments})
        return conds


def prepared_by_workers(model: Any) -> Any:
    """Return a ComfyUI model, changed so that the workers prepare its texts if its class prepares texts."""
    if hasattr(model.diffusion_model, "preprocess_text_embeds"):
        kind = type(model)
        model.__class__ = type(kind.__name__, (PreparedByWorkers, kind), {"__module__": __name__})
    return model
