"""The doctor's checks. Each check turns observations into findings and reads nothing else."""

from __future__ import annotations

from collections.abc import Iterator

from ..host.workers.causes import REMEDIES, known_cause
from ..host.workers.versions import OLDEST_TORCH, TORCH_REMEDY, dotted
from ..models.diffusers.diffusers_family import REMEDY, SUPPORTED, in_range
from .findings import Finding, FindingStatus
from .models import of_derived
from .observations import DeviceMeasurements, Observations

GIB = 1 << 30
OLDEST_FLASH_ATTN = (2, 6)
SHARED_MEMORY_PER_GPU = 64 << 20
"""Bytes of /dev/shm that each GPU needs: without P2P, NCCL takes some 10 MB per channel and pair of GPUs."""

LEAST_TEMPORARY = 64 << 20
LEAST_OPEN_FILES = 1024
SLOW_LINK = 5e9
"""Bytes/s of a slow link: below this, exchanging tokens takes longer than a consumer GPU computes on them."""


TORCHAUDIO = (
    "ComfyUI 0.30 to 0.33 do not start with this torchaudio: update ComfyUI, or install torch 2.11.0 with torchaudio 2.11.0, "
    "the last torchaudio, which is built for CUDA 13.0."
)
DRIVER = "Run nvidia-smi: if it fails, install the NVIDIA driver again; if it works, check CUDA_VISIBLE_DEVICES."


UNDER_WINDOWS = (
    "this Linux runs under Windows (WSL2): plans leave 2 GB of each GPU unused, and copies are slower if host memory cannot be "
    "pinned"
)

UNKNOWN_FUNCTION = (
    "Features that need it run one model call at a time, or are refused: use a tested ComfyUI, or update this pack."
)


def examine(facts: Observations) -> list[Finding]:
    """Return the findings of all checks, in an order in which later things depend on earlier ones."""
    return [finding for check in CHECKS for finding in check(facts)]


def _devices(facts: Observations) -> Iterator[Finding]:
    for index, gpu in enumerate(facts.gpus):
        free = "free memory not known" if gpu.free is None else f"{gpu.free / GIB:.1f} GiB free"
        text = f"{gpu.name}, {gpu.memory / GIB:.1f} GiB, {free}"
        yield Finding(f"cuda:{index}", FindingStatus.OK, text)
    if facts.gpus:
        return
    if facts.nvidia_devices:
        cause = known_cause(facts.cuda_error)
        remedy = cause.remedy if cause else DRIVER
        text = f"the driver shows {facts.nvidia_devices}, but torch can use none of them: {facts.cuda_error}"
        yield Finding("GPUs", FindingStatus.FAILURE, text, remedy)
    else:
        text = "none: workers run on the CPU (devices cpu:2), which is slow and only for trials"
        yield Finding(
            "GPUs", FindingStatus.WARNING, text, "Use a machine with NVIDIA GPUs, and start Docker with --gpus all."
        )


def _windows(facts: Observations) -> Iterator[Finding]:
    if facts.under_windows:
        yield Finding("WSL2", FindingStatus.OK, UNDER_WINDOWS)


def _memory(facts: Observations) -> Iterator[Finding]:
    text = f"{facts.memory / GIB:.1f} GiB, {facts.memory_free / GIB:.1f} GiB free"
    low = facts.memory_free < 2 * GIB
    yield Finding(
        "memory", FindingStatus.WARNING if low else FindingStatus.OK, text, REMEDIES["host memory"] if low else ""
    )


def _peers(facts: Observations) -> Iterator[Finding]:
    count = len(facts.gpus)
    if count < 2:
        return
    rows = ["from\\to  " + "  ".join(str(b) for b in range(count))]
    for a in range(count):
        cells = ("-" if a == b else "x" if (a, b) in facts.peers else "." for b in range(count))
        rows.append(f"{a:>7}  " + "  ".join(cells))
    everyone = len(facts.peers) == count * (count - 1)
    text = (
        ("every GPU reaches every other" if everyone else "some GPUs do not reach each other") + "\n" + "\n".join(rows)
    )
    yield Finding(
        "P2P", FindingStatus.OK if everyone else FindingStatus.WARNING, text, "" if everyone else REMEDIES["P2P"]
    )


def _nccl(facts: Observations) -> Iterator[Finding]:
    if facts.nccl:
        yield Finding("NCCL", FindingStatus.OK, facts.nccl)
    elif facts.gpus:
        status = FindingStatus.FAILURE if len(facts.gpus) > 1 else FindingStatus.WARNING
        yield Finding("NCCL", status, "this torch has no NCCL", REMEDIES["NCCL missing"])
    else:
        yield Finding("NCCL", FindingStatus.OK, "this torch has no NCCL, which is not needed without GPUs")


def _shared_memory(facts: Observations) -> Iterator[Finding]:
    space, needed = facts.shared_memory, SHARED_MEMORY_PER_GPU * len(facts.gpus)
    text = f"{space.path}: {space.size / GIB:.2f} GiB, {space.free / GIB:.2f} GiB free"
    low = len(facts.gpus) > 1 and space.free < needed
    remedy = REMEDIES["shared memory"] if low else ""
    yield Finding("shared memory", FindingStatus.WARNING if low else FindingStatus.OK, text, remedy)


def _temporary(facts: Observations) -> Iterator[Finding]:
    space = facts.temporary
    text = f"{space.path}: {space.free / GIB:.2f} GiB free"
    low = space.free < LEAST_TEMPORARY
    yield Finding(
        "temporary folder",
        FindingStatus.FAILURE if low else FindingStatus.OK,
        text,
        REMEDIES["disk full"] if low else "",
    )


