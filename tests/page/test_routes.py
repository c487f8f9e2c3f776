"""The pack's registered routes: the parts of a request that each route reads, and the answer to a wrong body."""

from __future__ import annotations

import itertools
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.comfyui import ComfyUI
from tests.support.page.outcomes import idle

Read = frozenset[str]
Key = tuple[str, str]

GUARD = frozenset({"host", "headers.Origin", "headers.Sec-Fetch-Site"})
"""Parts of a request that identify its origin. Every route reads them."""

WITH_BODY = GUARD | {"content"}
TEXT: list[str] = []
"""Marks a body that is plain text, without fields."""

FIELDS: dict[Key, list[str] | None] = {
    ("POST", "doctor"): None,
    ("POST", "compare"): None,
    ("POST", "models"): None,
    ("POST", "bench"): ["graph", "name"],
    ("GET", "run"): None,
    ("GET", "status"): None,
    ("GET", "troubleshooting"): None,
    ("POST", "troubleshooting"): TEXT,
    ("POST", "expectation"): [
        *("kind", "file", "width", "height", "plan", "length", "batch"),
        *("two_sided", "weight_dtype", "steps", "compute", "prompts"),
    ],
    ("POST", "loaders"): ["kind", "file", "further_files", "type", "devices"],
    ("POST", "sprites"): None,
    ("POST", "measure"): None,
    ("POST", "free"): None,
    ("POST", "stop"): None,
    ("GET", "doctor"): None,
}
"""All routes of the pack by name, and the fields that each reads of its body; None for a route that reads no body.

The tests call the routes in this order: while the doctor runs, no other job begins, and the second route of the doctor gets
the findings of the same run.
"""

LOADER = {"kind": "UNETLoader", "file": "tiny-schnell.safetensors"}
NAMES = ("127.0.0.1", "localhost", "[::1]", "10.1.2.3", socket.gethostname())
"""Names of this machine by which a page may ask it."""

EXPECTED: dict[str, Any] = {
    "kind": "LoadParallelFlux",
    "file": "tiny-schnell.safetensors",
    "width": 64,
    "height": 64,
    "plan": {"devices": "cpu:2", "preset": "automatic"},
    "prompts": ["cond-37.safetensors"],
    "steps": 2,
}
UNMEASURED = {"graph": {"1": {"class_type": "KSampler", "inputs": {}}}, "name": "none"}
BODIES: dict[str, Any] = {"expectation": EXPECTED, "loaders": [LOADER], "bench": UNMEASURED}
"""A body for each route that takes JSON; the benchmark's body begins no benchmark."""

DEEP = b'{"graph": ' + b'{"a": ' * 100_000 + b"1" + b"}" * 100_001
SECONDS = 1.0
"""Longest time in seconds for which ComfyUI may not answer: the promise of test_panel_routes."""


def ask(server: ComfyUI, method: str, path: str, body: object = None, **headers: str) -> requests.Response:
    data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
    return requests.request(method, server.url + path, data=data, headers=headers, timeout=300)


def post(server: ComfyUI, name: str, body: object = None, **headers: str) -> requests.Response:
    return ask(server, "POST", f"/parallel/{name}", body, **headers)


def registered(server: ComfyUI, pack: str) -> dict[Key, list[str] | None]:
    """Return the routes of a pack in ComfyUI's server, which registers each route a second time under /api."""
    listed = [
        (method, path, fields) for method, path, module, fields in server.get("/other_pack/routes") if pack in module
    ]
    plain = {
        (method, path): fields for method, path, fields in listed if method != "HEAD" and not path.startswith("/api/")
    }
    again = {(method, path.removeprefix("/api")) for method, path, _ in listed if method != "HEAD"}
    assert again == plain.keys() and len(listed) >= 2 * len(plain)
    return plain


def watched(server: ComfyUI, method: str, path: str, body: object = None, **headers: str) -> tuple[Read, str]:
    """Return the parts of a request that a route's handler reads to answer, and the answer's text."""
    answer = ask(server, method, path, body, **headers, **{"X-Watch": "yes"})
    assert answer.status_code in (200, 409), answer.text
    return frozenset(json.loads(answer.headers["X-Read"])), answer.text


