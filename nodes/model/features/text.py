"""Texts that a model's own weights prepare before sampling: the workers do it, once a run."""

from __future__ import annotations

from typing import Any

import comfy.conds

from ....parallel_backend.conditioning import ASKED, TEXT_PREPARATION


class PreparedByWorkers:
    """What a ComfyUI model class gets in front of it whose `extra_conds` asks its diffusion model about the text."""

    diffusion_model: Any

    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        """With what was asked about the text, if anything was."""
        proxy = self.diffusion_model
        proxy.asked_of_text = None
        conds: dict[str, Any] = super().extra_conds(**kwargs)  # type: ignore[misc]
        if proxy.asked_of_text is not None:
            conds[TEXT_PREPARATION] = comfy.conds.CONDConstant({ASKED: True, **proxy.asked_of_text})
        return conds


def prepared_by_workers(model: Any) -> Any:
    """A ComfyUI model whose texts the workers prepare, if it prepares them."""
    if hasattr(model.diffusion_model, "preprocess_text_embeds"):
        kind = type(model)
        model.__class__ = type(kind.__name__, (PreparedByWorkers, kind), {"__module__": __name__})
    return model
