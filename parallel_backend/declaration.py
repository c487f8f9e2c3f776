"""The words of a declaration, which says where the tokens of a model are, block by block.

A declaration reads like a sharding specification. A `BlockGroup` names each argument of a block's forward and says how the ranks
of a sequence group divide it. `docs/develop/adding-a-model.md` explains the words with an example.

Each word is a msgspec struct, so that a declaration can be kept on disk and sent to workers, which check it on arrival.
A `PythonFunction` and the other functions in a declaration cannot be sent. Only a declaration in `models/declared/` has those.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeAlias

import msgspec
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=256)]
Names: TypeAlias = Annotated[tuple[Name, ...], msgspec.Meta(max_length=64)]
Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 24)]
Positive: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
Ratio: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1 << 24)]
Numbers: TypeAlias = Annotated[tuple[Number, ...], msgspec.Meta(max_length=64)]

REMOVE = "remove the node that adds it"
"""The advice to the user in most refusals of conditioning."""


class DeclarationPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag=True):
    """The base class of all words. A message names the class of a word in its field `type`."""


class PythonFunction(DeclarationPart, frozen=True):
    """A Python function in a declaration. It cannot be sent, and nothing that arrives can be one.

    Attributes:
        function: the function that is called with the arguments of a call of this word.
    """

    function: Callable[..., Any]

    def __call__(self, *arguments: Any) -> Any:
        """Call the function."""
        return self.function(*arguments)


class Constant(DeclarationPart, frozen=True):
    """A value that is the same for every model of the class."""

    value: Number | Numbers

    def __call__(self, model: Any) -> Any:
        """Return the value."""
        return self.value


class StartAt(DeclarationPart, frozen=True):
    """The fixed position of the first latent token in a stream."""

    position: Number

    def __call__(self, length: int, latent_tokens: int) -> int:
        """Return the position, which does not depend on the numbers of tokens."""
        return self.position


class AlignedToEnd(DeclarationPart, frozen=True):
    """The position of the first latent token in a stream that ends with the latent tokens.

    Attributes:
        multiple: the model pads the number of latent tokens to a multiple of this number.
    """

    multiple: Positive = 1

    def __call__(self, length: int, latent_tokens: int) -> int:
        """Return the position in a stream of `length` tokens."""
        return length - -(-latent_tokens // self.multiple) * self.multiple


class TokensOfLatents(DeclarationPart, frozen=True):
    """The number of tokens that the model makes of latents in its conditioning.

    Attributes:
        latents: names of the model's arguments. Each holds a latent `[batch, channels, (frames,) height, width]` or a list of
            these.
        patch_size: latent values of one token in each dimension.
    """

    latents: Names
    patch_size: Numbers

    def __call__(self, arguments: Mapping[str, Any]) -> int:
        """Return the number of tokens for a call with these arguments; latent and timestep are not among them."""
        latents = tree_leaves([arguments.get(name) for name in self.latents])
        return sum(
            math.prod(-(-size // step) for size, step in zip(latent.shape[2:], self.patch_size, strict=True))
            for latent in latents
            if latent is not None
        )


class InterleavedBlocks(DeclarationPart, frozen=True):
    """Two lists of blocks that take turns, as Wan VACE's do. A pipeline stage does not begin between blocks that belong together.

    Attributes:
        path: the first list's name in the model.
        inserted: the second list's name. Each of its blocks runs right after a block of the first list.
        positions: for each block of the second list, the index of that block of the first list. A block of the second list
            without a position never runs and counts with the first block.
    """

    path: Name
    inserted: Name
    positions: Annotated[tuple[Number, ...], msgspec.Meta(max_length=256)]

    @property
    def second_position(self) -> int:
        """Return the position of the second inserted block, or 0 if there is none."""
        return max(self.positions[:2], default=0)

    def __call__(self, model: nn.Module) -> list[list[str]]:
        """Return the names of the blocks of each unit, in the order of their runs."""
        units = [[f"{self.path}.{number}"] for number, _ in enumerate(model.get_submodule(self.path).children())]
        for number, _ in enumerate(model.get_submodule(self.inserted).children()):
            runs = number < len(self.positions) and self.positions[number] < len(units)
            unit = units[self.positions[number] if runs else 0]
            unit.insert(len(unit) if runs else 0, f"{self.inserted}.{number}")
        return units


class FirstPatchTokens(DeclarationPart, frozen=True):
    """A stream without latent tokens, such as text. Under PipeFusion its tokens belong to the first patch."""

    dim: ClassVar[int] = 1


class LatentTokens(DeclarationPart, frozen=True):
    """A stream that holds the latent's tokens in one contiguous range. Tokens around the range belong to the first patch.

    Attributes:
        start: the position of the range. Trailing tokens do not count as part of the stream's length.
        trailing: tokens of other latents at the end of the stream, such as references.
        grid: the tokens have several dimensions (frames, height, width) instead of one. A block gets its tokens along the first
            dimension.
        dim: the tensor dimension of the tokens. It is 0 for a model without a batch dimension.
        parts_per_frame: the number of equal parts of a frame that have their own values; see `PerFramePart`. If it is not 0,
            ranks divide the tokens in short runs, of which none crosses the end of a row or of a part.
    """

    start: StartAt | AlignedToEnd = StartAt(0)
    trailing: TokensOfLatents | None = None
    grid: bool = False
    dim: Number = 1
    parts_per_frame: Number = 0


class ReplicatedTokens(DeclarationPart, frozen=True):
    """A stream that every rank holds in full, such as the short sound that goes with a video."""

    dim: ClassVar[int] = 1


class PrefixedTokens(DeclarationPart, frozen=True):
    """A stream of a prefix, which every rank holds in full, followed by the latent's tokens, which ranks divide.

    The prefix is text and references, which do not depend on the latent. A call of the block may have only the prefix or only the
    latent's tokens. Under PipeFusion each patch has the whole prefix.

    Attributes:
        length: the name of the block's argument that holds the number of prefix tokens.
    """

    length: Name
    dim: ClassVar[int] = 1


StreamKind: TypeAlias = FirstPatchTokens | LatentTokens | ReplicatedTokens | PrefixedTokens


class PerToken(DeclarationPart, frozen=True):
    """A tensor, or a tuple of tensors, with one entry per token along `dim`.

    Attributes:
        streams: the streams whose tokens it follows, concatenated in this order.
        dim: the tensor dimension of the tokens.
    """

    streams: Names
    dim: Number


class TokenRanges(DeclarationPart, frozen=True):
    """A list of tuples (start, stop, ...), each a range of a stream's tokens. A stop of None is the end of the stream.

    Any tensor in a tuple after `stop` has one row per token of the range.
    """

    stream: Name


class TokenPosition(DeclarationPart, frozen=True):
    """A position in a stream. On each rank it becomes the number of the rank's tokens before the position.

    If that number is 0 for an argument of a module in `Declaration.between`, the rank does not call the module.
    """

    stream: Name


class PerFrame(DeclarationPart, frozen=True):
    """A tensor `[batch, frames, ...]` whose entries the block repeats over the tokens of each frame.

    A tensor with one entry, or with fewer than `dims` dimensions, applies to all tokens.

    Attributes:
        stream: the stream whose tokens it applies to.
        dims: the number of the tensor's dimensions.
    """

    stream: Name
    dims: Number


class PerFramePart(DeclarationPart, frozen=True):
    """A tensor `[batch, parts, ...]` with values for each part of the stream's frames.

    `LatentTokens.parts_per_frame` is the number of parts in a frame. A rank gets the entries of the parts that hold its tokens.

    Attributes:
        stream: the stream whose tokens it applies to.
        values_per_part: consecutive entries that belong to one part.
        with_references: the tensor also covers the parts of trailing tokens.
    """

    stream: Name
    values_per_part: Positive = 1
    with_references: bool = False


class TextMask(DeclarationPart, frozen=True):
    """A mask `[batch, tokens]` of a text stream. Masked tokens are left out of the stream, and the block gets no mask.

    Attributes:
        stream: the text stream.
        after: streams after the text that the mask also covers and does not hide.
        before: streams before the text that the mask also covers and does not hide.
    """

    stream: Name
    after: Names = ()
    before: Names = ()


class TextLength(DeclarationPart, frozen=True):
    """The number of leading tokens of a text stream that are attended to. The later tokens are left out of the stream."""

    stream: Name


class PerTokenObject(DeclarationPart, frozen=True):
    """An object of a class of ComfyUI's that follows the tokens of a stream.

    Attributes:
        stream: the stream.
        select: a function of (object, positions, stream length) that returns the object for the tokens at these positions.
    """

    stream: Name
    select: Callable[[Any, Tensor, int], Any]


class AttentionBias(DeclarationPart, frozen=True):
    """An object of a class of ComfyUI's that weighs attention between two kinds of tokens of a stream.

    Attributes:
        stream: the stream.
        log_weights: a function of the object that returns `[tokens, 2]`. The first column is 0 for tokens of the first kind, and
            the logarithm of a token's weight for the second kind. The second column is 1 for tokens of the first kind and 0 for
            the second kind. A `DistributedAttention` with `biased` takes it as its mask.
    """

    stream: Name
    log_weights: Callable[[Any], Tensor]


class Replicated(DeclarationPart, frozen=True):
    """A value that is the same for all tokens, such as modulation or a number.

    A tensor holds vectors of features along its last dimension.

    Attributes:
        vectors: the allowed numbers of vectors per batch item. Empty: any number, and `TokenRanges` say which tokens each applies
            to. A tensor with another number, for example one vector per frame, is refused.
    """

    vectors: Numbers = (1,)


class ReplicatedContext(DeclarationPart, frozen=True):
    """Text or sound that tokens attend to and that is not in the sequence, or its masks. Every rank has all of it."""


class InjectedAttention(DeclarationPart, frozen=True):
    """A function that a node passes to a block in the place of one of its submodules for attention.

    The function runs for all tokens and this rank's heads, and sees the submodule with these heads only. The function gets the
    block's other arguments as the model passed them. Blocks of an older ComfyUI may not take this argument.

    Attributes:
        module: the submodule's name in the block. It has no batch dimension, and attributes `heads` and `head_dim`.
        stream: the stream that is the function's first argument.
        projections: layers of the submodule without bias, with outputs of a multiple of heads x head_dim. Layers that are None
            are skipped.
        output_layer: the layer that the function applies to its result.
        shared: other attributes that the function may read, which are the same for every head.
    """

    module: Name
    stream: Name
    projections: Names
    output_layer: Name
    shared: Names


Argument: TypeAlias = (
    PerToken
    | TokenRanges
    | TokenPosition
    | PerFrame
    | PerFramePart
    | TextMask
    | TextLength
    | PerTokenObject
    | AttentionBias
    | Replicated
    | ReplicatedContext
    | InjectedAttention
)


Options: TypeAlias = Mapping[str, Any]
"""ComfyUI's transformer_options of a block's call."""


def always(options: Options) -> bool:
    """Return True: the block calls this attention whatever its options are."""
    return True


class DistributedAttention(DeclarationPart, frozen=True):
    """Attention of this rank's queries to the keys of all ranks, by Ulysses, Ring and PipeFusion's cache.

    Attributes:
        streams: the streams of both queries and keys, concatenated in this order.
        kv_heads: the number of key heads in grouped-query attention, where several query heads share a key head. It is the same
            if the model repeats the key heads before the call. 0: each query head has its own.
        biased: the call takes the rows of an `AttentionBias` as its mask. ComfyUI's other masks cover the whole stream and are
            ignored.
        is_called: a function of the block's options that returns whether the block makes this call.
    """

    streams: Names
    kv_heads: Number = 0
    biased: bool = False
    is_called: Callable[[Options], bool] = always


class ReplicatedKeys(DeclarationPart, frozen=True):
    """Attention of this rank's queries to keys that every rank holds, such as cross-attention to text.

    Attributes:
        source: a stream or argument. The block does not make this call if the stream is empty or the argument is None.
        is_called: a function of the block's options that returns whether the block makes this call.
    """

    source: Name = ""
    is_called: Callable[[Options], bool] = always


class ReplicatedQueries(DeclarationPart, frozen=True):
    """Attention of queries that every rank holds to the keys of all ranks.

    Each rank attends to its own keys. All ranks merge the results in the order of the ranks, so that they have the same bits.

    Attributes:
        queries: the stream of the queries.
        keys: the stream of the keys.
        is_called: a function of the block's options that returns whether the block makes this call.
    """

    queries: Name
    keys: Name
    is_called: Callable[[Options], bool] = always


class HeadParallelAttention(DeclarationPart, frozen=True):
    """A submodule's method that computes attention and depends on token positions. It runs for all tokens and this rank's heads.

    Attributes:
        module: the submodule's name in the block. It stores its head count in `num_heads`.
        method: the method's name. Its first argument is the block's tokens.
        projection: the submodule's method that makes q, k and v `[batch, tokens, heads, head_dim]`.
        output_layer: the layer that the method applies to its result.
        stream: the stream of the tokens.
        keys: arguments of both block and method that are streams of further keys or values, shaped as `projection` makes them.
        scratch: an argument that holds tensors to write into, with heads, or heads x head_dim, along dimension 2.
    """

    module: Name
    method: Name
    projection: Name
    output_layer: Name
    stream: Name
    keys: Names = ()
    scratch: Name = ""
    kv_heads: ClassVar[int] = 0


class PrefixedAttention(DeclarationPart, frozen=True):
    """Attention of the latent tokens of a `PrefixedTokens` stream to the prefix and to the latent tokens of all ranks.

    The keys begin with the prefix's, from the stream or from a cache of the model's. Any number of attention calls inside the
    prefix may come before this call. Every rank computes those calls alone, by ComfyUI's own kernel.

    Attributes:
        stream: the name of the stream.
    """

    stream: Name
    kv_heads: ClassVar[int] = 0


Attention: TypeAlias = (
    DistributedAttention | ReplicatedKeys | ReplicatedQueries | HeadParallelAttention | PrefixedAttention
)
Attentions: TypeAlias = Annotated[tuple[Attention, ...], msgspec.Meta(max_length=64)]


class AttentionsBySubmodule(DeclarationPart, frozen=True):
    """The attention calls of blocks of two kinds, which differ in having a submodule.

    Attributes:
        submodule: the submodule's name in the block.
        present: the calls of a block that has the submodule.
        absent: the calls of a block that does not.
    """

    submodule: Name
    present: Attentions
    absent: Attentions

    def __call__(self, block: nn.Module) -> tuple[Attention, ...]:
        """Return the attention calls of one block."""
        return self.present if self.submodule in dict(block.named_modules()) else self.absent


class BlockGroup(DeclarationPart, frozen=True):
    """Blocks of one kind: a ModuleList, or a single module such as an output layer.

    `streams` and `arguments` together name every argument of the block's forward. An argument without a name here must be None.

    Attributes:
        path: the name of the list or module in the model.
        streams: the arguments that hold tokens. A call may leave one out.
        returns: for each returned value, the stream whose token positions it has.
        arguments: the other arguments.
        tuples: for an argument that is a tuple, the names of its members, which `streams` and `arguments` describe.
        attentions: the block's attention calls in order, or a function of the block that returns them.
        modulations: submodules whose only argument is the same for all tokens. Patches share their results.
        attention_module: the module that calls attention where the block passes no transformer_options on.
        kernels: the number of kernels that one block launches. 0: the prediction knows it by the model's class.
        active_weights: the fraction of a block's weights that multiply each token. 0: the prediction counts the layers.
        activation_copies: the features that a block holds per token at its peak, as a multiple of the hidden size. 0: as above.
        method: the method by which the model calls the blocks. A block is done when this method has run.
        other_methods: further methods of the same blocks that the model calls, each described by a group.
    """

    path: Name
    streams: Annotated[Mapping[Name, StreamKind], msgspec.Meta(max_length=64)]
    returns: Names
    arguments: Annotated[Mapping[Name, Argument], msgspec.Meta(max_length=64)] = {}
    tuples: Mapping[Name, Names] = {}
    attentions: Attentions | AttentionsBySubmodule | PythonFunction = ()
    modulations: Names = ()
    attention_module: Name = ""
    kernels: Number = 0
    active_weights: Ratio = 0.0
    activation_copies: Ratio = 0.0
    method: Name = "forward"
    other_methods: Annotated[tuple[BlockGroup, ...], msgspec.Meta(max_length=64)] = ()

    def __hash__(self) -> int:
        """Hash the fields without mappings, which cannot be hashed."""
        return hash((self.path, self.returns, self.attentions))


BlockGroups: TypeAlias = Annotated[tuple[BlockGroup, ...], msgspec.Meta(max_length=64)]


def rows_differ(tensor: Tensor | None) -> bool:
    """Return True if the rows of a tensor `[batch, ...]` are not all equal."""
    return tensor is not None and bool((tensor != tensor[:1]).any())


MODEL_PATCH_SIZE = PythonFunction(lambda model: model.patch_size)
"""The default patch size: the model's own attribute."""


