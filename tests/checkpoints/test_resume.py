"""`infinity train --resume`: a run continues after a save, a kill or SIGTERM with the bits of an uninterrupted run.

Long because the programs that are killed and the checks of their checkpoints share their helpers.
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent

import psutil
import pytest
import torch

from infinity.checkpoints import files, writer
from infinity.checkpoints.files import read_manifest
from infinity.errors import CheckpointError
from infinity.tools.cli import main
from infinity.tools.train import rotation, training
from infinity.tools.train.rotation import Rotation

ROOT = Path(__file__).parents[2]
MODEL = "--hidden 64 --layers 2 --heads 4 --seq 16 --batch 4 --device cpu --dtype fp32 --data text".split()
ON_NVME = "--param-tier nvme --optimizer-state-tier nvme --residency none --chunk-mib 0.0625 --host-memory 64MiB --device-memory 8MiB".split()
TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node 2".split()
ENDLESS = 100_000  # steps


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_bytes(bytes(i * i % 251 % 97 for i in range(20_000)))
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # child processes use one thread: same bits
    yield tmp_path
    torch.set_num_threads(before)


def train(*options, steps):
    """Trains in this process and returns the losses."""
    assert main(["train", *MODEL, *ON_NVME, "--steps", str(steps), "--output", "out.json", *options]) == 0
    return report()["losses"]


def report():
    return json.loads(Path("out.json").read_text())


_uninterrupted = []


def uninterrupted(steps):
    """The losses of an uninterrupted run. All tests share one run, which is repeated if a test needs more steps."""
    if len(_uninterrupted) < steps:
        _uninterrupted[:] = train(steps=steps + 50)
    return _uninterrupted[:steps]


def start(*options, steps, launcher=("-m", "infinity"), **environment):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment
    command = [sys.executable, *launcher, "train", *MODEL, *ON_NVME, "--steps", str(steps), "--output", "out.json", *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def start_training(*options, **more):
    """Starts a process and returns it after its first step."""
    process = start(*options, **more)
    lines = []
    while "loss" not in (line := process.stderr.readline()):
        assert line, lines
        lines.append(line)
    return process


RUNS = """
    import os, sys, json
    import torch.distributed as dist
    from infinity.tools.cli import main

    dist.init_process_group("gloo")
    for options in json.loads(sys.argv[-1]):
        assert main(options) == 0
    dist.destroy_process_group()
