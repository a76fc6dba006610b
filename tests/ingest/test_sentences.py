import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache.ingest.text_blocks import split_sentences


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("One. Two! Three? Four", ["One. ", "Two! ", "Three? ", "Four"]),
        ("Dr. Holm met Mrs. Berg. They spoke.", ["Dr. Holm met Mrs. Berg. ", "They spoke."]),
        ("J. K. Holm wrote it. It sold.", ["J. K. Holm wrote it. ", "It sold."]),
        ("It costs 3.50 kr. now. Cheap.", ["It costs 3.50 kr. now. ", "Cheap."]),
        ("Rivers (e.g. Alna) rise. Lakes do not.", ["Rivers (e.g. Alna) rise. ", "Lakes do not."]),
        ("Figs, e.g. Carica, grow. Yes.", ["Figs, e.g. Carica, grow. ", "Yes."]),
        ('She said "Stop." He did.', ['She said "Stop." ', "He did."]),
        ("Wait... what? No... Never.", ["Wait... what? ", "No... ", "Never."]),
        ("In 1901 it closed. 1902 was worse.", ["In 1901 it closed. ", "1902 was worse."]),
        ("3. Results are in. Good.", ["3. Results are in. ", "Good."]),
        ("See example.com. Then go.", ["See example.com. ", "Then go."]),
        ("一つ。二つ！三つ", ["一つ。", "二つ！", "三つ"]),
        ("Eins. Über zwei. élan", ["Eins. ", "Über zwei. élan"]),
        ("a title\n\nthen text", ["a title\n\n", "then text"]),
        ("", []),
        ("no end", ["no end"]),
    ],
)
def test_sentences_end_where_a_reader_says(text, sentences):
    assert split_sentences(text) == sentences


@given(st.text(alphabet=st.sampled_from("aB1 .!?。\n\"'(),Dr"), max_size=120))
def test_sentences_joined_are_the_text(text):
    sentences = split_sentences(text)
    assert "".join(sentences) == text
    assert all(sentences)


@pytest.mark.parametrize(
    "text", ["." * 300_000, "a" * 300_000, ". " * 100_000, '."' * 100_000, "。" * 100_000, " " * 300_000]
)
def test_hostile_texts_take_linear_time(text):
    started = time.process_time()
    assert "".join(split_sentences(text)) == text
    assert time.process_time() - started < 5
