"""Passages that are learnt from prompts, against a brute-force search for repeated text and plain transformers."""

import random

import numpy as np
import pytest
from kit.makers import open_loading
from plain_oracle import continued, places

import ragcache as rc
from ragcache.engine.caches import learner as learner_module
from ragcache.errors import ConfigError
from ragcache.store.collections import View
from ragcache.store.foreign import window_hashes

SHORT = rc.Sampling(max_tokens=6)
open_kb = open_loading(method="reposition")


def paragraph(seed, words=12):
    """A text of its own: made-up words."""
    made = random.Random(seed)
    return " ".join("".join(made.choices("abcdefghiklmnoprstuvw", k=made.randint(2, 7))) for _ in range(words)) + "."


PAGES = [paragraph(seed) for seed in range(4)]


@pytest.fixture
def kb(open_kb, monkeypatch):
    """With so many slots that no sighting overwrites another: their places depend on the store's secret."""
    monkeypatch.setattr(learner_module, "_SLOTS", 1 << 24)
    return open_kb(store=rc.StoreConfig())


def ask(kb, text, **options):
    """Ask, and wait until the prompt was learnt from."""
    answer = kb.complete(text, sampling=SHORT, **options)
    if kb._questions.learner is not None:
        kb._questions.learner.wait()
    return answer


def ask_twice(kb):
    """Two prompts that have PAGES in common, and nothing else."""
    ask(kb, stuffed(PAGES, "Who rows?"))
    ask(kb, stuffed(PAGES[::-1], "Who sings?", "Read."))


def stuffed(pages, question, head="Answer from this."):
    return "\n\n".join([head, *pages, question])


def learnt(kb):
    return kb.store.kv.passages.contents()


def ids_of(kb, text):
    return kb.lm.tokenizer(text, add_special_tokens=False)["input_ids"]


def common(one, other):
    """Whether some run of all but two tokens at either end of `one` is in `other`, by trying every place."""
    inner = list(one[2:-2])
    return any(list(other[at : at + len(inner)]) == inner for at in range(len(other) - len(inner) + 1))


def test_text_is_found_after_its_second_prompt(kb):
    assert ask(kb, stuffed(PAGES, "Who rows?")).hits == []
    assert learnt(kb) == []
    assert ask(kb, stuffed(PAGES[::-1], "Who sings?", "Read.")).hits == []
    answer = ask(kb, stuffed([PAGES[2], PAGES[0], PAGES[3], PAGES[1]], "Who swims?", "Now read."))
    total = sum(len(ids_of(kb, page)) for page in PAGES)
    assert sum(hit.chunk.num_tokens for hit in answer.hits) >= 0.95 * total
    assert answer.usage.cached_tokens >= 0.95 * total


def test_learnt_pieces_are_no_sources(kb):
    """Passages that somebody supplied are, with a name or without."""
    supplied = paragraph(9)
    kb.precompute([supplied])
    ask_twice(kb)
    answer = ask(kb, stuffed([PAGES[2], supplied], "Who swims?", "Now read."))
    assert [hit.chunk.is_learnt for hit in answer.hits] == [True, False]
    assert [hit["text"][5:40] for hit in answer.to_json()["hits"]] == [supplied[5:40]]


def test_learnt_pieces_are_those_that_two_prompts_share(kb):
    texts = [
        stuffed([*random.Random(seed).sample(PAGES, 2), paragraph(50 + seed)], f"Who {seed}?", f"By {seed}.")
        for seed in range(4)
    ]
    for text in texts:
        ask(kb, text)
    rows = [ids_of(kb, text) for text in texts]
    assert learnt(kb)
    for piece in learnt(kb):
        assert sum(common(piece, row) for row in rows) >= 2
    for page in PAGES:
        in_prompts = sum(page in text for text in texts)
        assert any(common(ids_of(kb, page), piece) for piece in learnt(kb)) == (in_prompts >= 2)


def test_answers_over_learnt_pieces_follow_the_method(kb, model_directory, read):
    """`reposition`: each piece sees itself alone, all else sees everything before it."""
    ask_twice(kb)
    read.clear()
    text = stuffed([PAGES[2], PAGES[0]], "Who swims?", "Now read.")
    answer = ask(kb, text)
    ids = read[0]
    assert ids[1:] == ids_of(kb, text)
    assert len(answer.hits) == 2
    assert answer.text == continued(model_directory, ids, places(ids, answer.hits), SHORT.max_tokens)


