"""completion: what a shell makes of the script, word by word."""

import shutil
import subprocess

import pytest

from infinity.tools.cli import main


@pytest.fixture
def complete(tmp_path, capsys):
    """The words that a bash offers for the last of a command line."""
    if shutil.which("bash") is None:
        pytest.skip("no bash here")
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
        ("infinity train --steps 5 --optimizer-state-tier n", ["nvme"]),  # a setting, whose values Config checks
        ("infinity train --swap-dirs tr", []),  # files: no words of ours
        ("infinity bench nc --rep", ["--repeats"]),
        ("infinity config show --js", ["--json"]),
        ("infinity completion z", ["zsh"]),
        ("infinity completion --hel", ["--help"]),
    ],
)
def test_words_that_bash_offers(complete, line, expected):
    assert complete(*line.split()) == expected


def test_an_empty_word_offers_all_commands(complete):
    words = complete("infinity", "")
    assert {"train", "plan", "doctor", "completion", "--version"} <= set(words) and "--hidden" not in words
    assert complete("infinity", "checkpoint", "")[:4] == ["inspect", "verify", "export", "reshard"]


def test_zsh_takes_it_by_its_own_way_to_functions_of_bash(capsys):
    assert main(["completion", "zsh"]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert "bashcompinit" in first and second == "_infinity() {"


def test_another_shell_is_named(capsys):
    assert main(["completion", "fish"]) == 2
    assert "argument shell: invalid choice: 'fish' (choose from" in capsys.readouterr().err
