"""Imports point downwards only, never sideways."""

import ast
from pathlib import Path

import pytest

import infinity

PACKAGE = Path(infinity.__file__).parent

# From the ground up; what stands in one row does not know its neighbours. The engine first: `__init__` is its public face.
LAYERS = [
    {"errors", "events", "interrupts", "lanes", "recompute", "freed", "_adam", "_adam_triton", "_huffman", "aio_ext", "peers"},
    {"settings", "dropped", "output", "jsontext", "deepspeed", "timeline", "gauge", "mounts", "parameters"},
    {"config", "adam", "arena", "chunks", "partition", "scaling", "schedule", "sharing", "gpt", "tiling", "facade", "tensorfiles", "buffers"},
    {"drives", "late"},
    {"planner", "residency", "rules", "tiers", "activations", "manifest"},
    {"compressor", "records", "optimizer", "store"},
    {"conversion", "foreign"},
    {"gradients", "pipeline"},
    {"updater"},
    {"hooks", "values"},
    {"assembly", "margin"},
    {"cycle"},
    {"engine"},
    {"init", "vertical", "inventory", "tracing"},
    {"saving", "loading", "importing", "dcp"},
    {"__init__"},
    {"tools.findings", "tools.formulas", "tools.machine", "tools.progress", "tools.rotation", "tools.search"},
    {"tools.breakdown", "tools.devices", "tools.probes", "tools.simulator", "tools.status", "tools.system", "tools.volumes", "tools.workload"},
    {"tools.prediction", "tools.selftest"},
    {
        "tools.benchmarks",
        "tools.checkpoints",
        "tools.configuration",
        "tools.doctor",
        "tools.overlap",
        "tools.planning",
        "tools.training",
        "tools.tuning",
    },
    {"cli"},
    {"__main__"},
]
HEIGHT = {module: height for height, row in enumerate(LAYERS) for module in row}


def modules():
    """Every file of the package, with its name below `infinity`."""
    files = [(path.stem, path) for path in PACKAGE.glob("*.py")] + [(f"tools.{path.stem}", path) for path in PACKAGE.glob("tools/*.py")]
    return sorted((name, path) for name, path in files if name != "tools.__init__")


def imports_of(path):
    """Every module of the package, and aio_ext, that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: a relative import"
            if node.module == "infinity":
                names = [f"infinity.{a.name}" if a.name in HEIGHT else "infinity" for a in node.names]
            elif node.module == "infinity.tools":
                names = [f"infinity.tools.{a.name}" for a in node.names]
            else:
                names = [node.module]
        else:
            continue
        for name in names:
            if name == "infinity":
                found.add("__init__")
            elif name.startswith("infinity."):
                found.add(".".join(name.split(".")[1 : 3 if name.startswith("infinity.tools.") else 2]))
            elif name == "aio_ext":
                found.add(name)
    return found


@pytest.mark.parametrize("name, path", modules(), ids=[name for name, _ in modules()])
def test_a_module_imports_only_what_lies_below_it(name, path):
    assert name in HEIGHT, f"{path} has no place in LAYERS"
    wrong = {other for other in imports_of(path) if HEIGHT[other] >= HEIGHT[name]}
    assert not wrong, f"{name} imports {wrong}, which are not below it"


def test_every_place_in_the_layers_is_taken():
    assert {name for name, _ in modules()} == set(HEIGHT) - {"_adam", "_huffman", "aio_ext"}


def test_only_four_modules_talk_to_torch_distributed():
    users = set()
    for module, path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            users |= {module for name in names if name.startswith("torch.distributed")}
    assert users == {"partition", "dcp", "tools.training", "tools.probes"}
