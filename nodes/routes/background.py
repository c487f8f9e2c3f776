"""Run a route's work in the background of ComfyUI's server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


async def run_in_background(work: Callable[[], Result]) -> Result:
    """Run work in a daemon thread, and return its result.

    ComfyUI does not wait for this thread at its end, as it would for one of asyncio's threads.
    """
    done: Future[Result] = Future()

    def run() -> None:
        done.set_running_or_notify_cancel()  # from here on, a cancelled task cannot cancel it
        try:
            result = work()
        except Exception as error:
            done.set_exception(error)
        except BaseException as error:  # such as a panic of a Rust library, which would end ComfyUI's event loop
            done.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
        else:
            done.set_result(result)

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(done)
