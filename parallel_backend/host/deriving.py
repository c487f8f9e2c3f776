"""Derives, in a child process, how to parallelise a model class without a declaration, and keeps the result."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import psutil

from ..declaration import Declaration
from ..derive.call_kind import CallKind
from ..derive.declaration_cache import DeclarationRecord, difference, load, save
from ..derive.prompt import PromptExample
from ..derive.request import ANSWER, DeriveReply, request_bytes
from ..temporary import memory_file, path_of
from .proofs import Child

MEMORY = 8 << 30
"""Most bytes that the child and its ranks may use together. If half of the free memory is less, that is the limit."""

WEIGHTS = 0.6
"""Fraction of the child's memory for the small model's weights."""

PLAN = 0.2
"""Fraction of the child's time for the proof of one plan."""

PAUSE = 60.0
"""Least seconds before another try after a failure of time, memory or the like; a longer try has an equally long pause."""

LOOK = 0.05
"""Seconds between two checks of Cancel."""

COMMAND = "parallel_backend.derive.reply"

log = logging.getLogger(__name__)


class Derivation:
    """The known declarations of one class with one configuration, and the thread that derives new ones.

    Args:
        key: the cache key; see `derive/declaration_cache.py`.
        kind: the class's name.
        file: a file of this class.
        folder: ComfyUI's folder.
        comfyui: ComfyUI's version.
        seconds: the time limit of a child.
        cache_folder: the folder of the cache; None for the default folder.
        pause: see PAUSE.
    """

    def __init__(
        self,
        key: str,
        kind: str,
        file: str,
        folder: str,
        comfyui: str,
        seconds: float,
        cache_folder: Path | None = None,
        pause: float = PAUSE,
    ) -> None:
        self._seconds, self._pause = seconds, pause
        self._key, self._file, self._folder, self._cache_folder = key, file, folder, cache_folder
        self._kind = kind
        self._record = load(key, cache_folder) or DeclarationRecord(kind, comfyui)
        self._trouble: DeriveReply | None = None
        self._again_at = 0.0
        self._running: tuple[CallKind, ...] = ()
        self._stopped = False
        self._changed = threading.Condition()
        self._new: list[DeriveReply] = []

    def found(self, kinds: Sequence[CallKind]) -> DeriveReply | None:
        """Return the declaration that was proved for all these kinds of calls; None if there is none yet."""
        with self._changed:
            return self._record.found(kinds)

    def failed(self, kinds: Sequence[CallKind]) -> str:
        """Return the reason why these calls have no declaration; empty if the reason is unknown or may have changed."""
        with self._changed:
            if (answer := self._record.failed(kinds)) is not None:
                return answer.failure
            remaining = self._again_at - time.monotonic()
            if self._trouble is None or remaining <= 0 or difference(self._trouble.kinds, kinds):
                return ""
            why = f"{self._trouble.failure}; queue again in {math.ceil(remaining / 60)} min for another try"
            return f"working out how to split it failed ({why})"

    def new_answers(self) -> list[DeriveReply]:
        """Return the declarations found since the last call of this method."""
        with self._changed:
            new, self._new = self._new, []
            return new

    def begin(self, prompts: Sequence[PromptExample]) -> bool:
        """Start a child for these prompts, unless one is at work. Return True if the child works for these kinds of calls."""
        kinds = tuple(prompt.kind for prompt in prompts)
        with self._changed:
            if self._running:
                return not difference(self._running, kinds)
            self._running, self._stopped = kinds, False
            known = self._record.declarations
        threading.Thread(target=self._derive, args=(prompts, known), daemon=True).start()
        return True

    def wait(self, prompts: Sequence[PromptExample], cancelled: Callable[[], bool]) -> None:
        """Wait for a declaration for these calls, or a reason against one. End the child if `cancelled` returns True."""
        kinds = [prompt.kind for prompt in prompts]
        while not (self.found(kinds) or self.failed(kinds)):
            self.begin(prompts)
            with self._changed:
                self._changed.wait(LOOK)
            if cancelled():
                self.stop()
                return

    def stop(self) -> None:
        """End the child, if one is at work, and wait until it has ended."""
        with self._changed:
            self._stopped = True
            while self._running:
                self._changed.wait(LOOK)

    def _derive(self, prompts: Sequence[PromptExample], known: Sequence[Declaration]) -> None:
        """Derive in a child process, and store the reply. This method runs in a thread."""
        kinds = tuple(prompt.kind for prompt in prompts)
        answer: DeriveReply | None = DeriveReply(0.0, kinds=kinds, failure="its process failed")
        try:
            answer = self._answer(prompts, known)
        except Exception as error:  # prompts with unexpected values, or errors of the system
            answer = DeriveReply(0.0, kinds=kinds, failure=str(error).rstrip("."))
        finally:
            with self._changed:
                self._running = ()
                if answer is not None:
                    self._take(answer)
                self._changed.notify_all()

    def _answer(self, prompts: Sequence[PromptExample], known: Sequence[Declaration]) -> DeriveReply | None:
        """Return the child's reply; None if the child was stopped."""
        kinds = tuple(prompt.kind for prompt in prompts)
        memory = min(MEMORY, psutil.virtual_memory().available // 2)
        request = request_bytes(self._file, prompts, known, memory * WEIGHTS, self._seconds * PLAN)
        with memory_file("request_bytes") as descriptor:
            with open(descriptor, "wb", closefd=False) as file:
                file.write(request)
            command = [COMMAND, str(path_of(descriptor))]
            child = Child(self._folder, command, 1, self._seconds, memory, (descriptor,))
            for line in child.lines(lambda: self._stopped):
                log.info("Parallel: deriving %s took %.1f s and %d MiB", self._kind, line.seconds, line.memory >> 20)
                if line.failure:
                    return DeriveReply(line.seconds, kinds=kinds, failure=line.failure)
                answer = ANSWER.decode(line.text)
                return answer if answer.declaration else msgspec.structs.replace(answer, kinds=kinds)
        return None

    def _take(self, answer: DeriveReply) -> None:
        if not answer.declaration and not answer.lasting:
            self._trouble = answer
            self._again_at = time.monotonic() + max(self._pause, answer.seconds)
            log.info("Parallel: %s was not derived: %s", self._kind, answer.failure)
            return
        self._record = (load(self._key, self._cache_folder) or self._record).with_answer(answer)
        save(self._key, self._record, self._cache_folder)
        if answer.declaration:
            self._new.append(answer)
            log.info(
                "Parallel: new model %s: worked out how to split it (%.0f s, once; %s): queue again",
                self._kind, answer.seconds, answer.proof,
            )  # fmt: skip
        else:
            log.info("Parallel: %s", answer.failure)
