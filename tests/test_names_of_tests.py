"""The name of a test says the behaviour in at most 70 characters."""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
MOST_CHARACTERS = 70
LONGER = {"integrations": 1, "model": 11, "optim": 6, "plan": 23}  # longer names by folder: numbers may only fall
FOLDERS = sorted({path.parent.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*.py")})


def names_of(path):
    functions = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return [node.name for node in functions if node.name.startswith("test_")]


@pytest.mark.parametrize("folder", FOLDERS)
def test_names_of_tests_have_at_most_70_characters(folder):
    names = [f"{path.name}::{name}" for path in sorted((TESTS / folder).glob("*.py")) for name in names_of(path)]
    found = [name for name in names if len(name.partition("::")[2]) > MOST_CHARACTERS]
    most = LONGER.get(folder, 0)
    told = f"{len(found)} names in tests/{folder} have over {MOST_CHARACTERS} characters, expected at most {most} such names; shorten one of"
    assert names and len(found) <= most, "\n".join([told, *found])
