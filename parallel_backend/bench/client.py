"""A client of a ComfyUI server: it queues graphs over the HTTP API and follows them by the server's events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Literal

import aiohttp
import requests
from typing_extensions import Self

from ..errors import Cancelled

LOOK = 5.0
"""Seconds without an event after which the client looks at the queue. A job that is removed from the queue sends no event."""

Graph = dict[str, Any]
"""A graph in ComfyUI's API format: node id -> {"class_type", "inputs"}."""

_TEXT, _PREVIEW_WITH_METADATA = 3, 4  # protocol.BinaryEventTypes


class ComfyUIError(RuntimeError):
    """The error of a ComfyUI that did not start, died, or refused a request."""


@dataclass(frozen=True)
class NodeError:
    """The exception that ended a run, as ComfyUI reports it."""

    node_id: str
    node_type: str
    exception_type: str
    exception_message: str
    traceback: str


@dataclass(frozen=True)
class StepProgress:
    """One step of one node, and the time when it was reported (time.perf_counter)."""

    value: int
    max: int
    node: str
    time: float


@dataclass(frozen=True)
class NodeText:
    """A text shown on a node, and the time when it was reported (time.perf_counter)."""

    node: str
    text: str
    time: float


@dataclass
class QueuedRun:
    """The state and the results of one queued graph.

    Attributes:
        status: `rejected` means that ComfyUI's validation refused the graph. `error` then sums up `node_errors`.
        node_errors: the errors of validation. A graph with only some valid outputs runs, with `node_errors` for the other
            outputs.
    """

    prompt_id: str
    status: Literal["pending", "success", "error", "interrupted", "rejected"] = "pending"
    outputs: dict[str, dict[str, Any]] = field(default_factory=dict)
    node_errors: dict[str, Any] = field(default_factory=dict)
    error: NodeError | None = None
    messages: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    progress: list[StepProgress] = field(default_factory=list)
    texts: list[NodeText] = field(default_factory=list)
    previews: int = 0
    submitted: float = 0.0  # time.perf_counter
    ended: float = 0.0  # time.perf_counter
    cached: list[str] = field(default_factory=list)
    started: dict[str, float] = field(default_factory=dict)  # node -> time.perf_counter

    def check(self) -> Self:
        """Return self, or raise ComfyUIError if the run did not succeed."""
        if self.status != "success":
            raise ComfyUIError(f"the run's status is {self.status}: {self.error or self.node_errors or 'no error'}")
        return self


@dataclass(frozen=True)
class _Event:
    kind: str
    data: dict[str, Any]
    time: float = field(default_factory=time.perf_counter)


