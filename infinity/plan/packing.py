"""Where each parameter lies: the packing of parameters into chunks, and of chunks into shards.

Pure arithmetic over names and sizes. Must not know tiers or files. Offsets and sizes are in elements unless a name says `nbytes`.
"""

# [Note: how parameters are packed]
#
# Parameters of one format share chunks, in registration order. Each format fills chunks of its own, so adapters between frozen
# layers lie together, and so do fp32 routers of a bf16 model. Chunks are numbered in the order of their first parameters.
#
#   block    1024 elements. A gradient norm sums blocks counted from a parameter's start, so that its bits depend on no
#            layout. A parameter starts on a block border, or lies whole within one block, aligned to 128 bytes there.
#            Every border of a shard or chunk is a block border: no block of a norm is ever cut.
#   chunk    a multiple of world * 1024 elements, so that it is cut into equal shards. Trimmed to what it holds.
#   span     one chunk, if each of its parameters fits into a chunk: these never straddle. Else the run that one larger
#            parameter is cut into, in equal chunks (the last one trimmed); a bounded tail of small parameters rides
#            along, so that the biases and norms behind each large matrix need no chunk of their own:
#
#            |<- chunk 3 ->|<- chunk 4 ->|<- 5 ->|
#            | qkv.weight ................ | b |ln|        b, ln: the tail
#
#            Small ones whose names have more modules in common with what follows lead that instead, as many as make a tail:
#            the norm at a block's start would else bring back the matrix before it, or the embedding, each time the block is
#            run again. A tail also ends if the parameters of other formats that follow have more elements than a tail may have.
#            Without this rule, all norms over a quantised base would be in the embedding's span.
#
# Parameters whose update needs whole matrices are packed otherwise: see unit_packing.py.
#
# `used` ends with the last parameter of a chunk. A record covers only what is used of a shard, so the padding behind it
# exists in gathered storage but neither in host records nor on disk; gaps in front of it are below one block each.

import functools
import math
import operator
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from infinity.formats.format import Format
from infinity.plan.partition import BLOCK_NUMEL, Partition
from infinity.plan.unit_packing import Packed, pack_units
from infinity.sizes import round_up

ALIGNMENT_NBYTES = 128
DEFAULT_CHUNK_MIB = 8
TAIL_FRACTION = 8  # a span's tail, and each parameter in it, is at most this part of a chunk


class Formatted:
    """Elements of one format."""

    numel: int
    format: Format

    @property
    def trainable(self) -> bool:
        return self.format.trainable

    @property
    def nbytes(self) -> int:
        """Bytes of the elements on the device, padding included."""
        return self.numel * self.format.itemsize


@dataclass(frozen=True)
class ParameterSpec(Formatted):
    """The name, the size and the format of one parameter. unit_numel: elements of a unit, which no shard cuts; 1 if shards may cut anywhere."""

    name: str
    numel: int
    format: Format
    unit_numel: int = 1


@dataclass(frozen=True, slots=True)
class Piece:
    """`numel` elements of parameter `param`, from `param_start` in it, at `start` in a chunk or shard."""

    param: int
    start: int
    param_start: int
    numel: int

    def __repr__(self):
        return f"Piece({self.param}[{self.param_start}:{self.param_start + self.numel}] at {self.start})"


