"""The commands of `infinity`: options, settings from files, messages, and exit statuses.

Long because each command runs as a process or in this one, with the same helpers for both.
"""

import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import infinity
from infinity.config import Config
from infinity.errors import ConfigError
from infinity.model.gpt import GPT, Batches
from infinity.output import check_different, check_file, write_json
from infinity.system.ranks import Ranks
from infinity.tools import cli
from infinity.tools.cli import _parser, main
from infinity.tools.measure import benchmarks
from infinity.tools.predict import plan_report
from infinity.tools.progress import StepProgress
from infinity.tools.train.training import CONFIG_OPTIONS, LINKS, TrainingRun, _config, _table

ROOT = Path(__file__).parents[2]
SMALL = "--hidden 64 --layers 3 --heads 4 --seq 32 --batch 4 --steps 5 --device cpu --dtype fp32 --data text".split()
ON_NVME = "--param-tier nvme --optimizer-state-tier nvme --residency none --chunk-mib 0.0625 --host-memory 64MiB --device-memory 8MiB".split()


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_bytes(bytes(i * i % 251 % 97 for i in range(20_000)))
    return tmp_path


def parse(*options):
    return _parser().parse_args(["train", *options])


# Options


def test_every_option_has_a_default():
    arguments = parse()
    assert arguments.hidden % arguments.heads == 0
    assert (arguments.vocab, arguments.accumulate, arguments.max_grad_norm, arguments.lr) == (256, 1, None, 3e-4)
    assert {getattr(arguments, name) for name in CONFIG_OPTIONS} == {None}  # the defaults are in Config or in a file
    assert (arguments.data, arguments.json, arguments.output, arguments.config, arguments.set) == (None, False, None, None, [])


