"""Safetensors files and folders: the same bits as the safetensors package, both ways; hostile files; all files or none.

Long because hostile, damaged and unusual files are made by the same helpers.
"""

import contextlib
import errno
import gc
import json
import os
import random
import time
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import infinity
from infinity.checkpoints import safetensors, safetensors_writer
from infinity.checkpoints.safetensors import TensorFiles
from infinity.checkpoints.safetensors_format import DTYPES, TensorSpec
from infinity.checkpoints.safetensors_writer import plan_files, write_files
from infinity.errors import CheckpointError

INDEX = "model.safetensors.index.json"


def noise(dtype, shape, seed=0):
    """A tensor of random bits, which include NaNs of many bit patterns. Booleans are 0 or 1."""
    numel = TensorSpec("", dtype, shape).numel
    high = 2 if dtype == torch.bool else 256
    memory = torch.randint(high, (numel * dtype.itemsize,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return memory.view(dtype).reshape(shape)


def bits(tensor):
    return tensor.contiguous().flatten().view(torch.uint8)


def specs_of(tensors):
    return [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]


def parts_of(tensors, numel=1000):
    return lambda spec: tensors[spec.name].flatten().split(numel)


def write(folder, tensors, **options):
    return write_files(folder, specs_of(tensors), parts_of(tensors), **options)


def listing(folder):
    return sorted(os.listdir(folder))


def open_files():
    """This process's file descriptors, after a garbage collection."""
    gc.collect()
    return listing("/proc/self/fd")


@pytest.fixture
def tensors():
    """A tensor of each dtype in odd sizes, scalars, and empty tensors."""
    made = {f"layer.{code}": noise(dtype, (7, 3, 5), seed) for seed, (code, dtype) in enumerate(DTYPES.items())}
    made |= {f"scalar.{code}": noise(dtype, (), seed) for seed, (code, dtype) in enumerate(DTYPES.items())}
    made |= {"empty": noise(torch.float32, (4, 0, 2)), "empty.1": noise(torch.bool, (0,))}
    return made | {"größe \"\\\n🤗": noise(torch.float16, (2, 2))}


# ---- files that the safetensors package reads or wrote ----


@pytest.mark.parametrize("bound", [10**9, 500, 1], ids=["one file", "several", "a file each"])
def test_the_safetensors_package_reads_our_files(tmp_path, tensors, bound):
    package = pytest.importorskip("safetensors")
    nbytes = write(tmp_path / "model", tensors, max_file_nbytes=bound, metadata={"step": "7"})
    names = listing(tmp_path / "model")
    assert nbytes == sum((tmp_path / "model" / name).stat().st_size for name in names)
    assert (INDEX in names) == (len(names) > 1) == (bound < 10**9)
    got, where = {}, {}
    for name in names:
        if name != INDEX:
            with package.safe_open(tmp_path / "model" / name, "pt") as file:
                assert file.metadata() == {"format": "pt", "step": "7"}
                got |= {key: file.get_tensor(key) for key in file.keys()}
                where |= dict.fromkeys(file.keys(), name)
    assert got.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(bits(got[name]), bits(tensor))
    if bound < 10**9:
        index = json.loads((tmp_path / "model" / INDEX).read_text())
        assert index == {"metadata": {"total_size": sum(len(bits(t)) for t in tensors.values())}, "weight_map": where}


@pytest.mark.parametrize("bound", [10**9, 500, 1], ids=["one file", "several", "a file each"])
def test_we_read_our_own_files(tmp_path, tensors, bound):
    write(tmp_path / "model", tensors, max_file_nbytes=bound)
    with TensorFiles(tmp_path / "model") as files:
        assert files.names.keys() == tensors.keys()
        assert files.metadata == {"format": "pt"}
        assert all(info.offset % 8 % info.dtype.itemsize == 0 for info in files.names.values())
        for name, tensor in tensors.items():
            assert torch.equal(bits(files.read(name)), bits(tensor))
            assert torch.equal(bits(torch.cat([*files.pieces(name, 9), files.read(name, 0, 0)])), bits(tensor))


def test_we_read_files_of_the_safetensors_package(tmp_path, tensors):
    package = pytest.importorskip("safetensors.torch")
    package.save_file(tensors, tmp_path / "it.safetensors", {"by": "them"})
    for path in (tmp_path, tmp_path / "it.safetensors", str(tmp_path)):
        with TensorFiles(path) as files:
            assert files.metadata == {"by": "them"}
            infos = files.names
            assert [info.offset for info in infos.values()] == sorted(info.offset for info in infos.values())
            assert {name: (info.dtype, info.shape) for name, info in infos.items()} == {
                name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()
            }
            for name, tensor in tensors.items():
                assert torch.equal(bits(files.read(name)), bits(tensor))


def test_random_slices_are_read(tmp_path, tensors):
    package = pytest.importorskip("safetensors.torch")
    package.save_file(tensors, tmp_path / "it.safetensors")
    dice = random.Random(0)
    with TensorFiles(tmp_path) as files:
        for _ in range(1000):
            name = dice.choice(list(tensors))
            flat = tensors[name].flatten()
            start = dice.randint(0, flat.numel())
            numel = dice.choice([None, dice.randint(0, flat.numel() - start)])
            got = files.read(name, start, numel)
            assert got.dim() == 1 and got.dtype == flat.dtype
            assert torch.equal(bits(got), bits(flat[start:][:numel]))


@pytest.mark.parametrize("family", [pytest.param("Bert", marks=pytest.mark.long), "GPT2"])
def test_a_folder_saved_by_transformers_is_read(tmp_path, family):
    transformers = pytest.importorskip("transformers")
    sizes = {
        "Bert": {"vocab_size": 90, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64},
        "GPT2": {"vocab_size": 90, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 40},
    }
    model = getattr(transformers, f"{family}Model")(getattr(transformers, f"{family}Config")(**sizes[family]))
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert INDEX in listing(tmp_path)
    state = model.state_dict()
    with TensorFiles(tmp_path) as files:
        assert files.names.keys() == state.keys()
        assert files.metadata == {"format": "pt"}
        for name, tensor in state.items():
            assert torch.equal(files.read(name).reshape(files.names[name].shape), tensor)


# ---- layout ----


def test_the_bytes_of_a_file(tmp_path):
    """Wider dtypes come first; otherwise the given order stays. The data begins at a multiple of 8 bytes."""
    tensors = {"b": torch.tensor([1, 2], dtype=torch.uint8), "a": torch.tensor(1.0), "c": torch.tensor([[3.0]])}
    assert write(tmp_path / "model", tensors) == 8 + 192 + 10
    header = (
        b'{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]},'
        b'"c":{"dtype":"F32","shape":[1,1],"data_offsets":[4,8]},"b":{"dtype":"U8","shape":[2],"data_offsets":[8,10]}}'
    )
    data = b"\0\0\x80\x3f\0\0\x40\x40\1\2"
    length = (192).to_bytes(8, "little")
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == length + header.ljust(192) + data


def test_plans_are_in_order_and_a_large_tensor_has_a_file_of_its_own():
    a, b, c, d = (TensorSpec(name, torch.float32, (numel,)) for name, numel in [("a", 10), ("b", 15), ("c", 50), ("d", 1)])
    assert plan_files([a, b], max_file_nbytes=100) == [("model.safetensors", [a, b])]
    assert plan_files([c], max_file_nbytes=100) == [("model.safetensors", [c])]
    assert plan_files([]) == [("model.safetensors", [])]
    assert plan_files(iter([a, b, c, d]), max_file_nbytes=100) == [
        ("model-00001-of-00003.safetensors", [a, b]),
        ("model-00002-of-00003.safetensors", [c]),
        ("model-00003-of-00003.safetensors", [d]),
    ]
    assert [len(specs) for _, specs in plan_files([a, b, c, d], max_file_nbytes=99)] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    "specs, expected",
    [
        ([TensorSpec("a", torch.float32, (1,))] * 2, "the name 'a' is taken"),
        ([TensorSpec("__metadata__", torch.float32, (1,))], "is taken"),
        ([TensorSpec("a", torch.complex128, (1,))], "complex128, expected one of F64"),
        ([TensorSpec("a", torch.float32, (1, -1))], "shape .1, -1."),
        ([TensorSpec("a", torch.float32, 1)], "shape 1"),
        ([TensorSpec("\ud800", torch.float32, (1,))], "Unicode"),
        ([TensorSpec(7, torch.float32, (1,))], "Unicode"),
    ],
)
def test_specs_that_a_file_cannot_hold_are_refused(tmp_path, specs, expected):
    with pytest.raises(ValueError, match=expected):
        write_files(tmp_path / "model", specs, None)
    assert listing(tmp_path) == []


@pytest.mark.parametrize("options", [{"max_file_nbytes": 0}, {"metadata": {"a": 1}}, {"metadata": {"\ud800": "1"}}])
def test_options_without_a_meaning_are_refused(tmp_path, options):
    with pytest.raises(ValueError, match="expected"):
        write(tmp_path / "model", {"a": torch.ones(1)}, **options)
    assert listing(tmp_path) == []


def test_the_writer_takes_parts_one_by_one_and_with_any_stride(tmp_path):
    log = []
    whole = torch.arange(12.0, requires_grad=True)

    def parts(spec):
        for part in (whole[:0], whole[::2], whole[1:2:2], whole.reshape(6, 2)[1:, 1]):
            log.append(part.numel())
            yield part

    done = []
    nbytes = write_files(tmp_path, [TensorSpec("a", torch.float32, (3, 4))], parts, progress=lambda *args: done.append(args))
    assert log == [0, 6, 1, 5]
    head = nbytes - 48
    assert done == [(head + n, nbytes) for n in (0, 24, 28, 48)]
    with TensorFiles(tmp_path) as files:
        assert files.read("a").tolist() == [0, 2, 4, 6, 8, 10, 1, 3, 5, 7, 9, 11]


def test_short_reads_and_writes_are_continued(tmp_path, tensors, monkeypatch):
    write_once, read_once = os.write, os.preadv
    monkeypatch.setattr(os, "write", lambda fd, data: write_once(fd, data[:101]))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: read_once(fd, [buffers[0][:13]], offset))
    write(tmp_path / "model", tensors)
    with TensorFiles(tmp_path / "model") as files:
        assert all(torch.equal(bits(files.read(name)), bits(tensor)) for name, tensor in tensors.items())


