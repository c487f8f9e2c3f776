"""Text that a model transforms with its own weights before sampling, computed once a run."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from ....conditioning import ASKED


class PreparedTexts:
    """The transformed texts of a run, by the key of a forward's prompts."""

    def __init__(self) -> None:
        self._prepared: dict[Hashable, tuple[Tensor, Tensor]] = {}

    def prepared(self, key: Hashable, module: Any, text: Tensor, keywords: Mapping[str, Any]) -> Tensor:
        """Return the model's transformation of each row of `text`, `[batch, tokens, features]`."""
        original, result = self._prepared.get(key, (None, text))
        if original is not text:
            with_it = {name: value for name, value in keywords.items() if name != ASKED}
            result = torch.cat([module.preprocess_text_embeds(row[None], **with_it) for row in text])
            self._prepared[key] = text, result
        return result.clone()
