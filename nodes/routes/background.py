"""Work that a route begins and that a page hears of."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


async def run_in_background(work: Callable[[], Result]) -> Result:
    """What a thread comes to that ComfyUI does not wait for when it ends, as it would for one of asyncio's."""
    done: Future[Result] = Future()

    def run() -> None:
        done.set_running_or_notify_cancel()  # from here on no task that is cancelled can cancel it
        try:
            result = work()
        except Exception as error:
            done.set_exception(error)
        except BaseException as error:  # a panic of a library in Rust; in a task it would end ComfyUI's event loop
            done.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
        else:
            done.set_result(result)

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(done)
