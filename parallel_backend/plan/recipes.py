"""Recipes: the settings to choose on a machine for popular models, by predicted seconds, one line each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from .offers import PIPEFUSION, Offer, OfferRequest, offered
from .plan import AUTOMATIC, SMALLEST

MODELS = (
    "flux-dev",
    "flux2-dev",
    "qwen-image",
    "z-image-turbo",
    "wan2.2-14b",
    "wan2.2-5b",
    "hunyuan-video",
    "minimax-h3",
)
HEAD = ("model", "1 GPU", "choose", "seconds", "gain", "GB a GPU", "approximate (*slow links*)")
REPLICATED = ("replicated",)
"""The weight storage of a plan that sets no `weights`."""

WORTH = 1.05
"""The smallest speedup at which several GPUs are worth choosing."""

AS_FAST = 1.02
"""Plans that take at most this many times the fastest plan's seconds count as equally fast; the plainest is chosen."""

Ask = Callable[[str, str], OfferRequest]
"""A function of a model's name and the weights' dtype that returns a request with the usual values for everything else."""


def recipe(ask: Ask, gpus: int) -> Iterator[Sequence[str]]:
    """Yield a line for each model in bf16, and in fp8 if bf16 does not fit whole into one GPU. HEAD names the columns."""
    for name in MODELS:
        request = ask(name, "bf16")
        yield _line(name, request, gpus)
        if not offered(request, 1)[0].fits:
            yield _line(f"{name}, fp8", ask(name, "fp8"), gpus)


def _line(title: str, request: OfferRequest, gpus: int) -> Sequence[str]:
    alone, together = (_best(request, count, exact=True) for count in (1, gpus))
    streaming = _best(request, gpus, exact=False)
    if together is None:
        return title, _seconds(alone), "nothing fits", "", "", "", _seconds(streaming)
    gain = alone.seconds / together.seconds if alone else None
    choice = _choice(together, request, gpus)
    if gain is not None and gain < WORTH:
        choice = f"one GPU ({choice})"
    return (
        title,
        _seconds(alone),
        choice,
        _seconds(together),
        f"{gain:.2f}x" if gain else "",
        f"{together.memory / 1e9:.1f}",
        _seconds(streaming),
    )


def _best(request: OfferRequest, gpus: int, *, exact: bool) -> Offer | None:
    """Return the plainest of the fastest plans that fit; None if no plan fits.

    Args:
        request: the job and the machine.
        gpus: the number of GPUs.
        exact: True for exact plans, False for plans with PipeFusion, which change the picture slightly.
    """
    fitting = [offer for offer in offered(request, gpus) if offer.fits and (offer.storage == PIPEFUSION) != exact]
    least = min((offer.seconds for offer in fitting), default=0.0)
    return next((offer for offer in fitting if offer.seconds <= AS_FAST * least), None)


def _choice(offer: Offer, request: OfferRequest, gpus: int) -> str:
    """Return an offer in the words of Parallel Plan, whose preset automatic streams only weights that do not fit whole."""
    whole = any(each.fits for each in offered(replace(request, weights=REPLICATED), gpus) if each.storage != PIPEFUSION)
    streaming = SMALLEST if whole else AUTOMATIC
    settings = {"streamed": f"*{streaming}*", "sharded": f"*{AUTOMATIC}* with `weights` sharded"}
    return f"{settings.get(offer.storage, f'*{AUTOMATIC}*')}: {offer.degrees}"


def _seconds(offer: Offer | None) -> str:
    if offer is None:
        return "does not fit"
    return f"{offer.seconds:.1f}" if offer.seconds < 100 else f"{offer.seconds:.0f}"
