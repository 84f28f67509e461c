"""The project's English is plain: each folder keeps to its limits of "what", "it" and long sentences (tests/prose.py)."""

import pytest
from prose import ROOT, Rates, files, measure, plain, rates

BARS = (2.0, 10.0, 2.0)  # "what" and "it" per 1,000 words, percent of sentences over 30 words
PLACES = {  # the limits of a place; those above BARS may only fall
    "README.md": BARS,
    "docs": BARS,
    "CONTRIBUTING.md": BARS,
    "bench/RESULTS.md": BARS,
}


@pytest.mark.parametrize("place", PLACES)
def test_the_english_of_a_place_is_plain(place):
    path = ROOT / place
    found = sum(map(measure, files(path) if path.is_dir() else [path]), Rates())
    what, it, long = PLACES[place]
    told = f"{place}: what {found.what:.1f} (limit {what}), it {found.it:.1f} ({it}), long {found.long:.1f} % ({long}): python tests/prose.py {place}"
    assert found.what <= what and found.it <= it and found.long <= long, told


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
