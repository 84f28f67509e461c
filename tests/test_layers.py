"""Imports point downwards only, never sideways."""

import ast
from pathlib import Path

import pytest

import infinity

PACKAGE = Path(infinity.__file__).parent

# From the ground up; what stands in one row does not know its neighbours.
LAYERS = [
    {"errors", "events", "gauge", "lanes", "recompute", "_adam", "_adam_triton", "aio_ext"},
    {"settings", "output"},
    {"config", "adam", "arena", "chunks", "partition", "scaling", "schedule", "drives", "gpt", "tiling", "facade", "tensorfiles"},
    {"planner", "residency", "rules", "tiers", "activations", "manifest", "progress", "machine"},
    {"records", "optimizer", "store"},
    {"conversion"},
    {"gradients", "pipeline"},
    {"updater"},
    {"hooks", "values"},
    {"assembly", "margin"},
    {"engine"},
    {"init", "vertical", "inventory"},
    {"saving", "loading", "importing", "dcp", "rotation"},
    {"__init__"},
    {"training", "checkpoints"},
    {"cli"},
    {"__main__"},
]
HEIGHT = {module: height for height, row in enumerate(LAYERS) for module in row}


def imports_of(path):
    """Every module of the package, and aio_ext, that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: a relative import"
            if node.module == "infinity":
                names = [f"infinity.{a.name}" if f"{a.name}" in HEIGHT else "infinity" for a in node.names]
            else:
                names = [node.module]
        else:
            continue
        for name in names:
            if name == "infinity":
                found.add("__init__")
            elif name.startswith("infinity."):
                found.add(name.split(".")[1])
            elif name == "aio_ext":
                found.add(name)
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.py")), ids=lambda path: path.stem)
def test_a_module_imports_only_what_lies_below_it(path):
    assert path.stem in HEIGHT, f"{path.name} has no place in LAYERS"
    wrong = {name for name in imports_of(path) if HEIGHT[name] >= HEIGHT[path.stem]}
    assert not wrong, f"{path.stem} imports {wrong}, which are not below it"


def test_only_three_modules_talk_to_torch_distributed():
    users = set()
    for path in PACKAGE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            users |= {path.stem for name in names if name.startswith("torch.distributed")}
    assert users == {"partition", "training", "dcp"}
