from tests.host.conftest import relative_error
from tests.host.graphs import ksampler_graph, parallel


def test_smoke(latent_of):
    graph = ksampler_graph("tiny-schnell", cfg=2.0)
    assert relative_error(latent_of(parallel(graph)), latent_of(graph)) < 1e-5
