"""Load Parallel VAE in a real ComfyUI gives the same pixels and latents as Load VAE, with ComfyUI's own nodes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import av
import psutil
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from parallel_backend.worker.process.environment import FAULT_FILE
from scripts.comfyui import ComfyUI, Graph, QueuedRun
from tests.support.graphs.comfyui import save_latent
from tests.support.graphs.flux import beside, node, queue_logged
from tests.support.graphs.vae import FILES, decode, encode, parallel, pixels, saved, saved_pixels
from tests.support.latents import cached_by_graph, relative_error, saved_latent
from tests.support.selection import thorough
from tests.support.tiny.vae import REAL, save_cogvideox_vae
from tests.vae.comfy_vaes import OF_A_FILE, save_comfy_vae, save_image_vae

Stock = Callable[[Graph], Tensor]

TOLERANCE = 1e-5
LATENTS = {
    "video-8": (1, 16, 2, 2, 1),
    "video-9": (1, 16, 3, 3, 2),
    "tall-video": (1, 16, 1, 10, 3),
    "image": (2, 16, 5, 3),
    "wide": (1, 16, 3, 11),
    "wan-video": (1, 16, 3, 5, 3),
    "flux2-image": (1, 128, 5, 3),
    "sd-image": (1, 4, 5, 7),
}
VIDEO = "cogvideox-vae"

TILES = {"tile_size": 64, "overlap": 16, "temporal_size": 64, "temporal_overlap": 8}


@pytest.fixture(scope="module")
def server(comfyui: ComfyUI) -> ComfyUI:
    """Provide a ComfyUI with random latents, and VAEs of CogVideoX, FLUX and Wan of the sizes that ComfyUI assumes."""
    folder = comfyui.base_dir / "models" / "vae"
    save_cogvideox_vae(folder / f"{VIDEO}.safetensors", torch.float16, widths=REAL, layers=3)
    save_image_vae(folder / "flux.safetensors", torch.float16)
    save_comfy_vae(folder / "wan.safetensors", "wan")
    for name, shape in LATENTS.items():
        save_latent(comfyui, name, *shape)
    return comfyui


@pytest.fixture(scope="module")
def stock(server: ComfyUI) -> Stock:
    """Provide a function that returns the pixels of ComfyUI's own nodes, and runs equal graphs only once."""
    return cached_by_graph(lambda graph: pixels(server, graph))


def assert_equal_pixels(server: ComfyUI, graph: Graph, stock: Graph, workers: int = 2) -> QueuedRun:
    """Assert that a graph with Load Parallel VAE gives the pixels of a stock graph. Return the run of both."""
    run = server.queue(beside(parallel(graph, workers), stock), timeout=500).check()
    assert relative_error(saved_pixels(server, run), saved_pixels(server, run, "stock save")) <= TOLERANCE
    return run


@pytest.mark.parametrize(
    ("vae", "latent", "workers"),
    [
        ("wan", "wan-video", 3),
        ("flux", "image", 3),
        # in the quick run tests/vae compares these autoencoders' code over rows, and one tile has CogVideoX's pixels
        pytest.param(VIDEO, "video-9", 2, marks=thorough),
        pytest.param("wan", "wan-video", 1, marks=thorough),
        pytest.param("sd", "sd-image", 4, marks=thorough),
        pytest.param("flux2", "flux2-image", 2, marks=thorough),
    ],
)
def test_decode_and_encode_equal_comfyuis(server: ComfyUI, vae: str, latent: str, workers: int) -> None:
    """TestSized in families tests the autoencoders that are too large at ComfyUI's assumed sizes."""
    file = server.base_dir / "models" / "vae" / f"{vae}.safetensors"
    if vae == "flux2":  # its file has 340 MB
        save_comfy_vae(file, vae, **OF_A_FILE)
    if vae == "sd":
        save_image_vae(file, torch.float16, vae)
    graph = encode(vae, latent)
    run = server.queue(beside(parallel(graph, workers), graph), timeout=500).check()
    ours, theirs = (saved_pixels(server, run, f"{side}save pixels") for side in ("", "stock "))
    assert relative_error(ours, theirs) <= TOLERANCE
    assert relative_error(saved_latent(server, run), saved_latent(server, run, "stock save")) <= TOLERANCE


def test_comfyuis_tiled_decode_gives_the_same_pixels(server: ComfyUI) -> None:
    graph = decode("flux", "wide", "VAEDecodeTiled", **TILES)
    assert_equal_pixels(server, graph, graph, workers=3)


