"""Every mistake raises one clear error that names the remedy, before anything is written.

Long because the library and the command line are tested with one table of mistakes.
"""

import errno
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import infinity
from infinity import BudgetError, CheckpointError, ConfigError, SwapError, UsageError
from infinity.checkpoints.convert import export, reshard
from infinity.model.gpt import GPT
from infinity.tools.cli import main

ROOT = Path(__file__).parents[2]


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))


def settings(folder, **changes):
    options = {"param_tier": "nvme", "optimizer_state_tier": "nvme", "residency": "none", "dtype": "fp32", "device": "cpu"}
    budgets = {"chunk_mib": 1 / 128, "host_memory": "4MiB", "device_memory": "1MiB"}
    return infinity.Config(swap_dirs=folder, **{**options, **budgets, **changes})


@pytest.fixture
def engine(tmp_path):
    """(model, optimizer, engine) after one step."""
    model = make_model()
    engine = infinity.offload(model, settings(tmp_path))
    optimizer = infinity.AdamW(model.parameters())
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    yield model, optimizer, engine
    engine.close()


def backward(model):
    model(torch.ones(2, 64)).square().mean().backward()


def start(config):
    """Starts an engine over a model, and closes the engine again."""
    model = make_model()
    with infinity.offload(model, config):
        infinity.AdamW(model.parameters())


def files(folder):
    return sorted(path.name for path in Path(folder).rglob("*") if path.is_file() and path.stat().st_size and "lock" not in path.name)


# ---- directories ----


def test_a_missing_directory_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="does not exist; create it .mkdir -p"):
        settings(tmp_path / "missing")
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_place_of_a_directory_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="file is not a directory; name a directory$"):
        settings(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_directory_removed_before_the_start_is_an_error(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    config = settings(gone)
    gone.rmdir()
    with pytest.raises(ConfigError, match="does not exist: create it .mkdir -p"):
        start(config)


def test_a_directory_that_is_not_writable_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode, **options: not Path(path) == tmp_path)  # os.access is always true for root
    with pytest.raises(ConfigError, match="not writable by this user; change its mode or name another"):
        settings(tmp_path)
    monkeypatch.undo()
    config = settings(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode, **options: not Path(path) == tmp_path)
    with pytest.raises(SwapError, match="not writable; choose a directory that this user may write") as error:
        start(config)
    assert error.value.errno == errno.EACCES and error.value.filename == str(tmp_path)
    assert files(tmp_path) == []


def test_the_same_directory_twice_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="one directory; name each only once"):
        settings([tmp_path, tmp_path / "."])


def test_a_filesystem_with_too_little_space_is_refused(tmp_path, monkeypatch):
    config = settings(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=10, f_frsize=4096))
    with pytest.raises(SwapError, match=r"swap needs [\d,]+ bytes on this filesystem and 40,960 are available: free space") as error:
        start(config)
    assert error.value.errno == errno.ENOSPC and error.value.filename == str(tmp_path)
    assert files(tmp_path) == []
    monkeypatch.undo()
    start(config)  # no file is left that refuses the next run


# ---- budgets ----


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes, named",
    [
        ({"host_memory": "64KiB"}, "host_memory"),
        ({"host_memory": "64KiB", "update": "deferred"}, "host_memory"),
        ({"device_memory": "16KiB"}, "device_memory"),
        ({"param_tier": "device", "optimizer_state_tier": "host", "device_memory": "48KiB"}, "device_memory"),
        ({"param_tier": "auto", "optimizer_state_tier": "device", "residency": "auto", "device_memory": "100KiB"}, "device_memory"),
        ({"param_tier": "host", "optimizer_state_tier": "host", "host_memory": "100KiB"}, "host_memory"),
    ],
)
def test_the_refusal_of_a_small_budget_names_the_least_budget_that_works(tmp_path, changes, named):
    with pytest.raises(BudgetError, match=rf"{named}=.*Raise {named}") as error:
        start(settings(tmp_path, **changes))
    needed = int(re.search(r"needs (\d+) bytes", str(error.value))[1])
    assert files(tmp_path) == []
    with pytest.raises(BudgetError, match=f"needs {needed} bytes"):
        start(settings(tmp_path, **{**changes, named: needed - 1}))
    model = make_model()
    with infinity.offload(model, settings(tmp_path, **{**changes, named: needed})):
        optimizer = infinity.AdamW(model.parameters())
        for _ in range(3):
            backward(model)
            optimizer.step()
            optimizer.zero_grad()


