"""A reader of manifests that trusts no byte: a manifest may be damaged, or made to do harm.

Knows the rules of [Note: the format of a checkpoint] in manifest.py, and checks each rule before a value is used. Must not know how files
are read, or the bytes of tensors.

[Note: bounded memory for JSON] in json_text.py describes the parser. The bounds of tables suffice for a model of over 100,000 parameters.
A manifest beyond a bound is refused. A save refuses such a manifest too, because `Directory.commit` reads each manifest back.
"""

from __future__ import annotations

import hashlib
import math
import re
import sys
from array import array

import numpy as np

from infinity.checkpoints.json_text import (
    LARGEST,
    Budget,
    Text,
    as_choice,
    as_flag,
    as_list,
    as_number,
    as_object,
    as_text,
    short,
)
from infinity.checkpoints.manifest import (
    ALIGNMENT,
    AVERAGED,
    FILE_NAME,
    FOLDER_NAME,
    FORMAT,
    LARGEST_WORLD,
    MIXED_MOMENTS,
    ONE_DTYPE,
    TENSOR_DTYPES,
    VERSIONS,
    File,
    Manifest,
    Parameter,
    Row,
    StoredTensor,
    Whole,
)
from infinity.errors import CheckpointError
from infinity.formats.format import MOMENTS_DTYPES, STORAGES, Format, trainable_names
from infinity.plan.packing import Chunk, Piece
from infinity.plan.partition import Partition
from infinity.system.garbage_collector import without_collections

_ENTRIES_NBYTES = 56 << 20  # memory of all lists: parameters, chunks, pieces, records, files, tensors
_VALUES_NBYTES = 8 << 20  # memory of values from the program: extra, scheduler, optimizer, generators
_DIGEST_NBYTES = len(',"sha256":""}\n') + 64  # bytes at the end of the file
_PARAMETER_NBYTES, _PIECE_NBYTES, _CHUNK_NBYTES, _TENSOR_NBYTES = 184, 128, 560, 240  # approximate bytes of memory, without names
_ROW_COPIES = 2  # a row's numbers are in memory twice while they are checked: parsed, and as a table


def manifest_from_json(data: bytes, where: str) -> Manifest:
    """The inverse of `Manifest.to_json`. where: the file's path, for messages. Raises CheckpointError unless the manifest is valid."""
    body = _signed(data, where)
    try:
        with without_collections():
            return _Checked(Text(body, is_open=True)).manifest()
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from None
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError, IndexError) as error:
        raise CheckpointError(f"{where}: the manifest is not valid ({type(error).__name__}: {error})") from None


def _signed(data: bytes, where: str) -> memoryview:
    """Check the digest, and return the JSON text before the digest. The text lacks the closing brace."""
    body, tail = memoryview(data)[:-_DIGEST_NBYTES], data[-_DIGEST_NBYTES:]
    match = re.fullmatch(rb',"sha256":"([0-9a-f]{64})"}\n', tail)
    if match is None or hashlib.sha256(body).hexdigest().encode() != match[1]:
        raise CheckpointError(f"{where}: the manifest is damaged or cut: the digest does not match the bytes; use another checkpoint")
    return body


