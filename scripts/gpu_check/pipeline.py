"""Checks of PipeFusion."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from parallel_backend.comm.meter import Meter
from parallel_backend.mesh import build_mesh
from parallel_backend.plan import ResolvedPlan
from parallel_backend.worker.memory.stage_part import stages
from tests.dry.dry_rank import inspected
from tests.dry.full_size import JOBS

from .bench import SHORT, TYPE, nothing
from .ranks import Ranks
from .report import Work


class Pipeline(Ranks):
    """Checks of pipeline stages."""

    def checks(self) -> Sequence[Work]:
        """Return the checks: stages against one rank while kernels load, and overlap of hops with work."""
        return self.stages, self.hops

    @property
    def by_nccl(self) -> bool | None:
        """Return the verdict of a run without a hang: True if patches go through NCCL, else None.

        A kernel that is loaded meanwhile may wait for NCCL. Other transports prove nothing.
        """
        return True if self.apart else None

    def staged(self) -> ResolvedPlan:
        """Return a plan with as many stages as possible. The ranks of one stage share its tokens."""
        cut = max(stages for stages in range(1, JOBS[self.name].blocks + 1) if self.ranks % stages == 0)
        return self.plan(self.name, {"pipefusion": cut, "ulysses": self.ranks // cut}, patches=2 * cut)

    def stages(self) -> None:
        """Compare stages with one rank. This is the process's first run, so kernels load while patches are in transit."""
        plan = self.staged()
        _, run = self.ours(self.name, plan, self.model(self.name, stage=stages(plan)[self.rank])[0])
        run(SHORT, nothing)
        self.wait()
        loading = os.environ.get("CUDA_MODULE_LOADING", "by CUDA's default")
        self.say("no hang while kernels are loaded", self.by_nccl, f"{plan.degrees}, kernels loaded {loading}")
        whole, _ = self.model(self.name)
        alone = self.plan(self.name, patches=plan.patches)
        self.compare(f"{plan.degrees}, {plan.patches} patches", plan, run, self.ours(self.name, alone, whole)[1])

    def hops(self) -> None:
        """Check and time a loop that receives the next patch early, works on a patch, and sends it."""
        plan = self.staged()
        mesh = build_mesh(plan, self.device, Meter(device=self.device))
        place, side = mesh.pipefusion, 8192 if self.cuda else 256
        a, b = (torch.randn(side, side, device=self.device, dtype=TYPE) for _ in range(2))
        patch = torch.zeros(
            self.tokens() // plan.patches, 128 * inspected(self.name)[1].shape.heads, device=self.device
        )

        def expect() -> Work:
            return (
                nothing
                if mesh.is_first_stage
                else mesh.from_previous_stage.start_receive(patch.shape, patch.dtype, place.rank - 1)
            )

        def stream(patches: int, rows: Callable[[int], int]) -> None:
            arrive = expect()
            for number in range(patches):
                following = expect() if number + 1 < patches else nothing
                arrive()
                arrive = following
                a[: rows(number)] @ b
                if not mesh.is_last_stage:
                    mesh.to_next_stage.send(patch, place.rank + 1)
            mesh.finish_sending()
            self.wait()

        stream(40, lambda number: 64 + 97 * number)  # each size may need a kernel that is not loaded yet
        self.say("no hang while kernels for matrices are loaded", self.by_nccl)
        count = 64
        work = self.milliseconds(lambda: a @ b)
        dist.all_reduce(torch.zeros(1))  # the ranks begin together
        start = time.perf_counter()
        stream(count, lambda _: side)
        each = 1e3 * (time.perf_counter() - start) / count
        hidden = each < 1.05 * work + work * place.size / count if self.apart else None
        self.say(
            "PipeFusion's hops overlap with computing",
            hidden,
            f"{each:.2f} ms a patch, of which {work:.2f} ms are computing",
        )
        mesh.close()