# ---- use ----


def test_elements_outside_a_tensor_and_unknown_names_are_refused(tmp_path):
    write(tmp_path / "model", {"a": torch.arange(6).reshape(2, 3)})
    with TensorFiles(tmp_path / "model") as files:
        for start, numel in [(-1, 2), (0, 7), (6, 1), (7, None), (3, -1), (2**70, 1)]:
            with pytest.raises(ValueError, match="elements .* of 'a', which has 6"):
                files.read("a", start, numel)
        with pytest.raises(KeyError):
            files.read("b")
        assert files.read("a", 6).numel() == 0
    files.close()
    with pytest.raises(ValueError, match="is closed"):
        files.read("a")


def test_the_first_file_decides_a_metadata_key_with_several_values(tmp_path):
    for name in "ab":
        metadata = {"format": "pt", "file": name, name: "1"}
        raw({"__metadata__": metadata, name: entry("U8", [1], 0, 1)}, b"x", tmp_path / f"{name}.safetensors")
    with TensorFiles(tmp_path) as files:
        assert files.metadata == {"format": "pt", "file": "a", "a": "1", "b": "1"}


def test_a_missing_path_is_a_file_not_found_error(tmp_path):
    for path in (tmp_path / "missing", tmp_path / "missing.safetensors"):
        with pytest.raises(FileNotFoundError) as info:
            TensorFiles(path)
        assert info.value.filename == str(path)