def test_full_answers_are_unchanged_by_learning(kb):
    texts = [stuffed(PAGES, "Who rows?"), stuffed(PAGES[::-1], "Who sings?"), stuffed(PAGES[:2], "Who swims?")]
    exact = [ask(kb, text, method="full").text for text in texts]
    assert learnt(kb) == []
    for text in texts:
        ask(kb, text)
    assert learnt(kb)
    assert [ask(kb, text, method="full").text for text in texts] == exact


def test_nothing_is_learnt_if_off(open_kb):
    kb = open_kb(store=rc.StoreConfig(learn="off"))
    for pages in (PAGES, PAGES[::-1], PAGES[:2]):
        assert ask(kb, stuffed(pages, "Who?")).hits == []
    assert kb._questions.learner is None
    assert not (kb.store.layout.foreign / "passages.sqlite3").exists() or learnt(kb) == []


def test_text_is_learnt_at_once_if_asked(open_kb):
    kb = open_kb(store=rc.StoreConfig(learn="first"))
    ask(kb, stuffed(PAGES, "Who rows?", "<context>"))
    assert len(ask(kb, stuffed(PAGES[::-1], "Who sings?", "Read.")).hits) == len(PAGES)


def test_unknown_ways_of_learning_are_refused():
    with pytest.raises(ConfigError, match="third"):
        rc.StoreConfig(learn="third")


def test_a_secret_said_once_is_not_kept(kb):
    """A conversation sends it with every turn, and a tool's result changes after it."""
    secret = paragraph(99)
    talk = f"{secret}\n\nKeep that."
    for turn in range(4):
        talk = f"{talk}\n\n{paragraph(200 + turn, 8)}"
        ask(kb, talk)
    assert learnt(kb) == []


@pytest.mark.parametrize("way", ["document", "replaced", "forget"])
def test_deleted_text_is_learnt_after_two_more_prompts(kb, way):
    ask_twice(kb)
    assert len(learnt(kb)) == len(PAGES)
    if way == "document":
        kb.ingest(rc.Document("page", f"{PAGES[0]} {PAGES[1]}"), split=False)
        kb.delete("page")
    elif way == "replaced":
        text = f"{PAGES[0]} {PAGES[1]}"
        kb.ingest([rc.Document("page", text), rc.Document("same", PAGES[2])], split=False)
        kb.ingest([rc.Document("page", "Another page, of boats."), rc.Document("same", PAGES[2])], split=False)
    else:
        kb.forget(given=[PAGES[0], PAGES[1]])

    def kept():
        return [any(common(ids_of(kb, page), piece) for piece in learnt(kb)) for page in PAGES]

    assert kept() == [False, False, True, True]
    for seed, back in enumerate((False, True)):
        answer = ask(kb, stuffed(random.Random(seed).sample(PAGES, 4), "Who swims?", f"Number {seed}."))
        text = " ".join(hit.chunk.text for hit in answer.hits)
        assert [page[5:40] in text for page in PAGES] == [False, False, True, True]
        assert kept() == [back, back, True, True]


def test_text_deleted_during_an_answer_stays_deleted(kb):
    ask(kb, stuffed(PAGES, "Who rows?"))
    learner = kb._questions.learner
    with learner.answering():  # so that what was seen waits
        kb.complete(stuffed(PAGES[::-1], "Who sings?", "Read."), sampling=SHORT)
        kb.forget(given=PAGES[0])
    learner.wait()
    assert learnt(kb) == []


def test_repeated_lines_flood_nothing(kb):
    line = "The same line again, on every row.\n"
    for rows in (9, 10, 11):
        ask(kb, line * rows)
    assert len(learnt(kb)) <= 3
    assert kb._questions.learner._sights.nbytes == 16 * learner_module._SLOTS


def test_collections_share_neither_sights_nor_pieces(kb):
    red, blue = kb.collection("red"), kb.collection("blue")
    for view in (red, blue):
        assert ask(view, stuffed(PAGES, "Who rows?")).hits == []
    assert learnt(kb) == []  # seen once in each
    ask(red, stuffed(PAGES, "Who sings?", "Read."))
    assert len(learnt(kb)) == len(PAGES)
    assert len(ask(red, stuffed(PAGES, "Who swims?", "Now read.")).hits) == len(PAGES)
    answer = ask(blue, stuffed(PAGES[::-1], "Who swims?", "Once read."))
    assert answer.hits == []
    assert answer.usage.cached_tokens <= 1


