"""The house: which package may import which, what each says of itself, that `plan` is pure, and how large things may be.

Sizes and stores from outside are ratchets: what is too large today is listed with its size, and may only shrink. Who makes one smaller
lowers its number; who splits or renames one moves its line. See ARCHITECTURE.md.
"""

import ast
import re
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
import torch
from support.house import EXCEPTIONS, FILES, FLOOR, NAMES, PACKAGE, TALKS_TO_TORCH_DISTRIBUTED, TREES, room


def imports_of(name):
    """Every module of the package, below `infinity`, and aio_ext, that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: a relative import"
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name.removeprefix("infinity.") in NAMES else node.module for name in inside]
        else:
            continue
        for imported in names:
            if imported == "infinity":
                found.add("__init__")
            elif imported.startswith("infinity."):
                found.add(imported.removeprefix("infinity."))
            elif imported.split(".")[0] == "aio_ext":
                found.add("aio_ext")
    return {name.rpartition(".")[0] if room(name) in FLOOR and name not in NAMES and name != "aio_ext" else name for name in found}


@pytest.mark.parametrize("name", NAMES)
def test_a_module_imports_only_what_lies_below_its_package(name):
    own = room(name)
    assert own in FLOOR, f"{name} has no place in FLOORS"
    for other in imports_of(name):
        assert FLOOR[room(other)] < FLOOR[own] or room(other) == own or (name, other) in EXCEPTIONS, f"{name} imports {other}"


def test_no_module_imports_what_imports_it():
    """However many steps later."""
    below = {name: imports_of(name) & NAMES.keys() for name in NAMES}
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
    text = ast.get_docstring(TREES[package.replace("/", ".")]) or ""
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


def test_only_these_modules_talk_to_torch_distributed():
    users = set()
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            users |= {name for module in names if module.startswith("torch.distributed")}
    assert users == TALKS_TO_TORCH_DISTRIBUTED


# [Note: stores from outside]
# A store is `x.name = ...` in any form (also `+=`, `for x.name in`, `with ... as x.name`) where x is neither `self` nor `cls`: it changes an
# object from outside of its class. It counts where a class of another module has an attribute of that name, in its body, its __slots__ or by
# `self.name = ...`, and none of this module has. So it goes by names, not by types: what two modules call alike is not seen, and what torch
# has, as `param.data`, or its own `ctx`, is nobody's here.
STORES_FROM_OUTSIDE = 94


def attributes_of(tree):
    """Names of all that the classes of a module say that their objects have."""
    found = set()
    for made in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for node in made.body:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
            names = {target.id for target in targets if isinstance(target, ast.Name)}
            found |= set(ast.literal_eval(node.value)) if names == {"__slots__"} else names
        found |= {node.attr for node in ast.walk(made) if is_store(node) and is_own(node.value)}
    return found


def is_store(node):
    return isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)


def is_own(node):
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def test_fewer_and_fewer_attributes_are_stored_from_outside():
    """See [Note: stores from outside]."""
    attributes = {name: attributes_of(tree) for name, tree in TREES.items()}
    found = []
    for name, tree in TREES.items():
        others = set().union(*(attributes[other] for other in attributes if other != name)) - attributes[name]
        stores = [node for node in ast.walk(tree) if is_store(node) and not is_own(node.value)]
        stores = [node for node in stores if not hasattr(torch.nn.Parameter, node.attr) and ast.unparse(node.value) != "ctx"]
        found += [f"{name}:{node.lineno} {ast.unparse(node)}" for node in stores if node.attr in others]
    assert len(found) <= STORES_FROM_OUTSIDE, f"{len(found)} stores from outside, {STORES_FROM_OUTSIDE} before:\n" + "\n".join(found)


# Modules that make the three values (formats, partition, tiers), or do arithmetic on elements of a format: there such questions belong.
MAKE_VALUES = {
    "config", "spelling", "renamed", "integrations.deepspeed", "tools.configuration",
    "plan.tiers", "plan.partition", "system.ranks", "system.failure_watch",
    "formats.dtypes", "formats.format", "formats.assignment", "optim.shard", "optim.adam", "optim._adam_triton", "optim._block_codes_triton",
}  # fmt: skip
MOST_QUESTIONS = 25


def is_none(node):
    return isinstance(node, ast.Constant) and node.value is None


def is_table(node):
    return isinstance(node.ops[-1], (ast.In, ast.NotIn)) and isinstance(node.comparators[-1], (ast.Name, ast.Attribute))


def questions(tree):
    """(line, text) of each literal "nvme", and of each comparison of a dtype, a rank or a number of ranks.

    A comparison with None, and a look into a named table, are no questions.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value == "nvme":
            yield node.lineno, "'nvme'"
        if isinstance(node, ast.Compare) and not is_none(node.comparators[-1]) and not is_table(node):
            names = [getattr(each, "attr", getattr(each, "id", "")) for each in (node.left, *node.comparators)]
            if any(re.fullmatch(r"(.*_)?(dtype|world|rank)", name) for name in names):
                yield node.lineno, ast.unparse(node)


def test_code_asks_a_format_a_partition_or_a_tier():
    """Code asks the value for a property, instead of comparing names of dtypes, numbers of ranks or names of tiers."""
    found = [f"{name}:{line} {text}" for name, tree in TREES.items() if name not in MAKE_VALUES for line, text in questions(tree)]
    assert len(found) <= MOST_QUESTIONS, f"{len(found)} questions, {MOST_QUESTIONS} before:\n" + "\n".join(found)


