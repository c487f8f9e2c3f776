"""The room for a text encoder whose blocks are divided over workers, judged before anything is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...errors import PlanRefused
from ...plan.advice import gigabytes
from ...plan.predict.profiles import CONTEXT_BYTES
from ..planning.devices import DeviceMemory
from .outcome import amount


@dataclass(frozen=True)
class GpuRoom:
    """The bytes that a text encoder may have on one GPU."""

    nbytes: float

    def holds(self, weight_bytes: int) -> bool:
        """Return True if the GPU has room for a whole text encoder with these bytes of weights."""
        return weight_bytes + CONTEXT_BYTES <= self.nbytes

    def why_too_small(self, name: str, weight_bytes: int) -> str:
        """Return the reason why the GPU does not hold a text encoder, in a sentence with the numbers."""
        needed, weights = gigabytes(weight_bytes + CONTEXT_BYTES), gigabytes(weight_bytes)
        free = gigabytes(self.nbytes)
        return f"{name} needs {needed} on one GPU ({weights} of weights), and no GPU has more than {free} free."


def emptiest_gpu(devices: Iterable[str], memory: Sequence[DeviceMemory], limit: float = 0.0) -> GpuRoom | None:
    """Return the room on the GPU with the most free memory, or None without a GPU of this machine.

    Args:
        devices: the devices that workers use.
        memory: the memory of this machine's devices. All memory counts if the free memory is not known.
        limit: bytes that the user allows on each device; 0 for all.
    """
    used = {device for device in devices if device.startswith("cuda")}
    free = [each.total if each.free is None else each.free for each in memory if each.device in used]
    return GpuRoom(min(max(free), limit or max(free))) if free else None


@dataclass(frozen=True)
class EncoderRoom:
    """The bytes of a text encoder's workers beside the memory of their devices.

    Attributes:
        workers: each worker's device.
        held: bytes of weights that each worker holds.
        whole: bytes of all weights.
        memory: the memory of this machine's devices.
        limit: bytes that the user allows on each device; 0 for all.
    """

    workers: tuple[str, ...]
    held: tuple[int, ...]
    whole: int
    memory: Sequence[DeviceMemory]
    limit: float = 0.0

    def check(self) -> None:
        """Refuse devices that cannot hold their workers' weights, whatever else leaves them.

        Raises:
            PlanRefused: a device is too small. The message has the numbers.
        """
        for device, needed in self._needed.items():
            allowed = self._allowed(device)
            if allowed is not None and needed > allowed:
                limit = f" (memory_limit {self.limit / 1e9:g})" if allowed == self.limit else ""
                raise PlanRefused(
                    f"Not enough memory for the text encoder: its workers on {device} need {gigabytes(needed)} "
                    f"({gigabytes(self.whole)} of weights over {len(self.workers)} workers), and {device} has "
                    f"{gigabytes(allowed)}{limit}: use more devices, or a file with smaller weights (fp8)."
                )

    def in_words(self) -> str:
        """Return the memory of the workers, and whether one GPU would do, in a line for the node."""
        count, largest = len(self.workers), max(self.held)
        kind = "GPU" if self.workers[0].startswith("cuda") else "worker"
        line = f"{count} {kind}s: {amount(largest)} each" if count > 1 else f"1 {kind}: {amount(largest)}"
        return line + (
            "; one GPU holds all of it, and Load CLIP encodes as fast" if count > 1 and self.one_holds_it else ""
        )

    @property
    def one_holds_it(self) -> bool:
        """Return True if one GPU of the workers has room for the whole encoder."""
        gpu = emptiest_gpu(self.workers, self.memory, self.limit)
        return gpu is not None and gpu.holds(self.whole)

    @property
    def _needed(self) -> Mapping[str, float]:
        """Return the bytes that a device's workers need, by device."""
        found: dict[str, float] = {}
        for device, held in zip(self.workers, self.held, strict=True):
            context = CONTEXT_BYTES if device.startswith("cuda") else 0.0
            found[device] = found.get(device, 0.0) + held + context
        return found

    def _allowed(self, device: str) -> float | None:
        """Return the bytes that workers may use of a device; None for a device of another machine."""
        total = next((float(each.total) for each in self.memory if each.device == device), None)
        return min(total, self.limit) if total is not None and self.limit else total
