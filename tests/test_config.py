import argparse
import dataclasses
import json
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path

import pytest

from infinity import config_files
from infinity.config import CHOICES, Config, command_layers
from infinity.errors import BudgetError, ConfigError, SwapError, UsageError
from infinity.sizes import format_bytes, parse_bytes


@pytest.fixture(autouse=True)
def empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_field_has_a_default(empty_directory):
    config = Config()
    assert config == Config(
        swap_dirs="infinity-swap",
        host_memory="auto",
        device_memory="auto",
        param_tier="auto",
        optimizer_state_tier="auto",
        activation_tier="auto",
        dtype="bf16",
        optimizer_state_dtype="fp32",
        chunk_mib=None,
        residency="auto",
        device=None,
        update="auto",
        nonfinite="auto",
        tile_above="auto",
        trace=False,
        seed=0,
    )
    assert config.creates_swap_dir
    assert os.listdir(empty_directory) == []  # a Config creates no files


def test_values_are_normalised(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    config = Config(swap_dirs=["a", tmp_path / "b"], host_memory="2 GiB", device_memory=10_000, chunk_mib=4)
    assert config.swap_dirs == (Path("a"), tmp_path / "b")
    assert (config.host_memory, config.device_memory, config.chunk_mib) == (2**31, 10_000, 4)
    assert not config.creates_swap_dir
    assert Config(swap_dirs="a").swap_dirs == Config(swap_dirs=Path("a")).swap_dirs == (Path("a"),)


def test_the_size_of_tiles_is_auto_bytes_or_none():
    assert [Config(tile_above=value).tile_above for value in ("auto", "512MiB", 7000, None)] == ["auto", 2**29, 7000, None]


def test_a_config_is_frozen_and_can_be_replaced_and_pickled():
    config = Config(host_memory="1GiB")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.host_memory = 5
    other = dataclasses.replace(config, dtype="fp32")
    assert (other.host_memory, other.dtype) == (2**30, "fp32")
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(TypeError):
        Config("infinity-swap")


@pytest.mark.parametrize(
    "unknown, expected",
    [
        ("host_memroy", "did you mean 'host_memory'?"),
        ("devise", "did you mean 'device'?"),
        ("chunk_mb", "did you mean 'chunk_mib'?"),
        ("zzz", "the fields are swap_dirs, host_memory"),
    ],
)
def test_an_unknown_field_is_an_error_with_the_nearest_name(unknown, expected):
    with pytest.raises(ConfigError) as raised:
        Config(**{unknown: 1})
    assert f"no field {unknown!r}" in str(raised.value)
    assert expected in str(raised.value)


@pytest.mark.parametrize(
    "field, value, expected",
    [
        ("swap_dirs", "missing", "missing does not exist; create it (mkdir -p missing)"),
        ("swap_dirs", [], "expected a directory"),
        ("swap_dirs", 5, "expected a directory"),
        ("swap_dirs", "", "a name is empty"),
        ("swap_dirs", ["a", ""], "a name is empty"),
        ("swap_dirs", ["a", None], "expected a directory"),
        ("swap_dirs", ["infinity-swap", "a"], "infinity-swap does not exist"),
        ("swap_dirs", ["a", "./a/../a"], "one directory"),
        ("swap_dirs", "file", "file is not a directory"),
        ("host_memory", "20G", 'expected bytes, such as 1073741824, "20GiB" or "4 GB"; got \'20G\', or "auto"'),
        ("host_memory", 0, "expected at least 1024 bytes; got 0"),
        ("host_memory", -1, "expected bytes"),
        ("host_memory", True, "expected bytes"),
        ("device_memory", "", "expected bytes"),
        ("device_memory", None, "expected bytes"),
        ("device_memory", 1.5, "expected bytes"),
        ("param_tier", "nvm", "did you mean 'nvme'?"),
        ("optimizer_state_tier", "disk", "expected 'auto', 'device', 'host' or 'nvme'"),
        ("activation_tier", "gpu", "expected 'auto', 'device', 'host' or 'nvme'"),
        ("dtype", "fp17", "dtype='fp17': expected 'bf16', 'fp16' or 'fp32'; did you mean 'fp16'?"),
        ("dtype", "BF16", "did you mean 'bf16'?"),
        ("optimizer_state_dtype", "fp8", "expected 'fp32', 'bf16' or '8bit'"),
        ("residency", "all", "expected 'auto' or 'none'"),
        ("residency", None, "expected 'auto' or 'none'"),
        ("update", "eager", "expected 'auto', 'deferred' or 'backward'"),
        ("nonfinite", "stop", "expected 'auto', 'ignore', 'raise' or 'skip'"),
        ("chunk_mib", 0, "above zero"),
        ("chunk_mib", float("nan"), "above zero"),
        ("chunk_mib", 1e308, "at most 1073741824"),
        ("chunk_mib", 10**400, "at most 1073741824"),
        ("chunk_mib", "8", "a number of MiB"),
        ("chunk_mib", True, "a number of MiB"),
        ("device", "gpu", "expected 'cpu', 'cuda' or 'cuda:N'"),
        ("device", "cuda:", "expected 'cpu'"),
        ("tile_above", 0, 'Give the unit, as in "0GiB", or "auto", or None'),
        ("tile_above", "big", 'expected bytes, such as 1073741824, "20GiB" or "4 GB"; got \'big\', or "auto", or None'),
        ("tile_above", False, "expected bytes"),
        ("trace", 1, "expected True or False"),
        ("seed", -1, "expected an integer"),
        ("seed", 2**64, "expected an integer"),
        ("seed", 1.0, "expected an integer"),
    ],
)
def test_the_error_of_a_wrong_value_names_field_value_and_remedy(tmp_path, field, value, expected):
    (tmp_path / "a").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as raised:
        Config(**{field: value})
    assert str(raised.value).startswith(field)
    assert expected in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_directory_that_is_not_writable_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)  # os.access is always true for root
    with pytest.raises(ConfigError, match="not writable"):
        Config(swap_dirs=tmp_path)


