"""`infinity.latest` finds the newest whole checkpoint. The documented program restarts after a kill during any of its first saves."""

import os
import shutil

import pytest
import torch.distributed as dist
from support.checkpoints import Run, write_checkpoint
from support.nursery import Calls, killed_at
from support.pages import ROOT, make_directories, program_of

import infinity
from infinity.checkpoints.files import Directory
from infinity.checkpoints.manifest import NAME
from infinity.errors import CheckpointError

NUM_SAVES = 3


# ---- the newest whole checkpoint ----


def test_latest_is_the_checkpoint_at_the_path_or_none(tmp_path):
    path = tmp_path / "last"
    assert infinity.latest(path) is None
    directory = Directory(path)
    (path / directory.folder / "rank0-0.records").write_bytes(b"begun")
    assert infinity.latest(path) is infinity.latest(tmp_path) is None  # the state after a killed process
    directory.close()
    write_checkpoint(path, seed=0)
    assert infinity.latest(path) == infinity.latest(str(tmp_path)) == path
    Directory(path).close()  # a second save begins
    assert infinity.latest(path) == path


def test_latest_of_several_checkpoints_has_the_largest_step(tmp_path):
    for name, step in (("b", 9), ("a", 10), ("c", 8), ("d", 9)):
        write_checkpoint(tmp_path / name, seed=0, step=step)
    Directory(tmp_path / "e").close()  # an interrupted save
    (tmp_path / "f").write_text("a file")
    (tmp_path / "g").symlink_to("g")
    assert infinity.latest(tmp_path) == tmp_path / "a"
    shutil.rmtree(tmp_path / "a")
    os.utime(tmp_path / "b" / NAME, (2e9, 2e9))
    assert infinity.latest(tmp_path) == tmp_path / "b"


def test_latest_does_not_skip_a_damaged_checkpoint(tmp_path):
    for name, step in (("old", 1), ("new", 2)):
        write_checkpoint(tmp_path / name, seed=0, step=step)
    next((tmp_path / "new").glob("data-*/*.records")).unlink()
    with pytest.raises(CheckpointError, match=f"missing or cut.*; move {tmp_path / 'new'} away to continue from an earlier checkpoint"):
        infinity.latest(tmp_path)
    (tmp_path / "new" / NAME).write_text("{}")
    with pytest.raises(CheckpointError, match=f"move {tmp_path / 'new'} away"):
        infinity.latest(tmp_path)
    with pytest.raises(CheckpointError, match="is a file: name a checkpoint's directory"):
        infinity.latest(tmp_path / "new" / NAME)


def test_load_after_an_interrupted_first_save_says_how_to_begin_anew(tmp_path):
    Directory(tmp_path / "last").close()
    with Run(tmp_path / "swap") as run, pytest.raises(CheckpointError, match=r"Training may start anew; infinity\.latest\(path\)"):
        run.load(tmp_path / "last")


def tells_latest(say, folder, rank, path):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        say(("found", infinity.latest(path)))
        dist.barrier()
    except CheckpointError as error:
        say(("refused", str(error)))
    os._exit(0)


@pytest.mark.parametrize("damaged", [False, True])
def test_all_ranks_return_the_checkpoint_that_rank_0_sees(nursery, tmp_path, damaged):
    paths = [tmp_path / "seen", tmp_path / "not yet seen"]
    write_checkpoint(paths[0], seed=0)
    if damaged:
        (paths[0] / NAME).write_text("{}")
    children = [nursery.start(tells_latest, tmp_path, rank, path) for rank, path in enumerate(paths)]
    found = [child.end()[0][0][1] for child in children]
    if damaged:
        assert all("is damaged or cut" in text for text in found) and found[1] == f"rank 0: {found[0]}", found
    else:
        assert found == [paths[0]] * 2


# ---- a restart always starts ----


def runs_the_page(say, folder, meet):
    """Runs the program of docs/pre-train.md with a save per step. Says the first step, and the number of calls of all saves."""
    make_directories(folder)
    os.chdir(folder)
    program = program_of(ROOT / "docs/pre-train.md")
    assert program.count("NUM_STEPS, EVERY = 4, 2") == 1
    names = {"__name__": "__main__"}
    with Calls(meet) as calls:
        exec(program.replace("NUM_STEPS, EVERY = 4, 2", f"NUM_STEPS, EVERY = {NUM_SAVES}, 1"), names)
    say((names["first"], len(calls.names)))


def killed(say, folder, position):
    runs_the_page(say, folder, killed_at(position))


def undisturbed(say, folder):
    runs_the_page(say, folder, lambda number, name, call: call())


@pytest.mark.long
@pytest.mark.parametrize("num_kills", [3, pytest.param(None, marks=pytest.mark.long)], ids=["some", "all"])
def test_the_documented_program_restarts_after_a_kill_in_its_first_saves(nursery, tmp_path, num_kills):
    ((first, num_calls),), _ = nursery.start(undisturbed, tmp_path / "reference").end()
    assert first == 0 and num_calls > 10 * NUM_SAVES
    last = 2 * num_calls - 1  # after the last call; at 1 the directory of the checkpoint exists and is empty
    began = []
    for position in range(1, last, last // num_kills if num_kills else 1):
        folder = tmp_path / str(position)
        said, was_killed = nursery.start(killed, folder, position).end()
        assert was_killed and not said, f"at {position}"
        ((first, _),), was_killed = nursery.start(undisturbed, folder).end()
        assert not was_killed
        began.append(first)
        shutil.rmtree(folder)
    assert began[0] == 0 < began[-1] <= NUM_SAVES, began
    assert all(earlier <= later for earlier, later in zip(began, began[1:])), began
