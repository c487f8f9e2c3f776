"""A worker dies, or the user cancels, while the frames of a video arrive."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from parallel_backend.errors import Cancelled, WorkerFailed
from tests.faults.bench import AFTERWARDS, BOUND, ERROR
from tests.support.selection import thorough

CLIP = torch.linspace(-1, 1, 16 * 33 * 4 * 4).view(1, 16, 33, 4, 4)
FIRST, PIECES = 9, 16
"""Number of frames that arrive first, and the number of times that frames arrive."""


@thorough
@pytest.mark.parametrize("rank", [0, 1])
def test_a_death_after_the_first_frames_is_one_error(bench, rank):
    """The first frames have arrived: the fault delays the rank before it decodes the next ones."""
    whole, pieces = bench.decode(2, latent=CLIP), list[Tensor]()
    bench.fault.arm(f"rank={rank},phase=decoding,step=1,kind=kill")
    said = rf"^Worker {rank} of 2 \(cpu\) was killed by SIGKILL while decoding, step 1\. "
    with pytest.raises(WorkerFailed, match=said) as failure:
        bench.decode(2, latent=CLIP, pieces=pieces)
    seconds = bench.fault.seconds()
    assert AFTERWARDS in str(failure.value)
    assert [piece.shape[1] for piece in pieces] == [FIRST]
    assert torch.equal(pieces[0], whole[:, :FIRST])
    bench.assert_recovered(2)
    bench.held("a worker was killed by SIGKILL", ERROR, seconds, BOUND)


@thorough
def test_cancel_after_the_first_frames_leaves_the_workers_right(bench):
    """The workers do not reach the last frames."""
    whole, pieces = bench.decode(2, latent=CLIP), list[Tensor]()
    assert whole.shape[1] == 129
    bench.fault.arm(f"rank=0,phase=decoding,step={PIECES},kind=late")
    with pytest.raises(Cancelled):
        bench.decode(2, lambda: bool(pieces), CLIP, pieces)
    assert not bench.fault.struck()
    bench.fault.disarm()
    assert [piece.shape[1] for piece in pieces] == [FIRST]
    assert torch.equal(bench.decode(2, latent=CLIP), whole)