"""


def run_two_ranks(*runs):
    """Trains several runs on two ranks, one after the other; a run is (*options, steps). Returns (losses of each run, stderr)."""
    Path("runs.py").write_text(dedent(RUNS))
    runs = [[*options, "--steps", str(steps), "--output", f"out{index}.json"] for index, (*options, steps) in enumerate(runs)]
    commands = json.dumps([["train", *MODEL, *ON_NVME, *options] for options in runs])
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *TORCHRUN, "runs.py", commands]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    return [json.loads(Path(f"out{index}.json").read_text())["losses"] for index in range(len(runs))], done.stderr


def names(path="saved"):
    return sorted(os.listdir(path))


def swap_files():
    return [path for path in Path(".").glob("infinity-swap/**/*") if path.suffix in (".swap", ".lock")]


# Resuming


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "options",
    ["", "--accumulate 2 --max-grad-norm 0.5 --update deferred", "--optimizer lion --param-tier device --optimizer-state-tier host --residency auto"],
)
def test_three_steps_and_three_resumed_steps_have_the_losses_of_six(capsys, options):
    options = options.split()
    whole = train(*options, steps=6)
    first = train(*options, "--save", "saved", "--resume", steps=3)
    assert (report()["resumed_from_step"], report()["checkpoint"]) == (None, "saved/step-00000003")
    assert "no checkpoint in saved: starting with step 1\n" in capsys.readouterr().err
    second = train(*options, "--save", "saved", "--resume", steps=6)
    assert (report()["resumed_from_step"], report()["checkpoint"]) == (3, "saved/step-00000006")
    assert "resumed from saved/step-00000003, step 3\n" in capsys.readouterr().err
    assert (first, second) == (whole[:3], whole[3:])


@pytest.mark.slow
def test_saving_does_not_change_the_losses():
    assert train("--save", "saved", "--save-every", "1", steps=6) == uninterrupted(6)


def test_a_run_resumes_with_another_placement_and_learning_rate():
    train("--save", "saved", "--optimizer", "sgd", steps=3)
    shutil.copytree("saved", "other")
    here = train("--save", "saved", "--optimizer", "sgd", "--resume", "--lr", "1000", steps=5)
    assert here[1] > 100  # --lr of this run applies, not the checkpoint's
    options = "--param-tier device --optimizer-state-tier host --residency auto --chunk-mib 1 --optimizer sgd --save other --resume --lr 1000".split()
    assert train(*options, steps=5) == here


def test_resume_from_the_last_step_trains_nothing(capsys):
    train("--save", "saved", steps=2)
    capsys.readouterr()
    for steps in (1, 2):
        assert train("--save", "saved", "--resume", steps=steps) == []
        assert capsys.readouterr().out == f"nothing to train: saved/step-00000002 has step 2, --steps {steps}\n"
        assert (report()["resumed_from_step"], report()["checkpoint"]) == (2, "saved/step-00000002")


def test_the_report_of_a_run_without_saves_has_no_checkpoint():
    train(steps=1)
    assert (report()["resumed_from_step"], report()["checkpoint"]) == (None, None)


@pytest.mark.long
def test_two_ranks_resume_with_the_same_bits_and_from_one_rank():
    one = train("--save", "one", steps=3) + uninterrupted(6)[3:]
    (whole, first, second, third), errors = run_two_ranks(
        (6,),
        ("--save", "saved", "--save-every", "2", 3),
        ("--save", "saved", "--resume", 6),
        ("--save", "one", "--resume", 6),
    )
    assert (first, second) == (whole[:3], whole[3:])
    assert names() == ["step-00000003", "step-00000006"]
    assert errors.count("resumed from saved/step-00000003, step 3\n") == 1  # only rank 0 prints
    assert third == pytest.approx(one[3:], rel=1e-5)
    assert train("--save", "one", "--resume", steps=9) == pytest.approx(uninterrupted(9)[6:], rel=1e-5)


# Which checkpoints stay


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "keep, expected",
    [((), [5, 6]), (("--keep", "3"), [3, 5, 6])]
    + [pytest.param(*case, marks=pytest.mark.long) for case in [(("--keep", "1"), [6]), (("--keep", "9"), [1, 3, 5, 6])]],
)
def test_the_newest_checkpoints_stay(keep, expected):
    train("--save", "saved", steps=1)
    train("--save", "saved", "--resume", "--keep", "9", steps=3)
    train("--save", "saved", "--resume", "--save-every", "5", *keep, steps=6)
    assert names() == [f"step-{step:08d}" for step in expected]


_made = []


@pytest.fixture
def checkpoint(directory, tmp_path_factory):
    """A whole checkpoint of step 1. Training makes it once; each test gets a copy."""
    if not _made:
        train("--save", "made", steps=1)
        _made.append(shutil.copytree("made", tmp_path_factory.mktemp("made") / "made"))
        shutil.rmtree("made")
    shutil.copytree(_made[0], "made")
    return Path("made/step-00000001")


def put(checkpoint, *steps):
    """Makes copies of `checkpoint` in `saved` under the names of these steps."""
    for step in steps:
        target = Path(f"saved/step-{step:08d}")
        subprocess.run(["cp", "-al", checkpoint, target], check=True)
    return Rotation("saved")


def test_the_latest_checkpoint_is_the_whole_one_of_the_highest_step(checkpoint):
    assert Rotation("saved").latest() is None
    Path("saved").mkdir()
    assert Rotation("saved").latest() is None
    saved = put(checkpoint, 3, 20, 100, 123456789)
    assert saved.latest() == Path("saved/step-123456789") == saved.path_of(123456789)
    os.unlink("saved/step-123456789/manifest.json")  # as after an interrupted first save
    assert saved.latest() == saved.path_of(100) == Path("saved/step-00000100")
    for name in ("step-101", "step-0000000101", "step-00000101x", "step-00000102.old"):  # not names of a rotation
        os.makedirs(f"saved/{name}")
        Path(f"saved/{name}/manifest.json").touch()
    Path("saved/step-00000103").touch()
    os.symlink(checkpoint.absolute(), "saved/step-00000104")
    assert saved.latest() == saved.path_of(100)


def cut_manifest(path):
    manifest = path / "manifest.json"
    data = manifest.read_bytes()
    manifest.unlink()  # the files are hard links: a write would change every copy
    manifest.write_bytes(data[:-10])


def cut_file(path):
    file = next(path.glob("data-*/*.records"))
    data = file.read_bytes()
    file.unlink()
    file.write_bytes(data[:-4096])


def flip_bit(path):
    file = next(path.glob("data-*/*.records"))
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.unlink()
    file.write_bytes(data)


@pytest.mark.parametrize("damage", [cut_manifest, cut_file, flip_bit])
def test_the_error_names_the_damaged_checkpoint_and_the_one_before(checkpoint, capsys, damage):
    Path("saved").mkdir()
    saved = put(checkpoint, 3, 7)
    damage(saved.path_of(7))
    options = ["train", *MODEL, *ON_NVME, "--save", "saved", "--resume", "--steps", "2"]
    if damage is not flip_bit:
        with pytest.raises(CheckpointError, match="move saved/step-00000007 away to use saved/step-00000003$"):
            saved.latest()
        assert main(options) == 2
        error = capsys.readouterr().err
        assert error.startswith("infinity: error: saved/step-00000007/") and error.count("\n") == 1
        damage(saved.path_of(3))
        os.rename("saved/step-00000007", "gone")
        with pytest.raises(CheckpointError, match="there is no older checkpoint: move saved/step-00000003 away to start from step 1$"):
            saved.latest()
        return
    assert main(options) == 2  # load finds the damage
    error = capsys.readouterr().err.splitlines()[-1]
    assert "damaged" in error and error.endswith("move saved/step-00000007 away to use saved/step-00000003")


def test_prune_removes_only_checkpoints_of_the_rotation(checkpoint):
    Path("saved").mkdir()
    saved = put(checkpoint, 1, 2, 3, 4)
    os.unlink("saved/step-00000002/manifest.json")
    Path("saved/step-00000002/.manifest.new").touch()
    put(checkpoint, 9)
    os.unlink("saved/step-00000009/manifest.json")
    Path("saved/step-00000001/notes.txt").touch()
    Path("saved/readme").touch()
    os.mkdir("saved/step-5")
    os.symlink(checkpoint.absolute(), "saved/step-00000000")
    saved.prune(2, saved.path_of(4))
    assert names() == ["readme", "step-00000000", "step-00000001", "step-00000003", "step-00000004", "step-5"]
    assert names("saved/step-00000001") == ["notes.txt"]
    assert checkpoint.joinpath("manifest.json").exists()
    saved.prune(1, saved.path_of(3))  # prune keeps the checkpoint that was just written
    assert saved.paths() == [saved.path_of(3), saved.path_of(4)]


def test_a_kill_during_a_removal_leaves_no_partial_checkpoint(checkpoint, monkeypatch):
    Path("saved").mkdir()
    saved = put(checkpoint, 1, 2)

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(rotation.shutil, "rmtree", killed)
        saved.prune(1, saved.path_of(2))
    assert (saved.paths(), len(names())) == ([saved.path_of(2)], 2)
    saved.prune(1, saved.path_of(2))
    assert names() == ["step-00000002"]


def test_a_checkpoint_that_another_process_writes_stays(checkpoint):
    Path("saved").mkdir()
    saved = put(checkpoint, 2)
    other = files.Directory(saved.path_of(1))
    saved.prune(1, saved.path_of(2))
    assert names() == ["step-00000001", "step-00000002"]
    other.abort()
    assert names() == ["step-00000002"]


# Mistakes and failures


@pytest.mark.parametrize(
    "options, expected",
    [
        ("--resume", "--resume needs --save DIR"),
        ("--save-every 5", "--save-every needs --save DIR"),
        ("--keep 5", "--keep needs --save DIR"),
        ("--save saved --keep 0", "argument --keep: expected a whole number above zero"),
        ("--save saved --save-every 0", "argument --save-every: expected a whole number above zero"),
        ("--save saved --save-evry 5", "did you mean --save-every?"),
        ("--save text", "--save text is not a directory"),
        ("--save missing/saved", "there is no directory missing; create it"),
        ("--save /proc/saved", "the directory of the checkpoints cannot be made"),
    ],
)
def test_a_mistake_prints_one_line(directory, capsys, options, expected):
    assert main(["train", *MODEL, *options.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("infinity: error: ") and error.count("\n") == 1
    assert expected in error
    assert names(".") == ["text"]


@pytest.mark.few(5)
@pytest.mark.parametrize(
    "other, expected",
    [
        ("--hidden 32", "saved/step-00000001 was saved with --hidden 64; here it is --hidden 32: use the saved options, or another --save"),
        ("--layers 3 --seq 8", "with --layers 2, --seq 16; here it is --layers 3, --seq 8"),
        ("--heads 2", "with --heads 4; here it is --heads 2"),
        ("--vocab 300", "with --vocab 256; here it is --vocab 300"),
        ("--tie", "with --tie False; here it is --tie True"),
        ("--batch 8", "with --batch 4; here it is --batch 8"),
        ("--accumulate 2", "with --accumulate 1; here it is --accumulate 2"),
        ("--seed 1", "with --seed 0; here it is --seed 1"),
        ("--optimizer adam", "with --optimizer adamw; here it is --optimizer adam"),
        ("--data random", "with --data of 20000 bytes with CRC32C "),
        ("--data other", "here it is --data of 20001 bytes with CRC32C "),
        ("--dtype bf16", "the model was saved with dtype='fp32', expected dtype='bf16'"),
    ],
)
def test_resume_refuses_options_that_differ_from_the_checkpoint(checkpoint, capsys, other, expected):
    Path("other").write_bytes(Path("text").read_bytes() + b"x")
    Path("saved").mkdir()
    put(checkpoint, 1)
    capsys.readouterr()
    assert main(["train", *MODEL, *ON_NVME, "--save", "saved", "--resume", *other.split()]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines()]
    assert len(errors) == 1 and errors[0].startswith("infinity: error: ") and expected in errors[0]
    assert "away" not in errors[0]  # the checkpoint is not damaged
    assert names() == ["step-00000001"]


def test_resume_accepts_the_same_text_under_another_name(checkpoint):
    os.rename("made", "saved")
    os.rename("text", "moved")
    assert len(train("--save", "saved", "--resume", "--data", "moved", steps=2)) == 1


def test_a_run_does_not_begin_in_a_directory_with_checkpoints(checkpoint, capsys):
    assert main(["train", *MODEL, "--save", "made"]) == 2
    assert "--save made holds step-00000001: add --resume to continue from it, or name another directory" in capsys.readouterr().err


def test_a_checkpoint_of_another_program_is_refused(checkpoint, capsys, monkeypatch):
    monkeypatch.setattr("infinity.tools.train.saver.Checkpoint.decode", lambda self, value: None)
    assert main(["train", *MODEL, "--save", "made", "--resume"]) == 2
    assert "made/step-00000001 was not saved by `infinity train`" in capsys.readouterr().err


@pytest.mark.parametrize("every, whole", [("2", [2]), ("4", [])])
def test_a_failed_save_ends_the_run(capsys, monkeypatch, every, whole):
    """The disk fails in the save of step 4; the checkpoint of step 2 stays."""
    finish = writer.Writer.finish

    def fail(self):
        if num_finished:
            num_finished.pop()
            return finish(self)
        self.abort()
        raise files.failed("a file could not be brought to the disk", self.folder, OSError(5, "Input/output error"))

    num_finished = [None] * len(whole)
    monkeypatch.setattr(writer.Writer, "finish", fail)
    options = ["train", *MODEL, *ON_NVME, "--save", "saved", "--save-every", every, "--steps", "4", "--output", "out.json"]
    assert main(options) == 2
    assert "infinity: error: [Errno 5] a file could not be brought to the disk" in capsys.readouterr().err
    assert [int(name[5:]) for name in names()] == whole
    assert not Path("out.json").exists()


# Kills and SIGTERM


@pytest.mark.parametrize("num_kills", [1, pytest.param(20, marks=pytest.mark.long)])
def test_a_run_killed_at_any_moment_resumes_with_the_same_losses(num_kills):
    for number in range(num_kills):
        saved = f"saved{number}"
        process = start_training("--save", saved, "--save-every", "1", steps=ENDLESS)
        time.sleep(random.random())
        process.kill()
        process.communicate()
        latest = Rotation(saved).latest()
        step = read_manifest(latest).step if latest else 0
        assert latest is None or latest.name == f"step-{step:08d}"
        losses = train("--save", saved, "--resume", steps=step + 3)
        assert losses == uninterrupted(step + 3)[step:]
        assert names(saved)[-1:] == [f"step-{step + 3:08d}"] and len(names(saved)) <= 2


@pytest.mark.slow
@pytest.mark.parametrize("num_signals", [1, pytest.param(20, marks=pytest.mark.long)])
def test_sigterm_ends_a_run_after_a_whole_step(num_signals):
    for number in range(num_signals):
        saved = f"saved{number}"
        every = random.choice([(), ("--save-every", "1"), ("--save-every", "7")])
        process = start_training("--save", saved, *every, steps=ENDLESS)
        time.sleep(random.random())
        process.terminate()
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        step = int(re.search(rf"^stopped by SIGTERM after step (\d+); saved {saved}/step-(?=0*\1$)", errors, re.MULTILINE)[1])
        assert swap_files() == []
        assert report()["checkpoint"] == f"{saved}/step-{step:08d}" == str(Rotation(saved).latest())
        assert report()["losses"] == uninterrupted(step) and "first, " in output
        assert train("--save", saved, "--resume", steps=step + 3) == uninterrupted(step + 3)[step:]


SLOW_STEP = """
    import sys, time
    from infinity.tools import cli
    from infinity.tools.train import training

    def slow(self, number, step=training.TrainingRun._step):
        loss = step(self, number)
        if number == 3:
            print("slow", flush=True)
            for _ in range(1000):  # a signal just before a sleep is handled only after the sleep
                time.sleep(0.1)
        return loss

    training.TrainingRun._step = slow
    sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.long
