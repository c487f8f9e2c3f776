"""The vocabulary of declarations: the positions of a model's tokens, block by block.

Each word is a msgspec struct, so that a declaration can be kept on disk and sent to workers, which check it on arrival.
A `PythonFunction` and the other functions in a declaration cannot be sent. Only a declaration of this pack's own has those.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeAlias

import msgspec
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .picture import Picture

Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=256)]
Names: TypeAlias = Annotated[tuple[Name, ...], msgspec.Meta(max_length=64)]
Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 24)]
Positive: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
Ratio: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1 << 24)]
Numbers: TypeAlias = Annotated[tuple[Number, ...], msgspec.Meta(max_length=64)]

REMOVE = "remove the node that adds it"
"""How to get rid of most conditioning."""


class Word(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag=True):
    """Base of all words. A message names a word's class in its field `type`."""


class PythonFunction(Word, frozen=True):
    """A Python function in a declaration. It cannot be sent, and nothing that arrives can be one.

    Attributes:
        function: the function that a call of this word calls.
    """

    function: Callable[..., Any]

    def __call__(self, *arguments: Any) -> Any:
        """Call the function."""
        return self.function(*arguments)


class Constant(Word, frozen=True):
    """Of a model: the same for all."""

    value: Number | Numbers

    def __call__(self, model: Any) -> Any:
        """The value, whatever the model."""
        return self.value


class StartAt(Word, frozen=True):
    """Where a run of tokens begins: always at this place."""

    place: Number

    def __call__(self, length: int, picture: int) -> int:
        """The place, whatever the numbers of tokens."""
        return self.place


