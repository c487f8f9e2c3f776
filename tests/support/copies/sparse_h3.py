"""A ComfyUI whose MiniMax-H3 blocks accept injected attention, as from 0.36 on, and a node that injects some.

The node is a stand-in for BlockSparseAttention, of the same shape. Its replacement of a block passes the block an attention
function. That function projects rows a piece at a time and orders video tokens in cubes. It picks blocks of keys by the means
kept from the last step.
"""

from __future__ import annotations

from pathlib import Path

from scripts.comfyui import ComfyUI
from tests.support.copies.sized import copied

MODEL, NODES = "comfy/ldm/minimax/model.py", "comfy_extras/nodes_mahiro.py"

EDITS = (
    (
        "attention=None):",
        "t_emb, mod_segments, rope_freqs, transformer_options={}):\n",
        "t_emb, mod_segments, rope_freqs, transformer_options={}, attention=None):\n"
        "        attention = self.attn if attention is None else attention\n",
    ),
    (
        " attention(h, rope_freqs=rope_freqs",
        " self.attn(h, rope_freqs=rope_freqs",
        " attention(h, rope_freqs=rope_freqs",
    ),
    (
        'attention=args.get("attention")',
        'transformer_options=args["transformer_options"])}',
        'transformer_options=args["transformer_options"], attention=args.get("attention"))}',
    ),
    (
        "minimax_h3_layout",
        "            if (\"double_block\", i) in blocks_replace:\n",
        "            transformer_options['block_index'], transformer_options['minimax_h3_layout'] = i, layout\n"
        "            if (\"double_block\", i) in blocks_replace:\n",
    ),
)  # fmt: skip
"""Edits of a model: text of a source that needs no edit, text to replace, and its replacement."""

GATE = (
    (
        "self.to_gate_compress = None",
        "        self.head_dim = head_dim\n        inner = heads * head_dim\n",
        "        self.head_dim = head_dim\n        inner = heads * head_dim\n        self.to_gate_compress = None\n",
    ),
    (
        "self.attn.to_gate_compress = ",
        "        self.adaln_proj = AdalnProj(t_dim, hidden, 6, 3,",
        "        self.attn.to_gate_compress = operations.Linear(\n"
        "            hidden, heads * head_dim, bias=False, dtype=dtype, device=device)\n"
        "        self.adaln_proj = AdalnProj(t_dim, hidden, 6, 3,",
    ),
)  # fmt: skip
"""Edits of a model whose attention has no gate."""

OPTIONAL_GATE = (("grid=None, gate_compress=True", "grid=None, gate_compress=False", "grid=None, gate_compress=True"),)
"""The edit of a model whose file says whether its attention has a gate."""