def test_all_mistakes_are_reported_together():
    with pytest.raises(ConfigError) as raised:
        Config(swap_dirs="missing", dtype="fp8", seed=-1)
    assert [line.split(":")[0].split("=")[0] for line in str(raised.value).splitlines()] == ["swap_dirs", "dtype", "seed"]


def test_every_choice_is_accepted():
    for field, choices in CHOICES.items():
        for choice in choices:
            assert getattr(Config(**{field: choice}), field) == choice
    for device in ("cpu", "cuda", "cuda:3"):
        assert Config(device=device).device == device


def test_every_field_is_documented():
    source = Path(sys.modules[Config.__module__].__file__).read_text()
    for field in dataclasses.fields(Config):
        declared = source.index(f"\n    {field.name}: ")
        assert source[source.index("\n", declared + 1) :].lstrip().startswith('"""'), field.name


@pytest.mark.parametrize(
    "text, expected",
    [
        (0, 0),
        (12, 12),
        ("4096", 4096),
        ("512MiB", 512 * 2**20),
        ("20GiB", 20 * 2**30),
        ("4 GB", 4 * 10**9),
        (" 1.5 kib ", 1536),
        ("2TB", 2 * 10**12),
        ("7 b", 7),
        ("1024 PiB", 2**60),
    ],
)
def test_parse_bytes(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "1.5", "-1", "1e9", "20 G", "1 GiB 2", "inf", None, 1.0, False, b"1"])
def test_parse_bytes_refuses(text):
    with pytest.raises(ConfigError, match="expected bytes"):
        parse_bytes(text)


@pytest.mark.parametrize(
    "nbytes, expected",
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (int(2.6 * 2**30), "2.6 GiB"),
        (2**20 - 1, "1.0 MiB"),
        (-(2**20), "-1.0 MiB"),
        (2**60, "1024.0 PiB"),
    ],
)
def test_format_bytes(nbytes, expected):
    assert format_bytes(nbytes) == expected


def test_errors_have_the_builtin_base_classes_that_callers_expect():
    assert issubclass(ConfigError, ValueError)
    assert issubclass(BudgetError, ConfigError)
    assert issubclass(UsageError, RuntimeError)
    error = SwapError(28, "no space left", "/swap/file")
    assert isinstance(error, OSError) and (error.errno, error.filename) == (28, "/swap/file")


@pytest.mark.parametrize("module", ["errors", "config"])
def test_the_pure_layers_do_not_import_torch(module):
    source = Path(sys.modules[Config.__module__].__file__).parent / f"{module}.py"
    code = (
        "import importlib.util, sys, types; package = types.ModuleType('infinity'); "
        f"package.__path__ = [{str(source.parent)!r}]; sys.modules['infinity'] = package; "
        f"import infinity.{module}; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    "fields, expected",
    [
        ({"optimizer_state_dtype": "bf16", "dtype": "fp32"}, "this value goes with dtype='bf16' only"),
        ({"optimizer_state_dtype": "bf16", "dtype": "fp16"}, "this value goes with dtype='bf16' only"),
        ({"dtype": "fp16", "nonfinite": "raise"}, "Use nonfinite='auto'"),
        ({"dtype": "fp16", "update": "backward"}, "Use update='deferred' or 'auto'"),
        ({"nonfinite": "skip", "update": "backward"}, "update='backward' with nonfinite='skip'"),
    ],
)
def test_fields_that_exclude_each_other_are_refused_with_a_remedy(fields, expected):
    with pytest.raises(ConfigError) as raised:
        Config(**fields)
    assert expected in str(raised.value)


