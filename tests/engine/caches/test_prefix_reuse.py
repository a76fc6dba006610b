"""Full prefill behind a prefix tree, through the engine, against plain transformers; and the order of passages that
lengthens what prompts share, against all orders there are."""

import logging
from itertools import permutations, takewhile
from operator import eq

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.makers import tiny_directory
from plain_oracle import greedy
from tiny_model import LINK

import ragcache as rc
from ragcache.engine.caches import prefixes
from ragcache.engine.shared_order import ReadCounts, relevance_hint, shared_order

SHORT = rc.Sampling(max_tokens=6)
QUESTIONS = (
    "Where do dogs bark?",
    "Is the cat happy?",
    "Where does the rowing club meet?",
    "Where do dogs bark at night?",
)


trained = tiny_directory(reuse=LINK)


def expected(kb, oracle, question, hits):
    return greedy(*oracle, prompt_of(kb, question, hits), None, SHORT.max_tokens)


def prompt_of(kb, question, hits):
    form = rc.prompt_format(kb.lm.tokenizer)
    return rc.Prompt(form.prefix_ids, [hit.chunk.token_ids for hit in hits], form.suffix_ids(kb.lm.tokenizer, question))


def ask(kb, question, **options):
    return kb.ask(question, **{"k": 3, "method": "full", "sampling": SHORT, **options})


def tree(kb):
    return kb._engine.prefixes


def test_answers_are_those_of_plain_transformers_whatever_was_asked_before(kb, oracle):
    shared = 0
    for question in (*QUESTIONS, *QUESTIONS):
        answer = ask(kb, question)
        assert answer.text == expected(kb, oracle, question, answer.hits)
        assert answer.usage.cached_tokens + answer.usage.computed_tokens == answer.usage.prompt_tokens
        shared += answer.usage.cached_tokens
    assert shared == tree(kb).stats().matched_tokens - 4, "a prompt asked again computes its last token"
    assert shared > 500


def test_only_what_is_new_is_computed(kb):
    hits = kb.retrieve("dogs", 3)
    first = ask(kb, "Where do dogs bark?", hits=hits)
    assert (first.usage.cached_tokens, {hit.kv for hit in first.hits}) == (0, {"unused"})
    again = ask(kb, "Where do dogs bark?", hits=hits)
    assert again.usage.computed_tokens == 1
    assert {hit.kv for hit in again.hits} == {"exact"}
    other = ask(kb, "Is the cat happy?", hits=[*hits[:2], kb.retrieve("rowing club", 1)[0]])
    prompt = prompt_of(kb, "Is the cat happy?", hits[:2])
    begin = len(prompt.prefix_ids) + sum(len(ids) for ids in prompt.chunk_ids)
    assert begin <= other.usage.cached_tokens < begin + len(hits[2].chunk.token_ids)
    assert [hit.kv for hit in other.hits] == ["exact", "exact", "unused"]


def test_streaming_that_is_left_early_keeps_what_was_computed(kb):
    stream = kb.stream("Where do dogs bark?", 3, method="full", sampling=SHORT)
    assert isinstance(next(stream), rc.Sources)
    assert isinstance(next(stream), rc.Token)
    stream.close()
    assert ask(kb, "Where do dogs bark?").usage.computed_tokens == 1


@pytest.mark.parametrize("first", ["full", "reposition", "a3"])
def test_a_prefix_serves_every_method(open_kb, tmp_path, first):
    """Whoever reads a system prompt first, the others only run what is theirs, and say what they say without it."""
    methods = ["full", "reposition", "cacheblend", "a3", "samkv", "concat"]
    system = "Answer in one word, and be sure of it. " * 4
    answers = {}
    for name, budget in (("off", 0), ("on", 1 << 24)):
        kb = open_kb(path=tmp_path / name, system=system, store=rc.StoreConfig(prefix_bytes=budget))
        kb.ingest([rc.Document("dogs", "Dogs bark at night.\n"), rc.Document("cats", "Cats sleep all day.\n")])
        asked = [first, *(method for method in methods if method != first)]
        answers[name] = [kb.ask("Where do dogs bark?", k=2, method=method, sampling=SHORT) for method in asked]
    prefix_tokens = len(kb._engine.prompts.format.prefix_ids)
    assert prefix_tokens > len(system)
    for off, on in zip(answers["off"][1:], answers["on"][1:], strict=True):
        assert on.text == off.text
        assert on.usage.created_tokens == 0
        assert on.usage.cached_tokens > off.usage.cached_tokens + prefix_tokens / 2  # samkv runs the question twice


