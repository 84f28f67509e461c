"""Promises of RELIABILITY.md that need whole training runs: any single fault, a full disk, little memory.

A run ends with the bytes of an undisturbed run, or in one SwapError that names the failure, the path and the remedy. No file and no thread
is left. Every accepted budget is enough and is kept. aio_ext/faults.c injects the faults of kernel calls.
Long because all promises need the same run and the same checks after it.
"""

import contextlib
import errno
import itertools
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import helpers
from support.faults import assert_says_what_failed, chain_step, linears, no_hang, nothing_left, shared_chain
from support.helpers import NVME, assert_same_states, states_of, training
from support.models import H, Model, gpt_step, mlp
from torch import nn

import infinity
from aio_ext import _aio
from infinity.engine import build
from infinity.engine import engine as engine_module
from infinity.model.gpt import GPT
from infinity.plan.record import GRADIENTS, STATES, WEIGHTS
from infinity.plan.tiers import DEVICE, in_storage
from infinity.system.swap import Swap

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parents[2]


def train_linears(directory, num_steps=2, **config):
    """Losses, states, and the number of calls that met a fault before the engine was closed."""
    with training(linears, directory, chunk_mib=1 / 256, **NVME | config) as (model, engine, optimizer):
        losses = []
        for step in range(num_steps):
            loss = model(torch.full((2, 48), 1.0 + step)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        engine.flush()  # without this, states come from host copies under way, and a failed write is not seen
        return losses, states_of(engine, model), _aio._inject()


# ---- one fault anywhere ----

UPDATES = ("deferred", "backward")
FAULTS = [  # call, return value, errno of the SwapError (None: the engine recovers)
    ("io_setup", -errno.EAGAIN, None),
    ("io_setup", -errno.ENOMEM, errno.ENOMEM),
    ("io_submit", -errno.EAGAIN, None),
    ("io_submit", -errno.EIO, errno.EIO),
    ("io_getevents", -errno.EINTR, None),
    ("io_getevents", -errno.EIO, errno.EIO),
    ("read", 0.5, None),
    ("read", 0.0, errno.EIO),
    ("read", -errno.EIO, errno.EIO),
    ("write", 0.5, None),
    ("write", -errno.EIO, errno.EIO),
    ("write", -errno.ENOSPC, errno.ENOSPC),
]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Losses and states of a run without faults, by update mode."""
    found = {}

    def of(update):
        if update not in found:
            found[update] = train_linears(tmp_path_factory.mktemp("undisturbed"), update=update)[:2]
        return found[update]

    return of


def sweep(directory, expected, fault, update, numbers):
    """Fail the call of each number once, each in a new run, until a run meets no fault. Returns the number of runs with a fault."""
    call, result, code = fault
    for num_met, nth in enumerate(numbers):
        where = f"{call} number {nth}"
        _aio._inject(call, nth, 1, result)
        with no_hang(), nothing_left(directory):
            try:
                losses, states, met = train_linears(directory, update=update)
            except OSError as error:
                assert code is not None, f"{where}: expected recovery, got {error!r}"
                assert_says_what_failed(error, code, directory)
                assert _aio._inject() == 1
                continue
        assert losses == expected[0], where
        assert_same_states(states, expected[1], where)
        if not met:
            return num_met
        # Only io_getevents may fail without an error: the queue makes one more call after all requests are complete.
        assert code is None or call == "io_getevents", f"{where} failed: expected a SwapError, got none"


@pytest.mark.slow
@pytest.mark.few(4)
@pytest.mark.filterwarnings("ignore:io_setup granted")
@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault[0]} {fault[1]}")
def test_one_failed_call_gives_the_same_bytes_or_a_swap_error(fault, update, tmp_path, undisturbed):
    numbers = (4**power // 3 for power in range(20))
    assert sweep(tmp_path, undisturbed(update), fault, update, numbers) >= (1 if fault[0] == "io_setup" else 3)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:io_setup granted")
@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault[0]} {fault[1]}")
def test_every_failed_call_gives_the_same_bytes_or_a_swap_error(fault, update, tmp_path, undisturbed):
    assert sweep(tmp_path, undisturbed(update), fault, update, itertools.count()) >= (1 if fault[0] == "io_setup" else 20)


def test_a_start_that_fails_ends_its_threads(tmp_path):
    """The first write of the initial values fails. The engine has not started, so `close` has no parts to close."""
    engine = infinity.offload(model := linears(), infinity.Config(swap_dirs=tmp_path, device="cpu", dtype="fp32", **NVME))
    _aio._inject("write", 0, 1, -errno.EIO)
    with nothing_left(tmp_path):
        with pytest.raises(infinity.SwapError):
            infinity.AdamW(model.parameters())
        engine.close()


def test_an_interrupted_start_ends_the_threads_of_its_parts(tmp_path, monkeypatch):
    """The interrupt comes before the engine holds its parts. Without cleanup, threads would run on and keep the swap directory locked."""
    engine = infinity.offload(model := linears(), infinity.Config(swap_dirs=tmp_path, device="cpu", dtype="fp32", **NVME))

    def interrupted(device):
        raise KeyboardInterrupt

    monkeypatch.setattr(engine_module, "gauge_of", interrupted)
    with nothing_left(tmp_path):
        with pytest.raises(KeyboardInterrupt):
            infinity.AdamW(model.parameters())
        with pytest.raises(infinity.UsageError, match="could not start.*KeyboardInterrupt.*close.*anew"):
            infinity.AdamW(model.parameters())
        engine.close()


@pytest.mark.parametrize("where, name", [(Swap, "allocate"), (build, "RecordMover"), (build, "Weights"), (build, "with_capacities")])
def test_a_part_that_cannot_be_built_leaves_nothing(tmp_path, monkeypatch, where, name):
    """The model keeps its values: a second attempt succeeds."""

    def failing(*args, **options):
        raise MemoryError(name)

    engine = infinity.offload(model := linears(), infinity.Config(swap_dirs=tmp_path, device="cpu", dtype="fp32", **NVME))
    with nothing_left(tmp_path):
        with monkeypatch.context() as patch, pytest.raises(MemoryError, match=name):
            patch.setattr(where, name, failing)
            infinity.AdamW(model.parameters())
        with nothing_left(tmp_path):
            pass
        infinity.AdamW(model.parameters())
        engine.close()


def test_an_engine_that_failed_to_start_refuses_every_use_with_the_reason(tmp_path):
    """Weights that had moved to their first records are lost. No use may show the placeholders, or start again with them."""
    engine = infinity.offload(model := linears(), infinity.Config(swap_dirs=tmp_path, device="cpu", dtype="fp32", **NVME))
    _aio._inject("write", 0, 1, -errno.ENOSPC)
    with pytest.raises(infinity.SwapError):
        infinity.AdamW(model.parameters())

    def gather():
        with infinity.gathered(model.parameters()):
            pass

    asks = (model.state_dict, gather, lambda: infinity.AdamW(model.parameters()), lambda: model(torch.ones(2, 48)))
    for ask in (*asks, lambda: model.load_state_dict(linears().state_dict()), lambda: infinity.save(tmp_path / "saved", model)):
        with pytest.raises(infinity.UsageError, match="could not start.*SwapError.*close.*anew"):
            ask()
    with pytest.raises(infinity.UsageError, match="0.weight has no value"):
        model[0].weight.norm()
    engine.close()
    with pytest.raises(infinity.UsageError, match="0.weight is only a placeholder"):
        model[0].weight.norm()


def test_a_queue_that_failed_raises_swap_error_for_all_later_calls(tmp_path):
    with Swap([tmp_path]) as swap:
        extent = swap.allocate(4096)
        swap.reserve()
        _aio._inject("io_getevents", 0, 1, -errno.EIO)
        for _ in range(2):
            with pytest.raises(OSError) as caught:
                swap.write(extent, bytes(4096)).wait()
            assert_says_what_failed(caught.value, errno.EIO, tmp_path)


@pytest.mark.parametrize("part", ["Gradients", "Updater", "hooks_for"])
def test_a_part_that_cannot_be_made_leaves_no_file_and_no_thread(tmp_path, monkeypatch, part):
    def fail(*arguments, **options):
        raise MemoryError(part)

    monkeypatch.setattr(f"infinity.engine.{'engine' if part == 'hooks_for' else 'build'}.{part}", fail)
    with nothing_left(tmp_path), pytest.raises(MemoryError), training(linears, tmp_path, **NVME):
        pass


# ---- a full disk ----


def free_nbytes(volume):
    status = os.statvfs(volume)
    return status.f_bavail * status.f_frsize


def fill(volume, left):
    """Extend the file `ballast` until about `left` bytes are free. Returns the free bytes."""
    with open(volume / "ballast", "wb") as file, contextlib.suppress(OSError):
        for unit in (1 << 20, 4096):
            while free_nbytes(volume) >= left + unit:
                os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, unit)
    return free_nbytes(volume)


def train_on(swap, begun, **changes):
    """Losses and states. begun: called with the engine when the swap file exists."""
    config = {"chunk_mib": 1 / 4, "host_memory": "16MiB"} | NVME | changes
    with training(lambda: linears(5, 512), swap, **config) as (model, engine, optimizer):
        begun(engine)
        losses = []
        for step in range(2):
            loss = model(torch.full((2, 512), 1.0 + step)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, states_of(engine, model)


def on_ample_room(swap):
    """Bytes of the swap file, losses and states."""
    needed = []
    losses, states = train_on(swap, lambda engine: needed.append(sum(path.stat().st_size for path in swap.glob("*/*.swap"))))
    return needed[0], losses, states


def the_volume_shrinks(volume):
    (swap := volume / "swap").mkdir()
    ample, expected_losses, expected_states = on_ample_room(swap)
    needed, refused = ample * 3 // 4, []  # gradients may do without a place: a quarter of the fp32 weights, states and gradients
    for asked in (3 * ample, ample, ample - 4096, needed + (64 << 10), needed, needed - 4096, needed // 2, 64 << 10, 0):
        left, begun = fill(volume, asked), []
        with no_hang(), nothing_left(volume):
            try:
                losses, states = train_on(swap, begun.append)
            except infinity.SwapError as error:
                assert not begun, f"with {left} bytes free: expected a refusal at the start, training began, then {error!r}"
                assert_says_what_failed(error, errno.ENOSPC, swap)
                refused.append(asked)
                if asked >= 64 << 10:  # with less, even the lock file does not fit
                    amounts = re.search(r"needs ([\d,]+) bytes .*and ([\d,]+) are available", error.strerror)
                    assert amounts, f"with {left} of {needed} bytes free: expected both amounts in the message, got {error}"
                    named = [int(amount.replace(",", "")) for amount in amounts.groups()]
                    assert named == pytest.approx([needed, left], abs=16 << 10)  # the lock file and the folder take one page each
            else:
                assert losses == expected_losses
                assert_same_states(states, expected_states, f"{left} bytes free")
        os.unlink(volume / "ballast")
    assert refused[-4:] == [needed - 4096, needed // 2, 64 << 10, 0]
    assert len(refused) <= 5, (needed, refused)  # a filesystem may need a few pages


def the_volume_is_full_later(volume):
    (swap := volume / "swap").mkdir()
    _, expected_losses, expected_states = on_ample_room(swap)
    left = []
    with no_hang():
        losses, states = train_on(swap, lambda engine: left.append(fill(volume, 0)))
    assert left[0] < 4096 and os.listdir(swap) == []
    assert losses == expected_losses
    assert_same_states(states, expected_states, "full")


def the_volume_is_too_small(volume):
    """The drive has too little room for the records that do not fit in host memory. The device has room for the rest."""
    (swap := volume / "swap").mkdir()
    needed, expected_losses, expected_states = on_ample_room(swap)
    fill(volume, needed // 2)
    homes = []
    places = {"param_tier": "auto", "optimizer_state_tier": "auto", "residency": "auto", "host_memory": "7MiB", "device_memory": "16MiB"}
    losses, states = train_on(swap, lambda engine: homes.extend(engine.placement.homes[STATES]), **places)
    assert DEVICE in homes and in_storage(homes), homes
    assert losses == expected_losses
    assert_same_states(states, expected_states, "too small")


SCENES = [pytest.param(the_volume_shrinks, marks=pytest.mark.long), the_volume_is_full_later, the_volume_is_too_small]


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_a_full_disk_is_an_error_at_the_start_or_never(scene, tmp_path):
    """On a separate volume in a mount namespace that ends with the process: ext4 on a loop device, or tmpfs if that fails."""
    volume, image = tmp_path / "volume", tmp_path / "image"
    volume.mkdir()
    with open(image, "wb") as file:
        file.truncate(128 << 20)
    loop = f"mkfs.ext4 -q -F -b 4096 -m 0 {image} && mount -o loop {image} {volume}"
    tmpfs = f"mount -t tmpfs -o size=128m tmpfs {volume}"
    for private, mount in ((["unshare", "-m"], loop), (["unshare", "-rm"], tmpfs)):
        with contextlib.suppress(FileNotFoundError):
            if not subprocess.run([*private, "sh", "-c", mount], capture_output=True).returncode:
                break
    else:
        pytest.skip("neither a loop device nor a tmpfs can be mounted here")
    source = f"import torch, test_faults as t; torch.set_num_threads(1); t.{scene.__name__}(t.Path('{volume}')); print('held')"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "SOURCE": source}
    command = [*private, "sh", "-c", f'{mount} && exec {sys.executable} -W ignore -c "$SOURCE"']
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.stdout == "held\n", done.stderr


def test_a_directory_that_accepts_no_byte_keeps_no_lock_file(tmp_path):
    """On a disk without a free block, a file can be created but not written."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(infinity.SwapError) as caught:
            Swap([tmp_path])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_says_what_failed(caught.value, errno.EFBIG, tmp_path)
    assert list(tmp_path.iterdir()) == []


# ---- memory is as planned ----


def lists_read_by_turns():
    """A module without direct parameters, which reads parameters from lists and from a dict."""

    def build(self):
        self.lists = nn.ModuleList(nn.ParameterList(nn.Parameter(torch.randn(H, H) / H) for _ in range(2)) for _ in range(3))
        self.named = nn.ParameterDict({"last": nn.Parameter(torch.randn(H, H) / H)})

    def run(self, x):
        for index in range(2):
            for weights in self.lists:
                x = torch.tanh(x @ weights[index])
        return x @ self.named["last"]

    return Model(build, run)


MODELS = {
    "tied": (lambda: GPT(hidden=16, layers=1, heads=2, vocab=61, seq=12, tie=True), gpt_step),
    "shared": (shared_chain, chain_step),
    "mlp": (mlp, chain_step),
    "lists": (lists_read_by_turns, chain_step),
}


def run(name, directory, *, options=None, num_steps=3, **config):
    """Losses, states and stats. Asserts that memory stays within the plan and the budgets."""
    make, take_step = MODELS[name]
    with no_hang(), training(make, directory, options=options, **config) as (model, engine, optimizer):
        losses = [take_step(model, optimizer, step, optimizer.accumulation_steps) for step in range(num_steps)]
        states = states_of(engine, model)
        stats, placement = engine.stats(), engine.placement
        for kind, cache in engine.records.caches.items():
            assert cache.slots is None or cache.slots.peak <= placement.slots[kind]
    plan = placement.host_nbytes
    assert plan <= stats["pinned_host_nbytes"] <= 1.02 * plan, (plan, stats["pinned_host_nbytes"])
    for field, held in (("host_memory", "pinned_host_nbytes"), ("device_memory", "peak_device_nbytes")):
        if isinstance(config.get(field), int):
            assert stats[held] <= config[field], field
    return losses, states, stats


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["tied", pytest.param("shared", marks=pytest.mark.long)])
@pytest.mark.parametrize("dtype, update, steps", [("bf16", "deferred", 1), ("fp32", "backward", 2), ("fp16", "auto", 1)])
def test_pinned_memory_is_as_planned_and_within_the_budget(name, dtype, update, steps, tmp_path):
    options = {"accumulation_steps": steps}
    base = {"dtype": dtype, "update": update, "options": options}
    for weights, states, residency in (("nvme", "nvme", "none"), ("host", "nvme", "auto"), ("auto", "auto", "auto")):
        config = base | {"param_tier": weights, "optimizer_state_tier": states, "residency": residency, "device_memory": "96KiB"}
        least = helpers.least_host_memory(MODELS[name][0], tmp_path, **config)
        for budget in (least, 2 * least + 12345):
            run(name, tmp_path, num_steps=2, host_memory=budget, **config)