def noisy_round(copies: int) -> Graph:
    """Return a graph that encodes and decodes a clip.

    ImageAddNoise seeds torch's generator, from which the decoder draws. With another number of copies, ComfyUI runs the node
    and so seeds the generator again.
    """
    graph = {
        "vae": node("VAELoader", vae_name="ltx095.safetensors"),
        "copy 0": node("EmptyImage", width=64, height=96, batch_size=17, color=0x808080),
        "noise": node("ImageAddNoise", image=[f"copy {copies}", 0], seed=5, strength=0.5),
        "latent": node("VAEEncode", pixels=["noise", 0], vae=["vae", 0]),
        "pixels": node("VAEDecode", samples=["latent", 0], vae=["vae", 0]),
        "save": saved(["pixels", 0]),
    }
    return graph | {
        f"copy {number + 1}": node("RepeatImageBatch", image=[f"copy {number}", 0], amount=1)
        for number in range(copies)
    }


def test_the_noise_that_a_decoder_draws_equals_comfyuis(server: ComfyUI) -> None:
    save_comfy_vae(server.base_dir / "models" / "vae" / "ltx095.safetensors", "ltx095")
    expected = pixels(server, noisy_round(0))
    assert relative_error(pixels(server, parallel(noisy_round(1))), expected) <= TOLERANCE
    not_seeded_again = parallel(noisy_round(1), frame_batches="original")
    assert relative_error(pixels(server, not_seeded_again), expected) > TOLERANCE


@thorough
def test_approximate_tiles_of_a_video_equal_comfyuis_tiles(server: ComfyUI, stock: Stock) -> None:
    graph = decode(VIDEO, "tall-video", "VAEDecodeTiled", **TILES)
    assert_equal_pixels(server, graph, graph)
    assert_equal_pixels(server, decode(VIDEO, "tall-video", "CogVideoParallelDecode", approximate_tiles=64), graph)
    assert relative_error(stock(graph), stock(decode(VIDEO, "tall-video"))) > 0.01


def test_a_decode_is_cancelled_between_pieces_and_the_next_one_of_one_tile_is_exact(server: ComfyUI) -> None:
    """The tile has an even number of latent frames."""
    save_latent(server, "long", 1, 16, 9, 2, 1)
    run = server.wait(
        server.submit(parallel(decode(VIDEO, "long"))), on_progress=lambda progress: server.interrupt(), timeout=500
    )
    assert run.status == "interrupted"
    tile = decode(VIDEO, "video-8", "CogVideoParallelDecode", approximate_tiles=64)
    assert len(saved_pixels(server, assert_equal_pixels(server, tile, decode(VIDEO, "video-8")))) == 8


@thorough  # in the quick run one tile has CogVideoX Parallel Decode's frames, and the cancelled decode its progress
def test_frames_make_a_playable_video_and_are_counted(server: ComfyUI) -> None:
    graph = parallel(decode(VIDEO, "video-9", "CogVideoParallelDecode"))
    graph["video"] = node("CreateVideo", images=["pixels", 0], fps=8.0)
    graph["save"] = node("SaveVideo", video=["video", 0], filename_prefix="video", format="mp4", codec="h264")
    run = server.queue(graph, timeout=500).check()
    (file,) = server.files(run, "save")
    with av.open(str(file)) as container:
        assert len([frame.width for frame in container.decode(video=0)]) == 9
    counted = [p.value for p in run.progress if p.node == "pixels"]
    assert counted in ([4, 8, 9], [4, 9])  # ComfyUI drops progress within a tenth of a second of the last


@thorough
def test_out_of_memory_retries_vae_decode_in_tiles_and_ends_parallel_decode(server: ComfyUI) -> None:
    """VAE Decode retries in tiles, of which these latents need one; CogVideoX Parallel Decode ends with an error."""
    fault = Path(server.env[FAULT_FILE])
    for name, vae in (("image", "flux"), ("video-8", VIDEO)):
        expected = pixels(server, decode(vae, name))  # a new run: ComfyUI then drops the VAE of the tests before
        fault.write_text("rank=1,phase=decoding,kind=oom")
        before = len(server.log)
        assert relative_error(pixels(server, parallel(decode(vae, name))), expected) <= TOLERANCE
        assert "retrying with tiled VAE decoding" in server.log[before:] and not fault.exists()
    fault.write_text("rank=1,phase=decoding,kind=oom")
    run = server.queue(parallel(decode(VIDEO, "video-8", "CogVideoParallelDecode"), frame_batches="original"))
    assert run.error is not None
    assert "Worker 1 of 2 (cpu) ran out of memory while decoding" in run.error.exception_message


