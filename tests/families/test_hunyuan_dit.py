"""HunyuanDiT, which nobody declared, derived by a real ComfyUI from a graph's own calls, then spread: the stock result."""

from __future__ import annotations

from pathlib import Path

from tests.support.copies.sized import sized_copy
from tests.support.graphs.comfyui import TOKENS, TOLERANCE, graph_of, save_latent, spread
from tests.support.graphs.derived import FINDING, FOUND, PATIENCE, own_cache
from tests.support.graphs.family_tests import save_with_prompts
from tests.support.graphs.flux import insert_after
from tests.support.latents import relative_error, saved_latent
from tests.support.selection import thorough
from tests.support.tiny.comfyui import TINY


@thorough
def test_hunyuan_dit_from_file_to_picture(tmp_path: Path) -> None:
    """Its calls are of two kinds, as a mask hides some of one side's text; Cancel ends the wait, the next prompt waits again."""
    server = sized_copy(tmp_path)
    server.env |= own_cache(tmp_path)
    save_with_prompts(server, "hunyuan_dit")
    save_latent(server, "hunyuan_dit", 1, *TINY["hunyuan_dit"].latent)
    graph = graph_of("hunyuan_dit", steps=2)
    for side in TOKENS:
        graph = insert_after(graph, side, "PackPrompt", "conditioning", file=f"hunyuan_dit-beside-{side}.safetensors")
    ours = spread(graph, strict=False, ulysses=2, cfg=1)
    with server:
        cancelled = server.queue(
            ours, on_text=lambda told: told.text == FINDING and server.interrupt(), timeout=PATIENCE
        )
        assert cancelled.status == "interrupted"
        assert not FOUND.search(server.log)
        run, stock = (server.queue(each, timeout=PATIENCE).check() for each in (ours, graph))
        assert relative_error(saved_latent(server, run), saved_latent(server, stock)) <= TOLERANCE
        assert FOUND.search(server.log)
