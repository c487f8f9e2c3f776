"""HTTP routes of ComfyUI's server under /parallel: the workers' state, the last run, the doctor, and a few actions.

A route reads the body that it declares here, and the headers that guard.py checks; it reads nothing else of a request. Every
route refuses pages of another origin.
"""

from __future__ import annotations

from server import PromptServer

from ..runtime import backend, progress
from .body import JsonBody, TextBody
from .doctor import DoctorRoute
from .expectation import ExpectationRequest, tell_expectation
from .loaders import LoaderList, judge_loaders
from .panel import Panel
from .remedies import find_entry, show_page
from .route import Route, in_thread
from .sprites import put_sprites
from .turn import Turn


def routes() -> tuple[Route, ...]:
    """Return all routes of this pack."""
    turn = Turn()
    doctor = DoctorRoute(turn)
    panel = Panel(backend, progress, doctor, turn)
    return (
        Route("GET", "doctor", doctor.answer),
        *panel.routes(),
        Route("POST", "sprites", in_thread(put_sprites)),
        Route("POST", "loaders", in_thread(judge_loaders), JsonBody(LoaderList, "a list of loaders")),
        Route("GET", "troubleshooting", in_thread(show_page)),
        Route("POST", "troubleshooting", in_thread(find_entry), TextBody()),
        Route("POST", "expectation", in_thread(tell_expectation), JsonBody(ExpectationRequest, "a loader with a size")),
    )


def add_routes() -> None:
    """Register the routes with ComfyUI's server."""
    table = PromptServer.instance.routes
    add = {"GET": table.get, "POST": table.post}
    for route in routes():
        add[route.method](f"/parallel/{route.name}")(route.handle)
