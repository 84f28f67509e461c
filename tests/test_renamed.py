"""Old public names: each one works with one warning that names the new one. Both names together are an error."""

import argparse
import dataclasses
import json
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import infinity
from infinity.config import Config, command_layers
from infinity.engine.stats import EngineStats
from infinity.engine.trace_file import RankTrace, Slice, read_trace, write_trace
from infinity.errors import ConfigError, RenamedWarning
from infinity.renamed import CONFIG_FIELDS, LINKS, STATS_KEYS, Renamed, warn_renamed
from infinity.tools.cli import main

VALUES = {"nvme": ".", "weights": "host", "states": "nvme", "moments": "bf16", "activations": "host"}
DEEPSPEED = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}, "bf16": {"enabled": True}}


@pytest.fixture(autouse=True)
def empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def given_by_new_name(old):
    return {CONFIG_FIELDS[old]: VALUES[old]}


@pytest.mark.parametrize("old", VALUES)
def test_an_old_field_is_accepted_with_one_warning(old):
    new = CONFIG_FIELDS[old]
    with pytest.warns(RenamedWarning) as found:
        config = Config(**{old: VALUES[old]})
    assert [(str(each.message), each.filename) for each in found] == [(f"Config: {old} is deprecated: use {new}", __file__)]
    assert config == Config(**given_by_new_name(old))
    with pytest.warns(RenamedWarning, match=f"^Config.{old} is deprecated: use Config.{new}$"):
        assert getattr(config, old) == getattr(config, new)


@pytest.mark.parametrize("old", VALUES)
@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_a_file_with_an_old_field_is_read_with_one_warning(old, suffix):
    path, new = Path(f"settings{suffix}"), CONFIG_FIELDS[old]
    path.write_text(f"[config]\n{old} = {VALUES[old]!r}\n" if suffix == ".toml" else json.dumps({"config": {old: VALUES[old]}}))
    with pytest.warns(RenamedWarning) as found:
        config = Config.load(path)
    assert [str(each.message) for each in found] == [f"{path}: {old} is deprecated: use {new}"]
    assert config == Config(**given_by_new_name(old)) and config.origins == {new: str(path)}
    with pytest.warns(RenamedWarning, match="key"):
        assert config.origins[old] == str(path)


def test_an_override_by_its_old_name_wins_over_a_file_with_the_new_name():
    Path("settings.toml").write_text('[config]\nparam_tier = "host"\n')
    with pytest.warns(RenamedWarning, match="^argument: weights is deprecated: use param_tier$"):
        assert Config.load("settings.toml", weights="nvme").param_tier == "nvme"
    with pytest.warns(RenamedWarning, match="^argument: weights"):
        assert Config.from_deepspeed(DEEPSPEED, weights="nvme").param_tier == "nvme"
    with pytest.warns(RenamedWarning, match="^--set: weights"):
        layers = command_layers(argparse.Namespace(config=Path("settings.toml"), set=["weights=nvme"]))
        assert Config.layered(layers).param_tier == "nvme"


def test_a_setting_with_both_names_is_an_error():
    with pytest.raises(ConfigError, match="^Config: nvme and swap_dirs are one setting: give swap_dirs alone$"):
        Config(nvme=".", swap_dirs=".")
    Path("settings.toml").write_text('[config]\nstates = "host"\noptimizer_state_tier = "host"\n')
    with pytest.raises(ConfigError, match="^settings.toml: states and optimizer_state_tier are one setting"):
        Config.load("settings.toml")
    with pytest.raises(ConfigError, match="^argument: moments and optimizer_state_dtype are one setting"):
        Config.from_deepspeed(DEEPSPEED, moments="fp32", optimizer_state_dtype="fp32")


@pytest.mark.parametrize("words", ["--weights nvm", "--weights=nvm"])
def test_an_old_option_is_accepted_with_a_warning(words, capsys):
    with pytest.warns(RenamedWarning, match="^--weights is deprecated: use --param-tier$"):
        assert main(["train", *words.split()]) == 2
    assert "--param-tier='nvm': expected" in capsys.readouterr().err


def test_an_option_with_both_names_is_an_error(capsys):
    assert main("train --weights host --param-tier host".split()) == 2
    assert "--weights and --param-tier are one setting: give --param-tier alone" in capsys.readouterr().err


