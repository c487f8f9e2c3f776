"""What a family declares: where the tokens of its model are, block by block."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

from torch import Tensor, nn

REMOVE = "remove the node that adds it"
"""How to get rid of most conditioning."""


@dataclass(frozen=True)
class Beside:
    """A stream without tokens of the picture: text. It belongs to the first patch."""

    dim: ClassVar[int] = 1


@dataclass(frozen=True)
class Pictured:
    """A stream with the picture's tokens in it, in one run; what is before and behind it belongs to the first patch.

    `start(length, picture)` is where the run begins in a stream of `length` tokens, `picture` of them the picture's;
    of that length are taken the tokens that lie `behind`, told by what the model is given besides latent and timestep.
    `grid` says that the tokens have several dimensions (frames, height, width) in place of one; a block that is given
    some of them has these along the first. `dim` is the tokens' dimension; 0 where a model has no batch. With `parts`
    ranks' tokens are cut between runs that lie each in one row and in one of so many equal parts of a frame.
    """

    start: Callable[[int, int], int] = lambda length, picture: 0
    grid: bool = False
    dim: int = 1
    parts: int = 0
    behind: Callable[[Mapping[str, Any]], int] = lambda arguments: 0


@dataclass(frozen=True)
class Everywhere:
    """A stream that every rank has whole: sound beside a video, which is short."""

    dim: ClassVar[int] = 1


@dataclass(frozen=True)
class Prefixed:
    """A stream of a prefix, which every rank holds whole, with the picture's tokens after it, which are split.

    The prefix is what does not depend on the picture: text and references. A call of the block may have the prefix alone, or
    the picture's tokens alone. Under PipeFusion each patch has the whole prefix.

    Attributes:
        length: the argument of the block that is the number of the prefix's tokens in this call.
    """

    length: str
    dim: ClassVar[int] = 1


StreamKind: TypeAlias = Beside | Pictured | Everywhere | Prefixed


@dataclass(frozen=True)
class Along:
    """A tensor, or a tuple's tensors, whose `dim` follows the tokens of these streams, laid one behind the other."""

    streams: tuple[str, ...]
    dim: int


@dataclass(frozen=True)
class Segments:
    """Runs of a stream's tokens: a list of (start, stop, ...); a stop of None is the stream's end.

    Of what else is said of a run, a tensor has a row for each of its tokens.
    """

    stream: str


@dataclass(frozen=True)
class Boundary:
    """A position in a stream; what adds to tokens before it is not called where there are none."""

    stream: str


@dataclass(frozen=True)
class ByFrame:
    """A tensor `[batch, frames, ...]` of `dims` dimensions whose rows are repeated over the tokens of a stream.

    A single row, or a tensor of fewer dimensions, is for all tokens.
    """

    stream: str
    dims: int


@dataclass(frozen=True)
class ByPart:
    """A tensor `[batch, parts, ...]`, of the parts of a stream's first frames: for each run of tokens that of its part.

    There are `each` values a part. The stream's kind says how many parts a frame has. A block that tells from the tensor how
    many parts it has takes runs as well, which are equally long. `whole`: the parts are all of the stream's, references too.
    """

    stream: str
    each: int = 1
    whole: bool = False


@dataclass(frozen=True)
class TextMask:
    """A mask of a text stream's tokens, `[batch, tokens]` or so; masked ones are left out of the stream.

    It may go over the tokens of the streams `before` and `behind` it too, and hides none of those.
    """

    stream: str
    behind: tuple[str, ...] = ()
    before: tuple[str, ...] = ()


@dataclass(frozen=True)
class TextLength:
    """How many of a text stream's first tokens are attended to; the others are left out of the stream."""

    stream: str


@dataclass(frozen=True)
class Known:
    """An object of ComfyUI's own that goes along a stream.

    `take(value, positions, length)` makes of it what goes with these positions of a stream of `length`.
    """

    stream: str
    take: Callable[[Any, Tensor, int], Any]


@dataclass(frozen=True)
class Weighs:
    """What weighs attention between two kinds of tokens of a stream, in an object of ComfyUI's own.

    `of(value)` makes of it `[tokens, 2]`: the logarithm of each token's weight, 0 for those of the one kind, and 1 for
    those, 0 for the others. A `Spread` attention that is `weighed` takes it as its mask.
    """

    stream: str
    of: Callable[[Any], Tensor]


@dataclass(frozen=True)
class Same:
    """The same for all tokens: modulation, numbers. Tensors are vectors of features, the last dimension.

    For each of the batch there are as many vectors as `rows` says, one of these numbers; any number if it is empty, because
    `Segments` say which vector is whose. So what a model comes to make of each frame or token is not taken for this.
    """

    rows: tuple[int, ...] = (1,)


@dataclass(frozen=True)
class Attended:
    """The same on all ranks, and of a length of its own: text and sound that are only attended to, and what goes with them."""


