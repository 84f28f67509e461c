"""Additions of a build of these pages: files of the checkout that the pages link to, and the help of every command.

Knows where pages of the site lie, and the command line's parser. Must not know the contents of a page.
"""

import argparse
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.structure.files import File

from infinity.tools.cli import _parser

ROOT = Path(__file__).parent.parent
CHECKOUT = "checkout/"  # where files from outside of docs/ lie in the site, with their paths
PLOTS = (f"bench/{path.name}" for path in sorted(ROOT.glob("bench/*.png")))
SHOWN = ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "bench/RESULTS.md", *PLOTS)
MARK = "<!-- The help of every command stands here in the site. -->"
WIDTH = 100


def on_files(files, config):
    """Add the files that pages link to outside of docs/."""
    for path in SHOWN:
        files.append(File.generated(config, f"{CHECKOUT}{path}", abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Links that are right in a checkout become right in the site."""
    if page.file.src_uri.startswith(CHECKOUT):
        up = "../" * page.file.src_uri.count("/")
        markdown = re.sub(r"\]\((?:\.\./)?README\.md\)", f"]({up}index.md)", markdown)
        return re.sub(r"\]\(docs/", f"]({up}", markdown)
    if MARK in markdown:
        markdown = markdown.replace(MARK, "\n\n".join(f"## {command.prog}\n\n```text\n{help_of(command)}```" for command in commands()))
    return markdown.replace("](../", f"]({CHECKOUT}")


def commands(parser: argparse.ArgumentParser | None = None) -> Iterator[argparse.ArgumentParser]:
    """The parsers of commands that have no commands of their own, in their order."""
    parser = parser or _parser()
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not groups:
        yield parser
    for group in groups:
        for command in group.choices.values():
            yield from commands(command)


def help_of(command: argparse.ArgumentParser) -> str:
    command.formatter_class = functools.partial(command.formatter_class, width=WIDTH)
    return command.format_help()
