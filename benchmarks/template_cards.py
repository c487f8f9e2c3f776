"""Draws the pictures of the pack's templates: results, memory on each of two GPUs, and the source of the files.

Next to them the page shows the descriptions of locales/<language>/main.json (web/templates.js). No model is needed:

    python -m benchmarks.template_cards            # draws workflows/*.jpg anew
    python -m benchmarks.template_cards --check    # names the pictures that differ from what it would draw
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from PIL import Image, ImageChops, ImageDraw, ImageFont

from parallel_backend.plan.__main__ import parser, request_of
from parallel_backend.plan.offers import offered

WORKFLOWS = Path(__file__).parents[1] / "workflows"

SIDE = 352
BACK, INK, PALE, LINE, SUN = "#202127", "#f0f0f0", "#b4b9c4", "#7fdc9c", "#f5b75a"
PICTURE, EDIT, VIDEO, SOUND = "#46628c", "#6d5a96", "#3f7d78", "#8c5a4a"
"""Colours of the kinds: pictures, edited pictures, videos, videos with sound."""

OFFERED, CONVERTED = "the page offers its files", "its note says how to get its files"

ALIKE = 1.0
"""Largest allowed mean difference of a colour, because another Pillow compresses and draws letters differently."""


@dataclass(frozen=True)
class Card:
    """A template: its colour, its number of drawn frames, its result, and the plan command's model and dtype for its memory.

    `pruned` is for a file without the weights that compute a block's modulation; the file has the few possible outcomes
    instead.
    """

    title: str
    colour: str
    frames: int
    makes: str
    model: str
    dtype: str = "bf16"
    files: str = OFFERED
    pruned: bool = False


CARDS = {
    "Chroma": Card("Chroma", PICTURE, 1, "pictures with a negative prompt", "chroma", "fp8"),
    "CogVideoX-5b image to video": Card(
        "CogVideoX-5b", VIDEO, 3, "a picture becomes a video", "cogvideox-5b", files=CONVERTED
    ),
    "CogVideoX-5b text to video": Card("CogVideoX-5b", VIDEO, 5, "videos from text", "cogvideox-5b", files=CONVERTED),
    "FLUX.1 Krea dev in fp8 for 24 GB GPUs": Card(
        "FLUX.1 Krea dev", PICTURE, 1, "photographs, in fp8", "flux-dev", "fp8"
    ),
    "FLUX.1 dev": Card("FLUX.1 dev", PICTURE, 1, "pictures from text, in bf16", "flux-dev"),
    "FLUX.2 dev image edit": Card("FLUX.2 dev", EDIT, 2, "edits a picture by text", "flux2-dev", "fp8"),
    "FLUX.2 dev": Card("FLUX.2 dev", PICTURE, 1, "pictures from text, in fp8", "flux2-dev", "fp8"),
    "HunyuanVideo 1.5 text to video": Card("HunyuanVideo 1.5", VIDEO, 4, "videos from text", "hunyuan-video-1.5"),
    "Krea 2 Turbo": Card("Krea 2 Turbo", PICTURE, 1, "pictures in a few steps", "krea2", "fp8"),
    "LTX-2.3 text to video": Card("LTX-2.3", SOUND, 4, "videos with sound", "ltx-2.3", "fp8"),
    "MiniMax-H3 text to video": Card("MiniMax-H3", SOUND, 5, "videos with sound", "minimax-h3", "fp8", pruned=True),
    "PixArt-alpha": Card("PixArt-alpha", PICTURE, 1, "pictures from text", "pixart-alpha", files=CONVERTED),
    "Qwen-Image-Edit": Card("Qwen-Image-Edit", EDIT, 2, "edits a picture by text", "qwen-image", "fp8"),
    "Qwen-Image": Card("Qwen-Image", PICTURE, 1, "pictures with written words", "qwen-image", "fp8"),
    "SDXL": Card("SDXL", PICTURE, 1, "prompts on a GPU each", "sdxl"),
    "SDXL with refiner": Card("SDXL + refiner", PICTURE, 2, "two models, one after the other", "sdxl"),
    "Wan 2.2 14B image to video": Card("Wan 2.2 14B", VIDEO, 3, "a picture becomes a video", "wan2.2-14b", "fp8"),
    "Wan 2.2 14B text to video": Card("Wan 2.2 14B", VIDEO, 5, "videos from text", "wan2.2-14b", "fp8"),
    "Wan 2.2 5B text and image to video": Card("Wan 2.2 5B", VIDEO, 4, "videos from text or a picture", "wan2.2-5b"),
    "Z-Image-Turbo": Card("Z-Image-Turbo", PICTURE, 1, "pictures in 8 steps", "z-image-turbo"),
}
"""All templates except the sprites, whose picture shows sprites."""


def memory_of(card: Card) -> str:
    """Return text with the memory that each of two GPUs needs for the unsharded model, as the plan command predicts.

    With two models, the larger one counts.
    """
    asked, _, _ = request_of(parser().parse_args(["--model", card.model, "--dtype", card.dtype, "--card", "h100"]))
    if card.pruned:
        asked = replace(asked, model=replace(asked.model, single_weights=asked.model.token_weights))
    whole = next(offer for offer in offered(asked, 2) if offer.storage == "replicated")
    return f"{whole.memory / 1e9:.0f} GB on each of 2 GPUs"


def draw(card: Card) -> Image.Image:
    """Return the card's picture."""
    image = Image.new("RGB", (SIDE, SIDE), BACK)
    pen = ImageDraw.Draw(image)
    step, left, top = 16, 24, 20
    width, height = 176 - 8 * card.frames, 128 - 6 * card.frames
    for frame in range(card.frames):
        x, y = left + frame * step * 2, top + frame * step
        pen.rounded_rectangle((x, y, x + width, y + height), 6, fill=card.colour, outline=PALE, width=2)
        for line in range(1, 4):  # rows of tokens that GPUs share
            pen.line((x + 2, y + line * height // 4, x + width - 2, y + line * height // 4), fill=LINE, width=2)
    last = left + (card.frames - 1) * step * 2, top + (card.frames - 1) * step
    sun = last[0] + width * (3 + len(card.title) % 5) // 9, last[1] + height * (2 + len(card.makes) % 4) // 7
    pen.ellipse((sun[0] - 15, sun[1] - 15, sun[0] + 15, sun[1] + 15), fill=SUN)
    if card.colour == SOUND:
        for bar, loud in enumerate((10, 26, 16, 34, 22, 12, 28, 14)):
            x, y = SIDE - 120 + 13 * bar, 64
            pen.line((x, y - loud, x, y + loud), fill=SUN, width=5)
    pen.text((24, 228), card.title, fill=INK, font=ImageFont.load_default(30))
    pen.text((24, 268), card.makes, fill=INK, font=ImageFont.load_default(19))
    pen.text((24, 296), memory_of(card), fill=LINE, font=ImageFont.load_default(19))
    pen.text((24, 322), card.files, fill=PALE, font=ImageFont.load_default(15))
    return image


def main() -> int:
    """Draw all pictures, or name those that differ. Return 1 if some differ."""
    line = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    line.add_argument(
        "--check", action="store_true", help="draw nothing, and list the pictures that differ from a new drawing"
    )
    check = line.parse_args().check
    others = []
    for name, card in CARDS.items():
        path, made = WORKFLOWS / f"{name}.jpg", draw(card)
        if check:
            others += [name] if differs(path, made) else []
        else:
            made.save(path, quality=92, subsampling=0, optimize=True)
    print("\n".join(others))
    return int(bool(others))


def differs(path: Path, made: Image.Image) -> bool:
    """Return True if a file is missing or shows another picture."""
    if not path.exists():
        return True
    with Image.open(path) as there:
        return there.size != made.size or apart(there.convert("RGB"), made) > ALIKE


def apart(one: Image.Image, other: Image.Image) -> float:
    """Return the mean difference of two pictures' grey, from 0 to 255."""
    counts = ImageChops.difference(one, other).convert("L").histogram()
    return sum(value * count for value, count in enumerate(counts)) / sum(counts)


if __name__ == "__main__":
    sys.exit(main())