def test_options_reach_the_arguments():
    arguments = parse(
        *"--hidden 8 --layers 1 --heads 2 --vocab 300 --seq 9 --batch 3 --steps 7 --accumulate 2 --lr 1e-2".split(),
        *"--max-grad-norm 0.5 --dtype bf16 --swap-dirs a b --param-tier host --optimizer-state-tier nvme --residency none".split(),
        *"--host-memory 1GiB --device-memory 2GiB --chunk-mib 0.5 --update deferred --checkpoint-activations".split(),
        *"--seed 9 --data x y --output out.json --tie --device cpu --master none --optimizer-state-dtype bf16 --optimizer lion".split(),
        *"--activation-tier host --tile-above 1MiB --save saved --save-every 4 --keep 3 --resume".split(),
        *"--config a.toml --set trace=true --set residency=auto --trace t.json --live".split(),
    )
    values = vars(arguments)
    del values["command"]
    assert values == {
        "hidden": 8, "layers": 1, "heads": 2, "vocab": 300, "seq": 9, "batch": 3, "steps": 7, "accumulate": 2, "by_layer": False, "lr": 0.01,
        "max_grad_norm": 0.5, "dtype": "bf16", "swap_dirs": ["a", "b"], "param_tier": "host", "optimizer_state_tier": "nvme", "residency": "none",
        "host_memory": "1GiB", "device_memory": "2GiB", "chunk_mib": 0.5, "update": "deferred",
        "checkpoint_activations": True, "seed": 9, "data": ["x", "y"], "json": False, "output": Path("out.json"), "tie": True, "device": "cpu",
        "master": "none", "optimizer_state_dtype": "bf16", "optimizer": "lion", "activation_tier": "host", "tile_above": "1MiB",
        "save": Path("saved"), "save_every": 4, "keep": 3, "resume": True,
        "config": Path("a.toml"), "set": ["trace=true", "residency=auto"], "trace": Path("t.json"), "live": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    "options, expected",
    [
        ("train --hiden 5", "unrecognized arguments: --hiden 5; did you mean --hidden?"),
        ("train --zzz", "see infinity train --help"),
        ("train extra", "unrecognized arguments: extra"),
        ("train --step 5", "did you mean --steps?"),
        ("train --hidden 0", "argument --hidden: expected a whole number above zero; got '0'"),
        ("train --hidden 5.5", "argument --hidden: expected a whole number"),
        ("train --layers -1", "argument --layers: expected"),
        ("train --steps 0", "argument --steps: expected a whole number above zero"),
        ("train --batch x", "argument --batch: expected a whole number above zero; got 'x'"),
        ("train --lr 0", "argument --lr: expected a number above zero; got '0'"),
        ("train --lr nan", "argument --lr: expected a number above zero"),
        ("train --max-grad-norm -1", "argument --max-grad-norm: expected"),
        ("train --seed -1", "argument --seed: expected"),
        (f"train --seed {2**64}", f"argument --seed: expected a whole number from 0 to {2**64 - 1}; got"),
        ("train --hidden 10 --heads 3", "--heads 3 does not divide --hidden 10"),
        ("train --dtype fp17", "dtype='fp17': expected 'bf16', 'fp16' or 'fp32'"),
        ("train --dtype int8", "dtype='int8': expected 'bf16', 'fp16' or 'fp32'"),
        ("train --param-tier nvm", "did you mean 'nvme'?"),
        ("train --update never", "update='never': expected"),
        ("train --host-memory 20G", "error: --host-memory: expected bytes"),
        ("train --device-memory 0", "error: --device-memory: expected at least 1024 bytes; got '0', which is 0 B. Give the unit"),
        ("train --chunk-mib 0", "argument --chunk-mib: expected"),
        ("train --chunk-mib 1e308", "argument --chunk-mib: expected MiB, at most 1073741824; got '1e308'"),
        ("bench overlap --chunk-mib 4 1e308", "argument --chunk-mib: expected MiB, at most"),
        ("train --set chunk_mib=1e308", "--set: chunk_mib=1e+308: expected a number of MiB above zero, at most 1073741824, or None"),
        ("train --device tpu", "device='tpu': expected"),
        ("train --swap-dirs missing", "missing does not exist"),
        ("train --set swap_dirs=", "--set: swap_dirs='': a name is empty, as from an unset shell variable; name a directory"),
        ("train --dtype x --update y", "--dtype='x': expected 'bf16', 'fp16' or 'fp32'; --update='y': expected"),
        ("train --set dtype", "'dtype': expected NAME=VALUE"),
        ("train --set dtipe=fp32", "--set: Config has no field 'dtipe': did you mean 'dtype'?"),
        ("train --set hidden=64", "--set: Config has no field 'hidden'"),
        ("train --config missing.toml", "missing.toml cannot be read: No such file or directory"),
        ("train --config text", "text is not valid TOML: Invalid"),
        ("config show --set seed=x", "--set: seed='x': expected an integer"),
        ("config show --from-deepspeed missing.json", "missing.json cannot be read"),
        ("config show --from-deepspeed a --config b", "--from-deepspeed and --config: expected one of them"),
        ("train --data missing.txt", "data: cannot read missing.txt: No such file or directory"),
        ("train --data text --seq 20000", "20000 bytes are too few for seq=20000"),
        ("train --data text --vocab 100", "vocab=100: expected at least 256"),
        ("train --output missing/out.json", "there is no directory missing"),
        ("train --output .", "is a directory; name a file"),
        ("train --output a --trace ./a", "--output a and --trace a are one file, and one would replace the other; name two"),
        ("plan --output a.png --plot a.png", "--output a.png and --plot a.png are one file"),
        ("bench nc --output a.png --plot a.png", "--output a.png and --plot a.png are one file"),
        ("train --precision bf16", "unrecognized arguments: --precision bf16; did you mean --dtype?"),
        ("train --host-memory 48", "--host-memory: expected at least 1024 bytes; got '48', which is 48 B. Give the unit, as in \"48GiB\""),
        ("train --swap-dirs text", "error: --swap-dirs: text is not a directory; name a directory"),
        ("train --save=", "argument --save: the path is empty"),
        ("train --data /dev/zero", "/dev/zero: a pipe, a socket or a device; expected an ordinary file"),
        ("train --json out.json", "unrecognized arguments: out.json; --json takes no file: write one with --output"),
    ],
)
def test_a_mistake_prints_one_line_and_ends_with_status_2(directory, capsys, options, expected):
    assert main(options.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("infinity: error: ") and err.count("\n") == 1
    assert expected in err
    assert sorted(os.listdir(directory)) == ["text"]  # no file was written


def test_the_refusal_of_a_small_budget_names_the_needed_bytes(directory, capsys):
    assert main(["train", *SMALL, *ON_NVME, "--device-memory", "1KiB"]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("infinity: error: device_memory=1.0 KiB is too small: this model needs ") and err.count("\n") == 1


@pytest.mark.slow
def test_a_nonfinite_gradient_prints_one_line_with_nonfinite_raise(directory, capsys):
    assert main(["train", *SMALL, "--set", "nonfinite=raise", "--lr", "1e30"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("infinity: error: ") and "gradients of this step are not finite" in error


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit) as raised:
        main(["train", "--help"])
    assert raised.value.code == 0
    text = capsys.readouterr().out
    for name in vars(parse()):
        assert name == "command" or f"--{name.replace('_', '-')}" in text


# Settings


def test_config_show_prints_every_value_with_its_origin(directory, capsys):
    (directory / "swap").mkdir()
    (directory / "infinity.toml").write_text('[config]\nswap_dirs = "swap"\nhost_memory = "48GiB"\n')
    assert main("config show --set trace=true --set tile_above=none".split()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [field.name for field in dataclasses.fields(Config)]
    assert lines[:3] == [
        "swap_dirs              swap      infinity.toml",
        "host_memory            48.0 GiB  infinity.toml",
        "device_memory          auto      default",
    ]
    assert [line.split()[1:] for line in lines[-4:]] == [["none", "--set"], ["true", "--set"], ["true", "default"], ["0", "default"]]


def test_the_json_of_config_show_is_a_file_of_settings(directory, capsys):
    assert main("config show --json --set host_memory=1GiB --set tile_above=none".split()) == 0
    (directory / "out.json").write_text(capsys.readouterr().out)
    assert Config.load("out.json") == Config(host_memory=2**30, tile_above=None)
    assert json.loads((directory / "out.json").read_text())["origins"]["tile_above"] == "--set"


def test_config_show_converts_from_deepspeed(directory, capsys):
    source = {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/missing/there"}}, "gradient_clipping": 2}
    (directory / "ds.json").write_text(json.dumps(source))
    (directory / "infinity.toml").write_text('[config]\nseed = 5\n')  # --from-deepspeed ignores this file
    assert main("config show --from-deepspeed ds.json".split()) == 0
    out, err = capsys.readouterr()
    assert "swap_dirs              /missing/there  ds.json\n" in out and "\nMapped\n" in out  # a path of another machine is printed
    assert "ds.json: swap_dirs: /missing/there does not exist on this machine" in err and "mkdir -p /missing/there" in err and err.count("\n") == 1
    assert main("config show --from-deepspeed ds.json --json".split()) == 0
    assert json.loads(capsys.readouterr().out)["config"]["swap_dirs"] == ["/missing/there"]
    assert main("config show --from-deepspeed ds.json --set swap_dirs=missing".split()) == 2  # a wrong path of this machine
    assert "--set: swap_dirs: missing does not exist" in capsys.readouterr().err
    assert main("config show --from-deepspeed ds.json --set swap_dirs=.".split()) == 0
    values, _, lists = capsys.readouterr().out.partition("\n\n")
    assert [line.split() for line in values.splitlines() if not line.endswith("default")] == [
        ["swap_dirs", ".", "--set"],
        ["param_tier", "nvme", "ds.json"],
        ["dtype", "fp32", "ds.json"],
    ]
    assert lists.startswith("Mapped\n") and lists.endswith("infinity.OPTIMIZER(model.parameters(), max_grad_norm=2.0)\n")
    there = directory / "made"
    (directory / "ds.json").write_text(json.dumps(source).replace("/missing/there", str(there)))
    assert main("config show --from-deepspeed ds.json".split()) == 0
    made = capsys.readouterr()
    there.mkdir()
    assert main("config show --from-deepspeed ds.json".split()) == 0
    assert (made.out, "") == capsys.readouterr() and "does not exist on this machine" in made.err
    assert main("config show --from-deepspeed ds.json --set swap_dirs=. --json".split()) == 0
    (directory / "out.json").write_text(capsys.readouterr().out)
    assert Config.load("out.json") == Config(swap_dirs=directory, param_tier="nvme", dtype="fp32")
    assert json.loads((directory / "out.json").read_text())["conversion"]["to_optimizer"] == {"gradient_clipping": "max_grad_norm = 2.0"}


@pytest.mark.parametrize(
    "content, options, expected",
    [
        ("", "", {"device": "cpu", "dtype": "fp32"}),
        ("", "--set device=cuda:1", {"device": "cuda:1", "dtype": "bf16"}),
        ("", "--set device=none", {"device": "cpu", "dtype": "fp32"}),
        ("dtype = 'fp16'", "", {"device": "cpu", "dtype": "fp16"}),
        ("dtype = 'fp16'", "--dtype bf16", {"device": "cpu", "dtype": "bf16"}),
        ("device = 'cuda'", "", {"device": "cuda", "dtype": "bf16"}),
        ("device = 'cuda'", "--device cpu", {"device": "cpu", "dtype": "fp32"}),
        ("seed = 7", "--host-memory 1GiB", {"seed": 7, "host_memory": 2**30, "device": "cpu", "dtype": "fp32"}),
        ("seed = 7", "--set seed=8 --seed 0", {"seed": 0, "device": "cpu", "dtype": "fp32"}),
    ],
)
def test_train_has_its_own_defaults_for_device_and_dtype_only(directory, monkeypatch, content, options, expected):
    (directory / "infinity.toml").write_text(f"[config]\n{content}\n")
    arguments = parse(*options.split())
    if expected["device"] == "cpu":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert _config(arguments) == Config(**expected)
    elif not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=f"device='{expected['device']}': this PyTorch finds no CUDA device"):
            _config(arguments)


@pytest.mark.slow
def test_a_run_takes_its_settings_from_files(directory, capsys):
    (directory / "run").mkdir()
    (directory / "run" / "swap").mkdir()
    (directory / "run" / "my.toml").write_text(
        '[config]\nswap_dirs = "swap"\nparam_tier = "nvme"\noptimizer_state_tier = "nvme"\nseed = 3\ndevice_memory = "8MiB"\nresidency = "none"\n'
        'chunk_mib = 0.0625\n'
    )
    assert main(["train", *SMALL, "--config", "run/my.toml", "--set", "host_memory=64MiB", "--output", "out.json"]) == 0
    report = json.loads((directory / "out.json").read_text())
    assert report["losses"] == pytest.approx(plain_losses(5, seed=3), rel=1e-6)
    assert (report["device_budget_bytes"], report["options"]["seed"]) == (8 * 2**20, 3)
    assert report["config"]["swap_dirs"] == [str(directory / "run" / "swap")]
    assert report["links"]["nvme_read"]["bytes_per_step"] > 0 and not (directory / "infinity-swap").exists()


# Output


def test_progress_without_a_terminal_is_a_few_whole_lines(capsys):
    progress = StepProgress(steps=1000)
    for step in range(1000):
        progress(step, 1.0, [0.25] * (step + 1))
    progress.finish()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "step 1/1000  loss 1.000  0.25 s a step  250 s left"
    assert lines[-1] == "step 1000/1000  loss 1.000  0.25 s a step  0 s left"
    assert len(lines) < 20


def test_progress_on_a_terminal_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    progress = StepProgress(steps=3)
    for step in range(3):
        progress(step, 1.0, [0.25])
    progress.finish()
    err = capsys.readouterr().err
    assert err.count("\r") == 3 and err.count("\n") == 1 and err.endswith("\n")


def test_a_report_replaces_the_old_one_atomically(directory):
    path = directory / "out.json"
    path.write_text("old")
    write_json(path, {"a": 1})
    assert json.loads(path.read_text()) == {"a": 1}
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert sorted(os.listdir(directory)) == ["out.json", "text"]


def test_a_link_is_checked_by_its_target(directory):
    (directory / "kept").mkdir()
    for link, target in (("good", "kept/out.json"), ("bad", "missing/out.json"), ("loop", "loop"), ("folder", "kept")):
        (directory / link).symlink_to(target)
    check_file(Path("good"), "--output")
    write_json(Path("good"), 1)
    assert (directory / "kept" / "out.json").read_text() == "1\n" and (directory / "good").is_symlink()
    for link, message in (("bad", "no directory .*/missing; create it"), ("loop", "leads to itself"), ("folder", "is a directory")):
        with pytest.raises(ConfigError, match=f"--output {link}.*{message}"):
            check_file(Path(link), "--output")
    with pytest.raises(ConfigError, match="--output good and --plot kept/out.json are one file"):
        check_different({"--output": Path("good"), "--plot": Path("kept/out.json")})


def test_json_is_a_flag_of_every_command_with_a_result():
    """--json is a flag of each command with a result: JSON instead of text."""
    found = {}

    def walk(parser, name):
        for action in parser._actions:
            if action.metavar == "COMMAND":
                for command, below in action.choices.items():
                    walk(below, (*name, command))
            elif "--json" in action.option_strings:
                found[" ".join(name)] = type(action).__name__

    walk(_parser(), ())
    links = [f"bench {link}" for link in (*benchmarks.LINKS, "overlap")]
    expected = ["train", "status", "trace", "checkpoint inspect", "config show", "doctor", "calibrate", *links, "plan"]
    assert found == dict.fromkeys(expected, "_StoreTrueAction")


def test_with_json_nothing_else_is_on_standard_output(directory, capsys):
    assert main(["train", *SMALL, "--steps", "2", "--json", "--output", "out.json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == json.loads((directory / "out.json").read_text()) and len(json.loads(out)["losses"]) == 2
    assert "step 2/2" in err


# Runs


def plain_losses(steps, seed=0, accumulate=1, lr=3e-4):
    """Losses of the same training in plain PyTorch."""
    torch.manual_seed(seed)
    model = GPT(64, 3, 4, 256, 32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    text = torch.frombuffer(bytearray(Path("text").read_bytes()), dtype=torch.uint8).numpy()
    batches = Batches(text, vocab=256, batch=4, seq=32, seed=seed)
    losses = []
    for step in range(steps):
        parts = [model(*batches(step, micro)) for micro in range(accumulate)]
        sum(loss / accumulate for loss in parts).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(loss.item() for loss in parts) / accumulate)
    return losses


def test_a_report_measures_the_steps_after_the_second():
    run = TrainingRun.__new__(TrainingRun)  # with the measurements of a run of four steps
    run.arguments = parse(*"--batch 3 --accumulate 2 --seq 10".split())
    run.config = Config(device="cpu", dtype="fp32")
    run.losses = [4.0, 3.0, 2.0, 1.0]
    run.seconds = [9.0, 8.0, 1.0, 3.0]
    total = [0, 1000, 2000, 2300, 2500]  # bytes before the first step and after each
    run.counters = [
        {
            "num_parameters": 100,
            "model_state_nbytes": 1200,
            "device_budget_nbytes": 400,
            "peak_device_nbytes": 300 + step,
            "pinned_host_nbytes": 77,
            "nvme_read_nbytes": total[step],
            "nvme_write_nbytes": 2 * total[step],
            "links": {
                link: {"nbytes": 10 * total[step], "busy_seconds": step * 1e-6, "stall_seconds": step * 0.5} for link in LINKS
            },
        }
        for step in range(5)
    ]
    report = run.report()
    assert (report["losses"], report["step_seconds"]) == ([4.0, 3.0, 2.0, 1.0], [9.0, 8.0, 1.0, 3.0])
    assert (report["measured_steps"], report["median_step_seconds"], report["tokens_per_second"]) == (2, 2.0, 30.0)
    assert (report["nvme_read_bytes_per_param"], report["nvme_write_bytes_per_param"]) == (2.5, 5.0)
    assert (report["states_over_device_budget"], report["peak_device_bytes"], report["host_arena_bytes"]) == (3.0, 304, 77)
    assert report["stall_seconds"] == {link: 1.0 for link in LINKS}
    assert report["links"]["nvme_write"]["bytes_per_step"] == 2500
    assert report["links"]["nvme_write"]["gbps"] == pytest.approx(2.5)  # 5000 bytes in two microseconds
    assert report["links"]["nvme_write"]["stall_share"] == 0.25
    assert "NVMe        2.50 bytes read, 5.00 written" in _table(report)


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.long), 2])
def test_the_report_of_training_on_nvme_has_losses_traffic_and_memory(directory, capsys, accumulate):
    options = ["train", *SMALL, *ON_NVME, "--steps", "12", "--accumulate", str(accumulate), "--output", "out.json"]
    assert main(options) == 0
    out, err = capsys.readouterr()
    report = json.loads((directory / "out.json").read_text())

    assert report["num_parameters"] == sum(p.numel() for p in GPT(64, 3, 4, 256, 32).parameters())
    assert report["losses"] == pytest.approx(plain_losses(12, accumulate=accumulate), rel=1e-6)
    assert len(report["step_seconds"]) == 12 and report["measured_steps"] == 10
    assert report["median_step_seconds"] == statistics.median(report["step_seconds"][2:])
    tokens = 4 * 32 * accumulate
    assert math.isclose(report["tokens_per_second"] * report["median_step_seconds"], tokens)
    # fp32: each pass reads the weights, one pass also the states, and each step writes all. Host memory may hold many records of so
    # small a model. Tests of the engine bound the traffic exactly.
    padded = report["state_bytes"] / report["num_parameters"]
    assert 12 <= padded < 14
    assert 0 < report["nvme_write_bytes_per_param"] < 1.2 * padded
    assert 0 < report["nvme_read_bytes_per_param"] < 1.2 * padded * (1 + (2 * accumulate - 1) / 3)
    assert 0 < report["peak_device_bytes"] <= report["device_budget_bytes"] == 8 * 2**20
    assert 0 < report["host_arena_bytes"] <= 64 * 2**20
    assert report["states_over_device_budget"] == report["state_bytes"] / 2**23
    assert list(report["stall_seconds"]) == list(report["links"]) == list(LINKS)
    assert report["links"]["nvme_read"]["bytes_per_step"] > 0 and report["links"]["nvme_write"]["bytes_per_step"] > 0
    assert report["options"]["swap_dirs"] is None and report["options"]["output"] == "out.json"
    assert report["versions"]["torch"] == torch.__version__
    assert report["versions"]["infinity"] == infinity.__version__

    assert "step 12/12" in err
    assert f"{report['losses'][0]:.4f} first, {report['losses'][-1]:.4f} last" in out
    for name in LINKS:
        assert f"\n{name} " in out


def test_a_run_of_two_steps_reports_no_traffic_per_step(directory, capsys):
    assert main(["train", *SMALL, "--steps", "2", "--output", "out.json"]) == 0
    report = json.loads((directory / "out.json").read_text())
    assert (report["nvme_read_bytes_per_param"], report["nvme_write_bytes_per_param"]) == (None, None)
    assert report["measured_steps"] == 2
    assert "a parameter and step" not in capsys.readouterr().out


def test_ranks_do_not_resume_if_one_finds_no_checkpoint(directory, capsys, monkeypatch):
    monkeypatch.setattr(Ranks, "agree", lambda ranks, *values, **options: values != (-1,))  # another rank found a checkpoint
    assert main(["train", *SMALL, "--steps", "2", "--save", "run", "--resume"]) == 2
    assert "run: the ranks found different checkpoints; all must see the same directory" in capsys.readouterr().err


@pytest.mark.slow
def test_named_swap_directories_are_used(directory, capsys):
    for name in ("one", "two"):
        (directory / name).mkdir()
    assert main(["train", *SMALL, *ON_NVME, "--steps", "2", "--swap-dirs", "one", "two"]) == 0
    assert not (directory / "infinity-swap").exists()


def test_a_tied_checkpointed_model_trains_on_random_data(directory, capsys):
    options = [*SMALL[: SMALL.index("--data")], "--data", "random", "--vocab", "100", "--tie", "--checkpoint-activations"]
    assert main(["train", *options, "--output", "out.json"]) == 0
    losses = json.loads((directory / "out.json").read_text())["losses"]
    assert losses[0] == pytest.approx(math.log(100), rel=0.05)


def run_command(*command, **environment):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=300, env=environment)


@pytest.mark.slow
def test_the_module_can_be_run():
    done = run_command("-m", "infinity", "train", "--heads", "7")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "infinity: error: --heads 7 does not divide --hidden 384; choose one that does\n"


@pytest.mark.long
def test_two_ranks_see_the_same_losses_under_torchrun(directory):
    done = run_command(
        *"-m torch.distributed.run --standalone --nproc-per-node 2 -m infinity train".split(),
        *SMALL,
        *ON_NVME,
        *"--output out.json".split(),
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((directory / "out.json").read_text())
    assert report["world"] == 2
    assert report["losses"] == pytest.approx(plain_losses(5), rel=1e-5)
    assert report["links"]["all_gather"]["bytes_per_step"] > 0 and report["links"]["reduce_scatter"]["bytes_per_step"] > 0
    assert done.stdout.count("first, ") == 1  # only rank 0 prints


@pytest.mark.long
def test_a_batch_that_ranks_cannot_share_is_refused():
    done = run_command("-m", "infinity", "train", *SMALL, "--batch", "3", RANK="1", WORLD_SIZE="2")
    assert done.returncode == 2
    assert done.stderr == "infinity: error: rank 1: batch=3 cannot be shared by 2 ranks; use a multiple of 2\n"


@pytest.mark.long
def test_layer_wise_training_has_the_same_losses_and_reads_less(directory):
    found = {}
    for option in ([], ["--by-layer"]):
        options = ["train", *SMALL, *ON_NVME, "--layers", "6", "--accumulate", "4", *option, "--output", "out.json"]
        assert main(options) == 0
        found[bool(option)] = json.loads((directory / "out.json").read_text())
    assert found[True]["losses"] == found[False]["losses"]
    read = {by_layer: report["links"]["nvme_read"]["bytes_per_step"] for by_layer, report in found.items()}
    assert read[True] < 0.7 * read[False]


# Versions and help


def test_version_prints_the_version_of_the_package(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"infinity {infinity.__version__}, PyTorch {torch.__version__}\n"


def test_the_help_is_shown_without_arguments(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["infinity"])
    assert main() == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("usage: infinity") and "train a GPT" in shown.out and not shown.err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["trian"], "there is no command 'trian'; did you mean train?"),
        (["checkpoint", "exprot"], "there is no command 'exprot'; did you mean export?"),
        (["xyz"], "there is no command 'xyz'; see infinity --help"),
        (["checkpoint"], "the following arguments are required: COMMAND; see infinity checkpoint --help"),
    ],
    ids=str,
)
def test_an_unknown_command_is_named_with_the_nearest_command(argv, said, capsys):
    assert main(argv) == 2
    assert capsys.readouterr().err == f"infinity: error: {said}\n"


def test_a_warning_of_a_command_is_one_line_without_source(monkeypatch, capsys):
    def warn(_):
        print(end=warnings.formatwarning(UserWarning("the drive is slow"), UserWarning, __file__, 1))
        return 2

    monkeypatch.setattr(cli, "_failed", warn)
    assert main(["train", "--heads", "7"]) == 2
    assert capsys.readouterr().out == "infinity: warning: the drive is slow\n"


def test_a_small_share_is_not_shown_as_zero_percent():
    assert [plan_report._percent(share) for share in (0, 0.001, 0.004, 0.01, 1)] == ["0%", "<1%", "<1%", "1%", "100%"]
