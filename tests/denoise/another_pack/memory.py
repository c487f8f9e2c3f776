"""Samplers that keep state, within a run or between runs."""

import io
import itertools
import random
import threading
from collections import deque
from types import SimpleNamespace

import numpy as np
import torch

from . import steps
from .elementwise import euler
from .steps import along

COUNT = 0
CALLS: list[int] = []


def counts_in_a_run(model, x, sigmas, extra_args=None, callback=None, disable=None):
    count = [0]

    def step(i, x, denoised, sigma, sigma_next):
        count[0] += 1
        return denoised + (x - denoised) * (sigma_next / sigma) * (1 - 0.01 * count[0])

    return along(step)(model, x, sigmas, extra_args, callback)


def counts_runs(model, x, sigmas, extra_args=None, callback=None, disable=None):
    global COUNT
    COUNT += 1
    return along(euler)(model, x * COUNT, sigmas, extra_args, callback)


def counts_calls(model, x, sigmas, extra_args=None, callback=None, disable=None):
    CALLS.append(len(CALLS))
    return along(euler)(model, x * len(CALLS), sigmas, extra_args, callback)


def counter():
    count = 0

    def counts_in_a_closure(model, x, sigmas, extra_args=None, callback=None, disable=None):
        nonlocal count
        count += 1
        return along(euler)(model, x * count, sigmas, extra_args, callback)

    return counts_in_a_closure


def counts_in_an_option(model, x, sigmas, extra_args=None, callback=None, disable=None, state=None):
    return along(euler)(model, x * state.next(), sigmas, extra_args, callback)


class Counter:
    """A counter in an object and in its class."""

    made = 0

    def __init__(self):
        self.count = 0

    def next(self):
        self.count += 1
        return self.count

    @classmethod
    def next_of_all(cls):
        cls.made += 1
        return cls.made


class Slotted:
    """A counter in an object without `__dict__`."""

    __slots__ = ("count",)

    def next(self):
        self.count = getattr(self, "count", 0) + 1
        return self.count


OBJECT, SLOTTED = Counter(), Slotted()
SPACE, NESTED = SimpleNamespace(count=0), SimpleNamespace(inner=Counter())
QUEUE, SEEN, ARRAY, TENSOR = deque(), set(), np.zeros(1), torch.zeros(1)
DICE, GENERATOR = random.Random(1), torch.Generator()
LOCALS = threading.local()
ENDLESS, NUMBERS, FILE = itertools.count(1), (number for number in range(1, 1000)), io.BytesIO()


def next_in_default(counts=[0]):  # noqa: B006
    counts[0] += 1
    return counts[0]


def next_in_attribute():
    next_in_attribute.count = getattr(next_in_attribute, "count", 0) + 1
    return next_in_attribute.count


def times(name, number, change=lambda: None):
    """Return a sampler that multiplies the latent by a number, which `change` or the number's own function lets grow."""

    def sample(model, x, sigmas, extra_args=None, callback=None, disable=None):
        change()
        return along(euler)(model, x * number(), sigmas, extra_args, callback)

    sample.__name__ = name
    return sample


ELSEWHERE = [
    times("counts_in_an_object", OBJECT.next),
    times("counts_in_a_class", Counter.next_of_all),
    times("counts_in_slots", SLOTTED.next),
    times("counts_in_a_nested_object", lambda: NESTED.inner.next()),
    times("counts_in_a_namespace", lambda: SPACE.count, lambda: setattr(SPACE, "count", SPACE.count + 1)),
    times("counts_in_a_queue", lambda: len(QUEUE), lambda: QUEUE.append(0)),
    times("counts_in_a_set", lambda: len(SEEN), lambda: SEEN.add(len(SEEN))),
    times("counts_in_an_array", lambda: float(ARRAY[0]), lambda: np.add(ARRAY, 1, out=ARRAY)),
    times("counts_in_a_tensor", lambda: float(TENSOR), lambda: TENSOR.add_(1)),
    times("counts_in_a_thread", lambda: len(vars(LOCALS)), lambda: setattr(LOCALS, f"call_{len(vars(LOCALS))}", True)),
    times("counts_in_a_module", lambda: steps.REMEMBERED, lambda: setattr(steps, "REMEMBERED", steps.REMEMBERED + 1)),
    times("counts_in_a_default", next_in_default),
    times("counts_in_an_attribute", next_in_attribute),
    times("draws_from_its_dice", DICE.random),
    times("draws_from_its_generator", lambda: float(torch.rand(1, generator=GENERATOR))),
]

GOES_ON = {
    "count": times("counts_with_itertools", lambda: next(ENDLESS)),
    "generator": times("goes_on_with_a_generator", lambda: next(NUMBERS)),
    "BytesIO": times("counts_in_a_file", lambda: FILE.tell(), lambda: FILE.write(b" ")),
}


def remembered():
    """Return all state that these samplers keep, as strings."""
    return [
        *(repr(vars(each)) for each in (OBJECT, NESTED.inner, SPACE, LOCALS, next_in_attribute)),
        *(
            repr(each)
            for each in (COUNT, CALLS, QUEUE, SEEN, ARRAY, TENSOR, Counter.made, next_in_default.__defaults__)
        ),
        repr(getattr(SLOTTED, "count", None)),
        repr(steps.REMEMBERED),
        repr(ENDLESS),
        repr(NUMBERS.gi_frame.f_lasti),
        repr(FILE.tell()),
        repr(DICE.getstate()),
        repr(GENERATOR.get_state().tolist()),
    ]


LOCAL = {"counts_in_a_run": counts_in_a_run}

REFUSED = {
    sample.__name__: (sample, "keeps state between runs")
    for sample in (counts_runs, counts_calls, counter(), counts_in_an_option, *ELSEWHERE)
} | {
    sample.__name__: (sample, f"reads from a {kind}, whose position cannot be restored")
    for kind, sample in GOES_ON.items()
}
