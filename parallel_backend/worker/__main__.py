"""The worker's life: connect to the host, join the other ranks, carry out requests until told to leave."""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import sys
import time
import traceback

import torch

from ..comm.meter import Meter
from ..comm.trace import DIRECTORY as TRACE_DIRECTORY
from ..comm.trace import Trace
from ..wire.messages import Failed, Ready, Shutdown
from .engine import Engine
from .environment import Environment
from .link import Link
from .status import Status
from .world import World

IMPORTS = ("diffusers.models.transformers", "diffusers.models.autoencoders")
"""What takes seconds to import, better spent before Ready than in a prompt; the fork server does it once for all."""


def main() -> int:
    """Run one rank; 1 after a failure, which has been told to the host."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in ComfyUI's terminal is for ComfyUI, which stops us
    faulthandler.enable()  # a crash leaves its stack in the log
    environment = Environment.read(os.environ)
    status = Status()
    link = Link(environment, status)
    try:
        _serve(environment, link, status)
    except Exception as error:
        out_of_memory = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        failed = Failed(
            rank=environment.rank,
            device=str(environment.device),
            phase=status.phase,
            step=status.step,
            out_of_memory=out_of_memory,
            reason=reason,
            trace=traceback.format_exc(),
            at=time.time(),
        )
        link.send(failed)
        return 1
    return 0


def _serve(environment: Environment, link: Link, status: Status) -> None:
    status.enter("importing diffusers")
    for module in IMPORTS:
        importlib.import_module(module)
    status.enter("joining the other workers")
    world = World(environment)
    trace_directory = os.environ.get(TRACE_DIRECTORY)
    trace = Trace(trace_directory, environment.rank) if trace_directory else None
    engine = Engine(environment, world, link, status, Meter(trace=trace))
    status.enter("idle")
    link.send(Ready())
    while True:
        frame = world.relay(link.inbox.get() if world.rank == 0 else None)
        if isinstance(frame.message, Shutdown):
            world.close()
            return
        engine.carry_out(frame)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of gloo and of the link would delay a normal exit
