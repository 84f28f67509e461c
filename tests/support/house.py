"""The modules of the package, their syntax trees, and the floor of each package."""

import ast
from pathlib import Path

import infinity

PACKAGE = Path(infinity.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# From the ground up; what stands in one row does not know its neighbours.
FLOORS = [
    {"errors", "version", "aio_ext"},
    {"sizes", "ordinary_file", "renamed", "spelling"},
    {"config_files", "output"},
    {"config"},
    {"system"},
    {"formats", "simulation"},
    {"plan"},
    {"model"},
    {"optim"},
    {"tiers"},
    {"engine"},
    {"checkpoints"},
    {"__init__"},
    {"integrations", "tools"},
    {"__main__", "alias"},
]
FLOOR = {name: floor for floor, row in enumerate(FLOORS) for name in row}

# On the ground by need, and by what nobody would look for elsewhere: what a configuration asks of a path before there is an engine.
# `Config.from_deepspeed` imports the conversion when a program asks for it.
EXCEPTIONS = {("config", "system.mounts"), ("config", "integrations.deepspeed")}

TALKS_TO_TORCH_DISTRIBUTED = {"system.ranks", "checkpoints.dcp_load", "checkpoints.dcp_save", "tools.train.training", "tools.measure.probes"}


def name_of(path):
    """Below `infinity`, with dots; of a package's `__init__` the package's."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


NAMES = {name_of(path): path for path in FILES}
TREES = {name: ast.parse(path.read_text()) for name, path in NAMES.items()}


def room(name):
    return name.split(".")[0]