def refused(server: ComfyUI, graph: Graph) -> str:
    run, log = queue_logged(server, graph)
    assert run.error is not None
    message = run.error.exception_message.strip()
    assert message.endswith(".") and ". " not in message and "\n" not in message
    assert "starting" not in log
    return message


def test_wrong_latents_wrong_loaders_and_saving_are_refused(server: ComfyUI) -> None:
    assert "an image VAE" in refused(server, parallel(decode("flux", "video-9", "CogVideoParallelDecode")))
    assert "a CogVideoX VAE takes" in refused(server, parallel(decode(VIDEO, "image")))
    stock = decode(VIDEO, "video-9", "CogVideoParallelDecode")
    assert "Load Parallel VAE" in refused(server, stock)
    saving = parallel(decode(VIDEO, "video-9"))
    saving["save"] = node("VAESave", vae=["vae", 0], filename_prefix="vae")
    assert "the weights live in the workers" in refused(server, saving)


def test_a_latent_too_long_for_the_ram_is_refused(server: ComfyUI) -> None:
    of_a_frame = 3 * 2048 * 2048 * 4
    frames = psutil.virtual_memory().total // of_a_frame // 4 * 4 + 5
    graph = parallel(decode(VIDEO, "video-9"))
    graph["latent"] = node("EmptyHunyuanLatentVideo", width=2048, height=2048, length=frames, batch_size=1)
    needed = f"{frames * of_a_frame / 1e9:.1f} GB of RAM"
    assert f"{frames} decoded pictures of 2048 x 2048 take {needed}" in refused(server, graph)


def test_files_without_a_supported_vae_are_refused(server: ComfyUI) -> None:
    for name, (tensors, said) in FILES.items():
        save_file(tensors, server.base_dir / "models" / "vae" / f"{name}.safetensors")
        assert said in refused(server, parallel(decode(name, "image"))), name


def packed(kind: str, copied: str = "none", latent: str = "image") -> Graph:
    """Return a graph that decodes while another pack changes the VAE, or a copy of it."""
    return decode("flux", latent, decoder="PackDecode", kind=kind, copied=copied)


INSIDE = {
    "circular padding": "Changing first_stage_model.encoder.conv_in.padding_mode",
    "a hook": "Changing first_stage_model.decoder.conv_in.forward",
    "a weight": "Reading or changing the weights",
    "a forward": "Changing first_stage_model.decoder.mid.block_1.forward",
}


def assert_refused_change(server: ComfyUI, stock: Stock, graph: Graph, said: str) -> None:
    """Assert that a graph whose change has an effect with Load VAE is refused with exactly this message."""
    assert relative_error(stock(graph), stock(decode("flux", "image"))) > 1e-3
    run = server.queue(parallel(graph))
    assert run.error is not None
    assert run.error.exception_message == said


@pytest.mark.parametrize(("kind", "what"), INSIDE.items(), ids=INSIDE)
def test_changes_inside_a_vae_are_refused_by_name(server: ComfyUI, stock: Stock, kind: str, what: str) -> None:
    way_out = "the weights live in the workers; remove that node, or use Load VAE."
    assert_refused_change(server, stock, packed(kind), f"{what} cannot be done with a parallel VAE: {way_out}")


def test_a_replaced_function_of_the_vaes_code_is_refused_by_name(server: ComfyUI, stock: Stock) -> None:
    said = (
        "comfy.ldm.modules.diffusionmodules.model.nonlinearity is replaced by other code (custom_nodes/other-pack/__init__.py), "
        "which cannot take effect on a parallel VAE, because the workers run ComfyUI without other packs: remove the pack that "
        "replaces it, or use Load VAE."
    )
    assert_refused_change(server, stock, packed("nonlinearity"), said)


@pytest.mark.parametrize(  # in the quick run the next test decodes with a VAE that has a deep copy
    "copied", ["none", pytest.param("deep", marks=thorough), "shallow"]
)
def test_a_vae_whose_modules_another_pack_only_reads_and_its_copies_decode(server: ComfyUI, copied: str) -> None:
    assert_equal_pixels(server, packed("nothing", copied), decode("flux", "image"))


def test_changes_of_a_deep_copy_of_a_vae_are_refused_only_for_the_copy(server: ComfyUI) -> None:
    run = server.queue(parallel(packed("circular padding", "deep")))
    assert run.error is not None
    assert run.error.exception_message.startswith(INSIDE["circular padding"])
    assert_equal_pixels(server, packed("circular padding", "deep, and the VAE"), decode("flux", "image"))