def test_a_deletion_leaves_other_collections_their_pieces(kb):
    red, blue = kb.collection("red"), kb.collection("blue")
    for view in (red, blue):
        view.ingest(rc.Document("page", " ".join(PAGES)), split=False, kv="lazy")
        view.delete("page")
        for head in ("Answer.", "Read."):
            ask(view, stuffed(PAGES, "Who rows?", head))
    for remove in (lambda: red.forget(given=PAGES), lambda: red.ingest(rc.Document("page", " ".join(PAGES)))):
        remove()
        assert len(ask(blue, stuffed(PAGES[::-1], "Who swims?", "Now read.")).hits) == len(PAGES)
    red.delete("page")
    assert len(ask(blue, stuffed(PAGES[:2], "Who swims?", "Now read.")).hits) == 2
    assert ask(red, stuffed(PAGES[:2], "Who swims?", "Now read.")).hits == []


def test_a_deleted_collection_takes_its_pieces_along(kb):
    both = kb.seen_by(View.of(["default", "red"], ["red"])) if kb.collection("red") else None
    blue = kb.collection("blue")
    for view in (kb.collection("red"), both, blue):
        for head in ("Answer.", "Read."):
            ask(view, stuffed(PAGES, "Who rows?", head))
    assert len(list(kb.store.kv.foreign.keys())) >= 3 * len(PAGES)
    owners = kb.store.kv.passages.owners(learnt(kb)[0])
    assert len(owners) == 3
    kb.delete_collection("red")
    assert [len(kb.store.kv.passages.owners(ids)) for ids in learnt(kb)] == [1] * len(PAGES)
    assert len(ask(blue, stuffed(PAGES[::-1], "Who swims?", "Now read.")).hits) == len(PAGES)


@pytest.mark.parametrize("join", ["\n\n", "\n"], ids=["blank", "line"])
def test_short_paragraphs_are_found_in_another_order(kb, join):
    """After a prompt that was only repeated. A question is no part of the passage before it."""
    short = [f"{paragraph(80 + number, 5)}\n\n{PAGES[number]}\n\n{paragraph(90 + number, 4)}" for number in range(3)]
    for _ in range(2):
        ask(kb, stuffed(short, "", "Answer.").rstrip() + join + "Who rows, and who sings?")
    answer = ask(kb, stuffed(short[::-1], "Who swims?", "Read."))
    total = sum(len(ids_of(kb, text)) for text in short)
    assert sum(hit.chunk.num_tokens for hit in answer.hits) >= 0.9 * total
    assert len(learnt(kb)) <= 10


def test_learnt_text_is_found_after_opening_again(open_kb):
    kb = open_kb(store=rc.StoreConfig())
    ask_twice(kb)
    kb.close()
    assert len(ask(open_kb(store=rc.StoreConfig()), stuffed(PAGES, "Who swims?", "Now read.")).hits) == len(PAGES)


def test_a_changed_sentence_leaves_the_rest_of_its_paragraph(kb):
    sentences = [paragraph(60 + number, 8) for number in range(7)]

    def told(number):
        text = " ".join([*sentences[:3], paragraph(70 + number, 4), *sentences[3:]])
        return f"Note {number}.\n\n{text}\n\nWho {number}?"

    for number in range(2):
        ask(kb, told(number))
    answer = ask(kb, told(2))
    assert len(answer.hits) == 2
    assert answer.usage.cached_tokens >= 0.95 * sum(len(ids_of(kb, f" {one}")) for one in sentences)


def test_cuts_depend_on_the_text_around_them(kb):
    cut = kb._questions.learner.cut

    def starts(text):
        ids = ids_of(kb, text)
        return {len(kb.lm.tokenizer.decode(ids[: unit.start])) for unit in cut(ids)}

    for join in ("\n", " ", "\n\n", "</source><source id='2'>"):
        text = join.join(PAGES)
        assert {text.index(page) - join.isspace() * (join == " ") for page in PAGES[1:]} <= starts(text)
    long = paragraph(7, 1500)
    later = {at - 200 for at in starts(long) if at >= 200}
    moved = {at - 22 for at in starts(f"Some words before it. {long[200:]}")}
    assert len(later & moved) > 0.8 * len(later)
    for text in (long, "x " * 5000, "", "\n\n" * 900, "\n".join(PAGES)):
        ids = ids_of(kb, text)
        units = cut(ids)
        assert [at for unit in units for at in range(unit.start, unit.end)] == list(range(len(ids)))
        assert all(unit.end - unit.start <= 128 for unit in units)


def test_window_hashes_are_equal_where_tokens_are():
    ids = np.random.default_rng(0).integers(0, 3, 300).tolist()
    windows, hashes = [tuple(ids[at : at + 8]) for at in range(293)], window_hashes(ids).tolist()
    assert len(hashes) == 293
    assert len(set(zip(windows, hashes, strict=True))) == len(set(windows)) == len(set(hashes))