# ---- settings ----


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"host_memry": 1}, "did you mean 'host_memory'"),
        ({"param_tier": "hots"}, "param_tier='hots': expected .*did you mean 'host'"),
        ({"dtype": "fp32", "optimizer_state_dtype": "bf16"}, "this value goes with dtype='bf16' only"),
        ({"host_memory": "20G"}, "host_memory: expected bytes"),
        ({"device_memory": 0}, "device_memory: expected at least 1024 bytes; got 0, .* as in .0GiB."),
        ({"chunk_mib": -1}, "chunk_mib=-1: expected a number of MiB above zero"),
        ({"update": "never"}, "update='never': expected 'auto', 'deferred' or 'backward'"),
        ({"device": "tpu"}, "device='tpu': expected 'cpu', 'cuda'"),
        ({"seed": -1}, "seed=-1: expected an integer from 0"),
    ],
)
def test_an_unknown_setting_or_value_is_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        settings(tmp_path, **changes)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "options, message",
    [
        ({"lr": -1.0}, "lr=-1.0: expected 0 or more"),
        ({"betas": (0.9, 1.0)}, r"betas\[1\]=1.0: expected from 0 to below 1"),
        ({"eps": float("nan")}, "eps=nan: expected 0 or more"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1: expected 0 or more"),
        ({"lr": "fast"}, "must be numbers"),
        ({"max_grad_norm": 0}, "max_grad_norm=0: expected a number above zero, or None"),
        ({"accumulation_steps": 0}, "accumulation_steps=0: expected an integer of 1 or more"),
    ],
)
def test_hyper_parameters_out_of_range_are_refused(tmp_path, options, message):
    model = make_model()
    with infinity.offload(model, settings(tmp_path)):
        with pytest.raises(ConfigError, match=message):
            infinity.AdamW(model.parameters(), **options)
        assert files(tmp_path) == []
        infinity.AdamW(model.parameters())  # the engine still accepts an optimizer


def test_backward_updates_cannot_clip(tmp_path):
    model = make_model()
    with infinity.offload(model, settings(tmp_path, update="backward")):
        with pytest.raises(ConfigError, match="update='backward' with max_grad_norm: .*Use update='deferred'"):
            infinity.AdamW(model.parameters(), max_grad_norm=1.0)
        assert files(tmp_path) == []


# ---- models and optimizers ----


def test_a_model_without_parameters_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="ReLU has no floating-point parameters; there is nothing to offload"):
        infinity.offload(nn.ReLU(), settings(tmp_path))


def test_parameters_without_values_are_refused(tmp_path):
    with torch.device("meta"):
        model = make_model()
    with pytest.raises(ConfigError, match="meta device have no values: 0.weight.* build them on the CPU"):
        infinity.offload(model, settings(tmp_path))


def test_a_model_that_an_engine_owns_already_is_refused(engine, tmp_path):
    with pytest.raises(UsageError, match="is in an engine already"):
        infinity.offload(engine[0], settings(tmp_path))


def test_engine_of_a_model_without_an_engine_is_an_error():
    with pytest.raises(ConfigError, match="build it inside infinity.init or call infinity.offload"):
        infinity.engine_of(make_model())


def test_an_optimizer_over_parameters_without_an_engine_is_refused():
    with pytest.raises(ConfigError, match=r"shape \(128, 64\) is in no engine.*infinity.offload"):
        infinity.AdamW(make_model().parameters())


def test_a_complex_parameter_is_refused(tmp_path):
    model = make_model()
    model.phase = nn.Parameter(torch.ones(4, dtype=torch.complex64))
    with infinity.offload(model, settings(tmp_path)):
        with pytest.raises(ConfigError, match=r"shape \(4,\) is of torch.complex64.*view_as_complex"):
            infinity.AdamW(model.parameters())


