import dataclasses
import math
import random
import struct
from pathlib import Path

import pytest

from infinity import config_files
from infinity.errors import ConfigError
from infinity.tools.machine import DriveRates, Machine

DRIVE = {"read_gbps": 3.4, "write_gbps": 4.5, "mixed_gbps": 3.8}
LEAST = {
    "device_memory": "141 GB",
    "device_tflops": 700,
    "device_update_gparams": 118.0,
    "host_memory": "2 TiB",
    "host_gbps": 400.0,
    "update_gparams": 20,
    "h2d_gbps": 55.0,
    "d2h_gbps": 55.0,
    "h2d_all_gbps": 40.0,
    "d2h_all_gbps": 31.0,
}


def written(machine, path):
    path.write_text(config_files.to_toml({"machine": machine.to_table()}), encoding="utf-8")
    return path


def bits(value):
    return struct.pack("<d", value) if isinstance(value, float) else value


def random_machine(draw):
    """A machine of random valid values."""

    def value_of(field):
        if field.type.startswith("float"):
            ordinary = draw.random() * 10 ** draw.randrange(-20, 20) + 1e-300
            return draw.choice([5e-324, 0.1 + 0.2, 1.7976931348623157e308, ordinary, draw.randrange(1, 1000)])
        if field.type == "int":
            return draw.choice([1024, draw.randrange(1024, 2**63), 10**30])
        if field.name == "unsure":
            return ()
        return draw.choice(["", "a b", '"\\\n\x7f', "ü/日本😀", "[machine]", "#"])

    def of(cls, **others):
        return cls(**{field.name: value_of(field) for field in dataclasses.fields(cls) if field.name not in others}, **others)

    return of(Machine, device=draw.choice(["cuda", "cpu"]), drives=tuple(of(DriveRates) for _ in range(draw.randrange(4))))


def test_a_file_restores_the_machine_with_the_same_bits(tmp_path):
    draw = random.Random(0)
    for _ in range(200):
        machine = random_machine(draw)
        loaded = Machine.load(written(machine, tmp_path / "machine.toml"))
        assert loaded == machine
        for one, other in ((machine, loaded), *zip(machine.drives, loaded.drives)):
            for field in dataclasses.fields(one):
                if field.name != "drives":
                    assert bits(getattr(one, field.name)) == bits(getattr(other, field.name))
                    assert type(getattr(one, field.name)) is type(getattr(other, field.name))


def test_a_file_keeps_the_names_of_unsure_figures(tmp_path):
    machine = Machine.from_table(LEAST | {"unsure": ["h2d_gbps"], "drives": [DRIVE | {"unsure": ["read_gbps", "write_gbps"]}]})
    assert Machine.load(written(machine, tmp_path / "machine.toml")) == machine
    assert machine.unsure_names == ["h2d_gbps", "read_gbps of a drive", "write_gbps of a drive"]


def test_sizes_are_bytes_and_drives_add_up():
    drives = [DRIVE | {"capacity": "7.68 TB", "endurance": "14 PB"}, DRIVE]
    machine = Machine.from_table(LEAST | {"nodes": 2, "devices": 8, "drives": drives})
    assert (machine.device_memory, machine.host_memory) == (141 * 10**9, 2 * 2**40)
    assert (machine.drives[0].capacity, machine.drives[0].endurance, machine.drives[1].endurance) == (7_680 * 10**9, 14 * 10**15, 0)
    assert machine.world == 16
    assert [machine.drive_gbps(what) for what in ("read", "write", "mixed")] == [6.8, 9.0, 7.6]


@pytest.mark.parametrize("drives", [{}, {"drives": []}])
def test_a_machine_without_drives_has_none(drives):
    machine = Machine.from_table(LEAST | drives)
    assert machine.drives == ()
    assert machine.drive_gbps("read") == 0
    assert Machine.from_table(machine.to_table()) == machine