# Files


def write(path, **values):
    """Writes a file of settings in the way of a user."""
    content = {"config": values, "machine": {"devices": 8}}
    path.write_text(json.dumps(content) if path.suffix == ".json" else config_files.to_toml(content))
    return path


def random_config(draw, directories):
    """A configuration of random valid values."""
    while True:
        try:
            return Config(
                swap_dirs=draw.choice([Path("infinity-swap"), draw.sample(directories, draw.randrange(1, 4))]),
                host_memory=draw.choice(["auto", draw.randrange(1, 2**63)]),
                device_memory=draw.choice(["auto", f"{draw.randrange(1, 99)}.5 GiB"]),
                tile_above=draw.choice(["auto", None, draw.randrange(1, 2**63)]),
                chunk_mib=draw.choice([None, 4, draw.random() * 10 ** draw.randrange(-9, 9)]),
                device=draw.choice([None, "cpu", "cuda:7"]),
                trace=draw.random() < 0.5,
                seed=draw.choice([0, draw.randrange(2**64)]),
                **{name: draw.choice(choices) for name, choices in CHOICES.items()},
            )
        except ConfigError:
            continue


@pytest.mark.slow
@pytest.mark.parametrize("name", ["infinity.toml", "any.json"])
def test_a_written_configuration_is_loaded_unchanged(tmp_path, name):
    directories = [tmp_path / text for text in ("a", "b c", "ü", '"\\#')]
    for directory in directories:
        directory.mkdir()
    draw = random.Random(0)
    for _ in range(150):
        config = random_config(draw, directories)
        write(tmp_path / name, **config.to_table())
        loaded = Config.load(name)
        assert loaded == config
        assert set(loaded.origins.values()) == {name} and set(loaded.origins) == {field.name for field in dataclasses.fields(Config)}
        if not config.creates_swap_dir:  # the default directory is relative to the working directory
            assert Config.load(tmp_path / name) == config


def test_the_word_none_means_none():
    assert Config(tile_above="none", device="none", chunk_mib="none") == Config(tile_above=None)


def test_relative_paths_in_a_file_are_relative_to_the_file(tmp_path, monkeypatch):
    (tmp_path / "settings" / "swap").mkdir(parents=True)
    (tmp_path / "home" / "swap").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    write(tmp_path / "settings" / "a.toml", swap_dirs=["swap", "~/swap", str(tmp_path)])
    assert Config.load("settings/a.toml").swap_dirs == (Path("settings/swap"), tmp_path / "home" / "swap", tmp_path)
    write(tmp_path / "settings" / "b.json", swap_dirs="swap")
    assert Config.load("settings/b.json").swap_dirs == (Path("settings/swap"),)
    monkeypatch.chdir(tmp_path / "settings")
    assert Config.load("b.json").to_table()["swap_dirs"] == [str(tmp_path / "settings" / "swap")]


def test_arguments_override_the_file(tmp_path):
    path = write(tmp_path / "a.toml", dtype="fp32", host_memory="1GiB")
    config = Config.load(path, dtype="bf16", seed=1)
    assert config == Config(dtype="bf16", host_memory=2**30, seed=1)
    assert config.origins == {"dtype": "argument", "host_memory": str(path), "seed": "argument"}


def test_origins_are_not_part_of_the_value(tmp_path):
    write(tmp_path / "a.toml", dtype="fp32")
    config, plain = Config.load("a.toml"), Config(dtype="fp32")
    assert (config, hash(config), repr(config)) == (plain, hash(plain), repr(plain))
    assert (config.origins, plain.origins, plain.conversion) == ({"dtype": "a.toml"}, {}, None)
    assert pickle.loads(pickle.dumps(config)).origins == config.origins
    for name in ("origins", "conversion"):
        with pytest.raises(ConfigError, match=f"no field {name!r}"):
            Config(**{name: {}})
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.origins = {}