def test_each_registered_route_reads_only_the_guards_headers_and_its_own_body(comfyui: ComfyUI) -> None:
    """No route reads a query string, a part of the path, a cookie, or a field of a body that is not in the table.

    The doctor's requests, one by each name of this machine, come while the doctor runs and get the findings of this run.
    """
    assert registered(comfyui, "ComfyUI-Parallel") == {(m, f"/parallel/{name}"): f for (m, name), f in FIELDS.items()}
    idle(comfyui)
    bodies, read = BODIES | {"troubleshooting": "a message"}, {}
    *others, doctor = FIELDS
    for method, name in others:
        read[method, name], _ = watched(comfyui, method, f"/parallel/{name}?a=b", bodies.get(name))
    hosts = [f"{name}:{urlsplit(comfyui.url).port}" for name in NAMES]
    with ThreadPoolExecutor(len(hosts)) as pool:
        told = list(pool.map(lambda host: watched(comfyui, "GET", "/parallel/doctor?a=b", Host=host), hosts))
    assert len({*told}) == 1, "measured values differ from run to run"
    read[doctor], text = told[0]
    assert read == {key: GUARD if fields is None else WITH_BODY for key, fields in FIELDS.items()}
    findings = {finding["name"]: finding for finding in json.loads(text)}
    assert findings["torch"]["text"].startswith(torch.__version__.split("+")[0])
    assert findings["2 workers, cpu"]["status"] == "ok"
    assert "all-to-all through gloo" in findings["2 workers, cpu"]["text"]


def test_every_route_refuses_a_page_of_another_origin(comfyui: ComfyUI) -> None:
    """So it does with a page whose own name resolves to this machine."""
    port = urlsplit(comfyui.url).port
    hosts = ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "256.1.1.1")
    strange = (
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Host": f"evil.example:{port}", "Origin": f"http://evil.example:{port}"},
        *({"Host": f"{host}:{port}"} for host in hosts),
    )
    for (method, name), headers in itertools.product(FIELDS, strange):
        answer = ask(comfyui, method, f"/parallel/{name}", **headers)
        assert answer.status_code == 403, (method, name, headers)
        assert "Host" not in headers or answer.text.startswith(f"'{headers['Host']}'")


def test_a_route_that_reads_more_is_detected(comfyui: ComfyUI) -> None:
    planted = ("GET", "/other_pack/planted/{file}")
    assert planted in registered(comfyui, "other-pack")
    assert watched(comfyui, "GET", "/other_pack/planted/a?path=b")[0] == {"query", "match_info"}


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from([-1, 0, 2**31, 2**63, 2**64, 10**400, -(10**400), 1.5, 1e308, -1e308])
    | st.sampled_from(["", "a\0b", "../../../etc/passwd", "/etc/passwd", "a" * 5000, "cpu:999999", "auto", "7"])
    | st.integers()
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
PLAN = (
    *("devices", "cfg", "pipefusion", "ulysses", "ring", "data", "patches", "warmup_steps"),
    *("stages", "weights", "attention", "memory_limit", "exchange", "compile", "preset", "none"),
)
PLACES: list[tuple[str, tuple[str | int, ...]]] = [
    *(("expectation", (field,)) for field in FIELDS["POST", "expectation"] or ()),
    *(("expectation", ("plan", field)) for field in PLAN),
    *(("loaders", (0, field)) for field in FIELDS["POST", "loaders"] or ()),
    *(("bench", (field,)) for field in FIELDS["POST", "bench"] or ()),
    *(("bench", ("graph", "1", *path)) for path in ((), ("class_type",), ("inputs",), ("inputs", "unet_name"))),
    *((name, ()) for name in BODIES),
]
"""All values in a body that a test replaces: the route, and the path to the value."""


def changed(content: Any, path: tuple[str | int, ...], value: Any) -> Any:
    """Return a body with another value at one path."""
    if not path:
        return value
    inner = content[path[0]] if isinstance(content, list) else content.get(path[0])
    new = changed(inner, path[1:], value)
    return [new] if isinstance(content, list) else content | {path[0]: new}


def check_is_answered(answer: requests.Response) -> None:
    """Check that a wrong body gets an answer of one sentence, which says that the body is wrong."""
    assert answer.status_code in (200, 400, 409, 413), (answer.status_code, answer.text)
    if answer.status_code in (400, 413):
        assert answer.text.startswith("The body ") and answer.text.endswith("."), answer.text


@settings(max_examples=120)
@given(place=st.sampled_from(PLACES), value=JSON)
def test_no_value_of_a_bodys_field_causes_a_server_error(
    comfyui: ComfyUI,
    place: tuple[str, tuple[str | int, ...]],
    value: Any,
) -> None:
    name, path = place
    if name == "bench" and path in ((), ("graph",)) and not value:
        return  # the route would measure the pack's own graph
    body = changed(BODIES[name], path, value)
    if not (name == "bench" and isinstance(body, dict) and not body.get("graph")):
        check_is_answered(post(comfyui, name, body))


@settings(max_examples=30)
@given(name=st.sampled_from(["expectation", "loaders", "bench", "troubleshooting"]), body=st.binary(min_size=1))
def test_no_bytes_of_a_body_cause_a_server_error(comfyui: ComfyUI, name: str, body: bytes) -> None:
    check_is_answered(post(comfyui, name, body))