def _open_files(facts: Observations) -> Iterator[Finding]:
    low = 0 <= facts.open_files < LEAST_OPEN_FILES
    text = "no limit" if facts.open_files < 0 else f"{facts.open_files} at most"
    remedy = REMEDIES["too many files"] if low else ""
    yield Finding("open files", FindingStatus.WARNING if low else FindingStatus.OK, text, remedy)


def _packages(facts: Observations) -> Iterator[Finding]:
    torch = facts.versions.get("torch", "")
    old = _parts(torch) < OLDEST_TORCH
    built = f" for CUDA {facts.cuda_version}" if facts.cuda_version else " without CUDA"
    text = f"{torch}{built}; {dotted(OLDEST_TORCH)} or newer is supported"
    yield Finding(
        "torch", FindingStatus.FAILURE if old else FindingStatus.OK, text, _sentence(TORCH_REMEDY) if old else ""
    )

    if facts.torchaudio_error:
        text = f"{facts.versions.get('torchaudio', '')} cannot be imported: {facts.torchaudio_error}"
        yield Finding("torchaudio", FindingStatus.WARNING, text, TORCHAUDIO)

    diffusers = facts.versions.get("diffusers", "")
    good = in_range(diffusers)
    text = f"{diffusers or 'not installed'}; CogVideoX and PixArt need {SUPPORTED}, other models do not need it"
    remedy = "" if good else _sentence(REMEDY)
    yield Finding("diffusers", FindingStatus.OK if good else FindingStatus.WARNING, text, remedy)

    flash = facts.versions.get("flash-attn", "")
    if not flash:
        yield Finding("flash-attn", FindingStatus.OK, "not installed: torch's own attention is used")
    elif _parts(flash) < OLDEST_FLASH_ATTN:
        text = f"{flash}; {dotted(OLDEST_FLASH_ATTN)} or newer is supported"
        yield Finding("flash-attn", FindingStatus.WARNING, text, REMEDIES["flash-attn"])
    elif failure := next(filter(None, (measured.kernel_faults.get("flash-attn") for measured in facts.measured)), ""):
        text = f"{flash}; {failure}: attention auto uses torch's own instead"
        yield Finding("flash-attn", FindingStatus.WARNING, text, REMEDIES["flash-attn"])
    else:
        yield Finding("flash-attn", FindingStatus.OK, flash)


def _allocator(facts: Observations) -> Iterator[Finding]:
    if "cudaMallocAsync" in facts.allocator:
        text = "ComfyUI uses cudaMallocAsync; the workers leave it out, because it cannot be used with NCCL"
    else:
        text = facts.allocator or "torch's own"
    yield Finding("allocator", FindingStatus.OK, text)


def _functions(facts: Observations) -> Iterator[Finding]:
    """Yield a finding for the last verdict on ComfyUI's functions of each kind."""
    for verdict in {verdict.kind: verdict for verdict in facts.verdicts}.values():
        of, named = f"in ComfyUI {verdict.comfyui}" if verdict.comfyui else "in ComfyUI", ", ".join(verdict.functions)
        if verdict.mismatch:
            yield Finding(
                f"ComfyUI's {verdict.kind}",
                FindingStatus.WARNING,
                f"{of}: {named}, {verdict.mismatch}",
                UNKNOWN_FUNCTION,
            )
        else:
            text = (
                f"{of}: {named}, not as in any tested version; a trial on this machine gave the same result as "
                "the workers' code"
            )
            yield Finding(f"ComfyUI's {verdict.kind}", FindingStatus.OK, text)


def _derived(facts: Observations) -> Iterator[Finding]:
    """Yield the findings about model classes that nobody declared."""
    yield from of_derived(facts.derived)


def _links(facts: Observations) -> Iterator[Finding]:
    for measured in facts.measured:
        yield _link(measured)


def _link(measured: DeviceMeasurements) -> Finding:
    first, last, count = measured.devices[0], measured.devices[-1], len(measured.devices)
    name = f"{count} workers, {first}" if first == last else f"{count} workers, {first} to {last}"
    machine = measured.machine
    if machine is None:
        cause = known_cause(measured.error)
        return Finding(
            name, FindingStatus.FAILURE, measured.error, cause.remedy if cause else "The cause is in the text above."
        )
    text = f"started; each computes {machine.matmul / 1e12:.3g} TFLOP/s"
    if count > 1:
        kind = "NCCL" if first.startswith("cuda") else "gloo"
        text += f"; all-to-all through {kind}: {machine.link_bandwidth / 1e9:.3g} GB/s from each worker"
        text += f", latency {machine.link_latency * 1e6:.0f} µs"
    slow = first.startswith("cuda") and count > 1 and machine.link_bandwidth < SLOW_LINK
    remedy = (
        "These links are slow: choose preset slow links or cfg 2 in Parallel Plan, or one GPU in devices."
        if slow
        else ""
    )
    return Finding(name, FindingStatus.WARNING if slow else FindingStatus.OK, text, remedy)


CHECKS = (
    _packages,
    _devices,
    _windows,
    _memory,
    _nccl,
    _peers,
    _shared_memory,
    _temporary,
    _open_files,
    _allocator,
    _functions,
    _derived,
    _links,
)


def _parts(text: str) -> tuple[int, ...]:
    parts = text.split("+")[0].split(".")[:2]
    return tuple(int(part) for part in parts if part.isdecimal())


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."