@pytest.mark.parametrize("code, num", [
    ("a.dtype == torch.float32", 1), ("if world > 1: pass", 1), ("0 <= rank < self.world", 1), ("x = 'nvme'", 1),
    ("dtype in ('fp16', 'fp32')", 1), ("dtype in TABLE", 0), ("dtype is None", 0), ("format.is_coded", 0), ("a.world * 2", 0),
])
def test_the_count_sees_each_kind_of_question(code, num):
    assert len(list(questions(ast.parse(code)))) == num


MOST_LINES_OF_A_FILE = 450


def test_no_file_is_too_long():
    sizes = {name: len(path.read_text().splitlines()) for name, path in NAMES.items()}
    too_long = {name: size for name, size in sizes.items() if size > MOST_LINES_OF_A_FILE}
    assert not too_long, f"split these at a noun: {too_long}"


# Lines, and methods of a class or arguments of a function but for self. Names are those inside of a module, so that a move changes nothing.
MOST = {"class": (300, 30), "function": (60, 8)}
TOO_LARGE = {
    "class": {
        "Ranks": (300, 33),
    },
    "function": {
        "_adam": (65, 23),
        "_adam_coded": (60, 27),  # a kernel of Triton takes no structures
        "_updated": (60, 14),
        "adam_step": (60, 9),
        "Muon.__init__": (60, 13),  # those of torch's Muon, and four of ours
        "SGD.__init__": (60, 9),  # those of torch's SGD, and three of every optimizer
        "plan": (60, 11),
        "workload": (80, 8),
    },
}


def sizes_of(node, prefix=""):
    """(kind, name, lines, methods or arguments) of each class and function."""
    for inner in ast.iter_child_nodes(node):
        if not isinstance(inner, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from sizes_of(inner, prefix)
            continue
        name, num_lines = prefix + inner.name, inner.end_lineno - inner.lineno + 1
        if isinstance(inner, ast.ClassDef):
            yield "class", name, num_lines, sum(isinstance(item, ast.FunctionDef) for item in inner.body)
        else:
            arguments = [each.arg for each in (*inner.args.posonlyargs, *inner.args.args, *inner.args.kwonlyargs)]
            yield "function", name, num_lines, len(arguments) - (arguments[:1] in (["self"], ["cls"]))
        yield from sizes_of(inner, f"{name}.")


# Lines of a file, a class and a function in packages that have reached their size.
SMALL_PACKAGES = {"checkpoints": (450, 300, 60)}


@pytest.mark.parametrize("package", SMALL_PACKAGES)
def test_a_small_package_stays_small(package):
    of_file, of_class, of_function = SMALL_PACKAGES[package]
    names = [name for name in NAMES if room(name) == package]
    found = [(name, of_file, len(NAMES[name].read_text().splitlines())) for name in names]
    for name in names:
        found += [(f"{name}.{inner}", of_class if kind == "class" else of_function, n) for kind, inner, n, _ in sizes_of(TREES[name])]
    assert not [f"{name} has {n} lines, at most {most}" for name, most, n in found if n > most]


def test_classes_and_functions_that_are_too_large_only_shrink():
    found = [size for tree in TREES.values() for size in sizes_of(tree)]
    grown = []
    for kind, name, num_lines, num_parts in found:
        most = [max(limit, listed) for limit, listed in zip(MOST[kind], TOO_LARGE[kind].get(name, (0, 0)))]
        if num_lines > most[0] or num_parts > most[1]:
            grown.append(f"{kind} {name}: {num_lines} lines of {most[0]}, {num_parts} {'methods' if kind == 'class' else 'arguments'} of {most[1]}")
    assert not grown, "cut these, or where one was cut out of a larger one, move that one's line:\n" + "\n".join(grown)


TESTS = Path(__file__).parent


def imported_in(source):
    """Parts of the names that a source imports, also in functions and in programs in strings."""
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(textwrap.dedent(source))
    except (SyntaxError, ValueError):
        return  # a string, and no program
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
            yield from ".".join(names).split(".")
        elif isinstance(node, ast.JoinedStr):
            yield from imported_in("".join(part.value if isinstance(part, ast.Constant) else "_" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "import" in node.value:
            yield from imported_in(node.value)


def test_no_test_module_imports_another():
    """Shared code is in tests/support/. A program in a string may import its own module."""
    paths = sorted(TESTS.rglob("*.py"))
    modules = {path.stem for path in paths if path.stem.startswith("test_")}
    found = {path: (set(imported_in(path.read_text())) & modules) - {path.stem} for path in paths}
    wrong = [f"{path.relative_to(TESTS)} imports {name}" for path, names in found.items() for name in sorted(names)]
    assert not wrong, "move shared code to tests/support/:\n" + "\n".join(wrong)


@pytest.mark.parametrize("source", [
    "import torch, test_a as t", "from tests.b import test_a", "from tests.test_a import b", "def f():\n    from test_a import b",
    "run('import test_a; test_a.b()')", "run(f'''\n    import {torch}\n    from test_a import b''')",
])
def test_an_import_of_a_test_module_is_found_anywhere(source):
    assert "test_a" in set(imported_in(source))