@pytest.mark.parametrize(
    ("name", "body", "said"),
    [
        ("expectation", EXPECTED | {"batch": 0}, "Expected `int` >= 1 - at `$.batch`"),
        ("expectation", EXPECTED | {"width": -64}, "Expected `int` >= 1 - at `$.width`"),
        ("expectation", EXPECTED | {"height": 0}, "Expected `int` >= 1 - at `$.height`"),
        ("expectation", EXPECTED | {"height": 10**300}, "an integer of more than 64 bits"),
        ("expectation", EXPECTED | {"file": "a\0b"}, "'a\\x00b' has a NUL"),
        ("expectation", EXPECTED | {"prompts": ["a\0b"]}, "'a\\x00b' has a NUL"),
        ("expectation", EXPECTED | {"file": "../../x"}, "'../../x' is outside of ComfyUI's folders"),
        ("expectation", EXPECTED | {"prompts": ["/etc/passwd"]}, "'/etc/passwd' is outside of ComfyUI's folders"),
        ("expectation", EXPECTED | {"plan": {"preset": []}}, "Expected `str`, got `array`"),
        ("loaders", [LOADER | {"file": "a\0b"}], "'a\\x00b' has a NUL"),
        ("loaders", [LOADER | {"further_files": ["a\0b"]}], "'a\\x00b' has a NUL"),
        ("loaders", b"{", "truncated"),
        ("loaders", [LOADER] * 1001, "Expected `array` of length <= 1000"),
        ("loaders", [0] * 200_000, "more than 200000 values"),
        ("bench", DEEP, "nests deeper than 64 levels"),
        ("bench", UNMEASURED | {"more": json.loads("[" * 65 + "]" * 65)}, "nests deeper than 64 levels"),
        ("bench", b'{"name": "\xff"}', "is not UTF-8 (byte 10)"),
        ("troubleshooting", b"\xff\xfe", "is not UTF-8 (byte 0)"),
    ],
)
def test_a_wrong_body_is_refused_in_a_sentence(comfyui: ComfyUI, name: str, body: object, said: str) -> None:
    answer = post(comfyui, name, body)
    check_is_answered(answer)
    assert answer.status_code == 400 and said in answer.text


def test_a_graph_nested_to_the_limit_is_handled_as_any_other(comfyui: ComfyUI) -> None:
    idle(comfyui)
    graph = {"1": {"class_type": "KSampler", "inputs": {"a": json.loads("[" * 60 + "]" * 60)}}}
    answer = post(comfyui, "bench", {"graph": graph})
    assert (answer.status_code, "has no Load Diffusion Model" in answer.json()["said"]) == (409, True)


def test_a_benchmark_that_fails_to_start_leaves_none_active(comfyui: ComfyUI) -> None:
    idle(comfyui)
    for body in (DEEP, b'{"name": "\xff"}', UNMEASURED | {"graph": 1}, UNMEASURED):
        assert post(comfyui, "bench", body).status_code in (400, 409)
        assert comfyui.get("/parallel/status")["bench"]["doing"] == ""
        assert "has no Load Diffusion Model" in post(comfyui, "bench", UNMEASURED).text, "it can begin again"


@pytest.fixture
def longest_gap(comfyui: ComfyUI) -> Iterator[list[float]]:
    """Provide a list of the seconds that ComfyUI took for each of its answers while the test runs."""
    taken, ended = [0.0], threading.Event()

    def look() -> None:
        while not ended.is_set():
            started = time.perf_counter()
            comfyui.get("/queue")
            taken.append(time.perf_counter() - started)

    thread = threading.Thread(target=look)
    thread.start()
    yield taken
    ended.set()
    thread.join()


@pytest.mark.parametrize(
    ("name", "body", "status"),
    [
        ("troubleshooting", b"x " * 15_500_000, 413),
        ("troubleshooting", b"x " * (1 << 19), 200),
        ("expectation", b'"' + b"x" * 31_000_000, 413),
        ("loaders", [{"kind": "UNETLoader", "file": f"{number}"} for number in range(1000)], 200),
        ("bench", {"graph": {str(n): {"class_type": "a", "inputs": {"a": [n] * 8}} for n in range(15_000)}}, 409),
        ("stop", b"x" * 31_000_000, 200),
    ],
    ids=["31 MB", "1 MB", "31 MB of JSON", "1000 loaders", "15000 nodes", "31 MB that nobody reads"],
)
def test_comfyui_answers_while_a_large_body_is_read(
    comfyui: ComfyUI,
    longest_gap: list[float],
    name: str,
    body: object,
    status: int,
) -> None:
    idle(comfyui)
    answer = post(comfyui, name, body)
    assert answer.status_code == status, answer.text
    check_is_answered(answer)
    assert max(longest_gap) < SECONDS
    assert len(longest_gap) > 1