@dataclass(frozen=True)
class Handed:
    """Attention that a node hands to a block: a function that is called as the block's own submodule for it would be.

    It runs for all tokens and some of the heads, and sees the submodule as if that had these heads alone. What else the
    block hands it on, it is given as the model gave it to the block. Blocks of an older ComfyUI may take no such argument.

    Attributes:
        module: the submodule, in the block, which has no batch. It knows as `heads` how many it has, and `head_dim`.
        stream: whose tokens it is given first.
        projects: the submodule's layers, without bias, whose output for each token is so many times heads x head_dim; one that
            is None is left out.
        out: the layer that the function applies to its result.
        same: what else the function may look at: it is the same for every head.
    """

    module: str
    stream: str
    projects: tuple[str, ...]
    out: str
    same: tuple[str, ...]


Argument: TypeAlias = (
    Along | Segments | Boundary | ByFrame | ByPart | TextMask | TextLength | Known | Weighs | Same | Attended | Handed
)


Options: TypeAlias = Mapping[str, Any]
"""ComfyUI's transformer_options of a block's call."""


def always(options: Options) -> bool:
    """Of an attention that comes whatever the options say."""
    return True


@dataclass(frozen=True)
class Spread:
    """Attention of this rank's queries to the keys of all ranks, both of these streams, in this order.

    If `weighed`, it may be given the rows of a `Weighs` of this rank's tokens as a mask; other masks are ComfyUI's for whole
    streams and not heeded. `kv_heads` are the model's heads of keys and values, where heads of queries share them: these are
    exchanged, whether or not the model repeats them before its call; 0 where every head has its own. Whether it comes at
    all, `comes` says by the block's options.
    """

    streams: tuple[str, ...]
    weighed: bool = False
    kv_heads: int = 0
    comes: Callable[[Options], bool] = always


@dataclass(frozen=True)
class Local:
    """Attention of this rank's queries to keys that every rank has.

    It does not come where the stream `of` is empty, or nothing is given as the argument `of`, or `comes` says so.
    """

    of: str = ""
    comes: Callable[[Options], bool] = always


@dataclass(frozen=True)
class Merged:
    """Attention of the stream `of`, which every rank has whole, to the keys of all ranks in another one.

    Each rank attends to its own keys; the results are merged in the order of ranks, so that all have the same bits.
    `comes` is as for `Spread`.
    """

    of: str
    keys: str
    comes: Callable[[Options], bool] = always


@dataclass(frozen=True)
class ByHeads:
    """Attention in a submodule's method, which goes by where tokens are: it is run for all tokens and some of the heads.

    Attributes:
        module: the submodule, in the block. That of how many heads it is, it knows as `num_heads`.
        method: of the submodule; what it is given first are the block's tokens.
        projects: the submodule's own method that makes q, k and v `[batch, tokens, heads, head_dim]` of some of these arguments.
        out: the layer that it applies to attention's result last.
        stream: whose tokens they are.
        keys: arguments of both block and method that are streams of further keys or values, as `projects` makes them.
        scratch: an argument of tensors to be written into, whose heads, or heads and width, are along dimension 2.
    """

    module: str
    method: str
    projects: str
    out: str
    stream: str
    keys: tuple[str, ...] = ()
    scratch: str = ""
    kv_heads: ClassVar[int] = 0


@dataclass(frozen=True)
class AfterPrefix:
    """Attention of a `Prefixed` stream's picture tokens: to a prefix, and to the picture tokens of all ranks.

    Keys and values begin with the prefix's, which every rank holds: those of the stream, or those that the model kept from an
    earlier call. Calls whose queries and keys all lie in the stream's prefix may come before this one, in any number. Every
    rank computes them for itself, by ComfyUI's own kernel.

    Attributes:
        stream: the name of the stream.
    """

    stream: str
    kv_heads: ClassVar[int] = 0


Attention: TypeAlias = Spread | Local | Merged | ByHeads | AfterPrefix


@dataclass(frozen=True)
class Group:
    """Blocks of one kind: a ModuleList, or a single module such as a head.

    `streams` and `arguments` together name every argument of the block's forward; one that is not named must be None.

    Attributes:
        path: the module's, in the model.
        streams: the arguments that are tokens, and where theirs are; a block may be given none of one.
        returns: for each value returned the stream whose places it has.
        arguments: the others, and what goes with which tokens.
        tuples: the names of what is given to a block together, as a tuple.
        attentions: the block's calls of attention, in order; a function of the block where they depend on it.
        modulations: submodules of a block that make something of one argument alone that is the same for all tokens and patches.
        attends_in: the module of ComfyUI's that calls attention, where it passes no transformer_options on.
        operations: the most that a block starts on a device; 0 where that goes by its class (`plan/predict/operations.py`).
        applied: the part of a block's weights that multiply a token, and
        copies: the features that a block holds at its peak for each token, in units of the hidden size; 0 where both go by its
            layers.
        method: by which the model calls its blocks.
        also: other methods of the same blocks that the model calls, each as a group; the block is done when `method` is.
    """

    path: str
    streams: Mapping[str, StreamKind]
    returns: tuple[str, ...]
    arguments: Mapping[str, Argument] = field(default_factory=dict)
    tuples: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    attentions: Sequence[Attention] | Callable[[nn.Module], Sequence[Attention]] = ()
    modulations: tuple[str, ...] = ()
    attends_in: str = ""
    operations: int = 0
    applied: float = 0.0
    copies: float = 0.0
    method: str = "forward"
    also: tuple[Group, ...] = ()