@pytest.mark.parametrize("method", ["reposition", "link", "samkv"])
def test_prompts_without_passages_go_on_from_each_other_by_every_method(open_kb, tmp_path, trained, method):
    """An identical prompt runs its last token, and a chat its new turn; the answers are those without any reuse."""
    model = {"model": trained} if method == "link" else {}
    turns: list[dict[str, str]] = []
    on, off = (
        open_kb(path=tmp_path / f"{budget}", method=method, store=rc.StoreConfig(prefix_bytes=budget), **model)
        for budget in (1 << 24, 0)
    )
    for _ in range(2):
        repeated = on.complete("Once upon a time there was", sampling=SHORT)
        assert repeated.text == off.complete("Once upon a time there was", sampling=SHORT).text
    assert repeated.usage.cached_tokens == repeated.usage.prompt_tokens - 1
    read = 0
    for word in ("one", "two", "three", "four", "five"):
        turns.append({"role": "user", "content": f"Say {word}."})
        answer = on.chat(turns, sampling=SHORT)
        assert answer.text == off.chat(turns, sampling=SHORT).text
        assert answer.usage.computed_tokens <= answer.usage.prompt_tokens - read
        assert answer.method == "full"
        read = answer.usage.prompt_tokens - len("Answer:")
        turns.append({"role": "assistant", "content": "Yes."})
    assert answer.usage.cached_tokens > answer.usage.prompt_tokens / 2
    nobody = on.ask("Say one.", hits=[], sampling=SHORT)
    assert on.ask("Say one.", hits=[], sampling=SHORT).usage.computed_tokens == 1
    assert nobody.text == off.ask("Say one.", hits=[], method="full", sampling=SHORT).text


@pytest.mark.parametrize("recipe", ["isolated", "prefix"])
def test_prefixes_of_methods_that_read_blocks_are_within_the_budget(open_kb, tmp_path, recipe):
    """Without a budget a system prompt is read for every question and nothing stays, for ingestion neither."""
    system = "Answer in one word, and be sure of it. " * 4
    texts, computed = [], []
    for name, budget in (("off", 0), ("on", 1 << 24)):
        store = tmp_path / name
        one = open_kb(path=store, system=system, recipe=recipe, store=rc.StoreConfig(prefix_bytes=budget))
        one.ingest([rc.Document("dogs", "Dogs bark at night.\n"), rc.Document("cats", "Cats sleep all day.\n")])
        answers = [one.ask("Where do dogs bark?", k=2, method="reposition", sampling=SHORT) for _ in range(2)]
        texts += [answer.text for answer in answers]
        computed.append(answers[1].usage.created_tokens)
        stats = one.prefix_stats()
        assert stats.num_bytes <= budget
        assert stats.tokens == (len(one._engine.prompts.format.prefix_ids) if budget else 0)
        assert "_prefix" not in vars(one._engine.lookup.encoder)
    assert len(set(texts)) == 1
    assert computed[0] >= len(system) > computed[1] == 0


def test_no_memory_costs_no_answer(kb, monkeypatch, caplog):
    def fail(*_):
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(prefixes, "read_cache", lambda cache: fail)
    with caplog.at_level(logging.WARNING):
        assert ask(kb, "Where do dogs bark?").text
    assert "not kept for later ones: CUDA out of memory" in caplog.text
    assert tree(kb).stats().num_bytes == 0


# Law 10


def holds(kb, ids):
    """Tokens of a prompt whose exact KV is there."""
    full = rc.METHODS["full"]()
    return kb._engine.prefixes.count(full, ids)


def test_a_deleted_document_leaves_no_exact_kv(kb):
    hits = kb.retrieve("dogs", 4)
    prompt = prompt_of(kb, "Where do dogs bark?", hits)
    ask(kb, "Where do dogs bark?", hits=hits)
    assert holds(kb, prompt.ids) == prompt.num_tokens
    gone = hits[2].chunk
    kb.delete(gone.document_id)
    before = len(prompt.prefix_ids) + sum(len(hit.chunk.token_ids) for hit in hits[:2])
    assert holds(kb, prompt.ids) == before
    assert gone.vector_id not in tree(kb)._tree.owners()
    # Whoever still has the passage in hand may read it, and leaves nothing behind.
    again = ask(kb, "Where do dogs bark?", hits=hits)
    assert again.usage.cached_tokens == before
    assert holds(kb, prompt.ids) == before


def test_what_another_process_deleted_is_dropped_at_the_next_question(open_kb, kb):
    hits = kb.retrieve("dogs", 4)
    prompt = prompt_of(kb, "Where do dogs bark?", hits)
    other = open_kb()
    ask(other, "Where do dogs bark?", hits=hits)
    kb.delete(hits[0].chunk.document_id)
    other.chat([{"role": "user", "content": "Hello?"}], sampling=SHORT)
    assert holds(other, prompt.ids) == len(prompt.prefix_ids)