def test_an_optimizer_over_some_parameters_without_an_engine_is_refused(tmp_path):
    model, other = make_model(), make_model()
    with infinity.offload(model, settings(tmp_path)):
        with pytest.raises(ConfigError, match="is in no engine"):
            infinity.AdamW([*model.parameters(), *other.parameters()])
        assert files(tmp_path) == []


def test_an_optimizer_over_parameters_of_two_engines_is_refused(tmp_path):
    models = [make_model(), make_model()]
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder, model in zip(folders, models):
        folder.mkdir()
        infinity.offload(model, settings(folder))
    with pytest.raises(ConfigError, match="belong to several engines; make one optimizer for each"):
        infinity.AdamW([p for model in models for p in model.parameters()])
    assert files(tmp_path) == []


def test_an_optimizer_without_parameters_is_refused():
    with pytest.raises(ValueError, match="empty parameter list"):
        infinity.AdamW([])


def test_a_second_optimizer_after_training_is_refused(engine):
    with pytest.raises(UsageError, match="has an optimizer already, made at .*, and has been trained with it"):
        infinity.AdamW(engine[0].parameters())


# ---- order of calls ----


def test_step_without_backward_is_refused(engine):
    model, optimizer, _ = engine
    with pytest.raises(UsageError, match="without a finished backward pass since the last step"):
        optimizer.step()
    backward(model)
    optimizer.step()
    with pytest.raises(UsageError, match="without a finished backward pass since the last step"):
        optimizer.step()


@pytest.mark.parametrize(
    "update, message",
    [
        ("backward", "a forward pass between a backward pass that has begun to update and its step.*several backward passes"),
        ("deferred", "backward pass 2 since the last step, .*Declare it: .*accumulation_steps"),
    ],
)
def test_a_second_backward_pass_without_accumulation_steps_is_refused(update, message, tmp_path):
    model = make_model()
    with infinity.offload(model, settings(tmp_path, update=update)):
        optimizer = infinity.AdamW(model.parameters())
        backward(model)
        with pytest.raises(UsageError, match=message):
            backward(model)
        optimizer.step()  # the step of the first pass
        optimizer.zero_grad()
        backward(model)
        optimizer.step()


def test_backward_without_an_optimizer_is_refused(tmp_path):
    model = make_model()
    with infinity.offload(model, settings(tmp_path)):
        with pytest.raises(UsageError, match="its engine has no optimizer. Make infinity.AdamW"):
            backward(model)


def test_calls_after_close_are_refused(engine):
    model, optimizer, engine = engine
    engine.close()
    engine.close()
    for use in (lambda: backward(model), optimizer.step, lambda: infinity.gathered(model[0].weight).__enter__(), engine.flush):
        with pytest.raises(UsageError, match="the engine is closed"):
            use()


def test_gathered_over_parameters_without_an_engine_is_refused(engine):
    with pytest.raises(ConfigError, match="is in no engine"):
        with infinity.gathered(make_model().parameters()):
            pass


# ---- a second run ----


def test_a_second_engine_of_this_process_on_the_same_swap_is_refused(engine, tmp_path):
    with pytest.raises(SwapError, match="in use") as error:
        start(settings(tmp_path))
    assert error.value.filename and str(tmp_path) in error.value.filename
    backward(engine[0])  # the first engine continues
    engine[1].step()


def run_cli(*options, directory):
    command = [sys.executable, "-m", "infinity", "train", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, timeout=90, cwd=directory, env=environment)


SMALL = "--hidden 32 --layers 1 --heads 2 --seq 16 --batch 2 --steps 2 --device cpu --data random --param-tier nvme --optimizer-state-tier nvme".split()


@pytest.mark.long
def test_an_engine_of_another_process_on_the_same_swap_is_refused(engine, tmp_path):
    run = run_cli(*SMALL, "--swap-dirs", str(tmp_path), directory=tmp_path)
    assert run.returncode == 2
    assert re.fullmatch(rf"infinity: error: .*in use.*{re.escape(str(tmp_path))}.*\n", run.stderr), run.stderr


# ---- the command line ----


