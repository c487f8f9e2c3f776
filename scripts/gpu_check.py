"""What is assumed of GPUs, checked on one: `python -m scripts.gpu_check one`, or under torchrun `many` (see gpu.sh)."""

from __future__ import annotations

import datetime
import functools
import hashlib
import os
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from parallel_backend.attention.kernels import CHOICES, choose_kernel
from parallel_backend.attention.merge import PartialAttention
from parallel_backend.attention.packages import package_faults
from parallel_backend.comm.meter import Meter
from parallel_backend.errors import Refused
from parallel_backend.mesh import build_mesh
from parallel_backend.models.comfyui.importing import import_comfyui
from parallel_backend.models.inputs import Inputs
from parallel_backend.plan import ResolvedPlan
from parallel_backend.plan.plan import APPROXIMATE_ATTENTION
from parallel_backend.weights.holding import Replicated
from tests.dry.dry_rank import model_of, plan_of
from tests.dry.full_size import JOBS

FLUX = "FLUX.1-dev"
BLOCKS = 4
"""Two of each kind."""

TYPE = torch.bfloat16
TOLERANCE = 2e-2
SHAPES = (
    (TYPE, 128, 1031, 777, 3),
    (torch.float16, 64, 33, 515, 5),
    (TYPE, 72, 100, 2, 16),
    (torch.float32, 128, 45, 67, 2),
)
"""Of attention: type, width of a head, queries, keys, heads."""

Work = Callable[[], object]


