"""The loop over steps that most of these samplers share."""


def steps(model, x, sigmas, extra_args, callback):
    """Yield each step's values, as in Euler's loop, and receive the new x."""
    ones = x.new_ones([x.shape[0]])
    for i in range(len(sigmas) - 1):
        denoised = model(x, sigmas[i] * ones, **extra_args)
        if callback is not None:
            callback({"x": x, "i": i, "sigma": sigmas[i], "sigma_hat": sigmas[i], "denoised": denoised})
        x = yield i, x, denoised, sigmas[i], sigmas[i + 1]


def along(step):
    """Return a sampler that applies a step: (i, x, denoised, sigma, sigma_next) -> x."""

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
