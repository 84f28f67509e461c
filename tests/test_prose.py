"""The project's English is plain: each folder keeps the limits of "what", "it" and long sentences (tests/support/prose.py)."""

import pytest
from support.prose import ROOT, Rates, files, measure, plain, rates

BARS = (2.0, 10.0, 2.0)  # "what" and "it" per 1,000 words, percent of sentences over 30 words
PLACES = {  # "what", "it", long sentences: the limits of a place; those above BARS may only fall
    "README.md": BARS,
    "CONTRIBUTING.md": BARS,
    "ARCHITECTURE.md": BARS,
    "docs": BARS,
    "bench": BARS,
    "examples": BARS,
    "infinity/model": BARS,
    "infinity/optim": BARS,
    "infinity/plan": BARS,
    "infinity/system": BARS,
    "CHANGELOG.md": BARS,
    "aio_ext": BARS,
    "infinity/checkpoints": BARS,
    "infinity/engine": BARS,
    "infinity/formats": BARS,
    "infinity/simulation": BARS,
    "infinity/integrations": BARS,
    "infinity/tiers": BARS,
    "infinity/tools": BARS,
    "infinity/*.py": BARS,
    "tests": BARS,
}


@pytest.mark.parametrize("place", PLACES)
def test_the_english_of_a_place_is_plain(place):
    paths = [path for match in ROOT.glob(place) for path in (files(match) if match.is_dir() else [match])]
    found = sum(map(measure, paths), Rates())
    what, it, long = PLACES[place]
    told = f"{place}: what {found.what:.1f} (limit {what}), it {found.it:.1f} ({it}), long {found.long:.1f} % ({long})"
    assert found.what <= what and found.it <= it and found.long <= long, f"{told}: python tests/support/prose.py {place}"


def test_every_package_has_limits():
    packages = {f"infinity/{path.parent.name}" for path in ROOT.glob("infinity/*/__init__.py")}
    assert packages <= PLACES.keys() and all(any(ROOT.glob(place)) for place in PLACES)


@pytest.mark.parametrize("text, words, what, it, sentences", [
    ("What it does. Its name is `what it` itself.", 8, 1, 3, 2),
    ("| what | it |\n|---|---|\n| a | b |", 4, 1, 1, 4),
    ("- one\n- two\n\n[What](what.md)", 3, 1, 0, 3),
])
def test_words_and_sentences_are_counted_without_code(text, words, what, it, sentences):
    found = rates(plain(text))
    assert (found.num_words, found.num_what, found.num_it, found.num_sentences) == (words, what, it, sentences)


def test_a_sentence_over_thirty_words_is_long():
    assert rates("word " * 30 + ".").num_long == 0
    assert rates("word " * 31 + ".").num_long == 1
