"""Which of the places that make a sentence for the user a list of refused.py reaches.

The browser's test holds each list against what it says here, and test_published each place in the code: one that is new
fails until it is shown, or a reason is given. A sentence is named by its beginning.
"""

from __future__ import annotations

from collections.abc import Mapping

from tests.refusals.places import Place, called

SHOWN: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "plans": {
        "nodes/without_plan.py": ("… There is no Parallel Plan: devices are",),
        "parallel_backend/attention/kernels.py": ("attention … cannot be used",),
        "parallel_backend/plan/devices/names.py": (
            'devices … is not understood: write "auto",',
            "devices … asks for GPU …, but …: use",
            "devices …: write cpu:N with N from 1",
        ),
        "parallel_backend/plan/resolve.py": (
            "…",
            "cfg 2 needs a negative prompt, and this",
            "ulysses … is more than the model's …",
            "pipefusion … is more than the model's",
            "weights sharded cannot be used with",
            "data … is more than the batch of …:",
            "patches … is more than the picture's",
            "stages … is not understood: write the",
            "stages … is … stages with … = … blocks,",
        ),
    },
    "conditionings": {
        "nodes/model/remote_model.py": ("the … holds … values of … that are NaN",),
        "parallel_backend/models/comfyui/comfy_family.py": (
            "the conditioning's text has the shape",
            "the conditioning's text is … and … takes",
            "the conditioning's pooled text is …",
        ),
    },
    "latents": {
        "parallel_backend/models/comfyui/comfy_family.py": (
            "the latent has the shape … and … takes",
            "the latent has the shape …, which is",
            "a reference latent has the shape … and",
        ),
    },
    "nodes": {
        "nodes/model/patcher.py": (
            "Merging models",
            "Saving the model",
            "Applying a LoRA in bypass mode",
            "Replacing …",
        ),
        "nodes/model/refusals.py": (
            "… cannot be done with a parallel MODEL:",
            "… cannot be applied to a parallel MODEL:",
        ),
        "nodes/model/features/lora.py": ("… cannot be applied to a parallel MODEL:",),
        "nodes/parallel_sampler.py": ("Parallel Sampler takes a MODEL from",),
    },
    "other packs": {
        "nodes/model/run/message.py": ("MultiGPU CFG Split cannot be used with",),
        "nodes/model/patcher.py": (
            "Applying LoRA hooks",
            "Reading the weights",
            "MultiGPU CFG Split",
            "Wrapping weights",
        ),
        "nodes/model/proxy.py": ("Changing diffusion_model.…",),
        "nodes/model/run/wrapper.py": ("Replacing the diffusion model",),
        "nodes/model/run/sigmas.py": ("the … is …, of which no picture comes:",),
        "nodes/model/features/lora.py": (
            "a patch of the type …",
            "the function … on …",
            "a change of …",
            "DoRA on an OFT adapter",
        ),
        "nodes/model/unchanged.py": (
            "Reading or changing the weights",
            "Changing … (…)",
            "Changing …",
        ),
        "nodes/samplers.py": ("The sampler … cannot be used with …:", "The sampler … is made for CogVideoX:"),
    },
    "saved prompts": {
        "nodes/model/conditioning_files.py": (
            "Save Conditioning writes one prompt",
            "Save Conditioning keeps the text, …;",
            "… has no tensor named cond: pick a file",
            "… could not be written to ComfyUI's",
        ),
    },
    "places and machines": {
        "parallel_backend/host/workers/diagnosis.py": ("… …. …",),
        "parallel_backend/host/workers/remote.py": (
            "the workers at … refused the connection:",
            "no workers answer at … (…): start them",
        ),
        "parallel_backend/plan/choose.py": ("…",),
        "parallel_backend/wire/address.py": ("… is no address: write …HOST:PORT, such",),
        "parallel_backend/wire/secret.py": (
            "… holds a secret and is not its owner's",
            "… holds … bytes and a secret has … to",
            "the secret of the workers on other machines",
        ),
    },
    "linked": {
        "nodes/model/build.py": ("weight_dtype … is unknown: use one of ….",),
        "parallel_backend/attention/kernels.py": ("attention … is unknown: use one of ….",),
        "parallel_backend/plan/resolve.py": (
            "weights … is unknown: use … or ….",
            "exchange … is unknown: use ….",
            "compile … is unknown: use ….",
            "memory_limit … is not an amount of memory:",
            "patches … and warmup_steps … cannot",
            "cfg … is more than the 2 prompts, the",
            "… … is negative: use 0 (automatic),",
        ),
    },
    "what travels": {
        "nodes/model/refusals.py": ("… cannot be used with a parallel MODEL",),
        "parallel_backend/wire/frames.py": (
            "a message with … tensors is over the",
            "a number or name in … cannot be sent",
        ),
    },
    "in the middle": {
        "nodes/model/run/coupled_rows.py": ("…, so they cannot be computed apart, as",),
        "nodes/model/features/controlnet.py": ("the ControlNet gives tensors of … and",),
        "nodes/model/run/wrapper.py": ("Parallel Sampler does not support …:",),
        "nodes/model/features/skipped_blocks.py": ("the guidance leaves out … of the",),
        "nodes/model/run/sigmas.py": (
            "the guidance is …, which overflows in …:",
            "sigma … of … is …: look at the node",
            "the sigmas end at …, where this model's",
        ),
        "parallel_backend/host/runs/finite.py": ("…: the sampler's step gives … values",),
    },
    "marked": {
        "parallel_backend/models/comfyui/diffusers_names.py": ("… holds … under diffusers' names, where",),
        "parallel_backend/models/comfyui/quantisation.py": ("… has damaged marks of quantisation",),
        "parallel_backend/models/comfyui/quantised_layers.py": (
            "… holds ….weight as …, which this ComfyUI",
            "… holds … quantised, which is supported",
            "… holds ….weight as … in a way that",
        ),
    },
    "loras": {
        "nodes/model/features/lora.py": (
            "an adapter of the type …",
            "a LoRA that enlarges a weight (FLUX.1",
            "a Tucker-decomposed adapter, which is",
            "an adapter's factors of … and … do not",
            "an adapter changes … values of …, which",
        ),
    },
    "files": {
        "parallel_backend/models/comfyui/detection.py": (
            "… has tensors of which ComfyUI can make",
            "… is no diffusion model that ComfyUI",
        ),
        "parallel_backend/models/comfyui/diffusers_names.py": ("… lacks rows of the tensor …: choose",),
        "parallel_backend/models/inspection.py": (
            "… lacks the tensor …: choose a complete",
            "… holds … with the shape …, which does",
            "… holds … as … in rows of … bytes, which",
        ),
        "parallel_backend/weights/files/checkpoint.py": ("… is a PyTorch pickle, which is not",),
        "parallel_backend/weights/files/safetensors_file.py": (
            "… (… bytes) is neither a safetensors",
            "… is truncated: its header takes … bytes",
            "… is truncated: it should have … bytes",
            "… holds … as …, a type not supported",
            "… has a damaged header (…); download",
        ),
    },
    "families": {
        "nodes/model/build.py": ("… is a … model and this loader takes",),
        "parallel_backend/models/diffusers/cogvideox.py": ("… has no CogVideoX tensors: choose a",),
        "parallel_backend/models/diffusers/pixart.py": ("… has no PixArt tensors: choose a PixArt-alpha",),
    },
    "vaes": {
        "nodes/vae/vae.py": ("Saving a parallel VAE cannot be done:",),
        "nodes/video_decode.py": (
            "CogVideoX Parallel Decode takes a VAE",
            "CogVideoX Parallel Decode was given",
        ),
        "parallel_backend/models/comfyui/autoencoder.py": (
            "… has no tensors of a VAE that ComfyUI",
            "… holds a VAE of ComfyUI's class …,",
            "… holds … of version 0.9.1, whose decoder",
            "… lacks the tensor …: choose a complete",
            "… has tensors of other sizes than ComfyUI's",
        ),
        "parallel_backend/vae/autoencoder.py": ("… lacks the tensor …: choose a complete",),
    },
    "stored": {
        "nodes/model/files.py": ("… is in none of ComfyUI's model folders:",),
        "parallel_backend/weights/files/checkpoint.py": ("… cannot be read (…): check the disk",),
        "parallel_backend/weights/files/diffusers_folder.py": (
            "… of … names …, which is outside the",
            "… lacks the file … that its index names:",
            "… of … lacks the tensor … that the index",
            "… of … is damaged (…); download it again.",
        ),
        "parallel_backend/weights/files/gguf_file.py": (
            "… is GGUF version … and … is supported:",
            "… is truncated: it should have … bytes",
            "… holds … as …, which is not supported",
            "… is truncated or damaged: its header",
            "… has a damaged header (…); download",
        ),
    },
    "of diffusers": {
        "parallel_backend/models/diffusers/cogvideox.py": (
            "… takes … latent channels (Fun and control",
            "… has learned positions for … tokens",
            "… has … features and no rotary positions,",
            "… lacks the CogVideoX tensor …: choose",
        ),
        "parallel_backend/models/diffusers/pixart.py": (
            "… compresses its keys and values, which",
            "… has … features, which … attention",
            "… lacks the PixArt tensor …: choose",
        ),
        "parallel_backend/models/inspection.py": ("… holds … with the shape …, which no",),
        "parallel_backend/vae/__init__.py": (
            "… has no tensors of a VAE: choose a",
            "… lacks the tensor …: choose a complete",
        ),
        "parallel_backend/vae/autoencoder.py": (
            "… holds … as …: choose a VAE file in",
            "… holds … with the shape … where … is",
        ),
        "parallel_backend/vae/cogvideox.py": ("… has … levels and CogVideoX has 4:",),
        "parallel_backend/weights/files/keymap.py": (
            "… lacks the tensor …: choose a complete",
            "… holds … with the shape … and … rows",
            "… has damaged tensors (…: …); download",
        ),
        "parallel_backend/weights/files/scaled_fp8.py": (
            "… holds … as … with a scale, which is",
            "… holds the scale of … as … with the",
            "… holds ….weight as …, which is not",
            "… has damaged marks of quantisation",
        ),
    },
    "whole": {
        "nodes/model/checkpoint.py": ("… is a … checkpoint, whose diffusion",),
        "nodes/model/features/controlnet_whole.py": ("the ControlNet gives … of this model: …",),
        "parallel_backend/models/comfyui/whole_family.py": (
            "the latent has the shape … and … takes",
            "the conditioning's … is … and … takes",
        ),
        "parallel_backend/plan/whole.py": (
            "… … cannot be used, as …; use … 1, and",
            "stages … cannot be used, as …; leave it",
            "weights … cannot be used with this",
            "attention … cannot be used with this",
            "devices … are … workers, and …: …, … at",
            "data … x cfg … takes … workers or a",
        ),
        "parallel_backend/worker/requests/row_coupling.py": ("a … model computes the rows of a batch",),
    },
    "videos and pictures": {
        "nodes/model/features/controlnet.py": ("the ControlNet changes … blocks, which",),
        "nodes/model/remote_model.py": ("… in the conditioning cannot be used",),
        "nodes/model/features/lora.py": ("an adapter of the type … mixes rows",),
        "nodes/vae/remote_vae.py": (
            "the latent has the shape … and … takes",
            "… decoded pictures of … x … take … GB",
        ),
        "parallel_backend/models/diffusers/cogvideox.py": (
            "the latent has the shape … and CogVideoX",
            "the latent has the shape …, which is",
            "the latent has … frames (of 4 video",
            "the conditioning's text has the shape",
            "the latent is … x … and CogVideoX-5b",
            "the conditioning has an image and this",
            "this CogVideoX model turns an image",
        ),
        "parallel_backend/models/diffusers/pixart.py": (
            "the latent has the shape … and PixArt",
            "the latent has the shape …, which is",
            "the conditioning's text has the shape",
            "the conditioning's attention_mask is",
        ),
    },
    "sound": {
        "parallel_backend/models/comfyui/comfy_family.py": (
            "the latent holds a video alone and …",
            "the latent's sound has the shape … and",
            "the latent is a batch of … and … makes",
            "the reference latents method … is not",
            "… in the conditioning cannot be used",
            "the picture beside the latent, such as",
        ),
        "parallel_backend/conditioning.py": (
            "… in the conditioning is nested too",
            "… in the conditioning holds a …, which",
        ),
        "parallel_backend/plan/resolve.py": ("pipefusion … with patches … cannot be used",),
        "parallel_backend/wire/frames.py": ("the tensor … has … dimensions and …",),
    },
    "computed": {
        "parallel_backend/host/workers/diagnosis.py": ("… failed…: … …",),
        "parallel_backend/host/runs/finite.py": ("…: the model's output holds … values",),
        "parallel_backend/models/comfyui/comfy_family.py": ("the conditioning's attention_mask is",),
        "parallel_backend/models/spread/arguments.py": (
            "… of the model's … … with a parallel",
            "…weighs tokens, or differs inside a",
            "…has … parts for … of the latent, which",
        ),
        "parallel_backend/models/comfyui/latents.py": ("the guides leave … of the latent's",),
        "parallel_backend/worker/memory/holder.py": ("weights streamed takes … of the computer's",),
    },
    "sizes": {
        "parallel_backend/models/comfyui/latents.py": (
            "a reference latent has the shape … and",
            "what lies beside the latent, such as a",
            "… in the conditioning is for a latent of",
            "… in the conditioning has the shape …",
            "the prompt has guides of … tokens and",
            "… takes whole tokens only, and …",
        ),
    },
    "networks": {
        "nodes/model/features/networks.py": (
            "Anima LLLite takes a picture and the",
            "the model patch is made for a width of",
            "the model patch is given a batch of …",
            "the model patch has … blocks and the",
            "the model patch adds to block … and the",
            "a model patch that is changed itself",
            "Apply Z-Image Fun ControlNet cannot be",
            "the speech is for … frames of the latent,",
            "InfiniteTalk takes one video and one prompt",
        ),
    },
}
"""By list, and file."""


def reached_by(name: str) -> list[Place]:
    """The places that a list is said to reach."""
    return [place for file, texts in SHOWN.get(name, {}).items() for text in texts for place in called(file, text)]
