"""Scripts of examples/ differ from their plain twins in at most three lines and have equal losses (fp32, to 1e-5)."""

import difflib

import pytest
from support.examples import FOLDER, SCRIPTS, check_losses

MOST_CHANGED = 3

pytestmark = pytest.mark.usefixtures("one_thread")


def changed_lines(before, after):
    blocks = difflib.SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False).get_opcodes()
    return sum(max(i2 - i1, j2 - j1) for kind, i1, i2, j1, j2 in blocks if kind != "equal")


def test_each_script_has_a_twin():
    assert SCRIPTS and set(SCRIPTS) | {"tiny.py"} == {path.name for path in FOLDER.glob("*.py")}


@pytest.mark.parametrize("name", SCRIPTS)
def test_at_most_three_lines_are_changed(name):
    assert 0 < changed_lines((FOLDER / "plain" / name).read_text(), (FOLDER / name).read_text()) <= MOST_CHANGED


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SCRIPTS)
def test_losses_equal_those_of_the_twin(name, tmp_path, monkeypatch):
    check_losses(name, tmp_path, monkeypatch)