def test_the_old_command_is_accepted_with_a_warning(capsys):
    with pytest.warns(RenamedWarning, match="^infinity tune is deprecated: use infinity calibrate$"):
        assert main(["tune", "missing"]) == 2
    assert "missing does not exist" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize(
    "words, warning",
    [
        ("config show --set weights=host", "--set: weights is deprecated: use param_tier"),
        ("train --help --weights host", "--weights is deprecated: use --param-tier"),
        ("tune --help", "infinity tune is deprecated: use infinity calibrate"),
    ],
)
def test_a_shell_shows_the_warning_in_one_line(words, warning):
    done = subprocess.run([sys.executable, "-m", "infinity", *words.split()], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr == f"infinity: warning: {warning}\n"


@pytest.mark.parametrize("old", VALUES)
def test_replace_accepts_an_old_field_with_one_warning(old):
    with pytest.warns(RenamedWarning) as found:
        config = dataclasses.replace(Config(seed=1), **{old: VALUES[old]})
    assert [(str(each.message), each.filename) for each in found] == [(f"Config: {old} is deprecated: use {CONFIG_FIELDS[old]}", __file__)]
    assert config == Config(seed=1, **given_by_new_name(old))


@pytest.mark.parametrize("unknown, old", [("weight", "weights"), ("state", "states"), ("moment", "moments")])
def test_a_misspelt_old_name_leads_to_the_new_one(unknown, old, capsys):
    new = CONFIG_FIELDS[old]
    with pytest.raises(ConfigError, match=f"no field '{unknown}': did you mean '{new}'"):
        Config(**{unknown: "host"})
    assert main(["train", f"--{unknown}", "host"]) == 2
    assert f"did you mean --{new.replace('_', '-')}?" in capsys.readouterr().err


def test_a_dict_accepts_old_keys_with_a_warning():
    found = Renamed({"new": 1, "other": 2}, {"old": "new", "gone": "left"})
    for read in (lambda: found["old"], lambda: found.get("old")):
        with pytest.warns(RenamedWarning, match="^key 'old' is deprecated: use 'new'$"):
            assert read() == 1
    assert list(found) == ["new", "other"] and found == {"new": 1, "other": 2}
    assert "old" in found and "gone" not in found and found.get("gone", 3) == 3
    with pytest.raises(KeyError):
        found["gone"]


def test_each_line_of_a_program_causes_one_warning():
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        for _ in range(3):
            warn_renamed("old", "new")
    assert len(found) == 1 and found[0].filename == __file__


def test_old_keys_of_stats_and_descriptions_are_read_with_a_warning(tmp_path):
    model = torch.nn.Linear(8, 8)  # an engine does not keep its model alive
    with infinity.offload(model, Config(swap_dirs=tmp_path, device="cpu", verbose=False)) as engine:
        stats, description = engine.stats(), infinity.describe(model)
        assert not {*STATS_KEYS, *LINKS} & {*stats, *stats["links"]} and list(stats) == list(EngineStats.__annotations__)
        for old, new in STATS_KEYS.items():
            with pytest.warns(RenamedWarning, match=f"^key '{old}' is deprecated: use '{new}'$"):
                assert stats[old] == stats[new]
        for old, new in LINKS.items():
            for values in (stats["links"], description.step_nbytes):
                with pytest.warns(RenamedWarning, match=f"^key '{old}' is deprecated: use '{new}'$"):
                    assert values[old] == values[new]
        assert dataclasses.asdict(description)["step_nbytes"] == description.step_nbytes


def test_a_trace_file_with_old_names_of_links_is_read(tmp_path):
    slices = [Slice("nvme_read", "chunk 0 weights", 0.0, 1.0, 4096), Slice("stall", "chunk 0", 0.5, 1.0, 0, "nvme_read")]
    write_trace(tmp_path / "new.json", [RankTrace(0, slices)])
    text = (tmp_path / "new.json").read_text()
    assert text.count('"nvme_read"') == 3
    (tmp_path / "old.json").write_text(text.replace('"nvme_read"', '"nc"'))
    assert read_trace(tmp_path / "old.json") == read_trace(tmp_path / "new.json") == [RankTrace(0, slices)]


def test_a_config_that_was_pickled_with_old_names_keeps_its_settings():
    config = Config(param_tier="host")
    state = {{"param_tier": "weights"}.get(name, name): value for name, value in vars(config).items()}
    loaded = Config.__new__(Config)
    with pytest.warns(RenamedWarning, match="weights is deprecated: use param_tier"):
        loaded.__setstate__(state)
    assert loaded == config and pickle.loads(pickle.dumps(config)) == config


def test_a_group_of_commands_has_names_of_its_own(capsys):
    assert main(["bench", "tune"]) == 2
    assert "tune" in capsys.readouterr().err