def test_a_document_deleted_while_it_is_read_leaves_nothing(open_kb, kb):
    hits = kb.retrieve("dogs", 4)
    prompt = prompt_of(kb, "Where do dogs bark?", hits)
    stream = kb.stream("Where do dogs bark?", hits=hits, method="full", sampling=SHORT)
    next(stream)
    open_kb().delete(hits[0].chunk.document_id)
    assert list(stream)
    assert holds(kb, prompt.ids) == len(prompt.prefix_ids)


def test_passages_from_outside_go_with_the_next_change(kb):
    passage = rc.Passage("Nobody stored this passage before.")
    first = ask(kb, "Who?", hits=[passage])
    assert ask(kb, "Who?", hits=[passage]).usage.computed_tokens == 1
    kb.ingest(rc.Document("new", "A new document.\n"))
    again = ask(kb, "Who?", hits=[passage])
    assert again.usage.cached_tokens < first.usage.prompt_tokens - 10


def known_of(kept):
    def known(ids):
        return max((sum(takewhile(bool, map(eq, ids, other))) for other in kept), default=0)

    return known


PASSAGES = [(10, 11), (20,), (30, 31, 32), (10, 12), (40, 41)]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.permutations(range(5)), max_size=4), st.permutations(range(5)), st.integers(0, 4))
def test_no_order_shares_more(earlier, asked, count):
    """Try all 24 orders of up to four passages."""
    prefix = (1, 2)
    kept = [[*prefix, *(id for rank in order for id in PASSAGES[rank]), 99] for order in earlier]
    known = known_of(kept)
    chosen = [PASSAGES[rank] for rank in asked[:count]]
    order = shared_order(known, ReadCounts(), prefix, chosen)
    assert sorted(order) == list(range(count))
    longest = max(
        (known([*prefix, *(id for rank in one for id in chosen[rank])]) for one in permutations(range(count))),
        default=0,
    )
    assert known([*prefix, *(id for rank in order for id in chosen[rank])]) == longest


def test_what_is_not_known_goes_by_how_often_it_was_read():
    counts = ReadCounts()
    counts.count([PASSAGES[2], PASSAGES[4]])
    counts.count([PASSAGES[4]])
    assert shared_order(lambda ids: 0, counts, (), PASSAGES) == [4, 2, 0, 1, 3]
    assert shared_order(lambda ids: 0, ReadCounts(), (), PASSAGES) == [0, 1, 2, 3, 4]


def test_the_hint_names_places():
    assert relevance_hint([0, 1, 2]) == relevance_hint([]) == ""
    assert relevance_hint([2, 0, 1]) == "Passages by relevance: 2, 3, 1.\n"


def ask_over(kb, question, hits, **options):
    return kb.ask(question, hits=hits, sampling=SHORT, **{"method": "full", "order": "shared", **options})


def test_passages_are_read_in_the_shared_order_with_the_hint(kb):
    one, two, three = kb.retrieve("dogs", 3)
    first = ask_over(kb, "Where do dogs bark?", [one, two])
    assert [hit.chunk.id for hit in first.hits] == [one.chunk.id, two.chunk.id]
    second = ask_over(kb, "Is the cat happy?", [three, two, one])
    assert [hit.chunk.id for hit in second.hits] == [one.chunk.id, two.chunk.id, three.chunk.id]
    assert [hit.kv for hit in second.hits] == ["exact", "exact", "unused"]
    hint = len(kb.lm.tokenizer("Passages by relevance: 3, 2, 1.\n", add_special_tokens=False)["input_ids"])
    plain = ask_over(kb, "Is the cat happy?", [three, two, one], order="relevance")
    bare = ask_over(kb, "Is the cat happy?", [three, two, one], hint=False)
    assert second.usage.prompt_tokens == plain.usage.prompt_tokens + hint
    assert bare.usage.prompt_tokens == plain.usage.prompt_tokens
    assert [hit.chunk.id for hit in plain.hits] == [three.chunk.id, two.chunk.id, one.chunk.id]
    assert bare.text == ask_over(kb, "Is the cat happy?", [one, two, three], method_options={"reuse": False}).text


def test_a_passage_is_read_once(kb):
    one, two, _ = kb.retrieve("dogs", 3)
    assert [hit.chunk.id for hit in ask_over(kb, "Where?", [one, two, one]).hits] == [one.chunk.id, two.chunk.id]


def test_methods_that_read_blocks_keep_the_order(kb):
    hits = kb.retrieve("dogs", 3)
    ask_over(kb, "Where do dogs bark?", hits[::-1])
    answer = ask_over(kb, "Where do dogs bark?", hits, method="reposition")
    assert [hit.chunk.id for hit in answer.hits] == [hit.chunk.id for hit in hits]
