"""A manifest's bytes, read by one who believes nothing: they may be damaged, or made to do harm.

Knows the rules of [Note: the format of a checkpoint] in manifest.py, and checks each before anything is done with what was read. Must
not know how files are read, nor what a tensor's bytes are.

Read as [Note: nothing is made of JSON before it is known to be small] in json_text.py says. Tables are bounded by what a model of over
100,000 parameters needs. What goes past a bound is refused, and when it is saved, too, as `Directory.commit` reads what it has written.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from array import array
from collections.abc import Iterator

import numpy as np

from infinity.checkpoints.json_text import LARGEST, Budget, Text, as_choice, as_flag, as_list, as_number, as_object, as_text, short
from infinity.checkpoints.manifest import (
    ALIGNMENT,
    FILE_NAME,
    FOLDER_NAME,
    FORMAT,
    LARGEST_WORLD,
    MOMENTS_DTYPES,
    TENSOR_DTYPES,
    VERSION,
    File,
    Manifest,
    Parameter,
    Row,
    StoredTensor,
    Whole,
)
from infinity.errors import CheckpointError
from infinity.plan.packing import BLOCK_NUMEL, Chunk, Piece
from infinity.plan.record import FORMATS, record_layout

_ENTRIES_NBYTES = 56 << 20  # of memory, for everything that is listed
_VALUES_NBYTES = 8 << 20  # for what the program gave
_LARGEST_CHUNK = 1 << 48  # of elements: sums over a batch of chunks stay below 1 << 63
_BATCH_NUMBERS = 1 << 14
_DIGEST_NBYTES = len(',"sha256":""}\n') + 64  # at the end
_PARAMETER_NBYTES, _PIECE_NBYTES, _CHUNK_NBYTES = 184, 128, 400  # of memory, about, without names


def manifest_from_json(data: bytes, where: str) -> Manifest:
    """What `Manifest.to_json` wrote. Raises CheckpointError that names `where` for anything but a whole, consistent manifest."""
    body = _signed(data, where)
    try:
        return _Checked(Text(body, is_open=True)).manifest()
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from None
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError, IndexError) as error:
        raise CheckpointError(f"{where}: the manifest makes no sense ({type(error).__name__}: {error})") from None


def _signed(data: bytes, where: str) -> memoryview:
    """The JSON text before the digest, once that is found right; the brace that closes it is missing."""
    body, tail = memoryview(data)[:-_DIGEST_NBYTES], data[-_DIGEST_NBYTES:]
    match = re.fullmatch(rb',"sha256":"([0-9a-f]{64})"}\n', tail)
    if match is None or hashlib.sha256(body).hexdigest().encode() != match[1]:
        raise CheckpointError(f"{where}: the manifest is damaged or cut: its digest is not that of its bytes; use another checkpoint")
    return body


class _Checked:
    """Turns the text of a manifest into a Manifest; raises CheckpointError or what a wrong type makes Python raise."""

    def __init__(self, text: Text):
        self.text = text
        self._names = text.members()
        lists, remedy = "the list of parameters, pieces and records", "save with fewer and larger chunks (chunk_mib)"
        self._entries = Budget(_ENTRIES_NBYTES, lists, remedy)
        self._values = Budget(_VALUES_NBYTES, "what beside weights was saved", "give long lists in extra= as tensors or arrays")
        self._numbers: dict[int, int] = {}  # one object for equal ones

    def manifest(self) -> Manifest:
        """Key by key: all are there, in the order of the note, and what follows them is left alone."""
        self._check_format()
        folder, step = self._folder(), self._value("step")
        self.world = as_number(self._value("world"), "world", 1, LARGEST_WORLD)
        self.dtype = as_choice(self._value("dtype"), "dtype", FORMATS)
        self.moments_dtype = as_choice(self._value("moments_dtype"), "moments_dtype", MOMENTS_DTYPES)
        self.moments = self._moments()
        seed = as_number(self._value("seed"), "seed", 0, (1 << 64) - 1)
        self.parameters = self._parameters()
        aliases = self._aliases()
        chunks, places = self._chunks()
        self.files = self._files()
        self._check_pieces(chunks)
        self._check_places(chunks, places)
        tensors, model = self._tensors(), self._model()
        optimizer, scheduler, scaler = (self._value(name, self._values) for name in ("optimizer", "scheduler", "scaler"))
        rng, extra = self._rng(), self._value("extra", self._values)
        for _ in self._names:
            self.text.value(self._values)
        self.text.end()
        for name, value in (("optimizer", optimizer), ("scaler", scaler)):
            if value is not None:
                as_object(value, name)
        manifest = Manifest(
            folder=folder,
            world=self.world,
            dtype=self.dtype,
            moments_dtype=self.moments_dtype,
            moments=self.moments,
            seed=seed,
            parameters=self.parameters,
            aliases=aliases,
            chunks=chunks,
            places=places,
            files=self.files,
            tensors=tensors,
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            scaler=scaler,
            rng=rng,
            extra=extra,
        )
        if step != manifest.step or type(step) is not int:
            raise CheckpointError(f"step {short(step)}, but the parameters say {manifest.step}")
        return manifest

    def _goto(self, name: str) -> None:
        """The next key must be this one."""
        found = next(self._names, None)
        if found != name:
            raise CheckpointError(f"expected {name!r}, got {'the end' if found is None else short(found)}")

    def _value(self, name: str, budget: Budget | None = None):
        """That of the next key, which must be this one."""
        self._goto(name)
        return self.text.value(budget)

    def _check_format(self) -> None:
        if next(self._names, None) != "format" or self.text.value() != FORMAT:
            raise CheckpointError("this is no manifest of an infinity checkpoint")
        if (version := self._value("version")) != VERSION or type(version) is not int:
            remedy = "read it with the release of infinity that wrote it"
            raise CheckpointError(f"format version {short(version)}, expected {VERSION}: {remedy}")

    def _folder(self) -> str:
        folder = as_text(self._value("folder"), "folder")
        if not FOLDER_NAME.fullmatch(folder):
            raise CheckpointError(f"folder {short(folder)} is no name of a checkpoint's folder")
        return folder

    def _moments(self) -> tuple[str, ...]:
        moments = tuple(as_text(name, "moments") for name in as_list(self._value("moments"), "moments", 64))
        if len(set(moments)) < len(moments) or any(not name.isidentifier() for name in moments):
            raise CheckpointError(f"moments {short(moments)} are no names, or the same one twice")
        return moments

    def _parameters(self) -> tuple[Parameter, ...]:
        self._goto("parameters")
        found, names = [], set()
        for _ in self.text.items():
            entry = self.text.value()
            name = as_text(as_object(entry, "a parameter")["name"], "a parameter's name")
            if name in names:
                raise CheckpointError(f"parameter {short(name)} stands there twice")
            names.add(name)
            shape = _shape(entry["shape"], name)
            self._entries.take(_PARAMETER_NBYTES + len(name) + 40 * len(shape))
            if not 0 < math.prod(shape) < LARGEST:
                raise CheckpointError(f"parameter {short(name)} of shape {shape} has no or too many elements")
            whole = _whole(entry["whole"], name, shape) if "whole" in entry else None
            if whole is not None:
                self._entries.take(_PARAMETER_NBYTES + len(whole.name) + 80 * len(shape))
            group = entry["group"] if entry["group"] is None else as_number(entry["group"], "a parameter's group", 0, 1 << 32)
            trainable, step = as_flag(entry["trainable"], name), self._same(as_number(entry["step"], "a parameter's step"))
            found.append(Parameter(name, shape, trainable, group, step, whole))
        return tuple(found)

    def _aliases(self) -> dict[str, str]:
        self._goto("aliases")
        names = {parameter.canonical.name for parameter in self.parameters}
        aliases = {}
        for alias in self.text.members():
            name = as_text(self.text.value(), "aliases")
            self._entries.take(_PARAMETER_NBYTES + len(alias) + len(name))
            if alias in names or alias in aliases or name not in names:
                raise CheckpointError(f"alias {short(alias)} of {short(name)}: expected another name of a parameter")
            aliases[alias] = name
        return aliases

    def _files(self) -> tuple[File, ...]:
        self._goto("files")
        found, names = [], set()
        for _ in self.text.items():
            name, nbytes = as_list(self.text.value(), "a file", 2)
            if not FILE_NAME.fullmatch(as_text(name, "a file's name")) or name in names:
                raise CheckpointError(f"file {short(name)}: expected a name such as rank0-0.records, once")
            names.add(name)
            self._entries.take(_PARAMETER_NBYTES)
            found.append(File(name, as_number(nbytes, "size of a file")))
        return tuple(found)

    def _chunks(self) -> tuple[tuple[Chunk, ...], tuple[Row, ...]]:
        """Numbers of pieces and records are checked in batches: checks of single numbers would take seconds."""
        self._goto("chunks")
        self._is_trainable = np.array([parameter.trainable for parameter in self.parameters], bool)
        self._numel_left = sum(parameter.numel for parameter in self.parameters)
        chunks, rows, batch = [], [], _Batch()
        for _ in self.text.items():
            what = f"chunk {len(chunks) + len(batch.heads)}"
            self._entries.take(_CHUNK_NBYTES)
            entry = as_object(self.text.value(self._entries.rest()), what)
            numel, trainable = self._same(as_number(entry["numel"], what, 1, _LARGEST_CHUNK)), as_flag(entry["trainable"], what)
            if numel % (self.world * BLOCK_NUMEL):
                raise CheckpointError(f"{what} of {numel} elements cannot be shared by {self.world} ranks")
            pieces, records = as_list(entry["pieces"], what), as_list(entry["records"], what, self.world)
            if not pieces:
                raise CheckpointError(f"{what} is empty")
            if len(records) != self.world:
                raise CheckpointError(f"{what} has records of {len(records)} ranks of {self.world}")
            row = self._row_dtype(trainable)
            self._entries.take(_PIECE_NBYTES * len(pieces) + row.itemsize * len(records) + 100)
            _append(batch.pieces, pieces, 4, f"{what}: its pieces")
            _append(batch.records[trainable], records, 2 + row["crcs"].shape[0], f"{what}: its records")
            batch.heads.append((numel, trainable, len(pieces)))
            if batch.is_full:
                self._add(batch, chunks, rows)
                batch = _Batch()
        self._add(batch, chunks, rows)
        return tuple(chunks), tuple(rows)

    def _add(self, batch: _Batch, chunks: list[Chunk], rows: list[Row]) -> None:
        """Append the chunks of a batch and their rows, once all their numbers are checked."""
        if not batch.heads:
            return
        pieces, ends = self._pieces(batch, len(chunks))
        found = {trainable: self._rows(batch, trainable, len(chunks)) for trainable in (True, False)}
        for (numel, trainable, num_pieces), end in zip(batch.heads, ends):
            own = tuple(itertools.islice(pieces, num_pieces))
            chunks.append(Chunk(len(chunks), 0, 0, numel, end, own, self.dtype, trainable, self.world))
            rows.append(next(found[trainable]))

    def _pieces(self, batch: _Batch, first: int) -> tuple[Iterator[Piece], list[int]]:
        """All pieces of a batch, and where the last one of each chunk ends. `first` is the index of the batch's first chunk."""
        param, start, param_start, count = np.frombuffer(batch.pieces, np.int64).reshape(-1, 4).T
        numel, trainable, num_pieces = np.array(batch.heads, np.int64).T
        chunk, firsts = np.repeat(np.arange(len(numel)), num_pieces), np.cumsum(num_pieces) - num_pieces
        numbers = np.stack((param, start, param_start, count))
        _check((numbers.min(0) >= 0) & (numbers.max(0) < LARGEST), chunk, first, "a piece is out of order or bounds")
        end = start + count
        before = np.concatenate(([0], end[:-1]))
        before[firsts] = 0
        is_inside = (param < len(self.parameters)) & (before <= start) & (start < before + BLOCK_NUMEL) & (count >= 1) & (end <= numel[chunk])
        _check(is_inside, chunk, first, "a piece is out of order or bounds")
        _check(self._is_trainable[param] == trainable[chunk], chunk, first, "it mixes frozen and trainable parameters")
        self._numel_left -= int(count.sum())
        if self._numel_left < 0:
            raise CheckpointError(f"chunks up to {first + len(numel) - 1} hold more elements than all parameters have")
        return map(Piece, *(column.tolist() for column in (param, start, param_start, count))), end[firsts + num_pieces - 1].tolist()

    def _rows(self, batch: _Batch, trainable: bool, first: int) -> Iterator[Row]:
        """For each chunk of a batch that is trainable or is not, the places of its records by rank."""
        row = self._row_dtype(trainable)
        numbers = np.frombuffer(batch.records[trainable], np.int64).reshape(-1, 2 + row["crcs"].shape[0])
        chunk = np.repeat(np.flatnonzero([head[1] == trainable for head in batch.heads]), self.world)
        is_sound = (numbers >= 0).all(1) & (numbers[:, 0] < 1 << 32) & (numbers[:, 2:] < 1 << 32).all(1) & (numbers[:, 1] % ALIGNMENT == 0)
        _check(is_sound, chunk, first, "a record's place makes no sense")
        table = np.empty(len(numbers), row)
        table["file"], table["offset"], table["crcs"] = numbers[:, 0], numbers[:, 1], numbers[:, 2:]
        return (Row(table[begin : begin + self.world]) for begin in range(0, len(table), self.world))

    def _row_dtype(self, trainable: bool) -> np.dtype:
        return Row.dtype(len(record_layout(0, self.dtype, trainable, self.moments, self.moments_dtype).segments))

    def _model(self) -> dict:
        """Its buffers, of which there may be many, and the rest of it."""
        self._goto("model")
        model: dict = {}
        for name in self.text.members():
            if name in model:
                raise CheckpointError(f"model: {short(name)} stands there twice")
            if name != "buffers":
                model[name] = self.text.value(self._values)
                continue
            buffers = model["buffers"] = {}
            for buffer in self.text.members():
                self._entries.take(_PARAMETER_NBYTES + len(buffer))
                entry = self.text.value()
                if buffer in buffers or not isinstance(entry, dict) or entry.keys() != {"$tensor"} or type(entry["$tensor"]) is not int:
                    raise CheckpointError(f"buffer {short(buffer)} is none of its tensors, or stands there twice")
                buffers[buffer] = entry
        return model

    def _rng(self) -> tuple:
        """Of every rank, its generators' states as they were saved; what they say is checked by who sets them."""
        self._goto("rng")
        found = []
        for _ in self.text.items():
            if len(found) == self.world:
                raise CheckpointError(f"generators' states of more than {self.world} ranks")
            found.append(self.text.value(self._values, texts_are_free=True))
        return tuple(found)

    def _same(self, number: int) -> int:
        return self._numbers.setdefault(number, number) if len(self._numbers) < 4096 else self._numbers.get(number, number)

    def _check_pieces(self, chunks: tuple[Chunk, ...]) -> None:
        """Every element of every parameter lies in one piece."""
        flat = array("Q")
        for chunk in chunks:
            for piece in chunk.pieces:
                flat.extend((piece.param, piece.param_start, piece.numel))
        param, start, numel = np.frombuffer(flat, dtype=np.int64).reshape(-1, 3).T if flat else np.empty((3, 0), np.int64)
        order = np.lexsort((start, param))
        param, start, end = param[order], start[order], start[order] + numel[order]
        is_first = np.diff(param, prepend=-1) != 0
        expected = np.where(is_first, 0, np.concatenate(([0], end))[: len(end)])
        if len(wrong := np.flatnonzero(start != expected)):
            at = wrong[0]
            raise CheckpointError(
                f"{short(self.parameters[param[at]].name)}: elements from {min(start[at], expected[at])} on are missing or there twice"
            )
        ends = np.zeros(len(self.parameters), np.int64)
        ends[param] = end  # of several, the last one's
        for parameter, end in zip(self.parameters, ends.tolist()):
            if end != parameter.numel:
                raise CheckpointError(f"{short(parameter.name)} has {parameter.numel} elements, and pieces of {end}")

    def _check_places(self, chunks, places) -> None:
        """Records lie inside their files, and not on one another. Positions count bytes as if all files lay one behind the other."""
        if sum(file.nbytes for file in self.files) > LARGEST:
            raise CheckpointError(f"the files have more than {LARGEST} bytes")
        sizes = np.array([file.nbytes for file in self.files], np.int64)
        begins = np.cumsum(sizes) - sizes
        position, end = np.empty((2, len(chunks) * self.world), np.int64)
        step = max(1, _BATCH_NUMBERS // self.world)
        for first in range(0, len(chunks), step):
            own, records = slice(first, first + step), slice(first * self.world, (first + step) * self.world)
            position[records], end[records] = self._placed(chunks[own], places[own], sizes, begins)
        order = np.argsort(position)
        for first in range(0, len(order), _BATCH_NUMBERS):
            part = order[first : first + _BATCH_NUMBERS + 1]
            is_over = end[part[:-1]] > position[part[1:]]
            if is_over.any():
                at = part[1:][np.argmax(is_over)]
                file = self.files[np.searchsorted(begins, position[at], "right") - 1]
                raise CheckpointError(f"{file.name}: the record of chunk {at // self.world} overlaps another one")

    def _placed(self, chunks, places, sizes: np.ndarray, begins: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where the records of some chunks begin and end. A record that holds nothing lies behind all files."""
        file = np.concatenate([row.table["file"] for row in places])
        offset = np.concatenate([row.table["offset"] for row in places]).astype(np.int64)
        used, shard_numel, trainable = np.array([(chunk.used, chunk.shard_numel, chunk.trainable) for chunk in chunks], np.int64).T[:, :, None]
        used = np.clip(used - np.arange(self.world) * shard_numel, 0, shard_numel)
        nbytes = np.zeros_like(used)
        for is_trainable in (True, False):
            segments = record_layout(0, self.dtype, is_trainable, self.moments, self.moments_dtype).segments
            for segment in segments:
                nbytes += (trainable == is_trainable) * (-(-used * segment.itemsize // ALIGNMENT) * ALIGNMENT)
        nbytes, chunk = nbytes.reshape(-1), np.repeat(np.arange(len(chunks)), self.world)
        _check(file < len(sizes), chunk, chunks[0].index, f"a record lies in no file of {len(sizes)}")
        _check(offset <= sizes[file] - nbytes, chunk, chunks[0].index, "a record goes past the end of its file")
        position = np.where(nbytes > 0, begins[file] + offset, LARGEST)
        return position, position + nbytes

    def _tensors(self) -> tuple[StoredTensor, ...]:
        self._goto("tensors")
        found, end = [], 0
        for _ in self.text.items():
            entry = self.text.value()
            self._entries.take(_PARAMETER_NBYTES)
            dtype = as_choice(as_object(entry, "a tensor")["dtype"], "a tensor's dtype", TENSOR_DTYPES)
            shape = _shape(entry["shape"], "a tensor")
            offset, nbytes, crc = (as_number(entry[name], "a tensor") for name in ("offset", "nbytes", "crc32c"))
            if offset != end or nbytes != math.prod(shape) * TENSOR_DTYPES[dtype].itemsize:
                raise CheckpointError(f"a tensor of shape {shape} and {nbytes} bytes at {offset}: expected them in a row")
            found.append(StoredTensor(dtype, shape, offset, nbytes, crc))
            end = offset + nbytes
        return tuple(found)


class _Batch:
    """Numbers of some chunks, before they are checked."""

    def __init__(self):
        self.heads: list[tuple[int, bool, int]] = []  # numel, trainable and number of pieces of each chunk
        self.pieces = array("q")
        self.records = {True: array("q"), False: array("q")}  # of the trainable chunks, and of the others

    @property
    def is_full(self) -> bool:
        return len(self.pieces) + len(self.records[True]) + len(self.records[False]) >= _BATCH_NUMBERS


def _append(numbers: array, values: list, width: int, what: str) -> None:
    """Append lists of `width` whole numbers to an array."""
    try:
        is_right = set(map(len, values)) == {width}
        numbers.extend(itertools.chain.from_iterable(values))
    except (TypeError, OverflowError):
        is_right = False
    if not is_right:
        raise CheckpointError(f"{what} are not whole numbers, {width} each")


def _check(is_right: np.ndarray, chunk: np.ndarray, first: int, fault: str) -> None:
    """Raises CheckpointError that names the chunk of the first wrong entry; `first` is the index of chunk 0."""
    if not is_right.all():
        raise CheckpointError(f"chunk {first + chunk[np.argmin(is_right)]}: {fault}")


def _shape(value, what: str) -> tuple[int, ...]:
    shape = tuple([as_number(size, "a size of a shape") for size in as_list(value, "a shape", 64)])
    if math.prod(filter(None, shape)) > LARGEST:
        raise CheckpointError(f"{short(what)}: shape {short(shape)} is too large")
    return shape


def _whole(value, name: str, shape: tuple[int, ...]) -> Whole:
    whole = as_object(value, name)
    found = Whole(as_text(whole["name"], name), _shape(whole["shape"], name), _shape(whole["begin"], name))
    inside = len(found.shape) == len(found.begin) == len(shape)
    if not inside or any(begin + size > end for begin, size, end in zip(found.begin, shape, found.shape)):
        raise CheckpointError(f"{short(name)} of shape {shape} is no part of {short(found.name)} of shape {found.shape} at {found.begin}")
    return found
