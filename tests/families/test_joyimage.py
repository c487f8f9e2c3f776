"""JoyImage through a real ComfyUI against its own loader: each split, a LoRA, references."""

from __future__ import annotations

from typing import ClassVar

from tests.support.graphs.comfyui_inputs import MATTERS
from tests.support.graphs.family_tests import FamiliesGiven, Given


class TestImages(FamiliesGiven):
    layers: ClassVar = {
        "joyimage": ("double_blocks.0.attn.img_attn_qkv", "double_blocks.1.attn.txt_attn_proj", "proj_out"),
    }
    given: ClassVar = {
        "joyimage, references": Given("joyimage", references=((16, 1, 6, 5), (16, 1, 3, 4)), sides=("positive",)),
    }
    matters = MATTERS