# ---- slot pressure waits ----

PRESSURES = [  # model, dtype, update, options of the optimizer
    ("mlp", "bf16", "backward", {}),
    ("mlp", "fp32", "deferred", {"max_grad_norm": 0.5}),
    ("tied", "bf16", "deferred", {"accumulation_steps": 3}),
    ("tied", "fp32", "backward", {"accumulation_steps": 2}),
    ("shared", "fp32", "backward", {}),
    ("shared", "bf16", "deferred", {"accumulation_steps": 2, "max_grad_norm": 0.5}),
    ("lists", "fp32", "backward", {"accumulation_steps": 2}),
]


def check_budgets(case, directory, num_budgets):
    """Train with both budgets at the least. Then raise each of them, in steps of at least a page, up to twice the least."""
    name, dtype, update, options = case
    config = NVME | {"dtype": dtype, "update": update, "options": options}
    expected = run(name, directory, **config)
    make = MODELS[name][0]
    least = {
        "host_memory": helpers.least_host_memory(make, directory, **config),
        "device_memory": helpers.least_device_memory(make, directory, **config),
    }
    for field, nbytes in least.items():
        pages = nbytes // 4096
        stride = max(1, pages // num_budgets)
        for budget in [nbytes, nbytes + 1, *(nbytes + page * 4096 for page in range(stride, pages, stride))]:
            losses, states, _ = run(name, directory, **config | least | {field: budget})
            assert losses == expected[0], (field, budget)
            assert_same_states(states, expected[1], f"{field}={budget}")


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.long if i in (2, 3, 5) else ()) for i, case in enumerate(PRESSURES)], ids=str
)
def test_budgets_at_or_above_the_least_train_with_the_same_bits(case, tmp_path):
    check_budgets(case, tmp_path, 2)


@pytest.mark.long
@pytest.mark.parametrize("case", PRESSURES, ids=str)
def test_every_budget_at_or_above_the_least_trains_with_the_same_bits(case, tmp_path):
    check_budgets(case, tmp_path, 1 << 20)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", [WEIGHTS, STATES, GRADIENTS])
def test_at_the_least_budget_every_slot_is_used(kind, tmp_path):
    config = NVME | {"update": "backward"}
    config["host_memory"] = helpers.least_host_memory(shared_chain, tmp_path, **config)
    with no_hang(), training(shared_chain, tmp_path, **config) as (model, engine, optimizer):
        for step in range(3):
            chain_step(model, optimizer, step)
        slots = engine.records.caches[kind].slots
        assert engine.placement.slots[kind] == slots.count == slots.peak == 2