def test_an_error_of_the_drive_names_the_file(tmp_path, monkeypatch):
    write(tmp_path / "model", {"a": torch.ones(3)})

    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    with TensorFiles(tmp_path / "model") as files:
        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(OSError, match="Input/output error: .*model.safetensors"):
            files.read("a")


@pytest.mark.parametrize("change", ["cut", "grown", "rewritten"])
def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path, change):
    write(tmp_path / "model", {"a": torch.arange(1000), "b": torch.arange(1000)})
    path = tmp_path / "model" / "model.safetensors"
    with TensorFiles(path) as files:
        assert files.read("a").sum() == 499500
        if change == "rewritten":
            os.utime(path, ns=(0, 1))
        else:
            os.truncate(path, path.stat().st_size + (8 if change == "grown" else -8))
        for name in "ab":
            with pytest.raises(CheckpointError, match="model.safetensors was changed while it was read"):
                files.read(name)


def test_links_of_a_hugging_face_cache_are_followed(tmp_path):
    write(tmp_path / "blobs", {"a": torch.ones(3), "b": torch.ones(2)}, max_file_nbytes=12)
    (tmp_path / "snapshot").mkdir()
    for name in listing(tmp_path / "blobs"):
        (tmp_path / "snapshot" / name).symlink_to(f"../blobs/{name}")
    with TensorFiles(tmp_path / "snapshot") as files:
        assert files.read("b").tolist() == [1, 1]


# ---- damaged and hostile files ----


