"""SQuAD's normalisation, EM and F1 against a slow reading of their definition, character by character."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest

from agentr1_jax.envs.rewards import exact_match, f1, normalise

PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
WORDS = ["a", "an", "the", "The", "AN", "yes", "No", "noanswer", "Ada", "corvin", "1,000", "1000", "U.S.", "the-a"]
GLUE = [" ", "  ", "\t", "\n", "\u00a0", "\u2003", "-", ".", "'", "\u2019", "\u2013", "_", "\u0301", "", '"', "/"]
ODD = ["İstanbul", "STRASSE", "straße", "ﬁlm", "Śliwak", "a\u0301", "東京", "½", "٣", "ª", "\u200b", "Ǆ", "ά"]

texts = st.one_of(
    st.text(max_size=20),
    st.lists(st.sampled_from(WORDS + GLUE + ODD), max_size=9).map("".join),
    st.lists(st.sampled_from(WORDS), max_size=5).map(" ".join),
)


def slow_words(text):
    """Lower case, ASCII punctuation away, then words; an article goes wherever no letter or digit touches it."""
    letters = [c for c in text.lower() if c not in PUNCTUATION]
    pieces, word = [], ""
    for c in [*letters, ""]:
        if c and c.isalnum():
            word += c
            continue
        pieces += [" " if word in ("a", "an", "the") else word, c]
        word = ""
    return "".join(pieces).split()


def slow_exact(prediction, answers):
    return float(any(slow_words(prediction) == slow_words(answer) for answer in answers))


def slow_f1(prediction, answers):
    best = 0.0
    for answer in answers:
        said, wanted = slow_words(prediction), slow_words(answer)
        closed = [" ".join(words) in ("yes", "no", "noanswer") for words in (said, wanted)]
        if any(closed) and said != wanted:
            continue
        left, common = list(wanted), 0
        for word in said:
            if word in left:
                left.remove(word)
                common += 1
        if common:
            precision, recall = common / len(said), common / len(wanted)
            best = max(best, 2 * precision * recall / (precision + recall))
    return best


@hypothesis.settings(max_examples=150)
@hypothesis.given(texts)
def test_normalisation_of_any_text(text):
    assert normalise(text).split() == slow_words(text)
    assert normalise(f"  {text}\n") == normalise(text)


@hypothesis.settings(max_examples=150)
@hypothesis.given(texts, st.lists(texts, max_size=3))
def test_em_and_f1_of_any_texts(prediction, answers):
    assert exact_match(prediction, answers) == slow_exact(prediction, answers)
    assert f1(prediction, answers) == pytest.approx(slow_f1(prediction, answers))
    assert exact_match(prediction, answers) <= f1(prediction, answers) or not normalise(prediction)
    assert f1(prediction, answers) == max((f1(prediction, [answer]) for answer in answers), default=0.0)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("The Beatles", "beatles", True),
        ("a thousand", "thousand", True),
        ("theatre", "atre", False),
        ("1,000", "1000", True),
        ("1.5", "15", True),  # as the published scripts have it
        ("one", "1", False),
        ("it's", "its", True),
        ("it\u2019s", "its", False),  # ASCII punctuation only
        ("1939\u20131945", "19391945", False),
        ("Vitamin A", "vitamin", True),
        ("A-ha", "aha", True),
        ("Śliwak", "Sliwak", False),
        ("ŚLIWAK", "śliwak", True),
        ("yes", "Yes!", True),
        ("the", "", True),
        ("\u00a0Ada\u2003Corvin ", "Ada Corvin", True),
    ],
)
def test_edges(one, other, same):
    assert exact_match(one, [other]) == exact_match(other, [one]) == float(same)
    assert (f1(one, [other]) == 1.0) == (same and normalise(one) != "")


def test_a_yes_needs_a_yes():
    assert f1("yes, he was", ["yes"]) == f1("yes", ["yes he was"]) == 0.0
    assert f1("no", ["no", "yes"]) == 1.0 and f1("noanswer", ["no answer"]) == 0.0
