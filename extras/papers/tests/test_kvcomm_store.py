"""What a method learns from one question serves others of the store, and of nobody else."""

import pytest

import ragcache as rc
from ragcache.errors import ConfigError

QUESTION = "Where do dogs bark at night?"
SHORT = rc.Sampling(max_tokens=8)


def ask(kb, question=QUESTION, **options):
    return kb.ask(question, **{"k": 3, "sampling": SHORT, **options})


def passages_ran(answer) -> bool:
    ran = answer.usage.computed_tokens + answer.usage.created_tokens
    return ran > sum(len(hit.chunk.token_ids) for hit in answer.hits)


@pytest.fixture
def learning(kb, open_kb) -> rc.RagCache:
    """The store with `kvcomm`, after one question."""
    opened = open_kb(method="kvcomm")
    assert passages_ran(ask(opened))
    return opened


def test_the_same_passages_are_not_read_again(kb, learning):
    """Whatever the question; answers are those of full prefill."""
    for question in (QUESTION, "Is it far to the town of Kelbrook?"):
        hits = kb.retrieve(QUESTION, k=3)
        found = ask(learning, question, hits=hits)
        assert not passages_ran(found)
        assert found.text == ask(kb, question, hits=hits, method="full").text


def test_a_question_that_names_the_store_s_own_method_shares_it(learning, open_kb):
    assert not passages_ran(ask(learning, method="kvcomm"))
    assert passages_ran(ask(learning, method="kvcomm", method_options={"threshold": 0.5}))
    other = open_kb(method="reposition")
    for _ in range(2):  # a method of its own keeps nothing for the next question
        assert passages_ran(ask(other, method="kvcomm"))


def test_deletion_takes_what_was_learnt_with_it(learning):
    pool, hits = learning._parts.choice.method.pool, learning.retrieve(QUESTION, k=4)
    assert pool.num_bytes
    learning.delete("rivers")
    assert pool.num_bytes == 0
    assert passages_ran(ask(learning))
    assert not passages_ran(ask(learning))
    held = pool.num_bytes
    for _ in range(2):  # one who still holds a passage that is gone gets it read, and leaves nothing
        assert passages_ran(ask(learning, hits=hits))
    assert pool.num_bytes == held


def test_another_process_s_deletion_counts_too(learning, open_kb):
    open_kb().delete("rivers")
    assert passages_ran(ask(learning))


def test_a_passage_that_goes_while_it_is_read_leaves_nothing(learning, monkeypatch):
    """It is deleted between the search and the reading, and somebody's question has been told of it."""
    pool = learning._parts.choice.method.pool
    loader = learning._parts.loader
    load = loader.load

    def delete_first(*args, **options):
        loaded = load(*args, **options)
        monkeypatch.setattr(loader, "load", load)
        learning.delete("dogs")
        return loaded

    monkeypatch.setattr(loader, "load", delete_first)
    hits = learning.retrieve(QUESTION, k=3)
    assert "dogs" in {hit.chunk.document_id for hit in hits}
    ask(learning, hits=hits)
    assert pool.num_bytes == 0


def test_what_is_learnt_stays_within_a_collection_and_a_filter(learning):
    """Law 8. Pools of earlier prompts serve neither another view nor a question under another filter."""
    theirs = learning.collection("theirs")
    theirs.ingest(
        rc.Document(one.id, "".join(chunk.text for chunk in learning.chunks_of(one.id))) for one in learning.documents()
    )
    ask(learning)
    assert passages_ran(ask(theirs))
    assert not passages_ran(ask(theirs))
    ask(learning)
    assert not passages_ran(ask(learning))
    hidden = {"document_id": {"$ne": "nothing"}}
    assert passages_ran(ask(learning, filter=hidden))
    assert not passages_ran(ask(learning, filter=hidden))


def test_what_somebody_said_is_not_learnt_from(learning):
    """A passage from outside, a system prompt and a conversation are read in full, and leave nothing."""
    pool = learning._parts.choice.method.pool
    held, mine = pool.num_bytes, rc.Passage("The key is under the mat.\n")
    hits = learning.retrieve(QUESTION, k=2)
    talk = [{"role": "user", "content": "I am Ann."}, {"role": "assistant", "content": "Hello."}]
    talk.append({"role": "user", "content": QUESTION})
    for _ in range(2):
        assert passages_ran(ask(learning, hits=[mine, *hits]))
        assert passages_ran(ask(learning, system="My name is Ann."))
        learning.chat(talk, k=3, sampling=SHORT)
    assert pool.num_bytes == held


def test_a_store_of_shortened_blocks_is_refused(open_kb, tmp_path):
    short = open_kb(tmp_path / "short", recipe=rc.Recipe(kept=0.5))
    short.ingest(rc.Document("cats", "The cat sat on the mat.\n"))
    with pytest.raises(ConfigError, match=r"'kvcomm'.*needs blocks that hold all"):
        ask(short, method="kvcomm")