def entry(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def raw(header, data=b"", path=None, length=None):
    """The bytes of a file with this header (a dict, text or bytes). Writes them to `path`, if given."""
    text = json.dumps(header) if isinstance(header, dict) else header
    text = text.encode() if isinstance(text, str) else text
    content = (len(text) if length is None else length).to_bytes(8, "little") + text + data
    if path is not None:
        path.write_bytes(content)
    return content


def one(value, data=bytes(8)):
    """The bytes of a file whose only tensor is `t`."""
    return raw({"t": value}, data)


GOOD = '{"t":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}'

FILES = {
    "empty": b"",
    "seven bytes": bytes(7),
    "no header": bytes(8),
    "header behind the end": raw("{}", length=3),
    "length of all ones": raw("{}", length=2**64 - 1),
    "length beyond the bound": raw("{}", length=100_000_001),
    "length of a negative": raw("{}", length=2**63),
    "a pickle": b"\x80\x02}q\x00." + bytes(100),
    "not JSON": raw("{]"),
    "cut JSON": raw(GOOD[:-1], bytes(8)),
    "two values": raw("{} {}"),
    "zeros behind the JSON": raw(GOOD + "\0", bytes(8)),
    "not UTF-8": raw(b'{"\xff":1}'),
    "UTF-16": raw(GOOD.encode("utf-16"), bytes(8)),
    "byte order mark": raw("\ufeff" + GOOD, bytes(8)),
    "a list": raw("[]"),
    "a number": raw("1"),
    "null": raw("null"),
    "deep lists": raw("[" * 100_000),
    "deep objects": raw('{"a":' * 100_000),
    "deep entry": raw('{"t":' + "[" * 500 + "]" * 500 + "}"),
    "a number of many digits": raw('{"t":' + "9" * 5000 + "}"),
    "a tensor twice": raw('{"t":%s,"t":%s}' % ((GOOD[5:-1],) * 2), bytes(8)),
    "a key of a tensor twice": raw(GOOD.replace('"shape":[8]', '"shape":[8],"shape":[8]'), bytes(8)),
    "metadata twice": raw('{"__metadata__":{},"__metadata__":{}}'),
    "metadata of numbers": raw({"__metadata__": {"a": 1}}),
    "metadata is a text": raw({"__metadata__": "pt"}),
    "metadata is null": raw({"__metadata__": None}),
    "metadata of half a surrogate": raw('{"__metadata__":{"a":"\\ud800"}}'),
    "a name of half a surrogate": raw(GOOD.replace("t", "\\ud800", 1), bytes(8)),
    "an entry is a list": one([]),
    "an entry is null": one(None),
    "no dtype": one({"shape": [8], "data_offsets": [0, 8]}),
    "no shape": one({"dtype": "U8", "data_offsets": [0, 8]}),
    "no offsets": one({"dtype": "U8", "shape": [8]}),
    "dtype unknown": one(entry("Q4", [8], 0, 8)),
    "dtype in small letters": one(entry("u8", [8], 0, 8)),
    "dtype is a list": one(entry(["U8"], [8], 0, 8)),
    "shape is a number": one(entry("U8", 8, 0, 8)),
    "shape is a text": one(entry("U8", "8", 0, 8)),
    "shape negative": one(entry("U8", [-8], 0, 8)),
    "shape twice negative": one(entry("U8", [-2, -4], 0, 8)),
    "shape is a fraction": one(entry("U8", [8.0], 0, 8)),
    "shape is true": one(entry("U8", [8, True], 0, 8)),
    "shape nested": one(entry("U8", [[8]], 0, 8)),
    "shape too small": one(entry("U8", [7], 0, 8)),
    "shape too large": one(entry("U8", [9], 0, 8)),
    "shape of another dtype": one(entry("F32", [8], 0, 8)),
    "shape wraps 64 bits": one(entry("U8", [2**32, 2**32], 0, 0)),
    "shape wraps to the right size": one(entry("I64", [2**61 + 1], 0, 8)),
    "shape beyond 64 bits": one(entry("U8", [2**64], 0, 8)),
    "shape beyond 64 bits, then zero": one(entry("U8", [2**62, 2**62, 0], 0, 0)),
    "a shape of very many": one(entry("U8", [2**60] * 20_000, 0, 8)),
    "offsets swapped": one(entry("U8", [8], 8, 0)),
    "offsets negative": one(entry("U8", [8], -8, 0)),
    "offsets are fractions": one(entry("U8", [8], 0.0, 8.0)),
    "offsets are texts": one(entry("U8", [8], "0", "8")),
    "three offsets": one({"dtype": "U8", "shape": [8], "data_offsets": [0, 8, 8]}),
    "offsets are a number": one({"dtype": "U8", "shape": [8], "data_offsets": 8}),
    "offsets behind the end": one(entry("U8", [8], 1, 9)),
    "offsets far behind the end": one(entry("U8", [8], 2**62, 2**62 + 8)),
    "a scalar without bytes": one(entry("F32", [], 0, 0)),
    "data cut": one(entry("U8", [8], 0, 8), bytes(7)),
    "data too long": one(entry("U8", [8], 0, 8), bytes(9)),
    "a hole at the start": one(entry("U8", [4], 4, 8)),
    "a hole": raw({"a": entry("U8", [3], 0, 3), "b": entry("U8", [4], 4, 8)}, bytes(8)),
    "an overlap": raw({"a": entry("U8", [5], 0, 5), "b": entry("U8", [4], 4, 8)}, bytes(8)),
    "two of the same bytes": raw({"a": entry("U8", [8], 0, 8), "b": entry("U8", [8], 0, 8)}, bytes(8)),
    "an empty one inside another": raw({"a": entry("U8", [8], 0, 8), "b": entry("U8", [0], 4, 4)}, bytes(8)),
}


@pytest.mark.few(28)
@pytest.mark.parametrize("case", FILES)
def test_damaged_files_are_refused(tmp_path, case):
    path = tmp_path / "it.safetensors"
    path.write_bytes(FILES[case])
    before = open_files()
    with pytest.raises(CheckpointError) as info:
        TensorFiles(path)
    message = str(info.value)
    assert message.startswith(str(path)) and "download or copy it again" in message
    assert len(message.encode()) < 1000 and message.isprintable()
    assert open_files() == before


def index_of(weight_map, folder):
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def two_files(folder, **maps):
    """Writes the tensors a and b into one file each, and an index."""
    for name in "ab":
        raw({name: entry("U8", [1], 0, 1)}, b"x", folder / f"{name}.safetensors")
    index_of({"a": "a.safetensors", "b": "b.safetensors", **maps}, folder)


def numbered(folder, *numbers, of):
    for number in numbers:
        raw({f"t{number}": entry("U8", [1], 0, 1)}, b"x", folder / f"m-{number:05}-of-{of:05}.safetensors")


FOLDERS = {
    "empty": (lambda folder: None, "has no .*safetensors file"),
    "other files": (lambda folder: (folder / "pytorch_model.bin").touch(), "has no .*safetensors file"),
    "a name in two files": (
        lambda folder: [raw({"t": entry("U8", [1], 0, 1)}, b"x", folder / f"{name}.safetensors") for name in "ab"],
        "'t' is in .*/a.safetensors and in .*/b.safetensors",
    ),
    "a folder as a file": (lambda folder: (folder / "it.safetensors").mkdir(), "is a directory or device"),
    "a pipe": (lambda folder: os.mkfifo(folder / "it.safetensors"), "is a directory or device"),
    "a device": (lambda folder: (folder / "it.safetensors").symlink_to("/dev/zero"), "is a directory or device"),
    "files that miss others": (lambda folder: numbered(folder, 1, 3, of=3), "2 of 3 files and no index"),
    "files of astronomically many": (lambda folder: numbered(folder, 1, of=999_999_999), "1 of 999999999 files"),
    "index of a missing file": (lambda folder: two_files(folder, c="c.safetensors", d="d.safetensors"), "2 of 4 files: 'c.*, 'd"),
    "index of a broken link": (
        lambda folder: (two_files(folder, c="c"), (folder / "c").symlink_to("nowhere")),
        "lacks 1 of 3 files: 'c'",
    ),
    "index of a name too long": (lambda folder: two_files(folder, c="c" * 5000), "lacks 1 of 3"),
    "index of a missing tensor": (
        lambda folder: two_files(folder, c="a.safetensors", d="b.safetensors"),
        "names tensors that the files do not have: 'c', 'd'",
    ),
    "index of very many missing": (
        lambda folder: two_files(folder, **{f"c{i}": "a.safetensors" for i in range(1000)}),
        "'c9' and 990 more",
    ),
    "index of another file's tensor": (lambda folder: two_files(folder, b="a.safetensors"), "do not have: 'b'"),
    "index above": (lambda folder: two_files(folder, c="../a.safetensors"), "a file in the same folder"),
    "index below": (lambda folder: two_files(folder, c="x/a.safetensors"), "a file in the same folder"),
    "index absolute": (lambda folder: two_files(folder, c="/etc/passwd"), "a file in the same folder"),
    "index of two dots": (lambda folder: two_files(folder, c=".."), "a file in the same folder"),
    "index of one dot": (lambda folder: two_files(folder, c="."), "a file in the same folder"),
    "index of nothing": (lambda folder: two_files(folder, c=""), "a file in the same folder"),
    "index of a zero": (lambda folder: two_files(folder, c="a\0"), "a file in the same folder"),
    "index of a backslash": (lambda folder: two_files(folder, c="..\\a"), "a file in the same folder"),
    "index of a number": (lambda folder: two_files(folder, c=1), "a file in the same folder"),
    "index of a list": (lambda folder: two_files(folder, c=[]), "a file in the same folder"),
    "index of half a surrogate": (lambda folder: two_files(folder, c="\ud800"), "a file in the same folder"),
    "index of itself": (lambda folder: two_files(folder, c=INDEX), "index.json: a header of"),
    "index without a map": (lambda folder: (folder / INDEX).write_text("{}"), "has no weight_map"),
    "index of a map that is a list": (lambda folder: (folder / INDEX).write_text('{"weight_map":[]}'), "has no weight_map"),
    "index that is a list": (lambda folder: (folder / INDEX).write_text("[]"), "expected a JSON object"),
    "index that is not JSON": (lambda folder: (folder / INDEX).write_bytes(b"\xff"), "not valid JSON"),
    "index with a name twice": (
        lambda folder: (folder / INDEX).write_text('{"weight_map":{"a":"b","a":"c"}}'),
        "'a' appears twice",
    ),
    "index without an end": (lambda folder: (folder / INDEX).symlink_to("/dev/zero"), "is a directory or device"),
    "index of 1 TB": (
        lambda folder: ((folder / INDEX).touch(), os.truncate(folder / INDEX, 10**12)),
        "expected at most 100000000",
    ),
    "several indices": (
        lambda folder: [(folder / f"{name}.safetensors.index.json").touch() for name in "ab"],
        "has several indices: 'a.* 'b",
    ),
}


@pytest.mark.few(14)
@pytest.mark.parametrize("case", FOLDERS)
def test_damaged_folders_are_refused(tmp_path, case):
    make, expected = FOLDERS[case]
    make(tmp_path)
    before = open_files()
    with pytest.raises(CheckpointError, match=expected) as info:
        TensorFiles(tmp_path)
    message = str(info.value)
    assert str(tmp_path) in message and len(message) < 1500 and message.isprintable()
    assert open_files() == before


def test_an_index_of_any_name_overrides_other_files(tmp_path):
    two_files(tmp_path)
    (tmp_path / "unrelated.safetensors").write_bytes(b"damaged")
    with TensorFiles(tmp_path) as files:
        assert list(files.names) == ["a", "b"]
    (tmp_path / INDEX).rename(tmp_path / "other.safetensors.index.json")
    with TensorFiles(tmp_path) as files:
        assert list(files.names) == ["a", "b"]
    index_of({"a": "a.safetensors"}, tmp_path)
    with TensorFiles(tmp_path) as files:
        assert list(files.names) == ["a"]


def mutate(content, dice):
    """Changes one to three bytes of the header, or one value in the header's JSON."""
    length = int.from_bytes(content[:8], "little")
    if dice.random() < 0.5:
        content = bytearray(content)
        for _ in range(dice.randint(1, 3)):
            content[dice.randrange(8 + length)] = dice.choice([dice.randrange(256), *b'0123456789{}[]",:-. '])
        return bytes(content)
    header = json.loads(content[8 : 8 + length])
    numbers = [0, 1, -1, 7, 8, 2**31, 2**63, 2**64 - 1, 10**300, 0.5]
    value = dice.choice([*numbers, None, True, "", "F64", "BOOL", [], [[]], {}, [2**40] * 3])
    owner = header[dice.choice(list(header))]
    key = dice.choice(list(owner))
    if isinstance(owner[key], list) and owner[key] and dice.random() < 0.7:
        owner[key][dice.randrange(len(owner[key]))] = value
    elif dice.random() < 0.2:
        del owner[key]
    else:
        owner[key] = value
    return raw(header, content[8 + length :])


@pytest.mark.parametrize("num_mutants", [250, pytest.param(1000, marks=pytest.mark.long)])
def test_mutations_end_in_an_error_or_stay_within_the_file(tmp_path, num_mutants):
    write(tmp_path / "model", {code: noise(DTYPES[code], (3, 5)) for code in ("F64", "BF16", "BOOL", "F8_E4M3")})
    content = (tmp_path / "model" / "model.safetensors").read_bytes()
    path = tmp_path / "it.safetensors"
    dice = random.Random(0)
    num_refused = 0
    tracemalloc.start()
    try:
        for _ in range(num_mutants):
            mutant = mutate(content, dice)
            path.write_bytes(mutant)
            try:
                files = TensorFiles(path)
            except CheckpointError as error:
                assert len(str(error)) < 1500
                num_refused += 1
                continue
            with files:
                infos = list(files.names.values())
                assert sum(info.nbytes for info in infos) < len(mutant)
                for info in infos:
                    assert bits(files.read(info.name)).numpy().tobytes() == mutant[info.offset :][: info.nbytes]
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
    assert 0.6 * num_mutants < num_refused < num_mutants


# ---- all or nothing ----


WITHOUT_DTYPE = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}  # bits per element


