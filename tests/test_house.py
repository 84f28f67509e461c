"""The house: which package may import which, what each says of itself, and that `plan` is pure. See ARCHITECTURE.md."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import infinity

PACKAGE = Path(infinity.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# From the ground up; what stands in one row does not know its neighbours.
FLOORS = [
    {"errors", "aio_ext"},
    {"sizes"},
    {"config_files", "deepspeed", "output"},
    {"config"},
    {"system"},
    {"plan"},
    {"model"},
    {"optim"},
    {"tiers"},
    {"engine"},
    {"checkpoints"},
    {"__init__"},
    {"tools"},
    {"__main__"},
]
FLOOR = {name: floor for floor, row in enumerate(FLOORS) for name in row}

# On the ground by need, and by what nobody would look for elsewhere: what a configuration asks of a path before there is an engine.
EXCEPTIONS = {("config", "system.mounts")}

TALKS_TO_TORCH_DISTRIBUTED = {"system.ranks", "checkpoints.dcp", "tools.train.training", "tools.measure.probes"}


def name_of(path):
    """Below `infinity`, with dots; of a package's `__init__` the package's."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


NAMES = {name_of(path): path for path in FILES}


def room(name):
    return name.split(".")[0]


def imports_of(path):
    """Every module of the package, below `infinity`, and aio_ext, that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: a relative import"
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name.removeprefix("infinity.") in NAMES else node.module for name in inside]
        else:
            continue
        for name in names:
            if name == "infinity":
                found.add("__init__")
            elif name.startswith("infinity."):
                found.add(name.removeprefix("infinity."))
            elif name.split(".")[0] == "aio_ext":
                found.add("aio_ext")
    return {name.rpartition(".")[0] if room(name) in FLOOR and name not in NAMES and name != "aio_ext" else name for name in found}


@pytest.mark.parametrize("name", NAMES)
def test_a_module_imports_only_what_lies_below_its_package(name):
    own = room(name)
    assert own in FLOOR, f"{name} has no place in FLOORS"
    for other in imports_of(NAMES[name]):
        assert FLOOR[room(other)] < FLOOR[own] or room(other) == own or (name, other) in EXCEPTIONS, f"{name} imports {other}"


def test_no_module_imports_what_imports_it():
    """However many steps later."""
    below = {name: imports_of(path) & NAMES.keys() for name, path in NAMES.items()}
    done = set()

    def walk(name, above):
        assert name not in above, f"a circle: {' -> '.join([*above[above.index(name):], name])}"
        if name not in done:
            for other in sorted(below[name]):
                walk(other, [*above, name])
            done.add(name)

    for name in below:
        walk(name, [])


def test_every_room_of_the_house_is_there():
    assert {room(name) for name in NAMES} | {"aio_ext"} == set(FLOOR)


@pytest.mark.parametrize("package", sorted(str(path.parent.relative_to(PACKAGE)) for path in FILES if path.name == "__init__.py" and path.parent != PACKAGE))
def test_a_package_says_what_it_knows_and_what_it_must_not(package):
    text = ast.get_docstring(ast.parse((PACKAGE / package / "__init__.py").read_text())) or ""
    if package.startswith("tools"):
        assert len(text) > 60
    else:
        assert "Knows " in text and "Must not know " in text


def test_plan_is_pure():
    """It imports neither torch nor threads nor files, not even by way of others."""
    code = (
        "import importlib, pkgutil, sys, types; package = types.ModuleType('infinity'); "
        f"package.__path__ = [{str(PACKAGE)!r}]; sys.modules['infinity'] = package; import infinity.plan; "
        "[importlib.import_module(m.name) for m in pkgutil.iter_modules(infinity.plan.__path__, 'infinity.plan.')]; "
        "found = {'torch', 'numpy', 'aio_ext'} & sys.modules.keys(); assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_only_four_modules_talk_to_torch_distributed():
    users = set()
    for name, path in NAMES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            users |= {name for module in names if module.startswith("torch.distributed")}
    assert users == TALKS_TO_TORCH_DISTRIBUTED
