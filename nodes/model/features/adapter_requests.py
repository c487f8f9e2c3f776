"""ComfyUI's own handling of weight patches: the parameters that it patches, and the adapters that fit a parameter."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import comfy.lora
import comfy.model_management
import comfy.model_patcher
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ....parallel_backend.errors import Refused


def loads_dynamically(device: torch.device) -> bool:
    """Return True if ComfyUI loads models dynamically on a device: an NVIDIA GPU, with comfy-aimdo in use."""
    dynamic = comfy.model_patcher.CoreModelPatcher is not comfy.model_patcher.ModelPatcher
    return dynamic and not comfy.model_management.is_device_cpu(device)


def patched_keys(patcher: Any) -> frozenset[str]:
    """Return the keys of the parameters that ComfyUI's loader patches, which never include those of a module with submodules.

    If ComfyUI loads dynamically, its loader patches only modules that cast their own weights.
    """
    dynamic = loads_dynamically(patcher.load_device)
    return frozenset(
        comfy.model_patcher.key_param_name_to_key(name, parameter)
        for *_, name, module, parameters in patcher._load_list()
        if not dynamic or hasattr(module, "comfy_cast_weights")
        for parameter in parameters
    )


class AdapterRequests:
    """Results of ComfyUI's `calculate_weight`, run on the meta device. Equal patches run only once."""

    def __init__(self) -> None:
        self._fitting: set[object] = set()
        self._skipped: dict[object, tuple[str, ...]] = {}

    def left_out(self, key: str, size: Sequence[int], patch: Sequence[Any]) -> tuple[str, ...] | None:
        """Return ComfyUI's log lines if it leaves out an adapter of the parameter `key`; None if ComfyUI applies the adapter.

        Raises:
            Refused: ComfyUI raises an error.
        """
        question = tuple(size), patch[0] == 0.0, _shapes(patch[1]), *patch[3:]
        if question in self._fitting:
            return None
        if (key, question) not in self._skipped:
            sentences = _ask(key, size, patch)
            if sentences is None:
                self._fitting.add(question)
                return None
            self._skipped[key, question] = sentences
        return self._skipped[key, question]


def _ask(key: str, size: Sequence[int], patch: Sequence[Any]) -> tuple[str, ...] | None:
    strength, value, _, offset, function = patch
    log = _Sentences()
    logging.getLogger().addHandler(log)
    try:
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            _AnyValue(),
        ):  # tensors of inference mode do not count changes
            weight = torch.empty(tuple(size), device="meta")
            before = weight._version
            result = comfy.lora.calculate_weight([(strength, value, 1.0, offset, function)], weight, key)
            applied = result is not weight or weight._version != before
    except Exception as error:
        raise Refused(
            f"ComfyUI cannot apply this LoRA to {key}, which has the shape {list(size)} ({error}): choose another LoRA."
        ) from None
    finally:
        logging.getLogger().removeHandler(log)
    return None if applied else tuple(log.sentences)


def _shapes(value: Any) -> object:
    """Return a patch's value with shapes in place of tensors. A result depends on nothing else."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, list | tuple):
        return tuple(map(_shapes, value))
    if isinstance(value, Mapping):
        return tuple((name, _shapes(entry)) for name, entry in value.items())
    return (type(value), _shapes(value.weights)) if hasattr(value, "weights") else value


class _AnyValue(TorchDispatchMode):
    """A dispatch mode that returns 0 when code reads a meta tensor's value. No shape depends on the value."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default:
            return 0.0
        return function(*args, **(kwargs or {}))


class _Sentences(logging.Handler):
    """A log handler that collects the warnings and errors of this thread."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.sentences: list[str] = []
        self._thread = threading.get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        """Collect the message of a record of this thread."""
        if record.thread == self._thread:
            self.sentences.append(record.getMessage())