@pytest.mark.parametrize("code", WITHOUT_DTYPE)
def test_a_tensor_of_a_dtype_unknown_to_torch_fails_only_when_it_is_read(tmp_path, code):
    path, nbytes = tmp_path / "it.safetensors", WITHOUT_DTYPE[code]
    header = {"weight": entry("F32", [2, 2], 0, 16), "scale": entry(code, [8], 16, 16 + nbytes), "bias": entry("F32", [2], 16 + nbytes, 24 + nbytes)}
    raw(header, np.arange(6, dtype=np.float32)[:4].tobytes() + bytes(nbytes) + np.float32([7, 8]).tobytes(), path)
    with TensorFiles(path) as files:
        assert list(files.names) == ["weight", "bias"] and files.unreadable["scale"].code == code
        assert files.read("bias").tolist() == [7, 8]
        with pytest.raises(CheckpointError, match=f"'scale' is of {code}, for which PyTorch .* has no dtype; convert it, or upgrade"):
            files.read("scale")
    engine_model = nn.Linear(2, 2)
    with infinity.offload(engine_model, infinity.Config(swap_dirs=tmp_path, device="cpu", dtype="fp32")):
        with pytest.raises(CheckpointError, match="unknown to the model: scale"):
            infinity.load_safetensors(engine_model, path)
        infinity.load_safetensors(engine_model, path, strict=False)
        assert engine_model.state_dict()["weight"].tolist() == [[0, 1], [2, 3]]
        raw({"weight": entry(code, [2, 8], 0, 2 * nbytes), "bias": entry("F32", [2], 2 * nbytes, 2 * nbytes + 8)}, bytes(2 * nbytes + 8), path)
        with pytest.raises(CheckpointError, match=f"'weight' is of {code}"):
            infinity.load_safetensors(engine_model, path, strict=False)


