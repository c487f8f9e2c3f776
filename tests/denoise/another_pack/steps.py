"""How most of them go from step to step."""


def steps(model, x, sigmas, extra_args, callback):
    """Euler's, as a generator that is sent what x becomes."""
    ones = x.new_ones([x.shape[0]])
    for i in range(len(sigmas) - 1):
        denoised = model(x, sigmas[i] * ones, **extra_args)
        if callback is not None:
            callback({"x": x, "i": i, "sigma": sigmas[i], "sigma_hat": sigmas[i], "denoised": denoised})
        x = yield i, x, denoised, sigmas[i], sigmas[i + 1]


def along(step):
    """A sampler of a step: (i, x, denoised, sigma, sigma_next) -> x."""

    def sample(model, x, sigmas, extra_args=None, callback=None, disable=None, **options):
        running = steps(model, x, sigmas, extra_args, callback)
        try:
            now = next(running)
            while True:
                x = step(*now, **options)
                now = running.send(x)
        except StopIteration:
            return x

    sample.__name__ = step.__name__
    return sample
