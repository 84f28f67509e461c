"""Engines without a call of close() end with their models, even if other references are left."""

import gc
import os
import threading
import time

import pytest
import torch
from support.faults import our_threads
from support.helpers import NVME, run_python
from torch import nn

import infinity


def config(directory, **changes):
    return infinity.Config(swap_dirs=directory, device="cpu", dtype="fp32", chunk_mib=1 / 256, host_memory="8MiB", verbose=False, **NVME | changes)


def layers():
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    model.itself = [model]  # a cycle, as in some libraries: only the garbage collector frees the model
    return model


def train(model, optimizer, num_steps=2):
    for step in range(num_steps):
        loss = model(torch.full((4, 64), 1.0 + step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss


def held(directory):
    """Number of engine threads, of all threads and of descriptors; bytes on disk."""
    nbytes = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    return len(our_threads()), threading.active_count(), len(os.listdir("/proc/self/fd")), nbytes


@pytest.mark.slow
@pytest.mark.parametrize("num_engines", [6, pytest.param(100, marks=pytest.mark.long)])
@pytest.mark.parametrize("activations", ["auto", pytest.param("nvme", marks=pytest.mark.long)])
def test_dropped_engines_leave_no_threads_descriptors_or_files(tmp_path, num_engines, activations):
    found = []
    for _ in range(num_engines):
        model = layers()
        engine = infinity.offload(model, config(tmp_path, activation_tier=activations))
        optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
        loss = train(model, optimizer)
        del model  # references to the engine, the optimizer and the last graph are left
        gc.collect()
        found.append(held(tmp_path))
    assert found == [found[0]] * num_engines and found[0][0] == found[0][3] == 0, found
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(infinity.UsageError, match="it ended with its model"):
        optimizer.step()
    assert loss.item() >= 0 and "closed" in repr(engine)


@pytest.mark.slow
def test_a_cell_that_offloads_and_trains_can_be_run_again(tmp_path):
    """In the second run, the first model is an uncollected cycle, and names of the first run still refer to its parts."""
    cell = """
model = layers()
infinity.offload(model, config(directory))
optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
loss = train(model, optimizer)
losses.append(loss.item())
"""
    names = {**globals(), "directory": tmp_path, "losses": []}
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            torch.manual_seed(0)
            exec(cell, names)
    finally:
        gc.enable()
    assert len(set(names["losses"])) == 1
    infinity.engine_of(names["model"]).close()


def test_a_directory_of_a_live_engine_is_refused_until_its_close(tmp_path):
    first, second = layers(), layers()
    infinity.offload(first, config(tmp_path))
    infinity.AdamW(first.parameters())
    infinity.offload(second, config(tmp_path))
    with pytest.raises(infinity.SwapError, match=r"close\(\) the engine that has it, infinity.engine_of\(its_model\).close\(\)"):
        infinity.AdamW(second.parameters())
    infinity.engine_of(first).close()
    optimizer = infinity.AdamW(second.parameters())
    train(second, optimizer)
    infinity.engine_of(second).close()


def test_an_engine_lives_as_long_as_a_part_of_its_model(tmp_path):
    model = layers()
    infinity.offload(model, config(tmp_path))
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    part = model[0]
    del model
    gc.collect()
    part(torch.ones(2, 64)).square().mean().backward()
    optimizer.step()
    assert our_threads()
    del part
    gc.collect()
    assert not our_threads() and list(tmp_path.iterdir()) == []


def test_an_engine_that_never_started_ends_with_its_model(tmp_path):
    model = layers()
    infinity.offload(model, config(tmp_path))
    del model
    gc.collect()
    with infinity.init(config(tmp_path), window=0):
        model = layers()
    del model
    gc.collect()
    assert not our_threads() and list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_a_program_without_close_succeeds_and_leaves_no_files(tmp_path):
    done = run_python(
        """
        import sys
        from pathlib import Path
        import infinity, test_dropped

        model = test_dropped.layers()
        infinity.offload(model, test_dropped.config(Path(sys.argv[1])))
        test_dropped.train(model, infinity.AdamW(model.parameters()))
        print(len(test_dropped.our_threads()) > 0)
        """,
        tmp_path,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.few(1)
@pytest.mark.parametrize("update", ["deferred", "backward"])
def test_a_model_dropped_during_its_save_ends_after_the_save(update, tmp_path):
    """The engine ends at once: the closing thread runs the announced updates, and the training thread waits for them."""
    (tmp_path / "swap").mkdir()
    model = layers()
    infinity.offload(model, config(tmp_path / "swap", update=update))
    optimizer = infinity.AdamW(model.parameters())
    train(model, optimizer)
    saving = infinity.save(tmp_path / "saved", model, optimizer, wait=False)
    start = time.monotonic()
    del model, optimizer
    gc.collect()
    assert time.monotonic() - start < 8 and saving.done
    saving.wait()
    other = layers()
    with infinity.offload(other, config(tmp_path / "swap", update=update)):
        assert infinity.load(tmp_path / "saved", other, infinity.AdamW(other.parameters())).step == 2


@pytest.mark.long
def test_objects_dropped_by_engine_threads_close_before_process_exit():
    source = """
    import threading, time
    import infinity
    from infinity.system import dropped_objects as dropped

    class Owner:
        pass

    class Slow:
        def close(self):
            time.sleep(0.5)
            print("closed")

    held = [Owner()]
    dropped.close_with(held[0], Slow())
    lane = threading.Thread(target=held.clear, name="infinity-update")  # a thread with this name must not wait
    lane.start()
    lane.join()
    """
    done = run_python(source)
    assert (done.returncode, done.stdout) == (0, "closed\n"), done.stderr