class Client(ABC):
    """A client that queues graphs at the ComfyUI at `url`, once it listens to the server's events."""

    def __init__(self) -> None:
        self.url = ""
        self._client_id = uuid.uuid4().hex
        self._listener: threading.Thread | None = None
        self._hang_up: Callable[[], object] = lambda: None
        self._runs: dict[str, tuple[QueuedRun, SimpleQueue[_Event]]] = {}
        self._http = requests.Session()
        self._http.trust_env = False  # no proxy between here and 127.0.0.1

    def _with_log(self, message: str) -> str:
        """Return a message of an error, with more facts if there are any."""
        return f"{message}."

    def _was_removed(self, prompt_id: str) -> bool:
        """Return True if another client removed a graph from the queue.

        The client asks this when the graph has reported nothing for LOOK seconds.
        """
        return False

    @abstractmethod
    def folder(self, kind: str) -> Path:
        """Return the path of this ComfyUI's folder `output` or `temp`."""

    def files(self, run: QueuedRun, node_id: str) -> list[Path]:
        """Return the files that an output node saved."""
        items = (item for value in run.outputs[node_id].values() for item in value if isinstance(item, dict))
        return [self.folder(item["type"]) / item["subfolder"] / item["filename"] for item in items]

    def queue(
        self,
        graph: Graph,
        *,
        on_progress: Callable[[StepProgress], None] | None = None,
        on_text: Callable[[NodeText], None] | None = None,
        timeout: float = 120,
    ) -> QueuedRun:
        """Queue a graph and wait until it is done, has failed, was interrupted or is rejected."""
        run = self._submit(graph)
        if run.status == "rejected":
            return run
        return self.wait(run.prompt_id, on_progress=on_progress, on_text=on_text, timeout=timeout)

    def submit(self, graph: Graph) -> str:
        """Queue a graph and return its prompt id for `wait`. Raises ComfyUIError if it is rejected."""
        run = self._submit(graph)
        if run.status == "rejected":
            run.check()
        return run.prompt_id

    def _submit(self, graph: Graph) -> QueuedRun:
        run = QueuedRun(str(uuid.uuid4()))
        self._runs[run.prompt_id] = run, SimpleQueue()
        run.submitted = time.perf_counter()
        body: dict[str, Any] = {"prompt": graph, "prompt_id": run.prompt_id, "client_id": self._client_id}
        response = self._http.post(f"{self.url}/prompt", json=body, timeout=60)
        answer = response.json()
        run.node_errors = answer["node_errors"]
        if response.status_code == 400:
            del self._runs[run.prompt_id]
            run.status = "rejected"
            run.error = _rejection(answer["error"], run.node_errors)
        else:
            response.raise_for_status()
        return run

    def wait(
        self,
        prompt_id: str,
        *,
        on_progress: Callable[[StepProgress], None] | None = None,
        on_text: Callable[[NodeText], None] | None = None,
        timeout: float = 120,
    ) -> QueuedRun:
        """Wait for a submitted graph. Call `on_progress` in this thread at every step, and `on_text` at every text.

        Raises:
            TimeoutError: the graph takes longer than `timeout`. It can be waited for again.
            ComfyUIError: the server died.
            Cancelled: the graph was removed from the queue.
        """
        run, events = self._runs[prompt_id]
        deadline = time.monotonic() + timeout
        while run.status == "pending":
            try:
                event = events.get(timeout=min(LOOK, max(0.0, deadline - time.monotonic())))
            except Empty:
                if self._was_removed(prompt_id):
                    raise Cancelled("its job was taken out of the queue.") from None
                if time.monotonic() < deadline:
                    continue
                raise TimeoutError(self._with_log(f"the graph was not done after {timeout:g} s")) from None
            match event.kind:
                case "progress":
                    data = event.data
                    run.progress.append(StepProgress(data["value"], data["max"], data["node"], event.time))
                    if on_progress is not None:
                        on_progress(run.progress[-1])
                case "text":
                    run.texts.append(NodeText(event.data["node"], event.data["text"], event.time))
                    if on_text is not None:
                        on_text(run.texts[-1])
                case "preview":
                    run.previews += 1
                case "execution_cached":
                    run.cached = event.data["nodes"]
                case "executing" if event.data["node"] is not None:
                    run.started[event.data["node"]] = event.time
                case "executing":
                    run.ended = event.time
                    _finish(run, self.history(prompt_id))
                case "closed":
                    raise ComfyUIError(self._with_log("ComfyUI ended while a graph was running"))
        del self._runs[prompt_id]
        return run

    def interrupt(self, prompt_id: str | None = None) -> None:
        """Press Cancel: interrupt the running graph, or only the given graph if it is running."""
        self._post("/interrupt", {"prompt_id": prompt_id} if prompt_id else {})

    def free(self, *, cached: bool = True) -> None:
        """Ask ComfyUI to unload all models, and to drop its `cached` results. ComfyUI does so once it is idle."""
        self._post("/free", {"unload_models": True} | ({"free_memory": True} if cached else {}))

    def history(self, prompt_id: str) -> dict[str, Any]:
        """Return ComfyUI's record of a finished graph: outputs, status, prompt."""
        entry: dict[str, Any] = self.get(f"/history/{prompt_id}")[prompt_id]
        return entry

    def object_info(self, node_id: str) -> dict[str, Any]:
        """Return ComfyUI's description of a kind of node, which is empty if there is no such node."""
        info: dict[str, Any] = self.get(f"/object_info/{node_id}").get(node_id, {})
        return info

    def get(self, path: str) -> Any:
        """GET a path of the server's API and return the JSON it answers."""
        response = self._http.get(self.url + path, timeout=60)
        response.raise_for_status()
        return response.json()

    def ask(self, path: str, content: Any) -> Any:
        """POST a value as JSON and return the JSON that is answered."""
        response = self._http.post(self.url + path, json=content, timeout=60)
        response.raise_for_status()
        return response.json()

    def _post(self, path: str, body: dict[str, Any]) -> None:
        self._http.post(self.url + path, json=body, timeout=60).raise_for_status()

    def _listen(self, timeout: float) -> None:
        ready = threading.Event()

        async def listen() -> None:
            loop, task = asyncio.get_running_loop(), asyncio.current_task()
            assert task is not None
            self._hang_up = lambda: loop.call_soon_threadsafe(task.cancel)
            async with (
                aiohttp.ClientSession() as session,
                session.ws_connect(f"{self.url}/ws?clientId={self._client_id}", max_msg_size=0) as websocket,
            ):
                # makes previews name the graph that they belong to
                flags = {"type": "feature_flags", "data": {"supports_preview_metadata": True}}
                await websocket.send_json(flags)
                async for message in websocket:
                    event = _decode(message)
                    if event.kind == "feature_flags":
                        ready.set()
                    self._deliver(event)

        def run() -> None:
            try:
                with contextlib.suppress(aiohttp.ClientError, asyncio.CancelledError):  # either side has closed
                    asyncio.run(listen())
            finally:
                for _, events in list(self._runs.values()):
                    events.put(_Event("closed", {}))

        self._listener = threading.Thread(target=run, name="comfyui-events", daemon=True)
        self._listener.start()
        if not ready.wait(timeout):
            raise ComfyUIError(self._with_log("ComfyUI's websocket did not answer"))

    def _listen_no_more(self) -> None:
        if self._listener is not None:
            with contextlib.suppress(RuntimeError):  # the event loop has ended already
                self._hang_up()
            self._listener.join()
            self._listener = None

    def _deliver(self, event: _Event) -> None:
        if event.kind == "text":  # a text does not name its graph, and ComfyUI runs one graph at a time
            for _, events in list(self._runs.values()):
                events.put(event)
        if entry := self._runs.get(event.data.get("prompt_id", "")):
            entry[1].put(event)


