"""Models one can ask about by name, and what is usually made with them.

The sizes are those of ComfyUI's own model classes at their published configurations: `tests/plan/test_known_models.py`
builds each class and counts. CogVideoX and PixArt, which run over diffusers' modules, are as in their public configurations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...errors import Refused
from .operations import of_a_block
from .profiles import Device, ForwardTime, ModelShape, copies_of


@dataclass(frozen=True)
class UnshardedWork:
    """One forward of a model that runs whole, for a batch of one.

    `flops` of matmuls and convolutions, `scores` of attention, and the bytes that all else reads and writes, for each position
    of the latent; `working` bytes that it computes with, likewise; `operations` that it starts.
    """

    flops: float
    scores: float
    traffic: float
    working: float
    operations: int

    def on(self, device: Device, positions: int) -> ForwardTime:
        """Return seconds on a device, as a start and the time per further batch item. The host may be slower than the
        device.
        """
        item = positions * (
            self.flops / device.matmul + self.scores / device.attention + self.traffic / device.bandwidth
        )
        host = self.operations * device.launch
        single, double = max(host, item), max(host, 2 * item)
        return ForwardTime(2 * single - double, double - single)


@dataclass(frozen=True)
class KnownModel:
    """A model, and the usual job: width, height and frames, and steps. `note` is what else a buyer should know.

    `work` is that of a forward that is not spread, None of one that is.
    """

    shape: ModelShape
    size: tuple[int, int, int] = (1024, 1024, 1)
    steps: int = 20
    note: str = ""
    work: UnshardedWork | None = None


TWO_EXPERTS = "Two experts of this size take turns; the one that waits lies in the computer's memory."


SOUND = "The tokens of its sound, which are few beside the video's, are not counted."

PROMPTS_ONLY = "It runs whole on each GPU: two GPUs share the prompts, more a batch."

# SDXL's UNet at 1024 x 1024 in bf16, counted on the meta device; attention's share grows with the size, here it does not. What it
# computes with is what ComfyUI's memory_usage_factor comes to.
_SDXL = UnshardedWork(5.977e12 / 128**2, 0.784e12 / 128**2, 10.4e9 / 128**2, 2 * 0.01 * 0.8 * 2**20, 1682)

_DOUBLE, _SINGLE = of_a_block("DoubleStreamBlock"), of_a_block("SingleStreamBlock")


def _flux(name: str, double_weights: int, single_weights: int, other_weights: int) -> ModelShape:
    return ModelShape(
        name=name,
        hidden=3072,
        heads=24,
        double_blocks=19,
        single_blocks=38,
        double_weights=double_weights,
        single_weights=single_weights,
        other_weights=other_weights,
        token_weights=12 * 3072**2,
        channels=64,
        copies=copies_of(3072, 5 * 3072, 7 * 3072),
        double_operations=_DOUBLE,
        single_operations=_SINGLE,
    )


def _flux2(name: str, hidden: int, blocks: tuple[int, int], other_weights: int) -> ModelShape:
    square = hidden**2
    return ModelShape(
        name=name,
        hidden=hidden,
        heads=hidden // 128,
        double_blocks=blocks[0],
        single_blocks=blocks[1],
        double_weights=26 * square + 512,
        single_weights=13 * square + 256,
        other_weights=other_weights,
        token_weights=13 * square,
        channels=128,
        embeds_whole=True,
        copies=copies_of(hidden, 4 * hidden, 9 * hidden, gated=3 * hidden),
        double_operations=_DOUBLE,
        single_operations=_SINGLE,
    )


def _wan(name: str, hidden: int, blocks: int, block_weights: int, other_weights: int) -> ModelShape:
    return ModelShape(
        name=name,
        hidden=hidden,
        heads=hidden // 128,
        double_blocks=0,
        single_blocks=blocks,
        double_weights=0,
        single_weights=block_weights,
        other_weights=other_weights,
        token_weights=8 * hidden**2 + 2 * hidden * _WAN_INNER[hidden],
        channels=64,
        latent_frames=1,
        joint_text=False,
        guided=True,
        embeds_whole=True,
        copies=copies_of(hidden, _WAN_INNER[hidden], _WAN_INNER[hidden]),
        single_operations=of_a_block("WanAttentionBlock"),
    )


_WAN_INNER = {5120: 13824, 3072: 14336, 1536: 8960}


def _cogvideox(name: str, hidden: int, blocks: int) -> ModelShape:
    return ModelShape(
        name=name,
        hidden=hidden,
        heads=hidden // 64,
        double_blocks=0,
        single_blocks=blocks,
        double_weights=0,
        single_weights=12 * hidden**2 + 12 * 512 * hidden,
        other_weights=40_000_000,
        token_weights=12 * hidden**2,
        channels=64,
        latent_frames=1,
        text=226,
        guided=True,
        embeds_whole=True,
        single_operations=of_a_block("CogVideoXBlock"),
    )


def _models() -> dict[str, KnownModel]:
    square = 3072**2
    dev = _flux("flux-dev", 36 * square, 15 * square, 70_000_000)
    chroma = _flux("chroma", 226_548_224, 113_271_040, 291_267_648)
    hunyuan = _flux("hunyuan-video", 339_831_296, 141_591_808, 360_714_304)
    qwen = ModelShape(
        name="qwen-image",
        hidden=3072,
        heads=24,
        double_blocks=0,
        single_blocks=60,
        double_weights=0,
        single_weights=339_831_296,
        other_weights=40_523_328,
        token_weights=113_246_208,
        channels=64,
        text=128,
        guided=True,
        embeds_whole=True,
        copies=copies_of(3072, 4 * 3072, 4 * 3072),
        single_operations=of_a_block("QwenImageTransformerBlock"),
    )
    z_image = ModelShape(
        name="z-image-turbo",
        hidden=3840,
        heads=30,
        double_blocks=2,
        single_blocks=30,
        double_weights=180_910_336,
        single_weights=180_910_336,
        other_weights=365_777_984,
        token_weights=176_947_200,
        channels=64,
        text=128,
        embeds_whole=True,
        copies=copies_of(3840, 10240, 3 * 3840, gated=10240),
        double_operations=of_a_block("JointTransformerBlock"),
        single_operations=of_a_block("JointTransformerBlock"),
    )
    pixart = ModelShape(
        name="pixart-alpha",
        hidden=1152,
        heads=16,
        double_blocks=0,
        single_blocks=28,
        double_weights=0,
        single_weights=16 * 1152**2,
        other_weights=15_000_000,
        token_weights=14 * 1152**2,  # the cross-attention's keys and values are made of the text alone
        channels=32,
        text=120,
        joint_text=False,
        guided=True,
        embeds_whole=True,
    )
    krea = ModelShape(
        name="krea2",
        hidden=6144,
        heads=48,
        double_blocks=0,
        single_blocks=28,
        double_weights=0,
        single_weights=434_159_872,
        other_weights=663_596_620,
        token_weights=434_110_464,
        channels=64,
        embeds_whole=True,
        copies=copies_of(6144, 16384, 16384, gated=16384),
        single_operations=of_a_block("SingleStreamBlock"),
        kv_heads=12,
    )
    hunyuan15 = ModelShape(
        name="hunyuan-video-1.5",
        hidden=2048,
        heads=16,
        double_blocks=0,
        single_blocks=54,
        double_weights=0,
        single_weights=151_056_896,
        other_weights=169_529_632,
        token_weights=50_331_648,
        channels=32,
        latent_frames=1,
        text=256,
        guided=True,
        embeds_whole=True,
        copies=copies_of(2048, 4 * 2048, 4 * 2048),
        single_operations=of_a_block("DoubleStreamBlock"),
    )
    minimax = ModelShape(
        name="minimax-h3",
        hidden=7168,
        heads=56,
        double_blocks=0,
        single_blocks=50,
        double_weights=0,
        single_weights=645_571_840,
        other_weights=844_400_896,
        token_weights=385_351_680,
        channels=96,
        pixels=32,
        latent_frames=1,
        embeds_whole=True,
        copies=13.0,
    )
    ltx = ModelShape(
        name="ltx-2.3",
        hidden=4096,
        heads=32,
        double_blocks=0,
        single_blocks=48,
        double_weights=0,
        single_weights=386_695_360,
        other_weights=1_136_401_664,
        token_weights=193_282_048,
        channels=128,
        pixels=32,
        latent_frames=2,
        text=1024,
        joint_text=False,
        embeds_whole=True,
        copies=13.0,
    )
    sdxl = ModelShape(
        name="sdxl",
        hidden=1,
        heads=1,
        double_blocks=0,
        single_blocks=1,
        double_weights=0,
        single_weights=2_567_463_684,
        other_weights=0,
        token_weights=0,
        channels=4,
        pixels=8,
        text=77,
        joint_text=False,
        guided=True,
        attentions=0.0,
        unsharded=True,
    )
    wan5 = _wan("wan2.2-5b", 3072, 30, 163_656_704, 90_086_592)
    wan14 = _wan("wan2.2-14b", 5120, 40, 351_394_304, 232_719_424)
    models = (
        KnownModel(dev),
        KnownModel(replace(dev, name="flux-schnell", text=256), steps=4),
        KnownModel(_flux2("flux2-dev", 6144, (8, 48), 816_316_416)),
        KnownModel(_flux2("flux2-klein-4b", 3072, (5, 20), 205_258_752), steps=4),
        KnownModel(_flux2("flux2-klein-9b", 4096, (8, 24), 372_244_480), steps=4),
        KnownModel(replace(chroma, guided=True, embeds_whole=True)),
        KnownModel(qwen),
        KnownModel(z_image, steps=8),
        KnownModel(replace(z_image, name="z-image", guided=True), steps=28),
        KnownModel(krea, steps=8),
        KnownModel(wan14, (1280, 720, 81), note=TWO_EXPERTS),
        KnownModel(replace(wan14, name="wan2.1-14b"), (1280, 720, 81)),
        KnownModel(_wan("wan2.1-1.3b", 1536, 30, 46_440_704, 25_775_680), (832, 480, 81)),
        KnownModel(replace(wan5, channels=192, pixels=32), (1280, 704, 121)),
        KnownModel(
            replace(hunyuan, double_blocks=20, single_blocks=40, latent_frames=1, text=256, embeds_whole=True),
            (1280, 720, 129),
        ),
        KnownModel(hunyuan15, (1280, 720, 121)),
        KnownModel(ltx, (1280, 704, 121), 8, note=SOUND),
        KnownModel(minimax, (1344, 768, 121), note=SOUND),
        KnownModel(sdxl, note=PROMPTS_ONLY, work=_SDXL),
        KnownModel(_cogvideox("cogvideox-2b", 1920, 30), (720, 480, 49), 50),
        KnownModel(_cogvideox("cogvideox-5b", 3072, 42), (720, 480, 49), 50),
        KnownModel(
            replace(_cogvideox("cogvideox1.5-5b", 3072, 42), latent_frames=2, channels=128), (1360, 768, 81), 50
        ),
        KnownModel(pixart),
    )
    return {model.shape.name: model for model in models}


def known_model(name: str) -> KnownModel:
    """A model by name. Raises Refused for an unknown one."""
    known = _models()
    if name not in known:
        raise Refused(f"the model {name!r} is unknown: use {', '.join(known)}.")
    return known[name]


def model_names() -> list[str]:
    """Names that `known_model` knows."""
    return list(_models())
