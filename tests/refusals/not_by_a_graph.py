"""Why no list of refused.py reaches the other places that make a sentence for the user. A sentence is named by its beginning."""

from __future__ import annotations

from collections.abc import Mapping

NOT_BY_A_GRAPH: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "a button of the tab, which shows the sentence itself (page/test_panel, test_panel_routes)": {
        "parallel_backend/host/backend.py": (
            "the workers are busy: wait until they",
            "no workers are running, so there is",
        ),
        "parallel_backend/host/planning/comparison.py": (
            "there is no run to compare: run a graph",
            "the last run was on one device, so there",
            "one device cannot hold the last run's",
        ),
    },
    "a fault of a worker, not of a graph: test_a_workers_failure_\u2026 has three, tests/faults the rest": {
        "parallel_backend/host/workers/diagnosis.py": (
            "… failed…: …. …",
            "… failed…: … …",
            "The connection to the workers was lost.",
            "The workers could not be started: ….",
            "The workers could not be started: the",
            "… has not answered for … s…. …",
            "No worker made progress for … s; … ….",
            "Worker … did not start within … s. …",
            "The connection to … was lost…. …",
            "… ran out of memory…: … …",
            "… was lost…. …",
        ),
    },
    "numbers that only PipeFusion makes NaN, of a class that no proof finds out (newer/test_changed_classes, with --all)": {
        "parallel_backend/host/runs/finite.py": ("…, under … and not under ",),
    },
    "an option of a class that no listed ComfyUI has yet (newer/test_qwen_image21)": {
        "nodes/model/features/prefix_cache.py": ("the cache of text and references with",),
    },
    "data of a request that no check before the run foresees (faults/test_alike)": {
        "parallel_backend/host/workers/alike.py": ("…", "… raised the same error while"),
        "parallel_backend/denoise/noise.py": ("the sampler asks for noise from sigma",),
    },
    "code of another pack takes part (features/test_other_packs, features/test_vae)": {
        "nodes/model/refusals.py": ("… is replaced by other code", "…"),
        "nodes/model/unchanged.py": ("Changing ….…",),
        "nodes/vae/vae.py": ("Changing first_stage_model.…", "Replacing first_stage_model"),
        "nodes/model/proxy.py": ("Copying the diffusion model",),
        "nodes/model/run/callbacks.py": ("The callback … changed … of step",),
    },
    "other machines or other versions of ComfyUI, torch, diffusers or this pack take part (tests/machines, tests/wire)": {
        "parallel_backend/host/workers/group.py": (
            "…",
            "the workers at … have changed since",
            "these workers are serving another client",
        ),
        "parallel_backend/host/workers/remote.py": ("the workers at … let nobody in for",),
        "parallel_backend/host/workers/versions.py": (
            "torch … is installed and the workers",
            "the workers on … run another version",
            "the workers on … have ComfyUI … and",
            "ComfyUI's files have changed since it",
            "worker … on … has another … than this",
            "…, and the workers on … have …: run",
            "worker … on … has … … and worker 0 on",
        ),
        "nodes/model/refusals.py": ("the option … (a …) cannot be",),
        "nodes/model/run/checks.py": ("What a node does by …, cannot be",),
        "nodes/model/proofs.py": ("… of … gives another result on several",),
        "nodes/model/proxy.py": ("A model patch cannot be used with",),
        "nodes/model/run/wrapper.py": ("The workers' loop does not run with",),
        "nodes/model/features/lora.py": ("what this ComfyUI makes of … adapters",),
        "parallel_backend/models/comfyui/comfy_family.py": ("… is a … model, whose … is not in the",),
        "parallel_backend/models/comfyui/whole_family.py": ("… is a … model, whose … is computed when",),
        "parallel_backend/models/comfyui/small/graph_inputs.py": ("this pack keeps no small call with … as",),
        "parallel_backend/models/comfyui/importing.py": ("this worker does not find ComfyUI (…):",),
        "parallel_backend/models/diffusers/attention.py": ("diffusers' attention is given …, which",),
        "parallel_backend/models/diffusers/installed.py": ("…, and … is installed: …",),
        "parallel_backend/models/diffusers/diffusers_family.py": ("diffusers … has a … of other weights",),
        "parallel_backend/models/spread/arguments.py": (
            "the model's … has no argument …: this",
            "the model's … has no …: this ComfyUI",
        ),
        "parallel_backend/models/spread/by_heads.py": (
            "the model's … has no …: this ComfyUI",
            "the model's … calls … where this pack",
        ),
        "parallel_backend/models/spread/attentions.py": (
            "the model's … calls attention where",
            "the model's … calls attention more than",
            "the model's … called attention … times",
            "the model's attention is given …, which",
            "the model's … attends with … queries to … keys where this pack knows of … and",
            "the model's … attends with … queries to … keys where this pack knows of …: update",
            "the model's … shares keys and values among heads otherwise than this pack knows",
        ),
        "parallel_backend/models/spread/blocks.py": (
            "the model's block of … returns … values",
            "a block of the model returned … tokens",
            "the model's block of … is given … tokens as a prefix where every GPU",
            "the model's … has no …: this ComfyUI",
        ),
        "parallel_backend/models/spread/token_layout.py": (
            "the model makes … tokens of a latent of",
            "the model makes … tokens where the picture",
        ),
        "parallel_backend/models/spread/run.py": ("the model gives … for a latent",),
        "parallel_backend/models/spread/module_attention.py": ("the model's … has no …: this ComfyUI is newer",),
        "parallel_backend/weights/stores/sharded.py": ("the model runs its block … of … after its block",),
        "parallel_backend/worker/memory/files.py": ("… is not on …: copy ComfyUI's file into",),
    },
    "the environment that ComfyUI was started with": {
        "parallel_backend/host/workers/group.py": ("PARALLEL_DEADLINES=… is not understood:",),
        "parallel_backend/wire/interfaces.py": ("… is … and this machine's network interfaces",),
    },
    "a class that nobody declared, which takes minutes to derive (families/test_causal_wan)": {
        "nodes/model/undeclared.py": (
            "… cannot be run under this plan, because",
            "… was not proved to give the same on",
        ),
    },
    "only where GPUs are": {
        "nodes/vae/vae.py": ("Select VAE Device cannot be used with",),
        "parallel_backend/plan/devices/names.py": ("devices … lists … workers; at most …",),
        "parallel_backend/plan/resolve.py": ("weights sharded needs a GPU for each",),
    },
    "what a host records is well-formed; it is what came that is looked at (tests/denoise)": {
        "parallel_backend/denoise/replay.py": ("the program of the sampler … cannot be run",),
        "parallel_backend/denoise/well_formed.py": (
            "the sampler's program cannot be read (…):",
            "the program of the sampler … is not well-formed",
        ),
    },
    "ComfyUI 0.30 has no node with an attention override (models/test_overriding, features/test_attention_overrides)": {
        "nodes/model/features/attention_override.py": (
            "an attention override (….…) cannot be",
            "… (…) sees all tokens of some heads",
        ),
        "parallel_backend/models/spread/overriding.py": (
            "the model's … …, and an attention",
            "the model's … attends with … queries where",
            "…merges attention of several ranks",
            "…has several streams of tokens",
            "…masks queries one by one",
            "…weighs its attention",
        ),
    },
    "ComfyUI 0.30 has no node that hands attention to blocks (features/test_block_attention)": {
        "nodes/model/run/wrapper.py": ("attention that a node hands to the model's",),
        "parallel_backend/models/comfyui/features/block_attention.py": (
            "what a node puts in the place of the model's",
            "looks at … of its tokens",
            "changes … of its arguments",
            "runs it twice",
            "gives something else than the block does",
            "looks at more of its tokens than how many they are",
        ),
        "parallel_backend/models/spread/handed.py": (
            "attention that a node hands to the model's blocks looks at",
            "attention that a node hands to the model's blocks does not",
            "the model's … has a bias, which",
        ),
    },
    "of the command that derives (tests/derive)": {
        "parallel_backend/derive/small.py": ("… is too large to derive: with …",),
        "parallel_backend/derive/undescribed.py": ("… cannot be derived, because …:",),
    },
    "of the command line alone (tests/plan)": {
        "parallel_backend/plan/calibrate.py": (
            "the report has figures that cannot be",
            "the report measured none of",
            "the report is of …, which is no known card",
        ),
        "parallel_backend/plan/gpu_report.py": (
            "the report … cannot be read",
            "line … of the report … is cut off",
            "the report … has no lines",
            "the report is of …: make a file",
        ),
        "parallel_backend/plan/predict/cards.py": ("… is no file of cards",),
        "parallel_backend/plan/predict/known_machines.py": ("the card … is unknown: use ….",),
        "parallel_backend/plan/predict/known_models.py": ("the model … is unknown: use ….",),
    },
    "the file goes away, or is cut, between two looks at it (tests/weights)": {
        "parallel_backend/weights/files/checkpoint.py": ("… does not exist (…): pick another file",),
        "parallel_backend/weights/files/diffusers_folder.py": ("the folder … has no … and no …: choose",),
        "parallel_backend/weights/loading/reading.py": (
            "… cannot be read at byte … (…): check",
            "… ended at byte … while it was being",
        ),
    },
    "no tested ComfyUI has a class that does so (tests/models)": {
        "parallel_backend/models/comfyui/detection.py": ("… is of a class that looks into values",),
        "parallel_backend/models/comfyui/autoencoder.py": ("… holds a VAE whose class looks into values",),
    },
    "another check comes before it": {
        "nodes/model/conditioning_files.py": ("… is not in ComfyUI's input folder: put it",),
        "nodes/model/build.py": ("… is not a model ComfyUI knows: choose",),
        "parallel_backend/weights/values.py": (
            "… holds a tensor as …, which cannot be",
            "… ends early: download it again.",
            "… cannot be read (…): check the disk",
        ),
        "parallel_backend/models/comfyui/quantisation.py": ("… has … in a layout that is not supported:",),
        "parallel_backend/models/diffusers/cogvideox.py": ("the image's latent has the shape … and",),
        "parallel_backend/weights/layers/packing.py": ("… holds … as …, which is supported for",),
        "parallel_backend/wire/frames.py": (
            "the description of … takes … bytes and",
            "the tensor … is of …, and only … are",
        ),
    },
    "takes more memory than a test may (tests/wire)": {
        "parallel_backend/wire/frames.py": ("a message with … GB of tensors is over",),
    },
    "takes the blocks of a model too large for a test, of which the class alone is tested (tests/models)": {
        "nodes/model/proxy.py": ("A ControlNet cannot be used with a",),
        "parallel_backend/models/comfyui/comfy_family.py": ("the picture to edit is a latent … high",),
        "parallel_backend/models/spread/arguments.py": (
            "…is for … tokens and the text has …,",
            "…hides tokens of the picture, which",
            "…is not supported",
            "…differs from GPU to GPU, which is not",
            "…has the shape … and not vectors, …",
            "…is for … items of a batch of …, which",
            "…has … places for … tokens, which is",
        ),
    },
}
"""By the reason, and file."""
