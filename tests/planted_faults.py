"""The faults that mutation testing plants (`mutants.py`), with the tests of the quick run that should catch each."""

from __future__ import annotations

from tests.support.mutant import Mutant

FAULTS = """
a rank's run is one item short
parallel_backend/layout.py: test_layout.py
- slice(start * total // ends[-1], stop * total // ends[-1])
+ slice(start * total // ends[-1], max(0, stop * total // ends[-1] - 1))

a rank has no head where there are as many as ranks
parallel_backend/layout.py: test_layout.py
- int(self.heads >= self.ulysses)
+ int(self.heads > self.ulysses + 1)

a rank lacks the last key head of its queries
parallel_backend/layout.py: test_layout.py
- -(-heads.stop // group)
+ heads.stop // group

the blocks of a merge are weighed the other way round
parallel_backend/attention/online_softmax.py: attention/test_sequence_parallel.py
- torch.sigmoid(lse - self._lse)
+ torch.sigmoid(self._lse - lse)

a merge keeps the larger log-sum-exp
parallel_backend/attention/online_softmax.py: attention/test_sequence_parallel.py
- torch.logaddexp(self._lse, lse)
+ torch.maximum(self._lse, lse)

a ring rank takes the next rank's number of keys
parallel_backend/attention/sequence_parallel.py: attention/test_sequence_parallel.py
- source = (ring.rank - hop) % ring.size
+ source = (ring.rank + hop) % ring.size

the prefix counts at every hop of a ring
parallel_backend/attention/sequence_parallel.py: attention/test_sequence_parallel.py models/test_prefix.py
- hop_prefix = prefix if hop == 0 else None
+ hop_prefix = prefix

replicated queries are merged without the log-sum-exp
parallel_backend/attention/sequence_parallel.py: attention/test_sequence_parallel.py models/test_sequence_parallel.py
- merged.add(result[..., :-1], result[..., -1].transpose(1, 2))
+ merged.add(result[..., :-1], torch.zeros_like(result[..., -1].transpose(1, 2)))

keys and values change places on their way
parallel_backend/attention/ulysses.py: attention/test_sequence_parallel.py
- q, k, v = decode(received.transpose(0, 1)).split(local_counts, dim=2)
+ q, v, k = decode(received.transpose(0, 1)).split(local_counts, dim=2)

outputs of the heads come back in another order
parallel_backend/attention/ulysses.py: attention/test_sequence_parallel.py
- return [piece.view(local, batch, heads, channels).transpose(0, 1) for piece, heads in pieces]
+ return [piece.view(local, batch, heads, channels).transpose(0, 1) for piece, heads in pieces][::-1]

a part of a stream takes the first token of the next
parallel_backend/models/sequence_parallel/placement.py: models/test_sequence_parallel.py
- (positions < stop)
+ (positions <= stop)

the last tokens of a patch belong to nobody
parallel_backend/models/sequence_parallel/placement.py: test_layout.py
- math.ceil(positions.numel() / unit)
+ positions.numel() // unit

tokens are in the order of the ranks
parallel_backend/models/sequence_parallel/placement.py: models/test_function_override.py
- return torch.cat(together.ranks).argsort()
+ return torch.arange(torch.cat(together.ranks).numel())

the branches of guidance change places
parallel_backend/denoise/guidance.py: engine/test_products.py
- negatives[0] + (positive - negatives[0]) * self._cfg
+ positive + (negatives[0] - positive) * self._cfg

every prompt counts as much
parallel_backend/denoise/guidance.py: features/test_stock_nodes_on_flux.py
- weights[branch] += strength
+ weights[branch] += 1.0

a rank takes its own branch for both
parallel_backend/denoise/guidance.py: engine/test_products.py
- averages = [part.view_as(x) for part in both.chunk(self._axis.size, dim=1)]
+ averages = averages * self._axis.size

a prompt's range leaves out the step that it begins with
parallel_backend/denoise/prompts.py: denoise/test_prompts.py
- sigma > prompt.start
+ sigma >= prompt.start

prompts share a batch in another order than ComfyUI's
parallel_backend/denoise/prompts.py: denoise/test_prompts.py
- return [self._batch(tuple(reversed(group))) for group in groups.values()]
+ return [self._batch(tuple(group)) for group in groups.values()]

prompts with different text masks share a batch
parallel_backend/denoise/prompts.py: denoise/test_prompts.py
- None if mask is None else tuple(self._tensors[mask].flatten().tolist())
+ None

the latent outside of a mask is denoised
parallel_backend/denoise/patch_sampler.py: features/test_flux_parity.py
- return denoised * self.mask + self.latent * (1.0 - self.mask)
+ return denoised

the model sees the original without noise outside of a mask
parallel_backend/denoise/patch_sampler.py: features/test_flux_parity.py
- self.latent if self.clean else
+ self.latent if not self.clean else

fresh noise repeats the initial noise
parallel_backend/denoise/noise.py: denoise/test_samplers.py
- seed + 1 if self.device.type == "cpu" else seed
+ seed

a Brownian path is walked the other way
parallel_backend/denoise/noise.py: denoise/test_samplers.py
- (increment if start < end else -increment)
+ increment

patches get noise of another patch
parallel_backend/denoise/noise.py: denoise/test_shared_noise.py
- noise = torch.cat([self.patch.of(drawn[rows]).flatten() for rows in self.rows])
+ noise = torch.cat([self.patch.of(drawn[rows].flip(-2)).flatten() for rows in self.rows])

one step more is exact than the plan says
parallel_backend/denoise/pipeline.py: engine/test_products.py
- call.step < self._warmup_steps
+ call.step <= self._warmup_steps

patches go on with stale keys after a change of prompts
parallel_backend/denoise/pipeline.py: engine/test_products.py features/test_flux_parity.py
-  or prompts != previous

the first stage keeps the latent of the step before
parallel_backend/denoise/pipeline.py: engine/test_products.py
- self._patches[number].region.of(self._latent).copy_(x)
+ self._patches[number].region.of(self._latent)

a timestep lacks its scale
parallel_backend/denoise/process.py: families/test_images.py families/test_reduced.py
- return sigma * self.timestep_scale
+ return sigma

a velocity is taken for noise
parallel_backend/denoise/process.py: engine/test_cogvideox.py
- output * (sigma / (sigma**2 + 1) ** 0.5)
+ output * sigma

a chunk of a file ends one byte late
parallel_backend/weights/loading/rounds.py: weights/test_sharded.py engine/test_loading.py
- end = min(stop, begin + CHUNK_BYTES)
+ end = min(stop, begin + CHUNK_BYTES) + 1

a LoRA stays in the weights after its removal
parallel_backend/weights/adapters/merging.py: models/test_adapters.py features/test_lora_on_flux.py
- if adapters.id == self._merged.id:
+ if adapters.id in (self._merged.id, NONE.id):

weights in fp8 lose their scale
parallel_backend/weights/files/scaled_fp8.py: weights/test_formats.py
-     return replace(entry, scale=scale)
+     return entry

an autoencoder pads a picture with ones
parallel_backend/vae/rows.py: vae/test_exact.py vae/test_comfyui.py
- frames[..., :top, :] = 0
+ frames[..., :top, :] = 1

the rows above a rank's are taken for those below
parallel_backend/vae/rows.py: vae/test_exact.py vae/test_comfyui.py
- if run.stop <= mine.start:
+ if run.stop < mine.start:

a route reads a file by its whole path
nodes/routes/body.py: page/test_routes.py
- if inside and (os.path.isabs(name) or os.path.normpath(name)
+ if inside and (os.path.normpath(name)

a class's verdict holds for its next version
parallel_backend/host/proofs.py: proof
-         sources,
-         code_digest(),
+         code_digest(),

a derived declaration holds for the class's next version
parallel_backend/derive/declaration_cache.py: derive/test_files.py
- (settings, tuple(sources), code_digest(),
+ (settings, code_digest(),

each rank adds a ControlNet's output for rank 0's tokens
parallel_backend/models/comfyui/features/controlnet.py: features/test_controlnet_on_flux.py
- everyone.send(part.of(tensors[name]), rank,
+ everyone.send(mine.of(tensors[name]), rank,

a step cache skips the step that its range begins with
parallel_backend/denoise/step_cache.py: features/test_step_caches.py
- if sigma <= self._settings.start and groups
+ if sigma < self._settings.start and groups

a recorded answer fits every question of its shape
nodes/model/recorded_answers.py: test_recorded_answers.py
- torch.equal(first, second)
+ first.shape == second.shape

a process without the secret is let in
parallel_backend/wire/handshake.py: wire
- elif not hmac.compare_digest(proof,
+ elif not proof and hmac.compare_digest(proof,

rows that change one another are computed apart
parallel_backend/worker/requests/single_forward.py: engine/test_products.py
-  or message.couples_rows

a model's output with NaN passes for a picture
parallel_backend/host/runs/finite.py: faults/test_numbers.py
-     if wrong == 0:
-         return
-     raise NotFinite(
-         f"{when}: the model's
+     if wrong >= 0:
+         return
+     raise NotFinite(
+         f"{when}: the model's

a rank's rows of a Kronecker product begin at the first block's first row
parallel_backend/weights/adapters/lora.py: models/test_adapters.py
- return blocks[start - first * height : stop - first * height]
+ return blocks[: stop - start]

tiles of the ranks change places
parallel_backend/vae/tiles.py: vae/test_tiles.py
- rest = received.split(coming[1 : len(shapes)])
+ rest = received.split(coming[1 : len(shapes)])[::-1]

a data rank adds the ControlNet's output for a cfg rank's rows
parallel_backend/models/comfyui/features/controlnet.py: features/test_controlnet_on_flux.py
- coordinates.data * plan.cfg + coordinates.cfg
+ coordinates.cfg * plan.data + coordinates.data

tensors of a file share bytes
parallel_backend/weights/files/entry.py: weights/test_formats.py
- if start < stop:
+ if start < stop - stop:

a tuple of the conditioning becomes a list
parallel_backend/conditioning.py: test_conditioning.py
- if (kind := type(value).__name__) in KINDS:
+ if (kind := type(value).__name__) in KINDS and not value:

an argument that a block changes in place stays old on the other ranks
parallel_backend/models/comfyui/divided_blocks.py: models/test_divided_blocks.py
- if _version(argument) != version
+ if _version(argument) < version

a rank keeps the blocks of another rank
parallel_backend/models/comfyui/divided_blocks.py: models/test_divided_blocks.py
-                 if owner != axis.rank:
+                 if owner > axis.rank:

a text encoder's parameter takes the file's rows from the first on
parallel_backend/models/comfyui/text_encoder.py: clip/test_files.py
- start = source.storage_offset() // max(row, 1)
+ start = 0 * source.storage_offset()

a worker waits for a folder that is gone
parallel_backend/worker/process/rendezvous.py: worker/test_rendezvous.py
-         file = os.open(launched.rendezvous, os.O_RDWR | os.O_CREAT, 0o600)
-         return FileStore(str(path_of(file)), world_size)
+         return FileStore(launched.rendezvous, world_size)

all copies of a text encoder have the first one's LoRA
nodes/clip/clip.py: features/test_text_encoders.py
-         self._patcher = patcher
+         self._patcher = self._patcher or patcher
"""
"""Each fault has a line with its name, and a line with its file and the tests that should catch it. Lines with `-` are the right
code, which occurs once in the file. Lines with `+` take their place.
"""


def mutant(fault: str) -> Mutant:
    """Return a fault of `FAULTS`."""
    name, place, *change = fault.strip("\n").splitlines()
    file, _, tests = place.partition(": ")
    before, after = ("\n".join(line[2:] for line in change if line.startswith(sign)) for sign in "-+")
    return Mutant(name, file, before, after, tuple(f"tests/{test}" for test in tests.split()))


MUTANTS = tuple(map(mutant, FAULTS.split("\n\n")))
