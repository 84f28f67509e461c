"""The `completion` command: prints a script with which a shell completes words of a command line.

Knows argparse's tables, and bash. Must not know any command. The script contains all words, because starting Python for each word would be
slow: PyTorch alone takes seconds to import. Arguments, and options without a list of values, are completed as file names.
"""

import argparse
import shlex
from collections.abc import Iterator

SHELLS = {  # with the lines that come before the script
    "bash": "",
    "zsh": "(( $+functions[compdef] )) || { autoload -U +X compinit && compinit; }; autoload -U +X bashcompinit && bashcompinit\n",
}

_SCRIPT = """\
{before}_{name}() {{
    local word command={name} offered=
    for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        case "$command $word" in {commands}) command="$command $word" ;; esac
    done
    case "$command ${{COMP_WORDS[COMP_CWORD-1]}}" in
{values}
    *)
        case "$command" in
{words}
        esac ;;
    esac
    COMPREPLY=($(compgen -W "$offered" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _{name} {name}
"""


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """The script for one of SHELLS. The shell sources the script."""
    words, values = [], []  # lines of the script for commands, and for options that take a value
    for command, actions in _commands(parser, parser.prog):
        below = [name for action in actions if not action.option_strings for name in action.choices or ()]
        options = [option for action in actions for option in action.option_strings if option.startswith("--")]
        words.append(f"        {shlex.quote(command)}) offered={shlex.quote(' '.join([*below, *options]))} ;;")
        for action in actions:
            if action.option_strings and action.nargs != 0:  # the option takes a value
                listed = action.choices or _listed(action.metavar)
                patterns = "|".join(shlex.quote(f"{command} {option}") for option in action.option_strings)
                values.append(f"    {patterns}) offered={shlex.quote(' '.join(listed))} ;;")
    commands = "|".join(shlex.quote(command) for command, _ in _commands(parser, parser.prog) if command != parser.prog)
    parts = {"commands": commands, "values": "\n".join(values), "words": "\n".join(words)}
    return _SCRIPT.format(before=SHELLS[shell], name=parser.prog, **parts)


def _commands(parser: argparse.ArgumentParser, name: str) -> Iterator[tuple[str, list[argparse.Action]]]:
    """Each command, as the user types it, with the options and arguments."""
    yield name, parser._actions
    for action in filter(_is_commands, parser._actions):
        for command, below in action.choices.items():
            yield from _commands(below, f"{name} {command}")


def _is_commands(action: argparse.Action) -> bool:
    return isinstance(action, argparse._SubParsersAction)


def _listed(metavar: str | None) -> list[str]:
    """Values that a metavar such as {auto,device} lists."""
    return metavar[1:-1].split(",") if metavar and metavar.startswith("{") else []