class _Checked:
    """Makes a Manifest from the text. Raises CheckpointError, or the error that Python raises for a wrong type."""

    def __init__(self, text: Text):
        self.text = text
        self._names = text.members()
        lists, remedy = "the list of parameters, pieces and records", "save with fewer and larger chunks (chunk_mib)"
        self._entries = Budget(_ENTRIES_NBYTES, lists, remedy)
        self._values = Budget(_VALUES_NBYTES, "the values beside the weights", "pass long lists in extra= as tensors or arrays")
        self._numbers: dict[int, int] = {}  # equal numbers share one object, to save memory
        self._names_of_moments: dict[tuple[str, ...], tuple[str, ...]] = {}  # so do equal names
        self._formats: dict[tuple[str, bool, tuple[str, ...], bool], Format] = {}

    def manifest(self) -> Manifest:
        """Read the keys in the order of the note. All keys must be present; further keys after them are ignored."""
        self._check_format()
        folder, step = self._folder(), self._value("step")
        self.world = as_number(self._value("world"), "world", 1, LARGEST_WORLD)
        self.dtype = as_choice(self._value("dtype"), "dtype", STORAGES)
        self.moments_dtype = as_choice(self._value("moments_dtype"), "moments_dtype", MOMENTS_DTYPES)
        self.moments = _moments(self._value("moments"), "moments")
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
            raise CheckpointError(f"step {short(step)}, expected {manifest.step}, the largest step of the parameters")
        return manifest

    def _goto(self, name: str) -> None:
        """Read the next key. Raises CheckpointError if the key is not `name`."""
        found = next(self._names, None)
        if found != name:
            raise CheckpointError(f"expected {name!r}, got {'the end' if found is None else short(found)}")

    def _value(self, name: str, budget: Budget | None = None):
        """Read the next key, which must be `name`, and return its value."""
        self._goto(name)
        return self.text.value(budget)

    def _check_format(self) -> None:
        if next(self._names, None) != "format" or self.text.value() != FORMAT:
            raise CheckpointError("this is not the manifest of an infinity checkpoint")
        version = self.version = self._value("version")
        if type(version) is not int or version not in VERSIONS:
            remedy = "read it with the release of infinity that wrote it"
            raise CheckpointError(f"format version {short(version)}, expected {', '.join(map(str, VERSIONS))}: {remedy}")

    def _folder(self) -> str:
        folder = as_text(self._value("folder"), "folder")
        if not FOLDER_NAME.fullmatch(folder):
            raise CheckpointError(f"folder {short(folder)}: expected a name such as data-0123456789ab")
        return folder

    def _parameters(self) -> tuple[Parameter, ...]:
        self._goto("parameters")
        found, names = [], set()
        for _ in self.text.items():
            entry = self.text.value()
            name = as_text(as_object(entry, "a parameter")["name"], "a parameter's name")
            if name in names:
                raise CheckpointError(f"parameter {short(name)} is listed twice")
            names.add(name)
            shape = _shape(entry["shape"], name)
            self._entries.take(_PARAMETER_NBYTES + len(name) + 40 * len(shape))
            if not 0 < math.prod(shape) < LARGEST:
                raise CheckpointError(f"parameter {short(name)} of shape {shape} has no elements, or too many")
            whole = _whole(entry["whole"], name, shape) if "whole" in entry else None
            if whole is not None:
                self._entries.take(_PARAMETER_NBYTES + len(whole.name) + 80 * len(shape))
            group = entry["group"] if entry["group"] is None else as_number(entry["group"], "a parameter's group", 0, 1 << 32)
            trainable, step = as_flag(entry["trainable"], name), self._same(as_number(entry["step"], "a parameter's step"))
            dtype, moments = self._own_dtype(entry, name, trainable), self._own_moments(entry, name)
            averaged = _averaged(entry, self.version, name) if "averaged" in entry else None
            found.append(Parameter(name, shape, trainable, group, step, whole, dtype, moments, averaged))
        return tuple(found)

    def _own_dtype(self, entry: dict, name: str, trainable: bool) -> str | None:
        """The dtype of a parameter, or None for the manifest's dtype. Equal strings are one object."""
        dtype = as_choice(entry["dtype"], f"dtype of {short(name)}", STORAGES) if "dtype" in entry else None
        if dtype is not None and self.version == ONE_DTYPE:
            raise CheckpointError(f"parameter {short(name)} has a dtype of its own, which format version {ONE_DTYPE} does not allow")
        if trainable and (dtype or self.dtype) not in trainable_names():
            raise CheckpointError(f"trainable parameter {short(name)} is of {dtype or self.dtype}, expected {', '.join(trainable_names())}")
        return None if dtype in (None, self.dtype) else sys.intern(dtype)

    def _own_moments(self, entry: dict, name: str) -> tuple[str, ...] | None:
        """The moments of a parameter, or None for the manifest's moments. Equal tuples are one object."""
        if "moments" not in entry:
            return None
        if self.version < MIXED_MOMENTS:
            raise CheckpointError(f"parameter {short(name)} has moments of its own, which format version {self.version} does not allow")
        moments = _moments(entry["moments"], f"moments of {short(name)}")
        return None if moments == self.moments else self._names_of_moments.setdefault(moments, moments)

    def _format(self, param: int) -> Format:
        """The format of a parameter. Equal formats are one object."""
        parameter = self.parameters[param]
        moments = self.moments if parameter.moments is None else parameter.moments
        key = parameter.dtype or self.dtype, parameter.trainable, moments, parameter.averaged is not None
        if key not in self._formats:
            self._formats[key] = Format(*key[:3], self.moments_dtype, averaged=key[3])
        return self._formats[key]

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
        self._goto("chunks")
        chunks, rows, partition = [], [], Partition(self.world)
        for _ in self.text.items():
            what = f"chunk {len(chunks)}"
            self._entries.take(_CHUNK_NBYTES)
            entry = as_object(self.text.value(self._entries.rest()), what)
            numel, trainable = self._same(as_number(entry["numel"], what, 1)), as_flag(entry["trainable"], what)
            if numel % partition.unit_numel:
                raise CheckpointError(f"{what} of {numel} elements cannot be shared by {self.world} ranks")
            pieces, end = self._pieces(as_list(entry["pieces"], what), numel, trainable, what)
            format = self._format(pieces[0].param)
            chunks.append(Chunk(len(chunks), 0, 0, numel, end, pieces, format, partition))
            rows.append(self._row(as_list(entry["records"], what, self.world), format, what))
        return tuple(chunks), tuple(rows)

    def _pieces(self, values: list, numel: int, trainable: bool, what: str) -> tuple[tuple[Piece, ...], int]:
        pieces, end = [], 0
        self._entries.take(_PIECE_NBYTES * len(values))
        for value in values:
            param, start, param_start, count = [as_number(number, what) for number in as_list(value, what, 4)]
            if param >= len(self.parameters) or start < end or count < 1 or start + count > numel:
                raise CheckpointError(f"{what}: a piece is out of order or bounds")
            if self.parameters[param].trainable != trainable:
                raise CheckpointError(f"{what} mixes frozen and trainable parameters")
            if pieces and self._format(param) is not self._format(pieces[0].param):
                raise CheckpointError(f"{what} mixes parameters of different formats")
            pieces.append(Piece(param, start, param_start, count))
            end = start + count
        if not pieces:
            raise CheckpointError(f"{what} is empty")
        return tuple(pieces), end

    def _row(self, values: list, format: Format, what: str) -> Row:
        """The places of a chunk's records, by rank."""
        if len(values) != self.world:
            raise CheckpointError(f"{what} has records of {len(values)} ranks, expected {self.world}")
        row = Row.dtype(len(format.segments))
        self._entries.take(_ROW_COPIES * row.itemsize * len(values) + 100)
        numbers = np.array(values)
        if numbers.dtype != np.int64 or numbers.shape != (len(values), 2 + row["crcs"].shape[0]) or (numbers < 0).any():
            raise CheckpointError(f"{what}: expected records of {2 + row['crcs'].shape[0]} whole numbers each")
        offsets, numbers[:, 1] = numbers[:, 1].copy(), 0
        if (numbers >> 32).any() or (offsets % ALIGNMENT).any():
            raise CheckpointError(f"{what}: a record's place is not valid")
        table = np.empty(len(values), row)
        table["file"], table["offset"], table["crcs"] = numbers[:, 0], offsets, numbers[:, 2:]
        return Row(table)

    def _model(self) -> dict:
        """The value of "model". Buffers are read one by one, because there may be many of them."""
        self._goto("model")
        model: dict = {}
        for name in self.text.members():
            if name in model:
                raise CheckpointError(f"model: {short(name)} is listed twice")
            if name != "buffers":
                model[name] = self.text.value(self._values)
                continue
            buffers = model["buffers"] = {}
            for buffer in self.text.members():
                self._entries.take(_PARAMETER_NBYTES + len(buffer))
                entry = self.text.value()
                if buffer in buffers or not isinstance(entry, dict) or entry.keys() != {"$tensor"} or type(entry["$tensor"]) is not int:
                    raise CheckpointError(f"buffer {short(buffer)} is not one of the tensors, or is listed twice")
                buffers[buffer] = entry
        return model

    def _rng(self) -> tuple:
        """The encoded states of the random number generators, by rank. `contents.checked_generators` checks the states before use."""
        self._goto("rng")
        found = []
        for _ in self.text.items():
            if len(found) == self.world:
                raise CheckpointError(f"states of random number generators for more than {self.world} ranks")
            found.append(self.text.value(self._values, texts_are_free=True))
        return tuple(found)

    def _same(self, number: int) -> int:
        return self._numbers.setdefault(number, number) if len(self._numbers) < 4096 else self._numbers.get(number, number)

    def _check_pieces(self, chunks: tuple[Chunk, ...]) -> None:
        """Raise CheckpointError unless each element of each parameter is in exactly one piece."""
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
                f"{short(self.parameters[param[at]].name)}: elements from {min(start[at], expected[at])} on are missing or listed twice"
            )
        ends = np.zeros(len(self.parameters), np.int64)
        ends[param] = end  # numpy keeps the end of the last piece of each parameter
        for parameter, end in zip(self.parameters, ends.tolist()):
            if end != parameter.numel:
                raise CheckpointError(f"{short(parameter.name)} has {parameter.numel} elements, but pieces for {end}")

    def _check_places(self, chunks, places) -> None:
        """Raise CheckpointError unless all records are inside their files and do not overlap."""
        held: list[array] = [array("Q") for _ in self.files]  # flat, three numbers per record: offset, bytes, chunk
        for chunk, row in zip(chunks, places):
            own = enumerate(zip(row.table["file"].tolist(), row.table["offset"].tolist()))
            for rank, (file, offset) in own:
                used = chunk.shard_used(rank)
                nbytes = sum([-(-segment.nbytes(used) // ALIGNMENT) * ALIGNMENT for segment in chunk.format.segments])
                if file >= len(held):
                    raise CheckpointError(f"chunk {chunk.index}: a record is in file {file}, but only {len(held)} files are listed")
                if nbytes > self.files[file].nbytes or offset > self.files[file].nbytes - nbytes:
                    raise CheckpointError(f"{self.files[file].name}: the record of chunk {chunk.index} ends behind the file's end")
                if nbytes:
                    held[file].extend((offset, nbytes, chunk.index))
        for file, records in zip(self.files, held):
            table = np.frombuffer(records, dtype=np.uint64).reshape(-1, 3) if records else np.empty((0, 3), np.uint64)
            table = table[np.argsort(table[:, 0], kind="stable")]
            overlaps = np.flatnonzero(table[:-1, 0] + table[:-1, 1] > table[1:, 0])
            if len(overlaps):
                raise CheckpointError(f"{file.name}: the record of chunk {table[overlaps[0] + 1, 2]} overlaps another record")

    def _tensors(self) -> tuple[StoredTensor, ...]:
        self._goto("tensors")
        found, end = [], 0
        for _ in self.text.items():
            entry = self.text.value()
            self._entries.take(_TENSOR_NBYTES)
            dtype = as_choice(as_object(entry, "a tensor")["dtype"], "a tensor's dtype", TENSOR_DTYPES)
            shape = _shape(entry["shape"], "a tensor")
            offset, nbytes, crc = (as_number(entry[name], "a tensor") for name in ("offset", "nbytes", "crc32c"))
            if offset != end or nbytes != math.prod(shape) * TENSOR_DTYPES[dtype].itemsize:
                raise CheckpointError(f"a tensor of shape {shape} has {nbytes} bytes at offset {offset}: expected tensors without gaps")
            found.append(StoredTensor(dtype, shape, offset, nbytes, crc))
            end = offset + nbytes
        return tuple(found)


_BLOCKS = ("2", "4", "8", "16", "32", "64", "128")  # elements that share a value of a moment


def _averaged(entry: dict, version: int, name: str) -> int:
    """The number of steps in the average of a parameter."""
    if version < AVERAGED or not entry["trainable"]:
        raise CheckpointError(f"parameter {short(name)} has an average: it is frozen, or format version {version} does not allow averages")
    return as_number(entry["averaged"], f"averaged of {short(name)}")


def _moments(value, what: str) -> tuple[str, ...]:
    moments = tuple(as_text(name, what) for name in as_list(value, what, 64))
    parts = [moment.partition("/") for moment in moments]
    wrong = [name for name, slash, block in parts if not name.isidentifier() or (slash and block not in _BLOCKS)]
    if wrong or len({name for name, *_ in parts}) < len(parts):
        raise CheckpointError(f"{what}: {short(moments)}: expected different names")
    return moments


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
        raise CheckpointError(f"{short(name)} of shape {shape} is not inside {short(found.name)} of shape {found.shape} at {found.begin}")
    return found