def _decode(message: aiohttp.WSMessage) -> _Event:
    if message.type == aiohttp.WSMsgType.TEXT:
        content = json.loads(message.data)
        return _Event(content["type"], content["data"])
    if message.type == aiohttp.WSMsgType.BINARY:
        kind, length = struct.unpack_from(">II", message.data)
        if kind == _PREVIEW_WITH_METADATA:
            return _Event("preview", json.loads(message.data[8 : 8 + length]))
        if kind == _TEXT:
            node, text = message.data[8 : 8 + length], message.data[8 + length :]
            return _Event("text", {"node": node.decode(), "text": text.decode()})
    return _Event("other", {})


def _finish(run: QueuedRun, entry: dict[str, Any]) -> None:
    # the history's own status_str calls an interrupted run an error
    run.outputs = entry["outputs"]
    run.messages = [(kind, data) for kind, data in entry["status"]["messages"]]
    kind, data = run.messages[-1]
    match kind:
        case "execution_success":
            run.status = "success"
        case "execution_interrupted":
            run.status = "interrupted"
        case _:
            run.status = "error"
            run.error = NodeError(
                data["node_id"],
                data["node_type"],
                data["exception_type"],
                data["exception_message"].strip(),
                "".join(data["traceback"]),
            )


def _rejection(error: dict[str, Any], node_errors: dict[str, Any]) -> NodeError:
    for node_id, node in node_errors.items():
        message = "; ".join(f"{item['message']}: {item['details']}" for item in node["errors"])
        return NodeError(node_id, node["class_type"], error["type"], message, "")
    return NodeError("", "", error["type"], f"{error['message']} {error['details']}".strip(), "")
