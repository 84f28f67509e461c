"""A package does not use the things that the package's docstring forbids ("Must not know ...").

The docstring of each package says "Must not know chunks, tiers or steps." The test looks up each of these phrases in FORBIDDEN, and walks
the imports, attributes, names and arguments of all modules of the package. A phrase that FORBIDDEN lacks is an error. EXCEPTIONS lists the
uses that remain, with their number, which may only fall.
"""

import ast
import re
from collections import Counter
from dataclasses import dataclass

import pytest
from support.house import NAMES, PACKAGE, TALKS_TO_TORCH_DISTRIBUTED, TREES


@dataclass(frozen=True)
class Forbidden:
    """Forbidden modules, with all modules below them, and identifiers. `allowed`: modules below the forbidden ones that may be imported."""

    imports: str = ""
    names: str = ""
    allowed: str = ""

    def has_import(self, module):
        return is_below(module, self.imports.split()) and not is_below(module, self.allowed.split())


FORBIDDEN = {
    "autograd": Forbidden(
        "torch.autograd infinity.engine.autograd",
        "autograd grad_fn requires_grad requires_grad_ is_leaf retain_grad backward no_grad enable_grad set_grad_enabled is_grad_enabled "
        "inference_mode saved_tensors_hooks register_hook register_post_accumulate_grad_hook _post_accumulate_grad_hooks _backward_hooks "
        "_current_graph_task_id increment_version",
    ),
    "chunks": Forbidden("infinity.tiers", "chunk chunks Chunk ChunkState ChunkInfo chunk_state chunks_of registry Registry"),
    "files": Forbidden("os io pathlib shutil tempfile mmap", "open Path fsync unlink preadv pwritev"),
    "hooks of modules": Forbidden(
        "infinity.engine.autograd.hooks infinity.engine.autograd.compiled_modules",
        "register_forward_hook register_forward_pre_hook register_full_backward_hook register_full_backward_pre_hook _forward_hooks "
        "_forward_pre_hooks",
    ),
    "how a step is planned": Forbidden(
        "infinity.plan.schedule infinity.plan.route infinity.plan.placement", "Course Route schedule Placement"
    ),
    "how an engine works": Forbidden(
        "infinity.tiers infinity.plan infinity.engine infinity.checkpoints infinity.system infinity.model infinity.optim",
        "updater cycle course follower gate",
    ),
    "how bytes move": Forbidden(
        "aio_ext ctypes infinity.system.swap infinity.system.swap_directory infinity.system.swap_owner",
        "crc32c preadv pwritev from_address memset memmove cudaMemcpyAsync submit Transfer Ticket",
    ),
    "modules": Forbidden(
        "torch.nn", "Module modules named_modules children named_children named_parameters named_buffers", "torch.nn.Parameter"
    ),
    "parameters": Forbidden("torch.nn infinity.model infinity.tiers", "Parameter ParameterState named_parameters requires_grad param params"),
    "ranks": Forbidden("infinity.system.ranks torch.distributed", "rank ranks world world_size Ranks"),
    "steps": Forbidden("infinity.engine", "cycle StepCycle begin_step end_step num_steps micro_batch micro_batches"),
    "threads": Forbidden(
        "threading queue concurrent asyncio multiprocessing infinity.system", "Thread Lock RLock Condition Event Monitor Lane"
    ),
    "tiers": Forbidden(
        "infinity.tiers",
        "ChunkState SpanState DeviceTier Records Updater Gradients registry updater weights_home states_home on_device device_states "
        "device_state extents evict prefetch tier tiers",
    ),
    "torch": Forbidden("torch numpy aio_ext", "torch numpy"),
    "what a kernel computes": Forbidden(
        "infinity.optim.adam infinity.optim._adam_triton infinity.tiers.arithmetic", "adam_step split_master masters denormals"
    ),
    "when a step begins": Forbidden(
        "infinity.engine", "cycle Cycle begin_forward begin_backward first_step gate Gate", "infinity.engine.access.training_state"
    ),
    "the place of a shard": Forbidden("infinity.tiers infinity.system.swap", "weights_home states_home on_device extents nvme swap residency"),
    "the reason of a transfer": Forbidden(
        "infinity.plan infinity.tiers infinity.engine infinity.optim", "optimizer gradient gradients schedule route prefetch evict"
    ),
}