@pytest.mark.parametrize("code, name", [("C64", "complex64"), ("F8_E8M0", "float8_e8m0fnu"), ("F8_E4M3FNUZ", "float8_e4m3fnuz"), ("F8_E5M2FNUZ", "float8_e5m2fnuz")])
def test_every_dtype_of_torch_is_read_and_written(tmp_path, code, name):
    if not hasattr(torch, name):
        pytest.skip(f"this PyTorch has no {name}")
    dtype = getattr(torch, name)
    value = torch.randint(0, 120, (6 * dtype.itemsize,), dtype=torch.uint8).view(dtype)
    write(tmp_path / "there", {"it": value})
    with TensorFiles(tmp_path / "there") as files:
        assert files.names["it"].dtype == dtype and torch.equal(bits(files.read("it")), bits(value))
        assert torch.equal(bits(files.read("it", 2, 3)), bits(value[2:5]))
    assert f'"dtype":"{code}"'.encode() in (tmp_path / "there" / "model.safetensors").read_bytes()


def test_a_folder_whose_index_names_an_unreadable_tensor_is_read(tmp_path):
    raw({"a": entry("F4", [4], 0, 2), "b": entry("U8", [1], 2, 3)}, b"\1\2\3", tmp_path / "model-00001-of-00001.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00001.safetensors", "b": "model-00001-of-00001.safetensors"}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    with TensorFiles(tmp_path) as files:
        assert files.read("b").tolist() == [3] and list(files.unreadable) == ["a"]


