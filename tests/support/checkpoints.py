"""Small runs that save checkpoints, checkpoints of random bytes, and the bytes that a checkpoint holds."""

import hashlib
import itertools
import json
import os

import numpy as np
import torch
from support.models import inputs, loss_of, mlp
from torch import nn

import aio_ext
import infinity
from infinity.checkpoints import encoding, manifest, reader, writer
from infinity.checkpoints.files import Directory, lay_out
from infinity.checkpoints.reader import Checkpoint
from infinity.checkpoints.writer import Tensors, Writer
from infinity.formats.format import Format
from infinity.plan import packing
from infinity.plan.record import record_layout

ON_HOST = {"param_tier": "host", "optimizer_state_tier": "host"}


class Net(nn.Module):
    """Trained layers around a frozen one, and a buffer that counts forward passes."""

    def __init__(self):
        super().__init__()
        self.first, self.frozen, self.last = nn.Linear(24, 40), nn.Linear(40, 40), nn.Linear(40, 24)
        self.frozen.requires_grad_(False)
        self.register_buffer("passes", torch.zeros(3))

    def forward(self, x):
        self.passes += 1
        return self.last(torch.tanh(self.frozen(torch.tanh(self.first(x)))))


class Run:
    """A small model in training. The states after a number of steps are the same in every run."""

    def __init__(self, swap, **config):
        swap.mkdir(exist_ok=True)
        torch.manual_seed(5)
        self.model = Net()
        config = ON_HOST | {"device": "cpu", "dtype": "bf16", "chunk_mib": 1 / 512, "host_memory": "64MiB"} | config
        self.engine = infinity.offload(self.model, infinity.Config(swap_dirs=swap, **config))
        self.optimizer = infinity.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-2)
        self.step = 0

    def train(self, num_steps=1):
        for _ in range(num_steps):
            self.step += 1
            x = torch.randn(4, 24, generator=torch.Generator().manual_seed(self.step)).bfloat16()
            self.model(x).float().square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def save(self, path, **options):
        extra = {"step": self.step, "noise": torch.full((700,), float(self.step))}
        return infinity.save(path, self.model, self.optimizer, extra=extra, **options)

    def load(self, path):
        self.step = infinity.load(path, self.model, self.optimizer).step
        return self.step

    def digest(self):
        states = {name: self.engine.read_state(param) for name, param in self.model.named_parameters()}
        return digest_of(states, self.model.passes)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.engine.__exit__(*exception)


def digest_of(states, passes):
    total = hashlib.sha256(bytes(writer.as_bytes(passes.contiguous())))
    for name in sorted(states):
        for segment in sorted(states[name]):
            total.update(f"{name} {segment}".encode())
            total.update(bytes(writer.as_bytes(states[name][segment].contiguous())))
    return total.hexdigest()


def on_disk(path):
    """Verifies all bytes of a checkpoint and returns (step, digest)."""
    with Checkpoint(path) as checkpoint:
        assert checkpoint.verify() == checkpoint.manifest.nbytes
        states = {}
        for index, parameter in enumerate(checkpoint.manifest.parameters):
            parts = [(count, dict(found)) for count, found in copied(checkpoint.values(index, 0, parameter.numel))]
            assert sum(count for count, _ in parts) == parameter.numel
            segments = {name: torch.cat([found[name] for _, found in parts]) for name in parts[0][1]}
            states[parameter.name] = segments
        passes = checkpoint.decode(checkpoint.manifest.model["buffers"]["passes"])
        extra = checkpoint.decode(checkpoint.manifest.extra)
        assert extra["step"] == checkpoint.manifest.step and (extra["noise"] == checkpoint.manifest.step).all()
        return checkpoint.manifest.step, digest_of(states, passes)


def copied(parts):
    for count, found in parts:
        yield count, {name: tensor.clone() for name, tensor in found.items()}


SPECS = [("a.weight", (50, 40), True), ("a.bias", (50,), True), ("b.weight", (40, 60), False), ("c.weight", (70, 50), True)]


def write_checkpoint(path, seed, world=2, values=None, step=3):
    """Writes a checkpoint of random bytes in the way of save.py, rank by rank. Returns the manifest."""
    generator = np.random.default_rng(seed)
    specs = [packing.ParameterSpec(name, int(np.prod(shape)), Format("bf16", trains)) for name, shape, trains in SPECS]
    layout = packing.layout(specs, chunk_numel=world * 1024, world=world)
    directory, tensors = Directory(path), Tensors()
    files, places = [], [[] for _ in layout.chunks]
    content = encoding.encode({"x": torch.arange(300.0) + seed, "y": (1, b"two", float("nan"))} if values is None else values, tensors.put)
    model = {"buffers": {"passes": {"$tensor": tensors.put(torch.full((77,), float(seed)))}}, "extra_state": {}}
    trains = [chunk.trainable for chunk in layout.chunks]
    for rank in range(world):
        records = [record_layout(chunk.shard_used(rank), Format("bf16", chunk.trainable)) for chunk in layout.chunks]
        own, at = lay_out(records, trains, rank)
        writer = Writer(path / directory.folder, own, at)
        for index, record in enumerate(records):
            memory = np.frombuffer(region := bytearray(record.nbytes + 4096), dtype=np.uint8)
            begin = -memory.ctypes.data % 4096
            buffer = memoryview(region)[begin : begin + record.nbytes]
            crcs = []
            for segment in reader.segment_bytes(record, buffer).values():
                segment[:] = generator.bytes(len(segment))
                crcs.append(aio_ext.crc32c(segment))
            if record.nbytes:
                writer.write(index, 0, buffer).wait()
            file, offset = at[index]
            places[index].append(manifest.RecordPlace(len(files) + file, offset, tuple(crcs)))
        writer.finish()
        files += own
    tensors.write(path / directory.folder)
    parameters = [manifest.Parameter(name, shape, trains, 0 if trains else None, step if trains else 0) for name, shape, trains in SPECS]
    made = manifest.Manifest(
        folder=directory.folder, world=world, dtype="bf16", moments_dtype="fp32", moments=("momentum", "variance"), seed=1,
        parameters=tuple(parameters), aliases={"tied": "a.weight"}, chunks=layout.chunks, places=tuple(map(tuple, places)),
        files=tuple(files), tensors=tuple(tensors.entries), model=model, optimizer={"rule": "AdamW", "groups": [{"lr": 0.1}]},
        scheduler={"last": 3}, rng=({"torch": {"$bytes": "AAAA"}},) * world, extra=content,
    )  # fmt: skip
    directory.commit(made)
    return made


TIERS = ("device", "host", "nvme")
PLACES = [{"param_tier": weights, "optimizer_state_tier": states} for weights, states in itertools.product(TIERS, TIERS)]


def train_trait(model, optimizer, step):
    loss = loss_of(model(inputs(model, step)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def frozen_half():
    model = mlp(6)
    for layer in (1, 2, 5):
        model.layers[layer].requires_grad_(False)
    return model


def record_files(path):
    """{whether the records are trained: {inode of a record file, ...}} of a checkpoint, by the manifest."""
    content = json.loads((path / "manifest.json").read_text())
    found = {True: set(), False: set()}
    for chunk in content["chunks"]:
        for file, *_ in chunk["records"]:
            found[chunk["trainable"]].add(os.stat(path / content["folder"] / content["files"][file][0]).st_ino)
    assert not found[True] & found[False]
    return found
