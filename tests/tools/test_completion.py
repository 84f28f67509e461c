"""completion: the words that a shell offers with the script."""

import shutil
import subprocess

import pytest

from infinity.tools.cli import main


@pytest.fixture
def complete(tmp_path, capsys):
    """Returns a function that returns the words that bash offers for the last word of a command line."""
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    assert main(["completion", "bash"]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)

    def complete(*words):
        source = 'source "$0"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _infinity; printf "%s\\n" "${COMPREPLY[@]}"'
        done = subprocess.run(["bash", "-c", source, tmp_path / "script", *words], capture_output=True, text=True, timeout=60)
        assert not done.stderr
        return done.stdout.split()

    return complete


@pytest.mark.parametrize(
    "line, expected",
    [
        ("infinity tr", ["train", "trace"]),
        ("infinity checkpoint ex", ["export"]),
        ("infinity --v", ["--version"]),
        ("infinity train --opt", ["--optimizer", "--optimizer-state-dtype", "--optimizer-state-tier"]),
        ("infinity train --optimizer s", ["sgd"]),
        ("infinity train --steps 5 --optimizer-state-tier n", ["nvme"]),  # Config checks the values of this option
        ("infinity train --swap-dirs tr", []),  # file names: bash completes these
        ("infinity bench nc --rep", ["--repeats"]),
        ("infinity config show --js", ["--json"]),
        ("infinity completion z", ["zsh"]),
        ("infinity completion --hel", ["--help"]),
    ],
)
def test_bash_offers_the_matching_words(complete, line, expected):
    assert complete(*line.split()) == expected


def test_an_empty_word_offers_all_commands(complete):
    words = complete("infinity", "")
    assert {"train", "plan", "doctor", "completion", "--version"} <= set(words) and "--hidden" not in words
    assert complete("infinity", "checkpoint", "")[:4] == ["inspect", "verify", "export", "reshard"]


def test_zsh_loads_the_script_with_bashcompinit(capsys):
    assert main(["completion", "zsh"]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert "bashcompinit" in first and second == "_infinity() {"


def test_an_unknown_shell_is_refused_by_name(capsys):
    assert main(["completion", "fish"]) == 2
    assert "argument shell: invalid choice: 'fish' (choose from" in capsys.readouterr().err