class LengthLess(Word, frozen=True):
    """Where a run of tokens begins that ends with its stream: its length less the picture's tokens, padded to a multiple."""

    multiple: Positive

    def __call__(self, length: int, picture: int) -> int:
        """Of a stream of `length` tokens, `picture` of them the picture's."""
        return length - -(-picture // self.multiple) * self.multiple


class Behind(Word, frozen=True):
    """How many tokens of `step` latent values are made of the latents of these names, which may be in lists."""

    names: Names
    step: Numbers

    def __call__(self, arguments: Mapping[str, Any]) -> int:
        """Of what a model is given besides latent and timestep."""
        latents = tree_leaves([arguments.get(name) for name in self.names])
        return sum(Picture(tuple(latent.shape), self.step).tokens for latent in latents if latent is not None)


class Turns(Word, frozen=True):
    """Blocks that run as one: each of the list `path`, with those of the list `beside` behind it whose place in `path` it has.

    `places` are as many as the list `beside` has members in the model that it is said of. Of a shorter one those that have no
    place, which never run, count with the first block.
    """

    path: Name
    beside: Name
    places: Annotated[tuple[Number, ...], msgspec.Meta(max_length=256)]

    @property
    def second(self) -> int:
        """The place of the second one of the other list, if it has two."""
        return max(self.places[:2], default=0)

    def __call__(self, model: nn.Module) -> list[list[str]]:
        """The names of the blocks of each unit."""
        units = [[f"{self.path}.{number}"] for number, _ in enumerate(model.get_submodule(self.path).children())]
        for number, _ in enumerate(model.get_submodule(self.beside).children()):
            placed = number < len(self.places) and self.places[number] < len(units)
            unit = units[self.places[number] if placed else 0]
            unit.insert(len(unit) if placed else 0, f"{self.beside}.{number}")
        return units


class Beside(Word, frozen=True):
    """A stream without tokens of the picture: text. It belongs to the first patch."""

    dim: ClassVar[int] = 1


class Pictured(Word, frozen=True):
    """A stream with the picture's tokens in it, in one run; what is before and behind it belongs to the first patch.

    `start(length, picture)` is where the run begins in a stream of `length` tokens, `picture` of them the picture's;
    of that length are taken the tokens that lie `behind`, told by what the model is given besides latent and timestep.
    `grid` says that the tokens have several dimensions (frames, height, width) in place of one; a block that is given
    some of them has these along the first. `dim` is the tokens' dimension; 0 where a model has no batch. With `parts`
    ranks' tokens are cut between runs that lie each in one row and in one of so many equal parts of a frame.
    """

    start: StartAt | LengthLess = StartAt(0)
    behind: Behind | None = None
    grid: bool = False
    dim: Number = 1
    parts: Number = 0


class Everywhere(Word, frozen=True):
    """A stream that every rank has whole: sound beside a video, which is short."""

    dim: ClassVar[int] = 1


class Prefixed(Word, frozen=True):
    """A stream of a prefix, which every rank holds whole, with the picture's tokens after it, which are split.

    The prefix is what does not depend on the picture: text and references. A call of the block may have the prefix alone, or
    the picture's tokens alone. Under PipeFusion each patch has the whole prefix.

    Attributes:
        length: the argument of the block that is the number of the prefix's tokens in this call.
    """

    length: Name
    dim: ClassVar[int] = 1


StreamKind: TypeAlias = Beside | Pictured | Everywhere | Prefixed


class Along(Word, frozen=True):
    """A tensor, or a tuple's tensors, whose `dim` follows the tokens of these streams, laid one behind the other."""

    streams: Names
    dim: Number


class Segments(Word, frozen=True):
    """Runs of a stream's tokens: a list of (start, stop, ...); a stop of None is the stream's end.

    Of what else is said of a run, a tensor has a row for each of its tokens.
    """

    stream: Name


class Boundary(Word, frozen=True):
    """A position in a stream; what adds to tokens before it is not called where there are none."""

    stream: Name


class ByFrame(Word, frozen=True):
    """A tensor `[batch, frames, ...]` of `dims` dimensions whose rows are repeated over the tokens of a stream.

    A single row, or a tensor of fewer dimensions, is for all tokens.
    """

    stream: Name
    dims: Number


class ByPart(Word, frozen=True):
    """A tensor `[batch, parts, ...]`, of the parts of a stream's first frames: for each run of tokens that of its part.

    There are `each` values a part. The stream's kind says how many parts a frame has. A block that tells from the tensor how
    many parts it has takes runs as well, which are equally long. `whole`: the parts are all of the stream's, references too.
    """

    stream: Name
    each: Positive = 1
    whole: bool = False


class TextMask(Word, frozen=True):
    """A mask of a text stream's tokens, `[batch, tokens]` or so; masked ones are left out of the stream.

    It may go over the tokens of the streams `before` and `behind` it too, and hides none of those.
    """

    stream: Name
    behind: Names = ()
    before: Names = ()


class TextLength(Word, frozen=True):
    """How many of a text stream's first tokens are attended to; the others are left out of the stream."""

    stream: Name


class Known(Word, frozen=True):
    """An object of ComfyUI's own that goes along a stream.

    `take(value, positions, length)` makes of it what goes with these positions of a stream of `length`.
    """

    stream: Name
    take: Callable[[Any, Tensor, int], Any]


class Weighs(Word, frozen=True):
    """What weighs attention between two kinds of tokens of a stream, in an object of ComfyUI's own.

    `of(value)` makes of it `[tokens, 2]`: the logarithm of each token's weight, 0 for those of the one kind, and 1 for
    those, 0 for the others. A `Spread` attention that is `weighed` takes it as its mask.
    """

    stream: Name
    of: Callable[[Any], Tensor]


class Same(Word, frozen=True):
    """The same for all tokens: modulation, numbers. Tensors are vectors of features, the last dimension.

    For each of the batch there are as many vectors as `rows` says, one of these numbers; any number if it is empty, because
    `Segments` say which vector is whose. So what a model comes to make of each frame or token is not taken for this.
    """

    rows: Numbers = (1,)


class Attended(Word, frozen=True):
    """The same on all ranks, and of a length of its own: text and sound that are only attended to, and what goes with them."""


class Handed(Word, frozen=True):
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

    module: Name
    stream: Name
    projects: Names
    out: Name
    same: Names


Argument: TypeAlias = (
    Along | Segments | Boundary | ByFrame | ByPart | TextMask | TextLength | Known | Weighs | Same | Attended | Handed
)


Options: TypeAlias = Mapping[str, Any]
"""ComfyUI's transformer_options of a block's call."""


def always(options: Options) -> bool:
    """Of an attention that comes whatever the options say."""
    return True


class Spread(Word, frozen=True):
    """Attention of this rank's queries to the keys of all ranks, both of these streams, in this order.

    If `weighed`, it may be given the rows of a `Weighs` of this rank's tokens as a mask; other masks are ComfyUI's for whole
    streams and not heeded. `kv_heads` are the model's heads of keys and values, where heads of queries share them: these are
    exchanged, whether or not the model repeats them before its call; 0 where every head has its own. Whether it comes at
    all, `comes` says by the block's options.
    """

    streams: Names
    kv_heads: Number = 0
    weighed: bool = False
    comes: Callable[[Options], bool] = always


class Local(Word, frozen=True):
    """Attention of this rank's queries to keys that every rank has.

    It does not come where the stream `of` is empty, or nothing is given as the argument `of`, or `comes` says so.
    """

    of: Name = ""
    comes: Callable[[Options], bool] = always


class Merged(Word, frozen=True):
    """Attention of the stream `of`, which every rank has whole, to the keys of all ranks in another one.

    Each rank attends to its own keys; the results are merged in the order of ranks, so that all have the same bits.
    `comes` is as for `Spread`.
    """

    of: Name
    keys: Name
    comes: Callable[[Options], bool] = always


class ByHeads(Word, frozen=True):
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

    module: Name
    method: Name
    projects: Name
    out: Name
    stream: Name
    keys: Names = ()
    scratch: Name = ""
    kv_heads: ClassVar[int] = 0


class AfterPrefix(Word, frozen=True):
    """Attention of a `Prefixed` stream's picture tokens: to a prefix, and to the picture tokens of all ranks.

    Keys and values begin with the prefix's, which every rank holds: those of the stream, or those that the model kept from an
    earlier call. Calls whose queries and keys all lie in the stream's prefix may come before this one, in any number. Every
    rank computes them for itself, by ComfyUI's own kernel.

    Attributes:
        stream: the name of the stream.
    """

    stream: Name
    kv_heads: ClassVar[int] = 0


Attention: TypeAlias = Spread | Local | Merged | ByHeads | AfterPrefix
Attentions: TypeAlias = Annotated[tuple[Attention, ...], msgspec.Meta(max_length=64)]


class Chosen(Word, frozen=True):
    """The attentions of a block: one kind's where it has a submodule of this name, else the other's."""

    mark: Name
    having: Attentions
    without: Attentions

    def __call__(self, block: nn.Module) -> tuple[Attention, ...]:
        """Those of one block."""
        return self.having if self.mark in dict(block.named_modules()) else self.without


class Group(Word, frozen=True):
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

    path: Name
    streams: Annotated[Mapping[Name, StreamKind], msgspec.Meta(max_length=64)]
    returns: Names
    arguments: Annotated[Mapping[Name, Argument], msgspec.Meta(max_length=64)] = {}
    tuples: Mapping[Name, Names] = {}
    attentions: Attentions | Chosen | PythonFunction = ()
    modulations: Names = ()
    attends_in: Name = ""
    operations: Number = 0
    applied: Ratio = 0.0
    copies: Ratio = 0.0
    method: Name = "forward"
    also: Annotated[tuple[Group, ...], msgspec.Meta(max_length=64)] = ()

    def __hash__(self) -> int:
        """Hash the fields that can be hashed. Mappings cannot."""
        return hash((self.path, self.returns, self.attentions))


Groups: TypeAlias = Annotated[tuple[Group, ...], msgspec.Meta(max_length=64)]


def rows_differ(tensor: Tensor | None) -> bool:
    """Whether the rows of a batch `[batch, ...]` are not all the same."""
    return tensor is not None and bool((tensor != tensor[:1]).any())


OWN_PATCH_SIZE = PythonFunction(lambda model: model.patch_size)


class Declaration(Word, frozen=True):
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

    groups: Groups
    heads: Groups
    heads_of: Constant | PythonFunction
    text_width: Constant | PythonFunction
    pooled_width: Callable[[Any], int] = lambda model: 0
    joint_text: bool = True
    units: Turns | PythonFunction | None = None
    patch_size: Constant | PythonFunction = OWN_PATCH_SIZE
    refused: Mapping[Name, str] = {}
    masked: bool = False
    embeddings: Groups = ()
    between: Groups = ()
    positions: Names = ()
    references: Annotated[frozenset[Name], msgspec.Meta(max_length=64)] = frozenset()
    beside: Name = ""
    divides: bool = False
    sized: Mapping[Name, Sequence[int]] = {}
    frames: Annotated[frozenset[Name], msgspec.Meta(max_length=64)] = frozenset()
    whole_picture: bool = False
    pipefusion_options: Mapping[str, Any] = {}
    sigmas: Callable[[Any], bool] = lambda model: False
    compute: Callable[[Any], object] = lambda model: None
    control: Mapping[Name, Name] = {}
    methods: Callable[[Any], Sequence[str]] = lambda model: ()
    sound: Callable[[Any], tuple[int | None, ...]] = lambda model: ()
    silent: bool = True
    channels: Callable[[Any], int | None] = lambda model: None
    one_at_a_time: bool = False
    couples_rows: Callable[[Mapping[str, Tensor]], str] = lambda conditioning: ""

    def __hash__(self) -> int:
        """Hash the fields that can be hashed. Mappings cannot."""
        return hash((self.groups, self.heads, self.heads_of, self.text_width))

    def sent(self) -> Declaration:
        """Return the declaration as it arrives on a worker: the same.

        Raises:
            ValueError: the declaration has a function, which cannot be sent, or more values than a message may have.
        """
        try:
            return msgspec.convert(msgspec.to_builtins(self), type=Declaration)
        except (TypeError, msgspec.ValidationError) as error:
            raise ValueError(f"the declaration cannot be sent: {error}") from None