class Declaration(DeclarationPart, frozen=True):
    """The declaration of one of ComfyUI's diffusion model classes: its blocks, and the inputs that the model takes.

    Functions take the model, unless their attribute says otherwise.

    Attributes:
        groups: the blocks, in the order of their runs.
        output_layers: modules that turn the last tokens into the output, token by token.
        attention_heads: the number of attention heads and their width.
        text_width: features of the text, or a tuple of several numbers that the model accepts.
        pooled_width: the least number of features of the pooled text.
        joint_text: text tokens are in the sequence, rather than only attended to.
        units: lists of block names. A pipeline stage does not begin inside a list.
        patch_size: latent values of one token.
        unsupported_conditioning: conditioning that the declaration does not cover, with the user's way out.
        takes_text_mask: the text may have an attention_mask, which must have as many entries as the text has tokens.
        embeddings: modules that make latent tokens and run on every stage. The model may place text before their tokens.
        between: modules that add something to tokens between blocks. Their attentions are to keys that every rank holds.
        positions: modules outside of blocks whose output depends on sizes and the prompt only. It is computed once a run.
        references: names of latents in the conditioning that become tokens in this model and in no other.
        concatenated_latent: the name of a latent of the same height that the model places to the right of the sampled latent.
        divisible_latent: the latent must divide into tokens, because the model pads none.
        per_token_conditioning: conditioning that follows the tokens, with the number of its values per latent value in each
            dimension.
        per_frame_conditioning: names of conditioning that follows whole frames.
        whole_picture: PipeFusion is impossible. Blocks need all tokens at once, or the layers after them need all tokens and the
            latent.
        pipefusion_options: transformer options that replace a request's under PipeFusion.
        sigmas: a function that returns whether the model reads the sigmas of the call and of the run.
        control: for each list of a ControlNet's output, the group of blocks after which its tensors are added to the latent
            tokens.
        methods: a function that returns the accepted layouts of references. Empty: all layouts.
        sound: a function that returns the shape of sound that may be packed with a video, without the batch. None: any length.
        sound_optional: a video may come without sound.
        channels: a function that returns the video's channels where they differ from the latent format's.
        no_batches: the model takes one batch item at a time.
        couples_rows: a function of the conditioning that returns why the rows of a batch change one another, or an empty text.
    """

    groups: BlockGroups
    output_layers: BlockGroups
    attention_heads: Constant | PythonFunction
    text_width: Constant | PythonFunction
    pooled_width: Callable[[Any], int] = lambda model: 0
    joint_text: bool = True
    units: InterleavedBlocks | PythonFunction | None = None
    patch_size: Constant | PythonFunction = MODEL_PATCH_SIZE
    unsupported_conditioning: Mapping[Name, str] = {}
    takes_text_mask: bool = False
    embeddings: BlockGroups = ()
    between: BlockGroups = ()
    positions: Names = ()
    references: Annotated[frozenset[Name], msgspec.Meta(max_length=64)] = frozenset()
    concatenated_latent: Name = ""
    divisible_latent: bool = False
    per_token_conditioning: Mapping[Name, Sequence[int]] = {}
    per_frame_conditioning: Annotated[frozenset[Name], msgspec.Meta(max_length=64)] = frozenset()
    whole_picture: bool = False
    pipefusion_options: Mapping[str, Any] = {}
    sigmas: Callable[[Any], bool] = lambda model: False
    control: Mapping[Name, Name] = {}
    methods: Callable[[Any], Sequence[str]] = lambda model: ()
    sound: Callable[[Any], tuple[int | None, ...]] = lambda model: ()
    sound_optional: bool = True
    channels: Callable[[Any], int | None] = lambda model: None
    no_batches: bool = False
    couples_rows: Callable[[Mapping[str, Tensor]], str] = lambda conditioning: ""

    def __hash__(self) -> int:
        """Hash the fields without mappings, which cannot be hashed."""
        return hash((self.groups, self.output_layers, self.attention_heads, self.text_width))

    def sent(self) -> Declaration:
        """Return the declaration as it arrives on a worker, which is an equal declaration.

        Raises:
            ValueError: the declaration has a function, which cannot be sent, or more values than a message may have.
        """
        try:
            return msgspec.convert(msgspec.to_builtins(self), type=Declaration)
        except (TypeError, msgspec.ValidationError) as error:
            raise ValueError(f"the declaration cannot be sent: {error}") from None