class Check:
    """What one rank finds out about its GPU."""

    def __init__(self) -> None:
        self.rank = int(os.environ.get("LOCAL_RANK", 0))
        self.ranks = int(os.environ.get("WORLD_SIZE", 1))
        self.device = torch.device("cuda", self.rank % torch.cuda.device_count())
        torch.cuda.set_device(self.device)

    def say(self, name: str, passed: bool | None, text: str = "") -> None:
        """A line; None is for information."""
        verdict = "INFO" if passed is None else "PASS" if passed else "FAIL"
        print(f"[{self.rank}] {verdict} {name}: {text}", flush=True)

    def milliseconds(self, work: Work, runs: int = 10) -> tuple[float, float]:
        """Of one run, and of the host alone."""
        for _ in range(3):
            work()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(runs):
            work()
        host = time.perf_counter() - start
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - start) / runs, 1e3 * host / runs

    def kernels(self) -> None:
        """Attention and its log-sum-exp against fp64, whole and merged of two halves of the keys."""
        for dtype, width, queries, keys, heads in SHAPES:
            q, k, v = (torch.randn(2, n, heads, width, device=self.device, dtype=dtype) for n in (queries, keys, keys))
            scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) / width**0.5
            expected = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.double())
            for choice in CHOICES:
                try:
                    kernel = choose_kernel(choice, self.device, dtype, width, package_faults(self.device))
                except Refused as refusal:
                    self.say(f"kernel {choice} {dtype} {width}", None, str(refusal)[:80])
                    continue
                out, lse = kernel.attend(q, k, v)
                merged = PartialAttention(q)
                for half in (slice(0, keys // 2), slice(keys // 2, keys)):
                    merged.add(*kernel.attend(q, k[:, half], v[:, half]))
                errors = [float((o.double() - expected).norm() / expected.norm()) for o in (out, merged.result())]
                errors.append(float((lse.double() - scores.logsumexp(-1)).abs().max()))
                good = None if choice == APPROXIMATE_ATTENTION else max(errors) < TOLERANCE
                self.say(f"kernel {kernel.name} {dtype} {width}", good, f"errors {errors}")

    def speeds(self) -> None:
        """Of attention at FLUX's shape."""
        q, k, v = (torch.randn(1, 4608, 24, 128, device=self.device, dtype=TYPE) for _ in range(3))
        tq, tk, tv = (x.transpose(1, 2) for x in (q, k, v))
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
        ours = choose_kernel("auto", self.device, TYPE, 128, package_faults(self.device))
        each: dict[str, Work] = {
            ours.name: lambda: ours.attend(q, k, v),
            "torch's choice": lambda: torch.nn.functional.scaled_dot_product_attention(tq, tk, tv),
            "cuDNN with LSE": lambda: cudnn(tq, tk, tv, None, True),
        }
        for name, work in each.items():
            try:
                speed = 4 * 4608**2 * 3072 / self.milliseconds(work)[0] / 1e9
                self.say(f"attention, {name}", None, f"{speed:.0f} TFLOP/s")
            except RuntimeError as error:
                self.say(f"attention, {name}", None, str(error)[:80])

    def each(self, *checks: Callable[[], None]) -> None:
        """One after another; one that raises is a failure, and the next one runs."""
        for check in checks:
            try:
                check()
            except Exception as error:
                self.say(check.__name__, False, f"{type(error).__name__}: {str(error)[:200]}")

    def one(self) -> None:
        """Kernels, four blocks of FLUX.1-dev, and copies on one GPU."""
        self.each(self.kernels, self.speeds, self.blocks, self.copies)

    def blocks(self) -> None:
        """Whether the host keeps the GPU busy, and nothing waits."""
        forward = self.forward(plan_of(BLOCKS, 0, {}), self.model())
        forward()
        with torch.profiler.profile() as profile:
            forward()
            torch.cuda.synchronize()
        started = [event for event in profile.events() or () if "CUDA" in str(event.device_type)]
        busy = sum(event.device_time for event in started) / 1e3
        wall, host = self.milliseconds(forward)
        self.say(
            "the GPU is busy",
            busy > 0.9 * wall,
            f"{wall:.1f} ms, host {host:.1f}, GPU {busy:.1f}, {len(started)} kernels",
        )
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            forward()
        torch.cuda.set_sync_debug_mode("default")
        self.say("nothing waits in a forward", not seen, str([str(warning.message)[:80] for warning in seen[:3]]))

    def copies(self) -> None:
        """How fast memory of the host is copied to the device."""
        there = torch.empty(1 << 28, dtype=torch.uint8, device=self.device)
        host_side = torch.empty(1 << 28, dtype=torch.uint8)
        for name, source in (("pageable", host_side), ("pinned", host_side.pin_memory())):
            rate = there.nbytes / 1e6 / self.milliseconds(functools.partial(there.copy_, source))[0]
            self.say(f"to the device, {name}", None, f"{rate:.1f} GB/s")

    def many(self) -> None:
        """Every split of four blocks against one rank, and whether messages hide behind work."""
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=datetime.timedelta(days=1))
        self.each(self.noise, self.splits, self.ring)
        dist.destroy_process_group()

    def noise(self) -> None:
        """Whether all GPUs draw the same."""
        generator = torch.Generator(self.device).manual_seed(7)
        drawn = torch.randn(1, 16, 128, 128, device=self.device, generator=generator)
        mark = hashlib.sha256(drawn.cpu().numpy().tobytes()).digest()[:7]
        marks = [torch.zeros(1, dtype=torch.int64) for _ in range(self.ranks)]
        dist.all_gather(marks, torch.tensor([int.from_bytes(mark, "big")]))
        self.say(
            "the same noise on all GPUs", None, f"{len({int(m) for m in marks}) == 1}, {torch.cuda.get_device_name()}"
        )

    def splits(self) -> None:
        """Ulysses and Ring against one rank."""
        model = self.model()
        alone = self.forward(plan_of(BLOCKS, 0, {}), model)
        expected, base = alone(), self.milliseconds(alone)[0]
        for degrees in ({"ulysses": self.ranks}, {"ring": self.ranks}):
            free = torch.cuda.mem_get_info()[0]
            forward = self.forward(self.on_gpus(plan_of(BLOCKS, 0, degrees)), model)
            took = (free - torch.cuda.mem_get_info()[0]) / 1e6
            out = forward()
            error = float((out.float() - expected.float()).norm() / expected.float().norm())
            wall, host = self.milliseconds(forward)
            text = (
                f"error {error:.1e}; {wall:.1f} ms (host {host:.1f}) of {base:.1f} alone; communicators {took:.0f} MB"
            )
            self.say(str(degrees), error < TOLERANCE, text)

    def ring(self) -> None:
        """Whether a hop of the ring hides behind attention."""
        mesh = build_mesh(
            self.on_gpus(plan_of(BLOCKS, 0, {"ring": self.ranks})), self.device, Meter(device=self.device)
        )
        kv = torch.zeros(2 * 4608 // self.ranks * 3072, device=self.device, dtype=TYPE)
        q = torch.randn(1, 4608 // self.ranks, 24, 128, device=self.device, dtype=TYPE)
        attend = choose_kernel("auto", self.device, TYPE, 128, package_faults(self.device)).attend

        def hop(beside: Work = lambda: None) -> None:
            _, wait = mesh.ring.shift(kv, kv.numel())
            beside()
            wait()

        sent, work = self.milliseconds(hop)[0], self.milliseconds(lambda: attend(q, q, q))[0]
        both = self.milliseconds(lambda: hop(lambda: attend(q, q, q)))[0]
        hidden = None if mesh.ring.size > torch.cuda.device_count() else both < 1.15 * max(sent, work)
        self.say("a hop hides behind attention", hidden, f"hop {sent:.2f} attention {work:.2f} both {both:.2f} ms")
        mesh.close()

    def model(self) -> Any:
        """Four blocks of FLUX.1-dev with the same random weights on every rank."""
        model = model_of(FLUX, whole=False)
        model.module.to_empty(device=self.device)
        torch.manual_seed(1)
        for parameter in model.module.parameters():
            parameter.copy_(0.02 * torch.randn(parameter.shape, dtype=TYPE))
        return model

    def on_gpus(self, plan: ResolvedPlan) -> ResolvedPlan:
        """The plan on the GPUs that there are; ranks may share one."""
        gpus = torch.cuda.device_count()
        devices = tuple(f"cuda:{rank % gpus}" for rank in range(plan.world_size))
        return msgspec.structs.replace(plan, devices=devices)

    def forward(self, plan: ResolvedPlan, model: Any) -> Callable[[], Tensor]:
        """A forward of the model under a plan."""
        mesh = build_mesh(plan, self.device, Meter(device=self.device))
        run = model.forward_on(mesh, plan, Replicated(), lambda: None)
        generator = torch.Generator().manual_seed(2)

        def draw(*shape: int) -> Tensor:
            return torch.randn(1, *shape, generator=generator).to(self.device, TYPE)

        latent = draw(*JOBS[FLUX].latent)
        prompt = {name: draw(*shape) for name, shape in JOBS[FLUX].prompt.items()}
        time_now = torch.full((1,), 0.5, device=self.device)
        inputs = Inputs("check", latent.shape, TYPE, self.device, time_now, prompt)

        def call() -> Tensor:
            out = run(inputs, latent, None)
            assert out is not None
            return out

        return call


def main() -> None:
    """Run one of the two lists."""
    import_comfyui()
    with torch.no_grad():
        check = Check()
        {"one": check.one, "many": check.many}[sys.argv[1]]()


if __name__ == "__main__":
    main()