@dataclass(frozen=True, repr=False)
class Chunk(Formatted):
    """The unit of every tier. `offset` is in its span; `used` ends with its last parameter; numel is a multiple of
    `partition.unit_numel`."""

    index: int
    span: int
    offset: int
    numel: int
    used: int
    pieces: tuple[Piece, ...]
    format: Format
    partition: Partition

    @property
    def shard_numel(self) -> int:
        return self.partition.shard_numel(self.numel)

    def shard_used(self, rank: int) -> int:
        """Elements of the rank's shard before `used`. Rank 0 has the most."""
        stored = self.partition.shard(rank, self.numel, self.used)
        return stored.stop - stored.start

    def shard_in_span(self, rank: int) -> slice:
        """The elements of the span that are the used part of the rank's shard."""
        stored = self.partition.shard(rank, self.numel, self.used)
        return slice(self.offset + stored.start, self.offset + stored.stop)

    def shard_pieces(self, rank: int) -> tuple[Piece, ...]:
        """The pieces in the rank's shard, cut at its borders; `start` is relative to the shard."""
        stored = self.partition.shard(rank, self.numel, self.used)
        return tuple(_cut(self.pieces, stored.start, stored.stop))

    def __repr__(self):
        params = sorted({piece.param for piece in self.pieces})
        names = f"{params[0]}" if len(params) == 1 else f"{params[0]}-{params[-1]}"
        return f"Chunk({self.index}, {self.numel} {self.format}, parameters {names})"


@dataclass(frozen=True, repr=False)
class Span(Formatted):
    """Contiguous device storage: one chunk, or the chunks of one large parameter. `params` in order of offset."""

    index: int
    chunks: tuple[int, ...]
    numel: int
    format: Format
    params: tuple[int, ...]

    def __repr__(self):
        return f"Span({self.index}, chunks {self.chunks[0]}-{self.chunks[-1]}, {self.numel} {self.format.compute})"


@dataclass(frozen=True)
class Home:
    """Where a parameter begins: element `offset` of span `span`."""

    span: int
    offset: int