@pytest.mark.parametrize(
    "options, message",
    [
        (["--swap-dirs", "missing"], "--swap-dirs: missing does not exist; create it"),
        (["--host-memory", "1KiB"], "host_memory=1.0 KiB is too small: this model needs .* Raise host_memory"),
        (["--device-memory", "1KiB"], "device_memory=1.0 KiB is too small: this model needs .* Raise device_memory"),
        (["--host-memory", "5G"], "--host-memory: expected bytes"),
        (["--param-tier", "disk"], "--param-tier='disk': expected 'auto', 'device', 'host' or 'nvme'"),
        (["--update", "backward", "--max-grad-norm", "1"], "Use update='deferred'"),
        (["--host-memori", "1GiB"], "unrecognized arguments: --host-memori 1GiB; did you mean --host-memory"),
        (["--heads", "5"], "--heads 5 does not divide --hidden 32"),
        (["--steps", "0"], "expected a whole number above zero; got '0'"),
    ],
)
def test_the_command_line_prints_a_mistake_in_one_line(tmp_path, monkeypatch, capsys, options, message):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *SMALL, *options]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("infinity: error: ") and captured.err.count("\n") == 1
    assert re.search(message, captured.err), captured.err
    assert files(tmp_path) == []


def test_the_command_line_reports_a_full_disk_at_the_start(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=10, f_frsize=4096))
    assert main(["train", *SMALL]) == 2
    assert re.fullmatch(r"infinity: error: .*swap needs .* available: free space there.*\n", capsys.readouterr().err)
    assert files(tmp_path) == []


@pytest.mark.long
def test_a_process_without_an_error_ends_with_status_0(tmp_path):
    run = run_cli(*SMALL, directory=tmp_path)
    assert run.returncode == 0 and "error" not in run.stderr, run.stderr


class Named(nn.Module):
    """One parameter, whose name has control sequences for a terminal."""

    def __init__(self, name):
        super().__init__()
        self.register_parameter(name, nn.Parameter(torch.ones(4)))

    def forward(self, x):
        return x * next(self.parameters())


ESCAPE = "\x1b[2J\x1b]0;owned\x07w\u202e"


def test_control_sequences_in_names_from_files_are_escaped(tmp_path, capsys):
    config = infinity.Config(swap_dirs=tmp_path, device="cpu", dtype="fp32")
    model = Named(ESCAPE)
    with infinity.offload(model, config):
        infinity.save(tmp_path / "saved", model, infinity.AdamW(model.parameters()))
    export(tmp_path / "saved", tmp_path / "exported")
    model = Named("plain")
    with infinity.offload(model, config):
        for act in (
            lambda: infinity.load(tmp_path / "saved", model),
            lambda: infinity.load_safetensors(model, tmp_path / "exported"),
        ):
            with pytest.raises(CheckpointError) as told:
                act()
            assert str(told.value).isprintable() and "\\x1b[2J" in str(told.value) and "\\u202e" in str(told.value)
    assert main(["checkpoint", "inspect", str(tmp_path / "saved"), "--parameters"]) == 0
    assert main(["checkpoint", "inspect", str(tmp_path / "saved")]) == 0
    assert main(["checkpoint", "inspect", str(tmp_path / ESCAPE)]) == 2
    told = capsys.readouterr()
    assert "\x1b" not in told.out + told.err and "\\x1b[2J" in told.out and "\\x1b[2J" in told.err


@pytest.mark.parametrize(
    "given, expected",
    [
        ({"host_memory": "99999999999999999999GiB"}, 'host_memory: 99999999999999999999GiB is more than 1024.0 PiB, which no machine has; give the memory of this one, or "auto"'),
        ({"host_memory": 2**70}, "more than 1024.0 PiB"),
        ({"device_memory": "9" * 5000}, "device_memory: expected bytes"),
        ({"device_memory": "99999999999999999999GiB"}, "more than 1024.0 PiB"),
        ({"chunk_mib": 1e-300}, "chunk_mib=1e-300: expected at least 0.001953125 MiB, or None to choose one"),
        ({"swap_dirs": "/tmp/" + "a" * 5000}, "swap_dirs: '/tmp/aaa.*has 5,005 bytes. A path may have 4,095 bytes, files below it included; name a shorter one"),
        ({"swap_dirs": "/tmp/" + "a" * 300}, "swap_dirs: .*contains a name of 300 bytes. A name may have 255 bytes; name a shorter one"),
        ({"swap_dirs": "a\0b"}, "swap_dirs: .*has a zero byte in it; name another"),
    ],
)
def test_impossible_numbers_and_paths_are_refused(tmp_path, given, expected):
    with pytest.raises(ConfigError, match=expected) as told:
        infinity.Config(**({"swap_dirs": tmp_path} | given))
    assert len(str(told.value)) < 400
    infinity.Config(swap_dirs=tmp_path, host_memory="auto", device_memory="4GiB", chunk_mib=0.001953125)


