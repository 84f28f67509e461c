"""README and the pages of docs/ as programs: the code blocks of a page, and a function that runs them.

Knows code fences, the comments listed here, and a few commands. Must not know the subject of a page, except the replacements in IN_PLACE.

    <!-- given            Python code that a reader already has. Runs at this place of the page, with the blocks of the page.
    ...
    -->
    <!-- not run: WHY --> Before a block that no test can run: the test checks only syntax and options.
    <!-- file: NAME -->   Before the content of a file, which later blocks can read.
"""

import atexit
import contextlib
import os
import re
import shlex
import subprocess
import sys
import tomllib
import traceback
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
IN_PLACE = {  # text of a page: replacement when the page runs
    "/ssd0/": "ssd0/",
    "/ssd1/": "ssd1/",
    "/shared/": "shared/",
    "/models/": "models/",
    "--live ": "--live --steps 2 --hidden 96 --layers 2 ",
    "--steps 20 ": "--steps 2 --hidden 96 --layers 2 ",
    "--steps 10 ": "--steps 6 --hidden 96 --layers 2 ",
    "--steps 4 ": "--steps 4 --hidden 96 --layers 2 ",
    "--params 8B": "--params 2M --vocab 512",
    "--hidden 4096 --layers 32": "--hidden 128 --layers 2 --vocab 512",
    '= "80 GB"': '= "80 MB"',  # a small machine: the search for the largest model is short
    '= "128 GB"': '= "128 MB"',
    '= "3.84 TB"': '= "384 MB"',
}
HERE = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}  # pages use data on the CPU
DIRECTORIES = ("ssd0/swap", "ssd1/swap", "shared/run", "models")
LANGUAGES = ("python", "sh", "toml", "text", "given")

_PIECE = re.compile(
    r"^<!-- given\n(?P<given>.*?)^-->$"
    r"|^(?:<!-- (?:not run: (?P<reason>[^\n]+)|file: (?P<file>\S+)) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """Code of a page. `line`: in the page, from 1. `reason`: why the block does not run, or None. `file`: the file's name, or None."""

    page: Path
    line: int
    language: str
    text: str
    reason: str | None = None
    file: str | None = None

    def __str__(self):
        return f"{self.page.name}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    source, found = page.read_text(), []
    for match in _PIECE.finditer(source):
        part = "text" if match["given"] is None else "given"
        line = source.count("\n", 0, match.start(part)) + 1
        found.append(Block(page, line, match["language"] if part == "text" else "given", match[part], match["reason"], match["file"]))
    return found


def program_of(page: Path) -> str:
    """All Python code of a page as one program."""
    return "\n".join(in_place(block.text) for block in blocks_of(page) if block.language in ("python", "given") and block.reason is None)


def make_directories(folder: Path) -> None:
    """Makes the directories that pages name."""
    for path in DIRECTORIES:
        os.makedirs(folder / path, exist_ok=True)


def in_place(text: str) -> str:
    for told, here in IN_PLACE.items():
        text = text.replace(told, here)
    return text


def run_page(page: Path, folder: Path) -> None:
    """Runs a page in `folder` and ends this process. The exit status is 0 without errors. `output` in the folder has the output."""
    os.chdir(folder)
    os.environ |= HERE
    make_directories(folder)
    with open("output", "w", buffering=1) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    status, names = 1, {"__name__": "__main__"}
    try:
        for block in blocks_of(page):
            if block.reason is None:
                _run(block, names)
        status = 0
    except BaseException:
        traceback.print_exc()
    names.clear()
    atexit._run_exitfuncs()  # os._exit skips atexit functions
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _run(block: Block, names: dict) -> None:
    text = in_place(block.text)
    if block.file is not None:
        Path(block.file).write_text(text)
    elif block.language == "sh":
        for words in commands_in(text):
            print("$", *words, flush=True)
            _run_command(words)
    elif block.language in ("python", "given"):
        exec(compile("\n" * (block.line - 1) + text, str(block.page), "exec"), names)


def commands_in(text: str) -> list[list[str]]:
    """The words of each command line of a shell text, without comments and empty lines."""
    lines = (shlex.split(line, comments=True) for line in text.replace("\\\n", "").splitlines())
    return [words for words in lines if words]


def _run_command(words: list[str]) -> None:
    words, target, mode = redirected(words)
    if words[0] != "infinity":
        assert words[0] in ("cp", "mkdir"), f"{words[0]}: tests run only infinity, cp and mkdir; put <!-- not run: WHY --> before the block"
        subprocess.run(words, check=True)
        return
    from infinity.tools.cli import main

    with open(target, mode) if target else contextlib.nullcontext(sys.stdout) as file, contextlib.redirect_stdout(file):
        try:
            status = main(words[1:])
        except SystemExit as end:  # argparse raises SystemExit after --help and --version
            status = end.code
    assert not status, f"{shlex.join(words)} ended with {status}"


def redirected(words: list[str]) -> tuple[list[str], str | None, str]:
    """(words without `> FILE` or `>> FILE` at the end, FILE or None, mode for `open`)."""
    if len(words) > 2 and words[-2] in (">", ">>"):
        return words[:-2], words[-1], "w" if words[-2] == ">" else "a"
    return words, None, "w"


def parse(block: Block) -> None:
    """Checks a block that is not run. Raises SyntaxError, ValueError or ConfigError for wrong syntax and unknown options."""
    if block.language in ("python", "given"):
        compile("\n" * (block.line - 1) + block.text, str(block.page), "exec")
    elif block.language == "sh":
        for words in commands_in(block.text):
            _parse_command(redirected(words)[0])
    elif block.language == "toml":
        tomllib.loads(block.text)


def _parse_command(words: list[str]) -> None:
    from infinity.tools.cli import _parser

    command, *rest = words
    if command == "infinity":
        _parser().parse_args(rest)
    elif command == "torchrun":
        from torch.distributed.run import get_args_parser

        told = get_args_parser().parse_args(rest)
        if told.module:
            assert told.training_script == "infinity", told.training_script
            _parser().parse_args(told.training_script_args)
    elif command == "make":
        subprocess.run(["make", "--dry-run", "--always-make", *rest], cwd=ROOT, check=True, capture_output=True)
    elif command == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert rest[0] == "install", rest
        told = {name.strip() for word in rest[1:] for names in re.findall(r"\[(.*)\]", word) for name in names.split(",")}
        assert told <= extras.keys(), f"no extra {sorted(told - extras.keys())}"
    else:
        assert command in ("sudo", "git", "cd", "."), f"{command}: unknown command; add a check for this command to _parse_command"
