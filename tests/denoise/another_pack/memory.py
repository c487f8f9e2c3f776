"""They remember something, in a run or between runs."""

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


class State:
    """What an option may keep between runs."""

    def __init__(self):
        self.count = 0


def counts_in_an_option(model, x, sigmas, extra_args=None, callback=None, disable=None, state=None):
    state.count += 1
    return along(euler)(model, x * state.count, sigmas, extra_args, callback)


LOCAL = {"counts_in_a_run": counts_in_a_run}

REFUSED = {
    sample.__name__: (sample, "remembers what it has done")
    for sample in (counts_runs, counts_calls, counter(), counts_in_an_option)
}