LARGE = {
    "empty lists": lambda n: b'{"__metadata__":{"a":' + b"[" + b",".join([b"[]"] * (n // 3)) + b"]}}",
    "an entry of many": lambda n: b'{"a":' + b"[" + b",".join([b"{}"] * (n // 3)) + b"]}",
    "metadata": lambda n: b'{"__metadata__":{' + b",".join(b'"%d":""' % i for i in range(n // 12)) + b"}}",
    "tensors": lambda n: b"{" + b",".join(b'"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' % i for i in range(n // 57)) + b"}",
    "a text": lambda n: b'{"__metadata__":{"a":"' + b"x" * n + b'\\ud83d\\ude00"}}',
}


@pytest.mark.few(1)
@pytest.mark.parametrize("case", [pytest.param(case, marks=[] if case in ("empty lists", "an entry of many") else pytest.mark.long) for case in LARGE])
def test_a_large_header_takes_100_mib_beyond_its_size_at_most(tmp_path, case):
    text = LARGE[case](33 << 20)
    raw(text, b"", tmp_path / "it.safetensors")
    tracemalloc.start()
    start = time.process_time()
    try:
        with contextlib.suppress(CheckpointError), TensorFiles(tmp_path / "it.safetensors"):
            pass
        seconds, most = time.process_time() - start, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    print(f"{case}: {seconds:.1f} s traced, {(most - len(text)) / 2**20:.0f} MiB beyond {len(text) / 2**20:.0f}")
    assert most - len(text) < 100 << 20


def test_a_header_of_too_many_tensors_is_refused_before_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors, "MAX_TENSORS", 3)
    raw({str(number): entry("U8", [0], 0, 0) for number in range(3)}, b"", tmp_path / "it.safetensors")
    with TensorFiles(tmp_path / "it.safetensors") as files:
        assert len(files.names) == 3
    raw({str(number): entry("U8", [0], 0, 0) for number in range(4)}, b"", tmp_path / "it.safetensors")
    with pytest.raises(CheckpointError, match="lists 4 tensors, expected at most 3"):
        TensorFiles(tmp_path / "it.safetensors")


def failing(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fail_call(monkeypatch, function, number):
    """Makes the call with this number fail, counted from 1, of a function of os."""
    calls = iter(range(1, 1000))
    original = getattr(os, function)
    monkeypatch.setattr(os, function, lambda *args: failing() if next(calls) == number else original(*args))


def raise_in_parts():
    yield torch.ones(2)
    raise RuntimeError("mine")


FAULTS = {
    "parts raise": (RuntimeError, "mine", raise_in_parts),
    "too few": (ValueError, "'c' have 2 elements, expected 3", lambda: [torch.ones(2)]),
    "none": (ValueError, "'c' have 0 elements, expected 3", lambda: []),
    "too many": (ValueError, "'c' have 4 elements or more, expected 3", lambda: [torch.ones(2), torch.ones(2)]),
    "another dtype": (ValueError, "'c' is 1D torch.float64", lambda: [torch.ones(3, dtype=torch.float64)]),
    "two dimensions": (ValueError, "'c' is 2D", lambda: [torch.ones(3, 1)]),
    "another device": (ValueError, "'c' is .* on meta", lambda: [torch.ones(3, device="meta")]),
    "not a tensor": (ValueError, "'c' is of .*list", lambda: [[1, 1, 1]]),
    "progress raises": (KeyboardInterrupt, "^$", None),
    "write 3": (OSError, "No space left on device: .*model-00002", None),
    "fsync 1": (OSError, "No space left on device: .*model-00001", None),
    "fsync 4": (OSError, "No space left on device: .*index.json", None),
    "fsync 5": (OSError, "No space left on device: .*model'", None),
    "rename 1": (OSError, "No space", None),
    "rename 3": (OSError, "No space", None),
    "rename 4": (OSError, "No space", None),
}


@pytest.mark.parametrize("is_new", [True, False], ids=["new directory", "old directory"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_failed_write_leaves_no_files(tmp_path, monkeypatch, fault, is_new):
    error, expected, parts = FAULTS[fault]
    tensors = {name: torch.ones(3) for name in "abc"}
    folder = tmp_path / "model"
    if not is_new:
        folder.mkdir()
        (folder / "config.json").write_text("mine")

    def interrupt(done, total):
        if done > 0.6 * total:
            raise KeyboardInterrupt

    if fault.split()[0] in ("write", "fsync", "rename"):
        fail_call(monkeypatch, fault.split()[0], int(fault.split()[1]))
    with pytest.raises(error, match=expected):
        write_files(
            folder,
            specs_of(tensors),
            lambda spec: parts() if parts and spec.name == "c" else [tensors[spec.name]],
            max_file_nbytes=12,
            progress=interrupt if fault == "progress raises" else None,
        )
    monkeypatch.undo()
    assert listing(tmp_path) == ([] if is_new else ["model"])
    if not is_new:
        assert listing(folder) == ["config.json"] and (folder / "config.json").read_text() == "mine"
    write(folder, tensors, max_file_nbytes=12)  # the failure left no file that prevents a second write
    assert len(listing(folder)) == 4 + (not is_new)


def test_no_file_has_its_final_name_before_all_are_written(tmp_path):
    seen = []
    tensors = {"a": torch.ones(3), "b": torch.ones(3)}
    write(tmp_path / "model", tensors, max_file_nbytes=12, progress=lambda *_: seen.append(listing(tmp_path / "model")))
    first, second = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    assert seen[-1] == [f"{first}.part", f"{second}.part", f"{INDEX}.part"]
    assert listing(tmp_path / "model") == [first, second, INDEX]


@pytest.mark.parametrize("name", ["x.safetensors", INDEX, "y.safetensors.index.json", "model.safetensors.part"])
def test_a_directory_that_holds_tensors_is_refused(tmp_path, name):
    (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=f"already holds '{name}'; name another directory"):
        write(tmp_path, {"a": torch.ones(1)})
    assert listing(tmp_path) == [name]


def test_a_parent_must_exist_and_a_file_is_no_directory(tmp_path):
    (tmp_path / "file").touch()
    for path, error in [(tmp_path / "no" / "model", FileNotFoundError), (tmp_path / "file", NotADirectoryError)]:
        with pytest.raises(error) as info:
            write(path, {"a": torch.ones(1)})
        assert str(tmp_path) in info.value.filename
    assert listing(tmp_path) == ["file"]


@pytest.mark.parametrize("is_new", [True, False], ids=["new directory", "old directory"])
def test_a_full_disk_is_refused_before_anything_is_written(tmp_path, monkeypatch, is_new):
    """Three files of 4,096 bytes and their headers, and an index, need 7 blocks."""
    tensors = {name: torch.ones(1024) for name in "abc"}
    folder = tmp_path if not is_new else tmp_path / "model"
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_frsize=4096, f_bavail=6, f_bfree=100))
    with pytest.raises(CheckpointError, match="has 24576 bytes available, the files need 28672; free 4096 bytes"):
        write(folder, tensors, max_file_nbytes=4096)
    assert listing(tmp_path) == []
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_frsize=4096, f_bavail=7, f_bfree=100))
    write(folder, tensors, max_file_nbytes=4096)


def test_a_huge_tensor_is_refused_by_its_size_alone(tmp_path):
    with pytest.raises(CheckpointError, match="the files need 4611686018427"):
        write_files(tmp_path / "model", [TensorSpec("a", torch.uint8, (2**62,))], None)
    assert listing(tmp_path) == []


# ---- memory ----


def peak_nbytes(work):
    """Peak of this process's resident memory during `work`, in bytes above the memory before."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        pytest.skip("the kernel does not reset the peak of a process")

    def status(key):
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith(key))

    before = status("VmRSS")
    work()
    return status("VmHWM") - before


def test_writing_and_reading_in_parts_takes_memory_for_one_part(tmp_path):
    """200 MiB in parts of 1 MiB. The bound of 32 MiB has room for other memory of the interpreter."""
    part = torch.ones(1 << 18)
    spec = TensorSpec("a", torch.float32, (200, 1 << 18))
    parts = (part.clone() for _ in range(200))
    assert peak_nbytes(lambda: write_files(tmp_path / "model", [spec], lambda spec: parts)) < 32 << 20
    with TensorFiles(tmp_path / "model") as files:
        assert peak_nbytes(lambda: sum(piece[0] for piece in files.pieces("a", 1 << 18))) < 32 << 20


def test_written_bytes_leave_the_page_cache(tmp_path, monkeypatch):
    """Writeback starts every 64 bytes. The writer waits for the drive every 256 bytes, and drops the rest from the page cache at the end."""
    calls = []
    monkeypatch.setattr(safetensors_writer, "_PIECE_NBYTES", 32)
    monkeypatch.setattr(safetensors_writer, "_FLUSH_NBYTES", 64)
    monkeypatch.setattr(safetensors_writer, "_SETTLE_NBYTES", 256)
    monkeypatch.setattr(os, "fdatasync", lambda fd: calls.append("wait"))
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, start, nbytes, advice: calls.append((start, nbytes)))
    nbytes = write(tmp_path / "model", {"a": torch.ones(75)})
    head = nbytes - 300
    assert head == 8 + 88
    assert calls == [(0, 64), (64, 64), (128, 64), "wait", (0, 256), (256, 64), (320, 64), (0, 0)]


@pytest.mark.parametrize("limit, value", [("MAX_TENSORS", 3), ("MAX_HEADER_NBYTES", (1 << 20) + 400)])
def test_the_writer_begins_another_file_at_the_limits_of_a_header(tmp_path, monkeypatch, limit, value):
    tensors = {f"layers.{i}.weight": torch.full((2,), float(i)) for i in range(10)}
    monkeypatch.setattr(safetensors_writer, limit, value)
    monkeypatch.setattr(safetensors, limit, value)
    write(tmp_path / "model", tensors)
    assert len(list((tmp_path / "model").glob("*.safetensors"))) == 4
    with TensorFiles(tmp_path / "model") as source:
        assert {name: source.read(name).tolist() for name in source.names} == {name: tensor.tolist() for name, tensor in tensors.items()}


@pytest.mark.parametrize("limit, value, refusal", [
    ("MAX_TENSORS", 1, "lists 2 tensors, expected at most 1"), ("MAX_HEADER_NBYTES", 16, "a header of .* bytes, expected at most 16"),
])  # fmt: skip
def test_a_header_above_its_limits_is_refused(tmp_path, monkeypatch, limit, value, refusal):
    write(tmp_path / "model", {"a": torch.zeros(1), "b": torch.zeros(1)})
    monkeypatch.setattr(safetensors, limit, value)
    with pytest.raises(CheckpointError, match=refusal):
        TensorFiles(tmp_path / "model")
