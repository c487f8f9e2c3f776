"""Graphs with latents whose size does not fit the model or the inputs next to the latent; none runs in ComfyUI either."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from scripts.comfyui import ComfyUI
from tests.refusals.kinds import literally
from tests.support.graphs.comfyui import graph_of, save_families, save_latent, with_guides, with_reference, with_tensors
from tests.support.graphs.flux import Graph, node
from tests.support.tiny.models import draw

ODD = (
    "does not pad latents, and the latent ({}) is not a multiple of 1 x 2 x 2: the nearest size that works has a "
    "latent of {}."
)
FOR = "in the conditioning is for a latent of {} and the one to sample is of {}: use the latent output of the node"
CONTROL = {
    "vace_frames": draw(2, 1, 32, 3, 8, 10, seed=31),
    "vace_mask": (draw(2, 1, 64, 3, 8, 10, seed=32) > 0).float(),
}
CASES: Mapping[str, tuple[str, tuple[int, ...], Mapping[str, Tensor], str]] = {
    "vace, odd": ("vace", (1, 16, 3, 8, 9), {}, f"WAN21_Vace {ODD.format('3 x 8 x 9', '3 x 8 x 10')}"),
    "kandinsky, odd": ("kandinsky", (1, 16, 3, 9, 10), {}, f"Kandinsky5 {ODD.format('3 x 9 x 10', '3 x 10 x 10')}"),
    "hunyuan, odd": ("hunyuan", (1, 16, 3, 7, 10), {}, f"HunyuanVideo {ODD.format('3 x 7 x 10', '3 x 8 x 10')}"),
    "vace, longer": ("vace", (1, 16, 5, 8, 10), CONTROL, f"vace_context {FOR.format('3 x 8 x 10', '5 x 8 x 10')}"),
    "camera, longer": (
        "camera",
        (1, 16, 5, 8, 10),
        {"camera_conditions": draw(1, 24, 3, 64, 80, seed=23)},
        f"camera_conditions {FOR.format('3 x 8 x 10', '5 x 8 x 10')}",
    ),
    "s2v, smaller": (
        "s2v",
        (1, 16, 3, 6, 8),
        {"control_video": draw(1, 16, 3, 8, 10, seed=7)},
        f"control_video {FOR.format('3 x 8 x 10', '3 x 6 x 8')}",
    ),
    "fun control, longer": (
        "fun_control",
        (1, 16, 5, 8, 10),
        {"concat_latent_image": draw(1, 32, 3, 8, 10, seed=30)},
        "the picture or video that is added to the latent, such as a first frame or a control video, is of 3 x 8 x 10 "
        "and the latent to sample is of 5 x",
    ),
    "animate, smaller": (
        "animate",
        (1, 16, 3, 6, 8),
        {"pose_video_latent": draw(1, 16, 2, 8, 10, seed=26)},
        "pose_latents in the conditioning has the shape [1, 16, 2, 8, 10] and the latent to sample has frames of 6 x "
        "8: encode the",
    ),
    "kandinsky, a larger first frame": (
        "kandinsky",
        (1, 16, 3, 6, 8),
        {"time_dim_replace": draw(1, 16, 1, 8, 10, seed=28)},
        "time_dim_replace in the conditioning has the shape [1, 16, 1, 8, 10] and the latent to sample has frames of "
        "6 x 8: encode",
    ),
}
"""The family, the latent's shape, further tensors of the prompts, and the beginning of the refusal."""


def wrong_sizes(server: ComfyUI) -> Iterator[tuple[str, Graph, str]]:
    """Yield each graph with its name, for ComfyUI's own loader, and the beginning of the refusal."""
    save_families(server, *dict.fromkeys(family for family, *_ in CASES.values()), "flux2", "ltxv")
    for number, (name, (family, shape, given, said)) in enumerate(CASES.items()):
        save_latent(server, f"sized-{number}", *shape)
        graph = graph_of(family) | {"latent": node("LoadLatent", latent=f"sized-{number}.latent")}
        yield name, with_tensors(server, graph, f"sized-{number}", given) if given else graph, literally(said)
    save_latent(server, "sized-video", 1, 128, 2, 6, 4)
    said = (
        "a reference latent has the shape [1, 128, 2, 6, 4] and Flux2 takes 4 dimensions: encode the reference picture"
    )
    yield "flux.2, a video as reference", with_reference(graph_of("flux2", cfg=1.0), "sized-video"), literally(said)
    graph = with_guides(server, graph_of("ltxv"), "latent")
    graph["sampler"]["inputs"]["latent_image"] = ["latent", 0]
    said = (
        r"the prompt has guides of \d+ tokens and the latent to sample \(3 x 4 x 5\) has none after its frames: "
        "sample the"
    )
    yield "ltx-video, guides that are not there", graph, said