def test_a_second_sigterm_ends_a_run_at_once_and_keeps_the_last_checkpoint():
    process = start("--save", "saved", "--save-every", "1", steps=9, launcher=("-c", dedent(SLOW_STEP)))
    while "slow" not in (line := process.stdout.readline()):
        assert line
    process.terminate()
    while "a second SIGTERM ends it at once" not in (line := process.stderr.readline()):
        assert line
    assert process.poll() is None and swap_files() != []
    process.terminate()
    process.communicate(timeout=50)
    assert process.returncode == -signal.SIGTERM
    assert swap_files() == []
    step = read_manifest(Rotation("saved").latest()).step
    assert 1 <= step <= 3  # no checkpoint of the interrupted step
    assert train("--save", "saved", "--resume", steps=5) == uninterrupted(5)[step:]


def test_a_run_without_saves_installs_no_handler_of_sigterm(monkeypatch):
    handlers = []

    def step(self, number, step=training.TrainingRun._step):
        handlers.append(signal.getsignal(signal.SIGTERM))
        return step(self, number)

    monkeypatch.setattr(training.TrainingRun, "_step", step)
    train(steps=1)
    train("--save", "saved", steps=1)
    assert handlers[0] == signal.getsignal(signal.SIGTERM) != handlers[1]


@pytest.mark.long
@pytest.mark.parametrize("told", [[0], [1], [0, 1]])
def test_all_ranks_stop_after_the_same_step_if_any_gets_sigterm(told):
    process = start_training("--save", "saved", "--save-every", "5", steps=ENDLESS, launcher=(*TORCHRUN, "-m", "infinity"))
    children = psutil.Process(process.pid).children(recursive=True)
    ranks = sorted((child for child in children if "RANK" in child.environ()), key=lambda child: child.environ()["RANK"])
    assert [child.environ()["RANK"] for child in ranks] == ["0", "1"]
    time.sleep(random.random())
    for rank in told:
        ranks[rank].terminate()
        ranks[rank].terminate()  # a launcher passes the signal on: the rank gets two
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    step = int(re.search(r"^stopped by SIGTERM after step (\d+); saved saved/step-(?=0*\1$)", errors, re.MULTILINE)[1])
    assert (len(report()["losses"]), swap_files()) == (step, [])
    first = report()["losses"]
    (losses, whole), _ = run_two_ranks(("--save", "saved", "--resume", step + 3), (step + 3,))
    assert first + losses == whole
