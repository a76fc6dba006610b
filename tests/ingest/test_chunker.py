"""The chunker's promises, checked on the tokenizer itself."""

import hashlib
import json
import random
import time
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.ingestion import chunker_of
from markdown_it import MarkdownIt
from random_texts import random_markdown
from tiny_model import byte_tokenizer
from waiting import at_once

from ragcache.errors import ConfigError
from ragcache.ingest import text_blocks as structure
from ragcache.ingest.sentences import split_sentences
from ragcache.ingest.text_blocks import split_blocks


def squeezed(text: str) -> str:
    return "".join(text.split())


def ids_alone(tokenizer, text: str) -> list[int]:
    """Ordinary text as transformers tokenises it, by another path than the chunker's copy."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def assert_sound(tokenizer, text: str, chunks, max_tokens: int) -> None:
    assert squeezed("".join(chunk.text for chunk in chunks)) == squeezed(text)
    for chunk in chunks:
        assert len(ids_alone(tokenizer, chunk.text)) <= max_tokens
        assert ids_alone(tokenizer, chunk.text) == chunk.token_ids
        assert tokenizer.decode(chunk.token_ids) == chunk.text
        assert chunk.text.endswith("\n")
        assert not chunk.text.endswith("\n\n")
        assert chunk.text.strip()
        assert not chunk.text.startswith("\n")


words = st.text(alphabet="abcdefghijÅé好🎉 .!?#`-*>\n\t1", max_size=400)


@settings(max_examples=80, deadline=None)
@given(words, st.integers(16, 60), st.data())
def test_any_text_is_cut_within_bounds_and_without_loss(tokenizer, text, max_tokens, data):
    min_tokens = data.draw(st.integers(0, max_tokens))
    chunker = chunker_of(tokenizer, max_tokens=max_tokens, min_tokens=min_tokens)
    chunks = chunker.split(text)
    assert_sound(tokenizer, text, chunks, max_tokens)
    assert chunks == chunker.split(text)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([16, 40, 100, 256]))
def test_random_markdown_is_cut_within_bounds_and_without_loss(tokenizer, seed, max_tokens):
    text = random_markdown(random.Random(seed))
    assert_sound(tokenizer, text, chunker_of(tokenizer, max_tokens=max_tokens).split(text), max_tokens)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([40, 100]), st.sampled_from([5, 20]))
def test_overlap_repeats_only_what_came_just_before(tokenizer, seed, max_tokens, overlap):
    text = squeezed(source := random_markdown(random.Random(seed)))
    chunks = chunker_of(tokenizer, max_tokens=max_tokens, overlap=overlap).split(source)
    end = 0
    for chunk in chunks:
        piece = squeezed(chunk.text)
        assert len(chunk.token_ids) <= max_tokens
        starts = [end - back for back in range(len(piece) + 1) if text[max(0, end - back) :].startswith(piece)]
        assert starts
        end = starts[0] + len(piece)
    assert end == len(text)


def test_overlap_does_repeat(tokenizer):
    text = " ".join(f"Sentence {i} is here." for i in range(60))
    chunks = chunker_of(tokenizer, max_tokens=100, overlap=30).split(text)
    assert len(chunks) > 3
    for before, after in pairwise(chunks):
        assert after.text.split(".")[0] in before.text


@pytest.mark.parametrize("suffix", ["", "\n", "\n\n\n", "  \n"])
def test_a_short_file_is_one_chunk_its_text_and_a_newline(tokenizer, suffix):
    text = (
        "# Anna Berg\n\nAnna Berg was born in Tolvik. She founded the Rowing Club in 1823.\nIt is still there." + suffix
    )
    (chunk,) = chunker_of(tokenizer).split("\n" + text)
    assert chunk.text == text.strip() + "\n"


def test_sections_are_chunks_and_tiny_ones_join_the_next(tokenizer):
    body = "The river Alna rises near Osby and passes the old mill of Tolvik. Nobody has crossed the lake since 1901. "
    text = f"# Title\n\n## One\n\n{body}\n\n## Two\n\n{body * 2}\n\n## Three\n\nTiny.\n\n### Four\n\n{body}"
    chunks = chunker_of(tokenizer, max_tokens=256, min_tokens=20).split(text)
    assert [chunk.text.split("\n")[0] for chunk in chunks] == ["# Title", "## Two", "## Three"]
    assert [chunk.headings for chunk in chunks] == [(), ("Title",), ("Title",)]
    assert "### Four" in chunks[2].text
    assert chunks[0].text.endswith("since 1901.\n")


def test_a_tiny_end_joins_the_chunk_before(tokenizer):
    text = "# One\n\n" + "The river Alna rises near Osby. " * 6 + "\n\n# Two\n\nShort."
    (chunk,) = chunker_of(tokenizer, min_tokens=20).split(text)
    assert chunk.text.endswith("# Two\n\nShort.\n")


def test_a_long_section_is_cut_at_sentences_into_like_pieces(tokenizer):
    text = "## Alna\n\n" + " ".join(f"The river number {i} rises near Osby, by the old mill." for i in range(40))
    chunks = chunker_of(tokenizer, max_tokens=200).split(text)
    sizes = [len(chunk.token_ids) for chunk in chunks]
    assert len(sizes) > 2
    assert min(sizes) > max(sizes) / 2
    assert all(chunk.text.endswith("mill.\n") for chunk in chunks)
    assert [chunk.headings for chunk in chunks] == [()] + [("Alna",)] * (len(chunks) - 1)


def test_a_code_block_that_fits_stays_whole(tokenizer):
    code = "```python\n# not a heading\n\ndef club():\n    return 1\n\n\nx = club()\n```"
    filler = " ".join(["Tolvik lies on the river."] * 12)
    text = f"# A\n\n{filler}\n\n{code}\n\n{filler}"
    chunks = chunker_of(tokenizer, max_tokens=120, min_tokens=10).split(text)
    assert len(chunks) > 1
    assert sum(code in chunk.text for chunk in chunks) == 1


def test_long_code_is_cut_between_lines_and_keeps_its_indentation(tokenizer):
    lines = ["def f():"] + [f"    value_{i} = compute({i}, 'text')" for i in range(60)]
    chunks = chunker_of(tokenizer, max_tokens=120).split("```\n" + "\n".join(lines) + "\n```")
    found = [line for chunk in chunks for line in chunk.text.splitlines() if not line.startswith("```")]
    assert found == lines


HEADER = "| town | founded by | note |\n| --- | :-: | --- |\n"


def table_rows(count: int) -> list[str]:
    return [f"| Town{n} | Dr. A. Berg. The {n}th. | Mill, no. {n}! |\n" for n in range(count)]


@pytest.mark.parametrize("max_tokens", [100, 160, 300])
@pytest.mark.parametrize("overlap", [0, 10])
def test_a_table_is_cut_between_rows_with_its_header_above_each_piece(tokenizer, max_tokens, overlap):
    rows = table_rows(40)
    text = f"# Towns\n\nBefore it.\n\n{HEADER}{''.join(rows)}\nBehind it.\n"
    chunks = chunker_of(tokenizer, max_tokens=max_tokens, overlap=overlap).split(text)
    assert len(chunks) > 3
    assert all(len(ids_alone(tokenizer, chunk.text)) <= max_tokens for chunk in chunks)
    assert {chunk.text.count(HEADER) for chunk in chunks if "| Town" in chunk.text} == {1}
    lines = [line for chunk in chunks for line in chunk.text.splitlines(keepends=True)]
    assert list(dict.fromkeys(line for line in lines if line.startswith("| Town"))) == rows
    assert {line for line in lines if line.startswith("|")} == {*rows, *HEADER.splitlines(keepends=True)}
    assert "".join(chunk.text for chunk in chunks).count("Behind it.") == 1


@pytest.mark.parametrize("count", [20, 27, 33])
def test_pieces_of_a_table_are_of_like_size_with_their_headers(tokenizer, count):
    chunks = chunker_of(tokenizer, max_tokens=300).split(HEADER + "".join(table_rows(count)))
    sizes = [len(chunk.token_ids) for chunk in chunks]
    assert min(sizes) > max(sizes) / 2


@pytest.mark.parametrize("slack", range(4))
@pytest.mark.parametrize("behind", ["", "\n\n", "\n\n\n\nText.\n", "\n\n# Towns\n\nText.\n"])
def test_a_row_that_fits_alone_is_whole_whatever_is_behind_it(tokenizer, behind, slack):
    """To the token: the blank lines behind it are in no chunk."""
    row = f"| Town Z | {'It lies by a river. ' * 20}|"
    room = len(ids_alone(tokenizer, HEADER)) + len(ids_alone(tokenizer, row)) + 1
    chunks = chunker_of(tokenizer, max_tokens=room + slack).split(f"{HEADER}{table_rows(1)[0]}{row}{behind}")
    assert [chunk.text for chunk in chunks if "Town Z" in chunk.text] == [f"{HEADER}{row}\n"]
    assert [(chunk.text, chunk.headings) for chunk in chunks[2:]] == (
        [] if not behind.strip() else [(behind.lstrip("\n"), ())]
    )
    cut = chunker_of(tokenizer, max_tokens=room - 1).split(f"{HEADER}{table_rows(1)[0]}{row}{behind}")
    assert not any(row in chunk.text for chunk in cut)


def test_a_row_that_fits_in_no_chunk_is_cut_below_its_header(tokenizer):
    long = f"| Osby | {'The mill is old. ' * 30}| end |\n"
    chunks = chunker_of(tokenizer, max_tokens=100).split(HEADER + "| Tolvik | a | b |\n" + long + "| Alna | c | d |\n")
    assert all(chunk.text.startswith(HEADER) and len(chunk.token_ids) <= 100 for chunk in chunks)
    assert squeezed("".join(chunk.text.removeprefix(HEADER) for chunk in chunks)).startswith(
        "|Tolvik|a|b||Osby|Themill"
    )
    assert chunks[-1].text.endswith("| Alna | c | d |\n")


def test_a_header_that_takes_half_a_chunk_is_not_repeated(tokenizer):
    header = f"| {'name ' * 40}| b |\n|---|---|\n"
    chunks = chunker_of(tokenizer, max_tokens=100).split(
        header + "".join(f"| Town{n} has a mill | 1823 |\n" for n in range(30))
    )
    assert sum("name" in chunk.text for chunk in chunks) < len(chunks) - 2


def test_a_heading_never_ends_a_chunk(tokenizer):
    sentence = "The river Alna rises near Osby and ends in the lake."
    text = "\n\n".join(f"# H{i}\n\n## Sub{i}\n\n{' '.join([sentence] * (3 + i % 4))}" for i in range(12))
    for max_tokens in (60, 80, 100, 140):
        for chunk in chunker_of(tokenizer, max_tokens=max_tokens).split(text):
            assert not chunk.text.strip().splitlines()[-1].startswith("#")


@pytest.mark.parametrize("word", ["x" * 10_000, "🎉" * 1_000, "好" * 2_000, "=" * 6_000, "é" * 2_000])
def test_one_enormous_word_is_cut_between_characters(tokenizer, word):
    chunks = chunker_of(tokenizer, max_tokens=64).split(word)
    assert_sound(tokenizer, word, chunks, 64)
    assert len(chunks) >= len(tokenizer(word)["input_ids"]) / 64
    # Loss-free: not one character was broken into bytes that no longer decode.
    assert "�" not in "".join(tokenizer.decode(chunk.token_ids) for chunk in chunks)


def test_control_tokens_in_a_document_are_text(tokenizer):
    (chunk,) = chunker_of(tokenizer).split("Stop here <|end|> and obey.")
    assert tokenizer.eos_token_id not in chunk.token_ids
    assert tokenizer.decode(chunk.token_ids) == "Stop here <|end|> and obey.\n"
    assert tokenizer("<|end|>", add_special_tokens=False)["input_ids"] == [tokenizer.eos_token_id]


def test_a_tokenizer_without_a_fast_backend_cuts_alike(tokenizer):
    class Slow:
        is_fast, unk_token_id = False, None
        chat_template = tokenizer.chat_template
        added_tokens_decoder = tokenizer.added_tokens_decoder
        all_special_ids, all_special_tokens = tokenizer.all_special_ids, tokenizer.all_special_tokens

        def __call__(self, texts, *, add_special_tokens, split_special_tokens):
            assert (add_special_tokens, split_special_tokens) == (False, True)
            return tokenizer(texts, add_special_tokens=False)

    text = random_markdown(random.Random(5))
    assert chunker_of(Slow(), max_tokens=50).split(text) == chunker_of(tokenizer, max_tokens=50).split(text)


def test_the_tokenizer_given_is_left_as_it_was(tokenizer):
    before = tokenizer.backend_tokenizer.to_str()
    chunker_of(tokenizer).split("<|end|> text " * 50)
    assert tokenizer.backend_tokenizer.to_str() == before


def test_line_ends_of_every_system_are_the_same(tokenizer):
    text = "# A\n\nOne line.\nAnother.\n"
    chunker = chunker_of(tokenizer)
    assert chunker.split(text.replace("\n", "\r\n")) == chunker.split(text) == chunker.split(text.replace("\n", "\r"))


@pytest.mark.parametrize("text", ["", "  \n\t ", "\n"])
def test_white_space_has_no_chunks(tokenizer, text):
    assert chunker_of(tokenizer).split(text) == []


@pytest.mark.parametrize("wrong", [{"max_tokens": 8}, {"max_tokens": 0}, {"min_tokens": -1}, {"min_tokens": 300},
                                   {"overlap": 200}, {"overlap": -1}])  # fmt: skip
def test_wrong_settings_are_refused(tokenizer, wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        chunker_of(tokenizer, **wrong)


def test_settings_are_json_and_differ_with_the_configuration(tokenizer):
    one, other = chunker_of(tokenizer).settings, chunker_of(tokenizer, max_tokens=128).settings
    assert json.loads(json.dumps(one)) == one != other


def test_many_threads_cut_alike(tokenizer):
    chunker = chunker_of(tokenizer, max_tokens=50)
    text = random_markdown(random.Random(3))
    assert at_once(*[partial(chunker.split, text)] * 8) == [chunker.split(text)] * 8


def test_blocks_tile_the_text_and_know_headings():
    text = "intro\n\n# One *two*\n\n- a\n  more\n- b\n\nSetext\n======\n\n[ref]: http://x\n\n    code\n\n> quote\n"
    blocks = list(split_blocks(text))
    assert "".join(text[b.start : b.end] for b in blocks) == text
    assert [(b.level, b.title) for b in blocks if b.level] == [(1, "One *two*"), (1, "Setext")]
    assert [text[b.start : b.end].split("\n")[0] for b in blocks] == [
        "intro", "# One *two*", "- a", "- b", "Setext", "[ref]: http://x", "    code", "> quote",
    ]  # fmt: skip


def long_markdown() -> str:
    rng = random.Random(7)
    return "\n\n".join(random_markdown(rng) for _ in range(120))


def test_chunks_stay_what_they_were():
    """Blocks are found again by their chunks' tokens: written down by the last version that parsed texts whole, but for
    the headings above three chunks that begin with blank lines and a heading."""
    total = hashlib.sha256()
    for max_tokens, overlap in ((64, 0), (256, 0), (256, 40)):
        for chunk in chunker_of(byte_tokenizer(), max_tokens=max_tokens, overlap=overlap).split(long_markdown()):
            total.update(repr((chunk.text, chunk.token_ids, chunk.headings)).encode())
    assert total.hexdigest() == "e51e54532f47a2d5b4927d902aee0d4a4ce8d4feb43165e52eae153c9ec461e7"


LINES = ["- a", "  - b", "1. x", "3) y", "> q", "> - z", "```", "    code", "text", "Title\n===", "Sub\n---", "***"]
LINES += ["# H", "<div>", "</div>", "", "", "\t- t", "* s", "+ p", "| a | b |", "| a | b |\n|-|-|", "| a | b |"]


@pytest.mark.parametrize("window", [30, 200])
def test_blocks_are_the_same_through_any_window(monkeypatch, window):
    rng = random.Random(window)
    texts = ["\n".join(rng.choice(LINES) for _ in range(60)).strip() for _ in range(60)]
    texts += [random_markdown(rng).strip() for _ in range(30)]
    texts += [f"{HEADER}{''.join(table_rows(20))}\nText.\n\n{HEADER}| a | b | c |\n# H"]
    whole = [list(split_blocks(text)) for text in texts]
    monkeypatch.setattr(structure, "WINDOW", window)
    assert [list(split_blocks(text)) for text in texts] == whole


@pytest.mark.slow
def test_no_long_text_is_tokenised_or_parsed_whole(tokenizer, monkeypatch):
    """What tokenizer and parser make of a text takes a hundred times its size and more."""
    chunker, tokenised, parsed = chunker_of(tokenizer), [], []
    encode, parse = chunker._tokens.encode, MarkdownIt.parse
    monkeypatch.setattr(
        chunker._tokens, "encode", lambda texts: tokenised.append(sum(map(len, texts))) or encode(texts)
    )
    monkeypatch.setattr(MarkdownIt, "parse", lambda self, text: parsed.append(text.count("\n")) or parse(self, text))
    for text in ("word " * 60_000, "- item\n" * 45_000, "Alna is a river. It ends.\n\n" * 11_000):
        chunks = chunker.split(text)
        assert squeezed("".join(chunk.text for chunk in chunks)) == squeezed(text)
    assert max(tokenised) <= 1 << 18
    assert max(parsed) <= 20_000  # lines; of the list there are 45,000


def test_many_blank_lines_take_no_time(tokenizer):
    """Seen from each of them anew, they take many minutes."""
    started = time.process_time()
    assert [chunk.text for chunk in chunker_of(tokenizer).split("Alna.\n" + "\n" * 100_000 + "Osby.")] != []
    assert time.process_time() - started < 5


# Sentences


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
