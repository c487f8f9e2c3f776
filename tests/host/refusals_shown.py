"""Which of the places that make a sentence for the user a list of refused.py reaches, and why none reaches the others.

The browser's test holds each list against what it says here, and test_published each place in the code: one that is new
fails until it is shown, or a reason is given. A sentence is named by its beginning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tests.host.refusal_places import Place, places

SHOWN: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "plans": {
        "parallel_backend/attention/kernels.py": ("…",),
        "parallel_backend/plan/devices.py": (
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
        "nodes/model/unsupported.py": (
            "… cannot be done with a parallel MODEL:",
            "… cannot be applied to a parallel MODEL:",
        ),
        "nodes/model/weight_patches.py": ("… cannot be applied to a parallel MODEL:",),
        "nodes/parallel_sampler.py": ("Parallel Sampler takes a MODEL from",),
    },
    "other packs": {
        "nodes/model/carry.py": ("MultiGPU CFG Split cannot be used with",),
        "nodes/model/patcher.py": (
            "Applying LoRA hooks",
            "Reading the weights",
            "MultiGPU CFG Split",
            "Wrapping weights",
        ),
        "nodes/model/proxy.py": ("Changing diffusion_model.…",),
        "nodes/model/sampler_wrapper.py": ("Replacing the diffusion model",),
        "nodes/model/sigmas.py": ("the cfg is …, of which no picture comes:",),
        "nodes/model/weight_patches.py": (
            "a patch of the type …",
            "the function … on …",
            "a change of …",
            "DoRA on an OFT adapter",
        ),
        "nodes/model/within.py": (
            "Reading or changing the weights",
            "Changing … (…)",
            "Changing …",
        ),
        "nodes/samplers.py": ("The sampler … cannot be used with …:",),
        "parallel_backend/denoise/samplers/__init__.py": ("The sampler … is made for CogVideoX:",),
    },
    "saved prompts": {
        "nodes/conditioning.py": (
            "Save Conditioning writes one prompt",
            "Save Conditioning keeps the text, …;",
            "… has no tensor named cond: pick a file",
            "… could not be written to ComfyUI's",
        ),
    },
    "places and machines": {
        "parallel_backend/host/diagnosis.py": ("… …. …",),
        "parallel_backend/host/elsewhere.py": (
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
        "parallel_backend/plan/resolve.py": (
            "memory_limit … is not an amount of memory:",
            "patches … and warmup_steps … cannot",
            "cfg … is more than the 2 prompts, the",
            "… … is negative: use 0 (automatic),",
        ),
    },
    "what travels": {
        "nodes/model/unsupported.py": ("… cannot be used with a parallel MODEL",),
        "parallel_backend/wire/frames.py": (
            "a message with … tensors is over the",
            "a number or name in … cannot be sent",
        ),
    },
    "in the middle": {
        "nodes/model/control.py": ("the ControlNet gives tensors of … and",),
        "nodes/model/sampler_wrapper.py": ("Parallel Sampler does not support …:",),
        "nodes/model/sigmas.py": (
            "sigma … of … is …: look at the node",
            "the sigmas end at …, where this model's",
        ),
        "parallel_backend/host/numbers.py": ("…: the sampler's step gives … values",),
    },
    "marked": {
        "parallel_backend/models/comfyui/diffusers_names.py": ("… holds … under diffusers' names, where",),
        "parallel_backend/models/comfyui/marks.py": ("… has damaged marks of quantisation",),
        "parallel_backend/models/comfyui/quantised.py": (
            "… holds ….weight as …, which this ComfyUI",
            "… holds … quantised, which is supported",
            "… holds ….weight as … in a way that",
        ),
    },
    "loras": {
        "nodes/model/weight_patches.py": (
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
        "parallel_backend/weights/checkpoint.py": ("… is a PyTorch pickle, which is not",),
        "parallel_backend/weights/safetensors_file.py": (
            "… (… bytes) is neither a safetensors",
            "… is truncated: its header takes … bytes",
            "… is truncated: it should have … bytes",
            "… holds … as …, a type not supported",
            "… has a damaged header (…); download",
        ),
    },
    "families": {
        "nodes/model/build.py": ("… is a … model and this loader takes",),
        "parallel_backend/models/comfyui/comfy_family.py": ("… is a … model, which is not supported",),
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
        "nodes/model_files.py": ("… is in none of ComfyUI's model folders:",),
        "parallel_backend/weights/checkpoint.py": ("… cannot be read (…): check the disk",),
        "parallel_backend/weights/diffusers_folder.py": (
            "… of … names …, which is outside the",
            "… lacks the file … that its index names:",
            "… of … lacks the tensor … that the index",
            "… of … is damaged (…); download it again.",
        ),
        "parallel_backend/weights/gguf_file.py": (
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
        "parallel_backend/weights/keymap.py": (
            "… lacks the tensor …: choose a complete",
            "… holds … with the shape … and … rows",
            "… has damaged tensors (…: …); download",
        ),
        "parallel_backend/weights/scaled.py": (
            "… holds … as … with a scale, which is",
            "… holds the scale of … as … with the",
            "… holds ….weight as …, which is not",
            "… has damaged marks of quantisation",
        ),
    },
    "videos and pictures": {
        "nodes/model/control.py": ("the ControlNet changes … blocks, which",),
        "nodes/model/remote_model.py": ("… in the conditioning cannot be used",),
        "nodes/model/weight_patches.py": ("an adapter of the type … mixes rows",),
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
        ),
    },
    "computed": {
        "parallel_backend/host/diagnosis.py": ("… failed…: … …",),
        "parallel_backend/host/numbers.py": ("…: the model's output holds … values",),
        "parallel_backend/models/spread/arguments.py": (
            "… of the model's … … with a parallel",
            "…weighs tokens, or differs inside a",
        ),
        "parallel_backend/models/spread/places.py": ("the model makes … tokens where the picture",),
    },
}
"""By list, and file."""

NOT_BY_A_GRAPH: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "a button of the tab, which shows the sentence itself (test_panel, test_panel_page)": {
        "parallel_backend/host/backend.py": (
            "the workers are busy: wait until they",
            "no workers are running, so there is",
        ),
        "parallel_backend/host/comparison.py": (
            "there is no run to compare: run a graph",
            "the last run was on one device, so there",
            "one device cannot hold the last run's",
        ),
    },
    "a fault of a worker, not of a graph: test_a_workers_failure_\u2026 has three, tests/faults the rest": {
        "parallel_backend/host/diagnosis.py": (
            "… failed…: …. …",
            "The connection to the workers was lost.",
            "The workers could not be started: ….",
            "… has not answered for … s…. …",
            "No worker made progress for … s; … ….",
            "Worker … did not start within … s. …",
            "The connection to … was lost…. …",
            "… ran out of memory…: … …",
            "… was lost…. …",
        ),
    },
    "other machines or other versions of ComfyUI, torch, diffusers or this pack take part (tests/machines, tests/wire)": {
        "parallel_backend/host/group.py": (
            "…",
            "the workers at … are others than when",
            "these workers are serving another client",
        ),
        "parallel_backend/host/versions.py": (
            "diffusers … is installed and … is supported:",
            "torch … is installed and the workers",
            "the workers on … run another version",
            "the workers on … have ComfyUI … and",
            "the workers on … have diffusers … and",
            "diffusers is not installed and … is",
            "worker … on … has … … and worker 0 on",
        ),
        "parallel_backend/models/comfyui/comfy_family.py": ("… is a … model, whose … is not in the",),
        "parallel_backend/models/comfyui/importing.py": ("this worker does not find ComfyUI (…):",),
        "parallel_backend/models/diffusers/attention.py": ("diffusers' attention is given …, which",),
        "parallel_backend/models/diffusers/family.py": ("diffusers … has a … of other weights",),
        "parallel_backend/models/spread/arguments.py": ("the model's … has no argument …: this",),
        "parallel_backend/models/spread/attend.py": (
            "the model's … calls attention more than",
            "the model's … called attention … times",
            "the model's attention is given …, which",
            "the model's … attends with … queries to … keys where this pack knows of … and",
            "the model's … attends with … queries to … keys where this pack knows of …: update",
        ),
        "parallel_backend/models/spread/blocks.py": (
            "the model's block of … returns … values",
            "a block of the model returned … tokens",
            "the model's … has no …: this ComfyUI",
        ),
        "parallel_backend/models/spread/without_options.py": ("the model's … has no …: this ComfyUI is newer",),
        "parallel_backend/worker/memory/files.py": ("… is not on …: copy ComfyUI's file into",),
    },
    "the environment that ComfyUI was started with": {
        "parallel_backend/host/group.py": ("PARALLEL_DEADLINES=… is not understood:",),
        "parallel_backend/wire/interfaces.py": ("… is … and this machine's network interfaces",),
    },
    "only where GPUs are": {
        "nodes/vae/vae.py": ("Select VAE Device cannot be used with",),
        "parallel_backend/plan/devices.py": ("devices … lists … workers; at most …",),
        "parallel_backend/plan/resolve.py": ("weights sharded needs a GPU for each",),
    },
    "ComfyUI takes nothing else from a field that is a list of choices": {
        "parallel_backend/attention/kernels.py": ("attention … is unknown: use one of ….",),
        "parallel_backend/plan/resolve.py": ("weights … is unknown: use … or ….",),
    },
    "the nodes name no other sampler or option": {
        "parallel_backend/denoise/samplers/__init__.py": (
            "The sampler … is not supported; these",
            "The sampler … is not supported with",
            "The option … of … must be …, not ….",
            "The option … of … must be of type …,",
        ),
    },
    "of the command line alone (tests/plan)": {
        "parallel_backend/plan/known_machines.py": ("the card … is unknown: use ….",),
        "parallel_backend/plan/known_models.py": ("the model … is unknown: use ….",),
    },
    "the file goes away, or is cut, between two looks at it (tests/weights)": {
        "parallel_backend/weights/checkpoint.py": ("… does not exist (…): pick another file",),
        "parallel_backend/weights/diffusers_folder.py": ("the folder … has no … and no …: choose",),
        "parallel_backend/weights/reading.py": (
            "… cannot be read at byte … (…): check",
            "… ended at byte … while it was being",
        ),
    },
    "another check comes before it": {
        "nodes/model/build.py": ("… is not a model ComfyUI knows: choose",),
        "parallel_backend/models/comfyui/marks.py": ("… has … in a layout that is not supported:",),
        "parallel_backend/models/diffusers/cogvideox.py": ("the image's latent has the shape … and",),
        "parallel_backend/weights/packing.py": ("… holds … as …, which is supported for",),
        "parallel_backend/wire/frames.py": (
            "the description of … takes … bytes and",
            "the tensor … is of …, and only … are",
            "the tensor … has … dimensions and …",
        ),
    },
    "takes more memory than a test may (tests/wire, tests/worker)": {
        "parallel_backend/wire/frames.py": ("a message with … GB of tensors is over",),
        "parallel_backend/worker/memory/holder.py": ("weights streamed takes … of the computer's",),
    },
    "takes a model too large for a test, whose class alone is tested, or another pack's node (tests/models)": {
        "parallel_backend/models/comfyui/comfy_family.py": ("… in the conditioning cannot be used",),
        "parallel_backend/models/comfyui/conditioning.py": (
            "… in the conditioning is nested too",
            "… in the conditioning holds a …, which",
        ),
        "parallel_backend/models/spread/arguments.py": (
            "…is for … tokens and the text has …,",
            "…hides tokens of the picture, which",
            "…is not supported",
            "…differs from GPU to GPU, which is not",
            "…has … places for … tokens, which is",
        ),
    },
}
"""By the reason, and file."""


def reached_by(name: str) -> list[Place]:
    """The places that a list is said to reach."""
    return [place for file, texts in SHOWN.get(name, {}).items() for text in texts for place in called(file, text)]


def claims() -> Iterator[tuple[str, str, list[Place]]]:
    """Each file and beginning that is named, with the places of that name."""
    for named in (*SHOWN.values(), *NOT_BY_A_GRAPH.values()):
        yield from ((file, text, called(file, text)) for file, texts in named.items() for text in texts)


def called(file: str, text: str) -> list[Place]:
    """The place of a file with this text, else those whose texts begin with it."""
    mine = [place for place in places() if place.file == file]
    return [each for each in mine if each.text == text] or [each for each in mine if each.text.startswith(text)]