@dataclass(frozen=True, repr=False)
class Layout:
    """The whole packing. `homes` is indexed like `specs`; chunks of a span are consecutive."""

    specs: tuple[ParameterSpec, ...]
    chunks: tuple[Chunk, ...]
    spans: tuple[Span, ...]
    homes: tuple[Home, ...]
    chunk_numel: int
    partition: Partition

    @functools.cached_property
    def num_parameters(self) -> int:
        """Elements of all parameters, without padding."""
        return sum(spec.numel for spec in self.specs)

    @functools.cached_property
    def dtypes(self) -> dict[str, int]:
        """Parameters (elements) by compute dtype, the most frequent dtype first."""
        return _most_first((spec.format.compute, spec.numel) for spec in self.specs)

    @functools.cached_property
    def main_dtype(self) -> str:
        """The compute dtype that most parameters have."""
        return next(iter(self.dtypes))

    @functools.cached_property
    def main_storage(self) -> str:
        """The name of the storage that most parameters have."""
        return next(iter(_most_first((spec.format.name, spec.numel) for spec in self.specs)))

    @functools.cached_property
    def is_coded(self) -> bool:
        """Whether some weight is coded, and has no home on the device."""
        return any(span.format.is_coded for span in self.spans)

    @functools.cached_property
    def rounds_moments(self) -> bool:
        """Whether some moments are stored with stochastic rounding."""
        return any(span.format.rounds_moments for span in self.spans)

    @functools.cached_property
    def rounds(self) -> bool:
        """Whether some updates need random bits."""
        return any(span.format.rounds for span in self.spans)

    @functools.cached_property
    def num_allocated(self) -> int:
        """Elements of all chunks, with padding."""
        return sum(chunk.numel for chunk in self.chunks)

    def chunks_of(self, param: int) -> tuple[int, ...]:
        """The chunks that hold some part of a parameter, in order."""
        home = self.homes[param]
        end = home.offset + self.specs[param].numel
        span = self.spans[home.span]
        if len(span.chunks) == 1:
            return span.chunks
        size = self.chunks[span.chunks[0]].numel  # all but the last are equal
        return span.chunks[home.offset // size : (end - 1) // size + 1]

    def __repr__(self):
        return (
            f"Layout({len(self.specs)} parameters, {self.num_parameters} elements, "
            f"{len(self.chunks)} chunks in {len(self.spans)} spans, world {self.partition.world})"
        )


def _most_first(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Sums by key, the largest sum first."""
    totals: Counter[str] = Counter()
    for key, number in pairs:
        totals[key] += number
    return dict(totals.most_common())


def default_chunk_numel(chunk_mib: float | None, world: int) -> int:
    """Elements of a chunk of `chunk_mib` MiB of 16-bit weights, rounded down to what can be sliced, at least that."""
    unit = Partition(world).unit_numel
    numel = int((DEFAULT_CHUNK_MIB if chunk_mib is None else chunk_mib) * 2**20 / 2)
    return max(numel // unit, 1) * unit


def layout(specs: Iterable[ParameterSpec], *, chunk_numel: int, world: int) -> Layout:
    """Pack parameters as [Note: how parameters are packed] says.

    chunk_numel must be a multiple of world * BLOCK_NUMEL, and no parameter empty; else ValueError.
    """
    specs = tuple(specs)
    partition = Partition(world)
    if chunk_numel <= 0 or chunk_numel % partition.unit_numel:
        raise ValueError(f"chunk_numel={chunk_numel}: expected a positive multiple of {partition.unit_numel} ({world} ranks)")
    empty = [spec.name for spec in specs if spec.numel < 1]
    if empty:
        raise ValueError(f"parameters without elements cannot be packed: {', '.join(empty)}")

    classes: dict[Format, list[int]] = {}
    for param, spec in enumerate(specs):
        classes.setdefault(spec.format, []).append(param)
    runs = [run for params in classes.values() for run in _packed(specs, params, chunk_numel, partition)]
    runs.sort(key=lambda run: run.params[0])

    chunks, spans = [], []
    homes = [None] * len(specs)
    for run in runs:
        first, sizes = specs[run.params[0]], run.chunk_sizes
        indices = tuple(range(len(chunks), len(chunks) + len(sizes)))
        span = Span(len(spans), indices, sum(sizes), first.format, tuple(run.params))
        whole = [Piece(param, offset, 0, specs[param].numel) for param, offset in zip(run.params, run.offsets)]
        begin = 0
        for index, size in zip(indices, sizes):
            pieces = tuple(_cut(whole, begin, begin + size) if len(sizes) > 1 else whole)
            used = pieces[-1].start + pieces[-1].numel
            chunks.append(Chunk(index, span.index, begin, size, used, pieces, first.format, partition))
            begin += size
        for param, offset in zip(run.params, run.offsets):
            homes[param] = Home(span.index, offset)
        spans.append(span)
    return Layout(specs, tuple(chunks), tuple(spans), tuple(homes), chunk_numel, partition)


class _Run:
    """A span in the making: parameters of one format with their offsets, and how far they may reach."""

    def __init__(self, chunk_numel: int, alignment: int):
        self.chunk_numel, self.alignment = chunk_numel, alignment
        self.limit = self.largest = chunk_numel  # elements that the whole run may take, that one more parameter may have
        self.params, self.offsets = [], []
        self.used = 0

    @property
    def is_tail(self) -> bool:
        """Whether a large parameter has come, so that only a tail may follow."""
        return self.largest < self.chunk_numel

    def append(self, params: Sequence[int], numels: Sequence[int]) -> bool:
        """Place parameters of these sizes behind the last one, if they fit. Returns whether they do. The first ones of a run always fit.

        A parameter that is larger than a chunk is the last of its call, and leaves room only for a tail.
        """
        offsets, used = [], self.used
        for numel in numels:
            offset = _place(used, numel, self.alignment)
            offsets.append(offset)
            used = offset + numel
        if self.params and (used > self.limit or max(numels) > self.largest):
            return False
        self.params.extend(params)
        self.offsets.extend(offsets)
        self.used = used
        if numels[-1] > self.chunk_numel:
            self.largest = self.chunk_numel // TAIL_FRACTION
            self.limit = max(round_up(used, self.chunk_numel), used + self.largest)
        return True


def _packed(specs: Sequence[ParameterSpec], params: list[int], chunk_numel: int, partition: Partition) -> Iterator[Packed]:
    """Divide parameters of one format into spans."""
    if specs[params[0]].format.unit != "element":
        numels, units = ([getattr(specs[param], name) for param in params] for name in ("numel", "unit_numel"))
        for found in pack_units(numels, units, chunk_numel=chunk_numel, partition=partition):
            yield Packed([params[index] for index in found.params], found.offsets, found.chunk_sizes)
        return
    for run in _runs(specs, params, chunk_numel):
        yield Packed(run.params, run.offsets, _chunk_sizes(run.used, chunk_numel, partition))


def _runs(specs: Sequence[ParameterSpec], params: list[int], chunk_numel: int) -> Iterator[_Run]:
    """Divide parameters of one format into runs, each of which becomes a span."""
    format = specs[params[0]].format
    alignment = max(ALIGNMENT_NBYTES // format.itemsize, format.block)
    run = _Run(chunk_numel, alignment)
    for unit in _units(specs, params, chunk_numel, alignment):
        numels = [specs[param].numel for param in unit]
        is_away = run.is_tail and run.largest < sum(specs[param].numel for param in range(run.params[-1] + 1, unit[0]))
        if is_away or not run.append(unit, numels):
            yield run
            run = _Run(chunk_numel, alignment)
            run.append(unit, numels)
    yield run


def _units(specs: Sequence[ParameterSpec], params: list[int], chunk_numel: int, alignment: int) -> Iterator[list[int]]:
    """The parameters one by one, but those that lead a large one together with it: up to a tail of small ones right before it that belong
    to it rather than to the large one before them, by their modules' names, unless they would cut over two chunks what fits into one."""
    tail = chunk_numel // TAIL_FRACTION
    small, before = [], ()  # since the last large one; the modules that it is in
    for param in params:
        spec = specs[param]
        if spec.numel <= tail:
            small.append(param)
            continue
        path = _modules(spec)
        room, num_alone = tail, len(small)
        for leading in reversed(small):
            modules, room = _modules(specs[leading]), room - specs[leading].numel
            if room < 0 or _num_common(modules, path) <= _num_common(modules, before):
                break
            num_alone -= 1
        unit = [*small[num_alone:], param]
        if spec.numel <= chunk_numel < _end(0, [specs[one].numel for one in unit], alignment):
            num_alone, unit = len(small), [param]
        yield from ([alone] for alone in small[:num_alone])
        yield unit
        small, before = [], path
    yield from ([alone] for alone in small)


def _modules(spec: ParameterSpec) -> list[str]:
    """The names of the modules that a parameter is in."""
    return spec.name.split(".")[:-1]


def _num_common(path, other):
    """How many names two paths begin with alike."""
    return sum(1 for _ in takewhile(bool, map(operator.eq, path, other)))


def _end(used: int, numels: Iterable[int], alignment: int) -> int:
    """The end of parameters of these sizes if they are placed from `used` on."""
    for numel in numels:
        used = _place(used, numel, alignment) + numel
    return used


def _place(used: int, numel: int, alignment: int) -> int:
    """The first offset from `used` on at which a parameter of this size may start."""
    aligned, border = -(-used // alignment) * alignment, -(-used // BLOCK_NUMEL) * BLOCK_NUMEL
    return aligned if aligned + numel <= border else border


def _chunk_sizes(used, chunk_numel, partition):
    """Cut `used` elements into the fewest equal chunks; the last one is trimmed."""
    num = math.ceil(used / chunk_numel)
    size = partition.padded(math.ceil(used / num))
    return [size] * (num - 1) + [partition.padded(used - (num - 1) * size)]


def _cut(pieces, begin, end):
    """The parts of sorted pieces that lie in [begin, end), relative to `begin`."""
    first = max(bisect_right(pieces, begin, key=lambda piece: piece.start) - 1, 0)
    for piece in pieces[first:]:
        start = max(piece.start, begin)
        stop = min(piece.start + piece.numel, end)
        if piece.start >= end:
            break
        if start < stop:
            yield Piece(piece.param, start - begin, piece.param_start + start - piece.start, stop - start)
