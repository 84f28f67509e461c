"""Measures how plain the project's English is: `python tests/support/prose.py [FILES]`.

Knows comments, docstrings and Markdown. Must not know the project's modules: the script imports none of them.

Counted per 1,000 words: "what", and "it", "its", "itself". Counted as a share of all sentences: those over 30 words.
A word is a run of letters and apostrophes. Inline code counts as one word. Not counted: code blocks, drawings, indented examples,
HTML comments, addresses of links. A sentence ends at a full stop, a question mark, a blank line, a list item or the border of a table cell.
"""

import ast
import io
import itertools
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LONGEST = 30  # words in a sentence
INDENT = 4  # columns: a line indented this much more than the paragraph is an example or a drawing

_WORD = re.compile(r"[A-Za-z']+")
_END = re.compile(r"(?<=[.!?])[)\"'*_]*\s+|\n{2,}")
_ITEM = re.compile(r"(?:[-*+]|\d+\.)\s+")
_PRONOUNS = ("it", "its", "itself")


@dataclass(frozen=True)
class Rates:
    """Counts of one text; `+` adds two texts."""

    num_words: int = 0
    num_what: int = 0
    num_it: int = 0
    num_sentences: int = 0
    num_long: int = 0

    def __add__(self, other: "Rates") -> "Rates":
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Rates(*(mine + theirs for mine, theirs in pairs))

    @property
    def what(self) -> float:
        return 1000 * self.num_what / max(self.num_words, 1)

    @property
    def it(self) -> float:
        return 1000 * self.num_it / max(self.num_words, 1)

    @property
    def long(self) -> float:
        """Percent of sentences."""
        return 100 * self.num_long / max(self.num_sentences, 1)

    def __str__(self) -> str:
        return f"{self.num_words:8,}{self.what:8.1f}{self.it:8.1f}{self.long:8.1f}"


def rates(text: str) -> Rates:
    """Rates of prose whose paragraphs are separated by blank lines."""
    words = [word.lower() for word in _WORD.findall(text)]
    lengths = [len(_WORD.findall(sentence)) for sentence in sentences(text)]
    return Rates(
        len(words), words.count("what"), sum(words.count(word) for word in _PRONOUNS), len(lengths), sum(length > LONGEST for length in lengths)
    )


def sentences(text: str) -> list[str]:
    found = (" ".join(piece.split()) for piece in _END.split(text))
    return [sentence for sentence in found if _WORD.search(sentence)]


def plain(text: str) -> str:
    """Only the prose: inline code is one word, links are their text, each list item and table cell is a paragraph."""
    text = re.sub(r"``.+?``|`[^`\n]+`", "code", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"https?://\S+", "address", text)
    lines: list[str] = []
    for line in text.splitlines():
        told = line.strip()
        if told.startswith("|"):
            lines += [piece for cell in told.strip("|").split("|") for piece in ("", cell.strip(" -:"), "")]
        elif _ITEM.match(told) or told.startswith(("#", "[Note:", ":::", "Source:")):
            lines += ["", told, *([""] if told.startswith(("#", "[Note:", ":::")) else [])]
        else:
            lines.append(told)
    return "\n".join(lines)


def without_examples(text: str) -> str:
    """The text of a comment or docstring without indented blocks, which are examples or drawings."""
    lines, base = [], 0
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        if line.strip() and indent >= base + INDENT:
            lines.append("")
        else:
            lines.append(line)
            base = min(base, indent) if line.strip() else base
    return "\n".join(lines)


def of_markdown(source: str) -> Iterator[str]:
    source = re.sub(r"(?ms)^\s*(```|~~~).*?^\s*\1\s*$", "\n\n", source)
    yield plain(re.sub(r"(?s)<!--.*?-->", "\n\n", source))


def of_python(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield plain(without_examples(ast.get_docstring(node) or ""))
        if isinstance(node, ast.ClassDef):
            for field, docstring in itertools.pairwise(node.body):
                if isinstance(field, ast.AnnAssign) and _is_text(docstring):
                    yield plain(without_examples(docstring.value.value))
    block, last = [], None
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, alone = token.start[0], token.line.lstrip().startswith("#")
            if not alone or last != row - 1:
                yield _comment(block)
                block = []
            block.append(token.string.removeprefix("#").removeprefix(" "))
            last = row if alone else None
    yield _comment(block)


def of_c(source: str) -> Iterator[str]:
    for match in re.finditer(r'"(?:\\.|[^"\\])*"|/\*(.*?)\*/|//([^\n]*)', source, re.DOTALL):
        text = match[1] or match[2] or ""
        yield plain(without_examples(re.sub(r"(?m)^\s*\* ?", "", text)))


def measure(path: Path) -> Rates:
    reader = {".md": of_markdown, ".py": of_python}.get(path.suffix, of_c)
    return sum((rates(text) for text in reader(path.read_text())), Rates())


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".md", ".c", ".h") and path.is_file())


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _comment(block: list[str]) -> str:
    kept = [line for line in block if not re.match(r"(?:type:|noqa|fmt:|pragma|!)", line)]
    return plain(without_examples("\n".join(kept)))


def main(arguments: list[str]) -> None:
    given = [Path(argument) for argument in arguments]
    if not given:
        given = [*sorted(ROOT.glob("*.md")), *(ROOT / name for name in ("docs", "bench", "examples", "infinity", "aio_ext", "tests"))]
    found = {path: measure(path) for place in given for path in (files(place) if place.is_dir() else [place])}
    width = max(len(str(path)) for path in found)
    print(f"{'':{width}}{'words':>8}{'what':>8}{'it':>8}{'long %':>8}")
    for path, rate in found.items():
        print(f"{path!s:{width}}{rate}")
    print(f"{'all':{width}}{sum(found.values(), Rates())}")


if __name__ == "__main__":
    main(sys.argv[1:])