NODE = '''


import torch
import comfy.model_management
import comfy.quant_ops

BLOCK = 8


class SparseOfSteps:
    """Options and, reset behind a run, what is kept from step to step."""

    def __init__(self, start, dense_blocks, keep, cubes):
        self.start = start
        self.dense_blocks = dense_blocks
        self.keep = keep
        self.cubes = cubes
        self.installed = set()
        self.reset()

    def reset(self):
        self.kept = {}
        self.orders = {}

    def dense(self, options, tokens, block):
        return float(options["sigmas"][0]) > self.start or block in self.dense_blocks or tokens < 2 * BLOCK

    def order(self, layout, device):
        """Rows behind each other: what is before the video, padded to blocks, and the video in cubes of 2 x 2 x 2; -1 is none."""
        if not self.cubes:
            return torch.arange(layout.seq_len, device=device)
        key = tuple(layout.segments), str(device)
        if key not in self.orders:
            _, frames, height, width, _ = layout.signature
            start, stop, _ = next(each for each in layout.segments if each[2] == "video")
            grid = torch.arange(start, stop, device=device).view(frames, height // 2, width // 2)
            pad = [amount for size in reversed(grid.shape) for amount in (0, size % 2)]
            grid = torch.nn.functional.pad(grid, pad, value=-1)
            t, h, w = (size // 2 for size in grid.shape)
            cubes = grid.view(t, 2, h, 2, w, 2).permute(0, 2, 4, 1, 3, 5).reshape(-1)
            before = torch.nn.functional.pad(torch.arange(start, device=device), (0, -start % BLOCK), value=-1)
            self.orders[key] = torch.cat([before, cubes])
        return self.orders[key]


def sparse_override(patch, previous):
    def override(func, q, k, v, heads, mask=None, **kwargs):
        given = (q, k, v, heads) if previous is None else (func, q, k, v, heads)
        return (previous or func)(*given, mask=mask, **kwargs)

    return override


def put_on_top(patch, options):
    current = options.get("optimized_attention_override")
    if current not in patch.installed:
        options["optimized_attention_override"] = sparse_override(patch, current)
        patch.installed.add(options["optimized_attention_override"])


def sparse_rows(attn, x, rope_freqs, options, patch, block):
    heads, width = attn.heads, attn.head_dim
    order = patch.order(options["minimax_h3_layout"], x.device)
    live, count = order >= 0, len(order)
    gates, pieces = x.new_empty(count, heads * width), []
    for first in range(0, count, 5 * BLOCK):
        rows = order[first : first + 5 * BLOCK]
        some = x[rows.clamp_min(0)] * (rows >= 0).unsqueeze(1).to(x.dtype)
        if attn.to_gate_compress is not None:
            gates[first : first + some.shape[0]] = attn.to_gate_compress(some)
        pieces.append(attn.qkv_proj(some))
    q, k, v = (each.reshape(1, count, heads, width) for each in torch.cat(pieces).split(heads * width, 1))
    freqs = rope_freqs.new_zeros(1, count, *rope_freqs.shape[2:])
    freqs[0, live] = rope_freqs[0, order[live]]
    comfy.quant_ops.ck.rms_rope_split_half_(
        q, k, freqs, *(comfy.model_management.cast_to(norm.weight, device=x.device) for norm in (attn.q_norm, attn.k_norm)),
        epsilon=attn.q_norm.eps, rot_dim=freqs.shape[-3] * 2,
    )
    q, k, v = (each[0].transpose(0, 1) for each in (q, k, v))  # heads, rows, width
    blocks = -(-count // BLOCK)
    of_block = torch.arange(count, device=x.device) // BLOCK
    lives = torch.zeros(blocks, device=x.device).index_add(0, of_block, live.float()).clamp_min(1)

    def mean(rows):
        return rows.new_zeros(heads, blocks, width).index_add(1, of_block, rows * live[:, None]) / lives[:, None]

    key = block, count, tuple(options.get("uuids", ()))
    coarse = mean(q) @ patch.kept.get(key, mean(k)).transpose(1, 2) / width**0.5
    patch.kept[key] = mean(k)
    chosen = torch.zeros_like(coarse, dtype=torch.bool).scatter(2, coarse.topk(min(patch.keep, blocks), 2).indices, True)
    chosen |= torch.eye(blocks, dtype=torch.bool, device=x.device)
    allowed = chosen[:, of_block][:, :, of_block] & live
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
    if attn.to_gate_compress is not None:
        out = out + (coarse.softmax(2) @ mean(v))[:, of_block] * gates.view(count, heads, width).transpose(0, 1)
    back = torch.empty(x.shape[0], dtype=torch.int64, device=x.device)
    back[order[live]] = torch.nonzero(live).flatten()
    return attn.out_proj(out.transpose(0, 1).reshape(count, heads * width)[back])


def patch_of_block(block, number, patch):
    def attention(h, rope_freqs=None, transformer_options={}):
        return sparse_rows(block.attn, h, rope_freqs, transformer_options, patch, number)

    def instead(args, extra):
        if not patch.dense(args["transformer_options"], args["img"].shape[0], number):
            args = {**args, "attention": attention}
        return extra["original_block"](args)

    return instead


def patch_that_scales(block, number, patch):
    def instead(args, extra):
        return extra["original_block"]({**args, "img": args["img"] * (block is not None and patch.keep + number)})

    return instead


def patch_of_another_output(block, number, patch):
    def instead(args, extra):
        return {"img": extra["original_block"](args)["img"] * (block is not None and patch.keep + number)}

    return instead


def patch_that_looks_at_weights(block, number, patch):
    def attention(h, rope_freqs=None, transformer_options={}):
        return torch.nn.functional.linear(h, block.attn.qkv_proj.weight)

    def instead(args, extra):
        return extra["original_block"]({**args, "attention": attention} if patch.keep + number else args)

    return instead


def with_sparse_blocks(model, start, keep, cubes, kind):
    patch = SparseOfSteps(start=start, dense_blocks={1}, keep=keep, cubes=cubes)
    m = model.clone()
    put_on_top(patch, m.model_options["transformer_options"])
    again = lambda _, __, options: put_on_top(patch, options["transformer_options"])
    m.add_callback_with_key("on_prepare_state", "sparse", again)
    m.add_callback_with_key("on_cleanup", "sparse", lambda _: patch.reset())
    diffusion_model = model.get_model_object("diffusion_model")
    if not isinstance(diffusion_model, importlib.import_module("comfy.ldm.minimax.model").MiniMaxH3Model):
        raise ValueError("this needs a MiniMax-H3 model")
    for number, block in enumerate(diffusion_model.blocks):
        m.set_model_patch_replace(globals()[kind](block, number, patch), "dit", "double_block", number)
    return m


import importlib
'''

GRAPH_NODE = '''


class StandInSparseBlocks:
    """What comes of it, as a node."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "patch", "stand-ins"

    @classmethod
    def INPUT_TYPES(cls):
        asked = {"start": "FLOAT", "keep": "INT", "cubes": "BOOLEAN", "kind": "STRING"}
        return {"required": {"model": ("MODEL",), **{name: (kind,) for name, kind in asked.items()}}}

    def patch(self, model, **asked):
        return (importlib.import_module("comfy_extras.nodes_mahiro").with_sparse_blocks(model, **asked),)


import importlib
NODE_CLASS_MAPPINGS["StandInSparseBlocks"] = StandInSparseBlocks
'''


def with_sparse_node(folder: Path) -> ComfyUI:
    """Copy the ComfyUI under test, and add injected attention and the node."""
    server = copied(folder, {NODES: NODE, "nodes.py": GRAPH_NODE})
    file = folder / "ComfyUI" / MODEL
    file.write_text(edited(file.read_text()))
    return server


def edited(model: str) -> str:
    """Return the model's source with blocks that take an attention function. Skip each edit that the source has already."""
    for has, before, after in (*EDITS, *(OPTIONAL_GATE if "gate_compress=" in model else GATE)):
        if has in model:
            continue
        assert model.count(before) == 1, f"{MODEL} of this ComfyUI has {before!r} {model.count(before)} times"
        model = model.replace(before, after)
    return model