@pytest.mark.parametrize(
    "change, expected",
    [
        ({"h2d_gpbs": 5}, "machine has no 'h2d_gpbs': did you mean 'h2d_gbps'?"),
        ({"zzz": 5}, "machine has no 'zzz': it has name, nodes, devices"),
        ({"drives": [DRIVE, DRIVE | {"path_": "x"}]}, "machine.drives[1] has no 'path_': did you mean 'path'?"),
        ({"drives": [DRIVE | {"mixed_gbps": 0}]}, "machine.drives[0]: mixed_gbps: expected a rate above zero; got 0"),
        ({"drives": DRIVE}, "machine.drives: expected a list of tables: [[machine.drives]]"),
        ({"drives": [5]}, "machine.drives: expected a list of tables"),
        ({"drives": "sda"}, "machine.drives: expected a list of tables"),
        ({"drives": [DRIVE | {"capacity": "8T"}]}, "machine.drives[0]: capacity: expected bytes"),
        ({"drives": [DRIVE | {"read_gbps": -1}]}, "machine.drives[0]: read_gbps: expected a number, zero or above; got -1"),
        ({"drives": [DRIVE | {"path": 5}]}, "machine.drives[0]: path: expected text; got 5"),
        ({"nodes": 0}, "machine: nodes=0: expected a whole number above zero"),
        ({"devices": 1.5}, "machine: devices=1.5: expected a whole number above zero"),
        ({"devices": True}, "machine: devices=True: expected a whole number"),
        ({"device": "gpu"}, "machine: device='gpu': expected 'cuda' or 'cpu'"),
        ({"device": []}, "machine: device=[]: expected 'cuda' or 'cpu'"),
        ({"name": 5}, "machine: name: expected text; got 5"),
        ({"device_memory": "141G"}, "machine: device_memory: expected bytes"),
        ({"device_memory": -1}, "machine: device_memory: expected bytes"),
        ({"host_memory": 1e12}, "machine: host_memory: expected bytes"),
        ({"host_memory": True}, "machine: host_memory: expected bytes"),
        ({"h2d_gbps": math.nan}, "machine: h2d_gbps: expected a number, zero or above; got nan"),
        ({"h2d_gbps": math.inf}, "machine: h2d_gbps: expected a number, zero or above; got inf"),
        ({"h2d_gbps": "55"}, "machine: h2d_gbps: expected a number, zero or above; got '55'"),
        ({"h2d_gbps": True}, "machine: h2d_gbps: expected a number"),
        ({"h2d_gbps": []}, "machine: h2d_gbps: expected a number"),
        ({"copy_latency_us": None}, "machine: copy_latency_us: expected a number"),
    ],
)
def test_an_error_names_the_mistake_and_its_place(change, expected):
    with pytest.raises(ConfigError) as raised:
        Machine.from_table(LEAST | change)
    assert str(raised.value).startswith(expected)
    assert "\n" not in str(raised.value)


def test_one_error_lists_all_missing_and_wrong_fields(tmp_path):
    with pytest.raises(ConfigError, match="machine: device_memory, host_memory missing"):
        Machine.from_table({})
    with pytest.raises(ConfigError) as raised:
        Machine.from_table(LEAST | {"nodes": 0, "h2d_gbps": -1, "drives": [DRIVE | {"endurance": "x"}]})
    assert [line.split(":")[1].split("=")[0].strip() for line in str(raised.value).splitlines()] == ["nodes", "h2d_gbps", "endurance"]


def test_unknown_rates_are_left_out_and_required_by_name():
    Machine.from_table({name: value for name, value in (LEAST | {"drives": [DRIVE]}).items() if name != "host_gbps"}).require_rates()
    machine = Machine.from_table({name: LEAST[name] for name in LEAST if name != "device_tflops"} | {"drives": [DRIVE, {"read_gbps": 1}]})
    assert Machine.from_table(machine.to_table()) == machine and "device_tflops" not in machine.to_table()
    with pytest.raises(ConfigError, match=r"^machine: device_tflops, drives\[1\].write_gbps, drives\[1\].mixed_gbps are not known: run"):
        machine.require_rates()


@pytest.mark.parametrize("content", ["", "machine = 5", "[config]\ndtype = 'fp32'", "[[machine]]\nnodes = 1"])
def test_the_refusal_of_a_file_without_a_machine_names_calibrate(tmp_path, content):
    path = tmp_path / "infinity.toml"
    path.write_text(content)
    with pytest.raises(ConfigError) as raised:
        Machine.load(path)
    assert str(raised.value) == f"{path} has no table [machine]; `infinity calibrate` writes one"


def test_an_error_names_the_file(tmp_path):
    path = tmp_path / "infinity.toml"
    path.write_text("[machine]\nnodes = 1\nnoods = 2\n")
    with pytest.raises(ConfigError) as raised:
        Machine.load(path)
    assert str(raised.value).startswith(f"{path}: machine has no 'noods': did you mean 'nodes'?\n")


def test_a_machine_of_the_package_is_loaded_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Machine.load("h200x8").devices == len(Machine.load(Path("h200x8")).drives) == 8
    with pytest.raises(ConfigError, match="^machine h200: there is no such file; the machines that come with infinity are h200x8$"):
        Machine.load("h200")
    (tmp_path / "h200x8").write_text("")  # a file in the working directory has precedence
    with pytest.raises(ConfigError, match=r"^h200x8 has no table \[machine\]"):
        Machine.load("h200x8")
