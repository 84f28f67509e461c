"""README and the pages of docs/: the code runs, all named things exist, and every public name is documented."""

import argparse
import dataclasses
import html
import importlib
import multiprocessing
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.pages import HERE, LANGUAGES, PAGES, ROOT, Block, blocks_of, in_place, make_directories, parse, program_of, run_page

import infinity
from infinity.config import CHOICES
from infinity.system import drives
from infinity.tools.cli import _parser

TEXTS = {page: page.read_text() for page in PAGES}
SECONDS = 300  # for a page, which takes 2 to 3 s on an idle machine
NEEDS = {"fine-tune.md": "transformers"}
PATHS = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
MEASURED = re.compile(r"\| one H100.*?\n\n", re.DOTALL)


@pytest.fixture(scope="module")
def forks():
    """A context for processes that have PyTorch and the engine imported at their start."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "infinity.tools.cli"])
    return context


def run(forks, page, folder):
    """Runs a page in its own process. Returns (exit status, output)."""
    process = forks.Process(target=run_page, args=(page, folder))
    process.start()
    process.join(SECONDS)
    if process.is_alive():
        process.kill()
        process.join()
    output = folder / "output"
    return process.exitcode, output.read_text() if output.exists() else ""


def named(page):
    return str(page.relative_to(ROOT))


@pytest.mark.few(7)
@pytest.mark.parametrize("page", [page for page in PAGES if any(block.language in ("python", "sh") for block in blocks_of(page))], ids=named)
def test_the_code_of_a_page_runs(page, forks, tmp_path):
    if page.name in NEEDS:
        pytest.importorskip(NEEDS[page.name])
    status, output = run(forks, page, tmp_path)
    assert status == 0, output[-4000:]


def test_a_page_with_failing_code_is_found(forks, tmp_path):
    page = tmp_path / "page.md"
    for text in ("```python\nimport infinity\ninfinity.no_such_name\n```\n", "```sh\ninfinity config show --config nowhere.toml\n```\n"):
        page.write_text(f"# A page\n\n{text}")
        status, output = run(forks, page, tmp_path)
        assert status == 1 and ("no_such_name" in output or "nowhere.toml" in output)


def test_the_start_block_of_the_readme_is_the_output_of_its_program(tmp_path):
    """The drive gets the rate of the README. The free space is that of this machine and is not compared."""
    blocks = blocks_of(ROOT / "README.md")
    (number,) = [number for number, block in enumerate(blocks) if block.language == "text"]
    shown = blocks[number].text.strip()
    make_directories(tmp_path)
    rate = float(re.search(r"measured (\S+) GB/s", shown)[1]) * 1e9
    directory = os.open(tmp_path / "ssd0/swap", os.O_RDONLY)
    drives.store(directory, drives.Drive(nbytes_per_s=rate))
    os.close(directory)
    program = in_place(blocks[number - 1].text)
    command = [sys.executable, "-c", f"import infinity\n{program}\ninfinity.engine_of(model).close()"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | PATHS | HERE, capture_output=True, text=True, timeout=SECONDS)

    def without_room(text):
        return re.sub(r"(?m)(^  NVMe.*) +\S+ \SiB$", r"\1", text)

    assert without_room(done.stderr.strip()) == without_room(shown) != shown


@pytest.mark.long
def test_the_program_for_several_nodes_resumes_on_two_ranks(tmp_path):
    make_directories(tmp_path)
    program = program_of(ROOT / "docs/pre-train.md") + '\nprint(f"steps {first} to {step}")\n'
    assert program.count("NUM_STEPS, EVERY = 4, 2") == 1
    for number, expected in (4, "steps 0 to 3"), (6, "steps 4 to 5"):
        (tmp_path / "pretrain.py").write_text(program.replace("NUM_STEPS, EVERY = 4, 2", f"NUM_STEPS, EVERY = {number}, 2"))
        command = [sys.executable, *"-m torch.distributed.run --standalone --nproc-per-node 2 pretrain.py".split()]
        done = subprocess.run(command, cwd=tmp_path, env=os.environ | PATHS | HERE, capture_output=True, text=True, timeout=SECONDS)
        assert done.returncode == 0 and done.stdout.count(expected) == 2, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_all_code_blocks_are_found_and_those_not_run_are_parsed(page):
    blocks = blocks_of(page)
    assert 2 * sum(block.language != "given" for block in blocks) == len(re.findall(r"(?m)^\s*(?:```|~~~)", TEXTS[page]))
    assert len(re.findall(r"(?m)^<!-- (?:given|not run|file)", TEXTS[page])) == sum(
        block.language == "given" or block.reason is not None or block.file is not None for block in blocks
    )
    for block in blocks:
        assert block.language in LANGUAGES, f"{block}: {block.language!r}"
        assert block.language != "toml" or block.file, f"{block}: a block of toml needs <!-- file: NAME --> before it"
        if block.reason is not None:
            parse(block)


@pytest.mark.parametrize(
    "language, text",
    [
        ("python", "for x in"),
        ("sh", "infinity train --no-such-option"),
        ("sh", "torchrun --nproc-per-node 2 -m infinity train --no-such-option"),
        ("sh", "torchrun --no-such-option 2 train.py"),
        ("sh", "make no-such-target"),
        ("sh", "pip install .[no-such-extra]"),
        ("sh", "no-such-command"),
    ],
)
def test_wrong_code_in_a_block_that_is_not_run_is_found(language, text):
    with pytest.raises((SyntaxError, ValueError, AssertionError, SystemExit, subprocess.CalledProcessError)):
        parse(Block(ROOT / "README.md", 1, language, text, "a test"))


def leaves(parser, name="infinity"):
    """{name: parser} of every command without subcommands."""
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    found = {} if groups else {name: parser}
    for group in groups:
        for word, command in group.choices.items():
            found |= leaves(command, f"{name} {word}")
    return found


def test_every_command_is_in_the_table_of_commands():
    assert re.findall(r"(?m)^\| `(infinity [^`]+)` \|", TEXTS[ROOT / "docs/command-line.md"]) == list(leaves(_parser()))


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_commands_and_options_in_the_text_exist(page):
    known = leaves(_parser())
    for text in re.findall(r"`(infinity [^`]+)`", TEXTS[page]):
        name = " ".join(re.match(r"infinity(?: [a-z]+)*", text)[0].split())
        parsers = [parser for command, parser in known.items() if f"{name} ".startswith(f"{command} ") or command.startswith(f"{name} ")]
        options = set(re.findall(r"--[\w-]+", text)) - {"--help", "--version"}
        assert parsers or text == "infinity COMMAND", text
        assert not options or any(options <= parser._option_string_actions.keys() for parser in parsers), text


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_names_of_the_package_in_the_text_exist(page):
    for name in re.findall(r"\binfinity\.((?!toml|json|start\b)[a-zA-Z_]\w*)", TEXTS[page]):
        assert hasattr(infinity, name) or importlib.util.find_spec(f"infinity.{name}"), f"infinity.{name}"


def test_every_public_name_has_its_entry_in_the_reference():
    entries = re.findall(r"(?m)^::: infinity\.(\S+)$", TEXTS[ROOT / "docs/reference.md"])
    assert sorted(name.rpartition(".")[2] for name in entries) == sorted(infinity.__all__)


def test_every_setting_and_its_choices_are_in_the_configuration_table():
    rows = re.findall(r"(?m)^\| (`[a-z_`, ]+`) \| ([^|]+) \|", TEXTS[ROOT / "docs/configuration.md"])
    values = {name: set(re.findall(r"`([^`]+)`", told)) for names, told in rows for name in re.findall(r"`(\w+)`", names)}
    assert list(values) != [] and values.keys() == {field.name for field in dataclasses.fields(infinity.Config)}
    for name, choices in CHOICES.items():
        assert values[name] == set(choices), name


def test_every_error_and_its_base_class_is_in_the_table_of_errors():
    rows = dict(re.findall(r"(?m)^\| `(\w+Error)` \| `(\w+)` \|", TEXTS[ROOT / "docs/fails.md"]))
    errors = {name: getattr(infinity, name) for name in infinity.__all__ if name.endswith("Error")}
    assert rows == {name: error.__base__.__name__ for name, error in errors.items()}


def first_column(table):
    return [name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])]


def test_the_tables_of_stats_have_every_key_and_every_link(tmp_path):
    page = TEXTS[ROOT / "docs/slow.md"]
    keys = first_column(re.search(r"(?s)All of `stats\(\)`.*?\n\n(.*?)\n\n", page)[1])
    links = first_column(re.search(r"(?s)\n(\| link \|.*?)\n\n", page)[1])
    with infinity.offload(torch.nn.Linear(4, 4), infinity.Config(swap_dirs=tmp_path, device="cpu")) as engine:
        stats = engine.stats()
        assert keys == list(stats)
        assert set(links) == set(stats["links"])


def test_the_table_of_measurements_is_the_same_on_all_pages():
    tables = {MEASURED.search(TEXTS[ROOT / path])[0] for path in ("README.md", "docs/index.md", "docs/measured.md")}
    assert len(tables) == 1


@pytest.mark.long
def test_the_site_builds_without_warnings_and_has_all_public_names(tmp_path):
    """--strict checks that all links, anchors and names of the reference exist."""
    for package in ("mkdocs", "material", "mkdocstrings", "mkdocstrings_handlers.python"):
        pytest.importorskip(package, reason="the extra `docs` is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = os.environ | PATHS | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    page = html.unescape(re.sub(r"<[^>]+>", "", (tmp_path / "site/command-line/index.html").read_text()))
    for name, parser in leaves(_parser()).items():
        assert f"usage: {name} " in page
        assert all(option in page for option in parser._option_string_actions)
    reference = (tmp_path / "site/reference/index.html").read_text()
    for name in infinity.__all__:
        assert re.search(rf'id="infinity\.(\w+\.)*{name}"', reference), name
    assert len(list(Path(tmp_path / "site").rglob("peers.png"))) == 1