@pytest.mark.parametrize("path", ["/tmp/" + "a" * 5000, "/tmp/" + "a/" * 2500, "a\0b", "/tmp/" + "a" * 300], ids=["long", "deep", "zero", "name"])
def test_impossible_paths_are_refused_by_all_functions(tmp_path, path):
    model = nn.Linear(4, 4)
    with infinity.offload(model, infinity.Config(swap_dirs=tmp_path, device="cpu", dtype="fp32")):
        optimizer = infinity.AdamW(model.parameters())
        infinity.save(tmp_path / "saved", model, optimizer)
        for act in (
            lambda: infinity.save(path, model, optimizer),
            lambda: infinity.load(path, model, optimizer),
            lambda: infinity.load_safetensors(model, path),
            lambda: infinity.save_dcp(path, model, optimizer),
            lambda: infinity.load_dcp(path, model, optimizer, trust_pickle=True),
            lambda: export(tmp_path / "saved", path),
            lambda: export(path, tmp_path / "exported"),
            lambda: reshard(tmp_path / "saved", path, world=2),
            lambda: reshard(path, tmp_path / "other", world=2),
        ):
            with pytest.raises(ConfigError, match="name a shorter one|name another") as told:
                act()
            assert len(str(told.value)) < 300
        infinity.save(tmp_path / "saved", model, optimizer)
    for options in ({"chunk_mib": 1e-300}, {"chunk_mib": 1e300}, {"world": 10**30}):
        with pytest.raises(ConfigError, match="expected"):
            reshard(tmp_path / "saved", tmp_path / "other", **({"world": 2} | options))


@pytest.mark.slow
@pytest.mark.few(7)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"param_tier": "nvme", "optimizer_state_tier": "nvme"},
        {"param_tier": "host", "optimizer_state_tier": "host"},
        {"activation_tier": "host"},
        {"activation_tier": "nvme", "chunk_mib": 0.02},
        {"residency": "none"},
        {"dtype": "fp32"},
        {"compression": "on"},
        {"compression": "on", "param_tier": "nvme", "optimizer_state_tier": "nvme", "activation_tier": "host"},
        {"update": "deferred", "nonfinite": "skip"},
    ],
    ids=str,
)
@pytest.mark.parametrize("accumulation_steps", [1, 2])
@pytest.mark.parametrize("make", [lambda: GPT(64, 2, 2, 256, 32), lambda: GPT(32, 3, 1, 3001, 32)], ids=["even", "wide"])
def test_the_refusal_names_the_least_host_memory_to_the_byte(make, accumulation_steps, settings, tmp_path):
    x = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))

    def train(nbytes):
        model = make()
        device_memory = "900KiB" if settings.get("dtype") != "fp32" else "1800KiB"
        with infinity.offload(
            model, infinity.Config(swap_dirs=tmp_path, device="cpu", host_memory=nbytes, device_memory=device_memory, tile_above=None, **settings)
        ):
            optimizer = infinity.AdamW(model.parameters(), accumulation_steps=accumulation_steps)
            for _ in range(2):
                for _ in range(accumulation_steps):
                    model(x, x).backward()
                optimizer.step()
                optimizer.zero_grad()

    with pytest.raises(infinity.BudgetError, match="host_memory=1.0 KiB is too small") as refused:
        train(1024)
    enough = int(re.search(r"needs (\d+) bytes", str(refused.value))[1])
    with pytest.raises(infinity.BudgetError, match=f"needs {enough} bytes"):
        train(enough - 1)
    train(enough)