# The number of uses that remain, by package and identifier or imported module. Nobody raises a number.
EXCEPTIONS = {
    ("engine", "infinity.optim.adam"): 1,  # the sum of squares of a norm
    ("engine", "infinity.system.swap"): 2,  # sizing.py measures the swap, engines.py imports the module for the order of atexit
    ("engine", "infinity.system.swap_owner"): 1,  # build.py has files of dead runs removed
    ("engine", "infinity.tiers.arithmetic"): 3,  # hyper-parameters, and the result of an update
    ("integrations", "infinity.engine.refused_trainers"): 1,  # a trainer with an integration is not refused
    ("tiers", "cycle"): 1,  # itertools.cycle
    ("tiers", "no_grad"): 3,  # values.py writes to spans, which parameters that require gradients look into
}

TORCH_DISTRIBUTED = re.compile(r"\btorch\.(distributed|_C\._distributed_c10d)\b")


def is_below(module, packages):
    return any(module == package or module.startswith(package + ".") for package in packages)


def packages():
    """Module names below `infinity` of all packages whose docstring has a "Must not know"."""
    for path in sorted(PACKAGE.rglob("__init__.py")):
        name = ".".join(path.parent.relative_to(PACKAGE).parts)
        if name and "Must not know " in (ast.get_docstring(TREES[name]) or ""):
            yield name


def phrases_of(package):
    """The phrases behind "Must not know" in the package's docstring: "chunks, tiers or steps" are three."""
    text = " ".join(ast.get_docstring(TREES[package]).split())
    (listed,) = re.findall(r"Must not know ([^.:;]*)", text)
    return [phrase.strip() for phrase in re.split(r", or |, | or ", listed) if phrase.strip()]


def imports_of(tree):
    """Each imported module; of `from a import b` both `a` and `a.b`, since b may be a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name,) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((f"{node.module}.{alias.name}", node.module) for alias in node.names)


def names_of(tree):
    """Each use of an identifier: attributes, variables, arguments, functions and classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name


def uses(package):
    """Counts, by (package, forbidden import or identifier), and the modules where each of them is."""
    found, places = Counter(), {}
    for name in NAMES:
        if not is_below(name, [package]):
            continue
        here = Counter()
        for phrase in phrases_of(package):
            forbidden = FORBIDDEN[phrase]
            for names in imports_of(TREES[name]):
                if forbidden.has_import(names[0]):
                    here[package, names[-1]] += 1
            words = set(forbidden.names.split())
            here.update((package, word) for word in names_of(TREES[name]) if word in words)
        found += here
        for use in here:
            places.setdefault(use, []).append(name)
    return found, places


@pytest.mark.parametrize("package", [*packages()])
def test_each_phrase_of_must_not_know_has_a_meaning(package):
    assert phrases_of(package) and not [phrase for phrase in phrases_of(package) if phrase not in FORBIDDEN]


@pytest.mark.parametrize("package", [*packages()])
def test_a_package_does_not_use_things_that_it_must_not_know(package):
    found, places = uses(package)
    wrong = [f"{use[1]}, {n} times, in {', '.join(places[use])}" for use, n in found.items() if n > EXCEPTIONS.get(use, 0)]
    assert not wrong, f"{package} must not know {', '.join(phrases_of(package))}:\n" + "\n".join(wrong)


def test_each_exception_is_still_needed():
    found = Counter()
    for package in packages():
        found |= uses(package)[0]
    assert not EXCEPTIONS.keys() - found.keys()


def test_checkpoints_use_one_module_of_the_engine():
    imported = {names[0] for name in NAMES if is_below(name, ["checkpoints"]) for names in imports_of(TREES[name])}
    of_engine = {module for module in imported if is_below(module, ["infinity.engine"])}
    assert of_engine and all(is_below(module, ["infinity.engine.access.training_state"]) for module in of_engine), of_engine


def test_only_listed_modules_reach_torch_distributed_by_any_name():
    """test_house.py looks at imports; this test looks at attributes, such as `torch.distributed.get_rank`."""
    users = set()
    for name, tree in TREES.items():
        attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        if any(TORCH_DISTRIBUTED.search(ast.unparse(node)) for node in attributes):
            users.add(name)
    assert users <= TALKS_TO_TORCH_DISTRIBUTED | {"tools.doctor.devices"}, users  # tools.doctor.devices only asks for the version of NCCL


def test_the_walk_sees_imports_attributes_and_arguments():
    lines = "from torch import nn", "import torch.autograd as a", "def f(requires_grad): return x.grad_fn, torch._C._current_graph_task_id()"
    tree = ast.parse("\n".join(lines))
    assert [names[0] for names in imports_of(tree)] == ["torch.nn", "torch.autograd"]
    assert {"requires_grad", "grad_fn", "_current_graph_task_id", "f"} <= set(names_of(tree))