@pytest.mark.parametrize(
    "content, overrides, expected",
    [
        ("[config]\nhost_memroy = 1", {}, "a.toml: Config has no field 'host_memroy': did you mean 'host_memory'?"),
        ("[config]\norigins = {}", {}, "a.toml: Config has no field 'origins'"),
        ("[config.swap_dirs]\npath = 1", {}, "a.toml: swap_dirs={'path': 1}: expected a directory"),
        ("[config]\nswap_dirs = [5]", {}, "a.toml: swap_dirs=[5]: expected a directory"),
        ("[config]\nswap_dirs = ''", {}, "a.toml: swap_dirs=['']: a name is empty"),
        ("[config]\nswap_dirs = 'missing'", {}, "a.toml: swap_dirs: missing does not exist"),
        ("[config]\nhost_memory = 1e9", {}, "a.toml: host_memory: expected bytes"),
        ("[config]\nseed = 2024-01-01", {}, "a.toml: seed=datetime.date(2024, 1, 1): expected an integer"),
        ("[config]\nchunk_mib = inf", {}, "a.toml: chunk_mib=inf: expected a number of MiB"),
        ("[config]\ndtype = 'fp32'", {"sed": 1}, "argument: Config has no field 'sed': did you mean 'seed'?"),
        ("[config]\ndtype = 'fp32'", {"optimizer_state_dtype": "bf16"}, "argument: optimizer_state_dtype='bf16' with dtype='fp32'"),
        ("[config]\nupdate = 'backward'", {"dtype": "fp16"}, "a.toml: update='backward' with dtype='fp16'"),
        ("[config]\nnonfinite = 'raise'", {"dtype": "fp16"}, "a.toml: nonfinite='raise' with dtype='fp16'"),
        ("[machine]", {}, "a.toml has no table [config]"),
        ("config = 5", {}, "a.toml has no table [config]"),
        ("[config", {}, "a.toml is not valid TOML"),
        (None, {}, "a.toml cannot be read: No such file or directory"),
    ],
)
def test_the_error_of_a_mistake_in_a_file_names_the_file(tmp_path, content, overrides, expected):
    if content is not None:
        (tmp_path / "a.toml").write_text(content)
    with pytest.raises(ConfigError) as raised:
        Config.load("a.toml", **overrides)
    assert str(raised.value).startswith(expected)
    assert "\n" not in str(raised.value)


# Commands


def of_command(*, config=None, set=(), options=(), **values):
    return Config.layered(command_layers(argparse.Namespace(config=config, set=set, **values), options))


def test_options_override_set_and_set_overrides_files(tmp_path):
    fields = ("seed", "dtype", "param_tier", "optimizer_state_tier", "chunk_mib")
    write(tmp_path / "infinity.toml", **dict(zip(fields, (1, "fp16", "host", "host", 1))))
    assert of_command().origins == dict.fromkeys(fields, "infinity.toml")
    other = write(tmp_path / "other.json", **dict(zip(fields[1:], ("fp32", "nvme", "nvme", 2))))
    told = ["param_tier=device", "optimizer_state_tier=auto", "chunk_mib=3", "chunk_mib=4"]
    options = {"optimizer_state_tier": "device", "chunk_mib": None, "host_memory": None}
    config = of_command(config=other, set=told, options=tuple(options), **options)
    assert config == Config(seed=1, dtype="fp32", param_tier="device", optimizer_state_tier="device", chunk_mib=4)
    assert [config.origins[name] for name in fields] == ["infinity.toml", str(other), "--set", "--optimizer-state-tier", "--set"]


def test_the_origin_of_an_option_is_its_spelling():
    config = of_command(options=("host_memory", "seed"), host_memory="1GiB", seed=0)
    assert config.origins == {"host_memory": "--host-memory", "seed": "--seed"}


@pytest.mark.parametrize("content", [None, "", "[machine]\ndevices = 8"])
def test_a_default_file_without_settings_is_ignored(tmp_path, content):
    if content is not None:
        (tmp_path / "infinity.toml").write_text(content)
    assert of_command().origins == {}


def test_every_mistake_names_its_origin(tmp_path):
    write(tmp_path / "infinity.toml", dtipe="fp32")
    with pytest.raises(ConfigError) as raised:
        of_command(set=["sed=1"])
    assert str(raised.value).splitlines() == [
        "infinity.toml: Config has no field 'dtipe': did you mean 'dtype'?",
        "--set: Config has no field 'sed': did you mean 'seed'?",
    ]
    write(tmp_path / "infinity.toml", dtype="fp17")
    with pytest.raises(ConfigError) as raised:
        of_command(set=["seed=-1"], options=("update",), update="x")
    first, second, third = str(raised.value).splitlines()
    assert first.startswith("infinity.toml: dtype='fp17': ") and third.startswith("--set: seed=-1: ")
    assert second.startswith("--update='x': expected "), "the error of an option names the field twice"
