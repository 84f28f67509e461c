"""References in documents and comments are right: paths, tests, notes and names of files."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted((*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "bench" / "RESULTS.md"))
SOURCES = sorted(
    path for folder in ("infinity", "aio_ext", "bench", "tests") for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".c", ".h")
)
PATH = re.compile(r"(?:`|\]\()((?:[\w.-]+/)+(?:[\w.-]+\.(?:py|c|h|md|toml|png))?|[\w-]+\.(?:md|toml|png))(?:::(\w+))?(?:[`)\s])")
MADE_LATER = {"infinity.toml", "./infinity.toml", ".venv/bin/", "dist/"}  # commands make these files: no checkout has them
CITED = re.compile(r"\[Note: ([^\]]+)\](?: in `?([\w/]+\.(?:py|c|h))`?)?")


def told(text):
    """The text in one line, without the marks of comment lines."""
    return re.sub(r"\s*\n\s*(?:#|\*|//|\|)?\s*", " ", text)


def notes():
    """{name: paths} of all notes. A note's title begins a line; in Python the line has nothing more."""
    found = {}
    for path in SOURCES:
        end = r"\s*$" if path.suffix == ".py" else ""
        for name in re.findall(rf"(?m)^\s*(?:#|\*|/\*|//)?\s*\[Note: ([^\]]+)\]{end}", path.read_text()):
            found.setdefault(name, []).append(path)
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_paths_and_tests_named_in_a_document_exist(document):
    text = document.read_text()
    found = set(PATH.findall(text))
    assert found or document.name == "CHANGELOG.md"
    made = MADE_LATER | set(re.findall(r"(?m)^<!-- file: (\S+) -->$", text))  # the page makes these files
    missing = [path for path, _ in found if path not in made and not (ROOT / path).exists() and not (document.parent / path).exists()]
    assert not missing
    assert not [test for path, test in found if test and not re.search(rf"(?m)^def {test}\(", (ROOT / path).read_text())]


def test_cited_notes_exist_in_the_cited_files():
    made = notes()
    assert len(made) > 50
    for path in (*SOURCES, *DOCUMENTS):
        for name, file in CITED.findall(told(path.read_text())):
            if path != Path(__file__) and name != "...":
                assert name in made, f"{path.name} cites [Note: {name}]"
                assert any(str(place).endswith(f"/{file}") for place in made[name]) or not file, f"{path.name}: [Note: {name}] is not in {file}"


def test_files_named_in_comments_exist():
    names = {path.name for path in SOURCES} | {"setup.py"}
    for path in SOURCES:
        if path.is_relative_to(ROOT / "infinity") or path.is_relative_to(ROOT / "aio_ext"):
            missing = set(re.findall(r"\b\w+\.py\b", path.read_text())) - names
            assert not missing, f"{path.name} names {sorted(missing)}"