def rows_differ(tensor: Tensor | None) -> bool:
    """Whether the rows of a batch `[batch, ...]` are not all the same."""
    return tensor is not None and bool((tensor != tensor[:1]).any())


@dataclass(frozen=True)
class Declaration:
    """One of ComfyUI's diffusion models: where its tokens are, and what it takes.

    What is a function is asked of the model.

    Attributes:
        groups: its blocks, in the order in which they run.
        heads: what turns the last tokens into the output token by token.
        heads_of: the attention heads and their width.
        text_width: the width of the text, or several that it may have.
        pooled_width: the least width of pooled text.
        joint_text: whether text is in the sequence.
        units: the names of blocks that run as one, so that no stage begins between them.
        patch_size: the latent values that are one token.
        refused: the conditioning that has no place in it, and how to get rid of that.
        masked: whether the text may have an attention_mask, which must then be as long.
        embeddings: what makes tokens of the picture, on every stage; behind them a model may lay text before the picture.
        between: modules that add something to tokens between blocks, each on the stage that has them then; their attentions are
            to keys that every rank has.
        positions: modules outside of blocks whose output follows from sizes and the prompt alone, and is kept for a run.
        references: latents that become tokens in this model alone.
        beside: a latent of the same height that the model lays to the right of the picture, so that each row of tokens has its
            tokens behind.
        divides: whether a latent must divide into tokens, because the model pads none.
        sized: conditioning that goes with every token, with so many values for one of the latent's.
        frames: of that, what goes with whole frames.
        whole_picture: blocks need all tokens at once, or what comes behind them is no head: it needs all tokens and the latent,
            and each rank computes it for all. So there is no PipeFusion.
        pipefusion_options: transformer options that take the place of a request's under PipeFusion, where a rank computes some of
            the blocks, patch by patch.
        sigmas: whether the model reads the sigmas of the call and of the whole run.
        compute: makes what no file has and the class computes on the device where it is built.
        control: for each of ComfyUI's lists of a ControlNet's output the group whose blocks it goes with: each tensor is added,
            after its block, to the picture's tokens, behind which references may lie.
        methods: the ways to lay out references that the model takes; all if empty.
        sound: the shape of the sound that may be packed with a video, less the batch (None: any length).
        silent: whether a video may come without sound.
        channels: those of the video where the latent format has others.
        one_at_a_time: whether batches are not taken.
        couples_rows: what makes the rows of a batch with this conditioning change one another, in words; empty where it does not.
    """

    groups: tuple[Group, ...]
    heads: tuple[Group, ...]
    heads_of: Callable[[Any], tuple[int, int]]
    text_width: Callable[[Any], int | tuple[int, ...]]
    pooled_width: Callable[[Any], int] = lambda model: 0
    joint_text: bool = True
    units: Callable[[Any], Sequence[Sequence[str]]] | None = None
    patch_size: Callable[[Any], int | Sequence[int]] = lambda model: model.patch_size
    refused: Mapping[str, str] = field(default_factory=dict)
    masked: bool = False
    embeddings: tuple[Group, ...] = ()
    between: tuple[Group, ...] = ()
    positions: tuple[str, ...] = ()
    references: frozenset[str] = frozenset()
    beside: str = ""
    divides: bool = False
    sized: Mapping[str, Sequence[int]] = field(default_factory=dict)
    frames: frozenset[str] = frozenset()
    whole_picture: bool = False
    pipefusion_options: Mapping[str, object] = field(default_factory=dict)
    sigmas: Callable[[Any], bool] = lambda model: False
    compute: Callable[[Any], object] = lambda model: None
    control: Mapping[str, str] = field(default_factory=dict)
    methods: Callable[[Any], Sequence[str]] = lambda model: ()
    sound: Callable[[Any], tuple[int | None, ...]] = lambda model: ()
    silent: bool = True
    channels: Callable[[Any], int | None] = lambda model: None
    one_at_a_time: bool = False
    couples_rows: Callable[[Mapping[str, Tensor]], str] = lambda conditioning: ""
