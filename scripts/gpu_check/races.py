"""Checks of weights that come and go while a card is nearly full. A copy that is early or late changes some run's bits."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from parallel_backend.comm.communicator import Communicator
from parallel_backend.comm.meter import Meter
from parallel_backend.weights.stores.streamed import Streamed

from .bench import SHORT, Bench, Run, error_of, nothing

SIXTEEN, SMALL_SIXTEEN = "FLUX.1-dev, sixteen blocks", "FLUX.1, small, sixteen blocks"

RUNS = 5

SLACK = 1 << 28
"""Bytes of the device that stay free beyond a run's peak, because memory has gaps."""


@contextmanager
def crowded(bench: Bench, run: Run) -> Iterator[float]:
    """Fill the device except for the memory that a run takes, and yield the bytes that were taken away."""
    run(SHORT, nothing)  # lasting allocations happen in this run
    peak = bench.peak(lambda: run(SHORT, nothing))
    if not bench.cuda:
        yield 0
        return
    gc.collect()  # models contain reference cycles
    torch.cuda.empty_cache()
    taken = max(0, torch.cuda.mem_get_info()[0] - peak - peak // 8 - SLACK)
    ballast = torch.empty(taken, dtype=torch.uint8, device=bench.device)
    try:
        yield ballast.nbytes
    finally:
        del ballast


def five_times(bench: Bench, name: str, expected: Run, run: Run) -> None:
    """Check that a denoise gives the expected bits in each of five runs on a nearly full device."""
    right = expected(SHORT, nothing)
    with crowded(bench, run) as taken:
        found = [run(SHORT, nothing) for _ in range(RUNS)]
    if right is None:
        return
    results = [each for each in found if each is not None]
    equal = [torch.equal(each, right) for each in results]
    errors = (
        f"{min(error_of(each, right) for each in results):.1e} to {max(error_of(each, right) for each in results):.1e}"
    )
    kinds = len({each.view(torch.uint8).numpy().tobytes() for each in results})
    text = f"{sum(equal)} of {RUNS} runs have equal bits, {kinds} different results; errors {errors}; "
    bench.say(name, sum(equal) == RUNS, f"{text}{taken / 1e9:.1f} GB of the device were filled")


class Races(Bench):
    """Checks of one GPU whose weights come and go."""

    def run(self) -> None:
        """Check blocks that are copied from the host, of which a quarter stays on the device."""
        self.name = SIXTEEN if self.cuda else SMALL_SIXTEEN
        self.each(self.streamed)

    def streamed(self) -> None:
        """Compare streamed blocks with all blocks on the device."""
        plan = self.plan(self.name)
        model, _ = self.model(self.name)
        resident = self.ours(self.name, plan, model)[1]
        right, again = resident(SHORT, nothing), resident(SHORT, nothing)
        assert right is not None
        assert again is not None
        self.say("all of sixteen blocks, twice", torch.equal(right, again), f"error {error_of(again, right):.1e}")
        del model, resident
        alone = Communicator("subgroup", None, torch.device("cpu"), False, Meter())
        model, store = self.model(
            self.name, lambda module, blocks: Streamed(module, blocks, alone, self.device, Meter(device=self.device))
        )
        assert isinstance(store, Streamed)
        store.fit(store.kept // 4)
        run = self.ours(self.name, plan, model, access=store)[1]
        roomy = run(SHORT, nothing)
        assert roomy is not None
        error = f"error {error_of(roomy, right):.1e}"
        self.say("streamed, sixteen blocks, with room", torch.equal(roomy, right), error)
        five_times(self, "streamed, sixteen blocks", lambda *_: right, run)
