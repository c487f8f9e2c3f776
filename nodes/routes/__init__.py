"""What ComfyUI's server answers under /parallel: the state of the workers, the last run, the doctor, and a few actions.

One puts the sprites' files in place, one judges the files that loaders name, one tells what a run should come to,
one finds a message's entry of the troubleshooting page, one measures a graph. No other takes a parameter, and none answers a page
of another origin.
"""

from __future__ import annotations

from server import PromptServer

from ..runtime import backend
from .doctor import DoctorRoute
from .expectation import tell_expectation
from .guard import guarded
from .loaders import judge_loaders
from .panel import Panel
from .remedies import find_entry, show_page
from .sprites import put_sprites


def add_routes() -> None:
    """Have ComfyUI's server answer them."""
    routes = PromptServer.instance.routes
    doctor = DoctorRoute()
    panel = Panel(backend, doctor)
    routes.get("/parallel/doctor")(doctor.answer)
    routes.get("/parallel/status")(panel.status)
    routes.get("/parallel/run")(panel.run)
    for name, action in panel.actions().items():
        routes.post(f"/parallel/{name}")(action)
    routes.post("/parallel/sprites")(guarded(put_sprites))
    routes.post("/parallel/loaders")(guarded(judge_loaders))
    routes.get("/parallel/troubleshooting")(guarded(show_page))
    routes.post("/parallel/troubleshooting")(guarded(find_entry))
    routes.post("/parallel/expectation")(guarded(tell_expectation))
