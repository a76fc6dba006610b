"""Stored passages that come as plain text are read from their KV; where they cannot be, they are noticed, once. The
content index behind it against a search token by token."""

import numpy as np
import pytest
import torch
from engine_texts import TEXTS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kit.makers import messages_of
from plain_oracle import continued, places
from tiny_model import LINK, bpe_tokenizer, save_tiny_llama

import ragcache as rc
from ragcache.engine import local_engine
from ragcache.engine.caches import passage_finder
from ragcache.engine.caches.content_index import EDGE, WINDOW, ContentIndex
from ragcache.engine.request import Clock
from ragcache.errors import ContextTooLongError
from ragcache.fusion import get_method
from ragcache.fusion.fuse import prefill
from ragcache.prompt import PromptEnds
from ragcache_demo.bag_of_words import BagOfWords

QUESTION = "Who meets on Monday?"
ONE = rc.Sampling(max_tokens=1)


said = messages_of(passage_finder)


@pytest.fixture
def pasted(kb) -> str:
    texts = [hit.chunk.text.strip() for hit in kb.retrieve(QUESTION, k=3)]
    return "Answer from this.\n\n" + "\n\n".join(texts) + f"\n\n{QUESTION}"


def calls(kb, text):
    """Calls that cannot use the KV of passages in their text."""
    yield lambda: kb.chat([{"role": "user", "content": ["Read:", text]}], k=1, context="keep", sampling=ONE)
    yield lambda: kb.chat([{"role": "user", "content": text}], method="a3", sampling=ONE)
    yield lambda: kb.complete(text, method="a3", sampling=ONE)
    yield lambda: kb.complete(["Read:", text], method="a3", sampling=ONE)
    yield lambda: kb.ask(text, k=1, method="a3", sampling=ONE)


@pytest.mark.parametrize("way", range(5))
def test_passages_as_text_are_noticed_once(kb, pasted, said, way):
    call = list(calls(kb, pasted))[way]
    call()
    assert len(said()) == 1
    assert "3 stored passages" in said()[0]
    for component in ("create_fused_documents_chain", "FusedSynthesizer", "rc.Passage", "ragcache.documents"):
        assert component in said()[0]
    call()
    assert len(said()) == 1


def asked(kb, way, content, **options):
    """The content where a chain may put it."""
    options = {"sampling": rc.Sampling(max_tokens=8), **options}
    if way == "system":
        return kb.chat([{"role": "system", "content": content}, {"role": "user", "content": "Who?"}], **options)
    if way == "user":
        return kb.chat([{"role": "user", "content": content}], **options)
    return kb.complete([content[:9], content[9:]] if way == "in pieces" else content, **options)


@pytest.mark.parametrize("way", ["user", "system", "complete", "in pieces"])
def test_passages_as_text_are_read_from_their_kv(kb, pasted, said, read, model_directory, way):
    hits = kb.retrieve(QUESTION, k=3)
    answer = asked(kb, way, pasted)
    assert [hit.chunk.id for hit in answer.hits] == [hit.chunk.id for hit in hits]
    assert answer.text == continued(model_directory, read[0], places(read[0], hits))
    assert answer.usage.cached_tokens == sum(len(hit.chunk.token_ids) for hit in hits)
    assert answer.usage.computed_tokens < answer.usage.prompt_tokens / 2
    assert said() == []
    kb._questions.finder._index.clear()
    assert asked(kb, way, pasted).usage.prompt_tokens == answer.usage.prompt_tokens == len(read[0])
    assert read[0] == read[1]


@pytest.mark.parametrize("place", ["system", "earlier", "question"])
def test_retrieved_passages_are_added_to_those_in_the_text(kb, pasted, said, read, model_directory, place):
    """Each stands where it stood; what the text holds is not retrieved once more, by whatever method (law 15)."""
    held = [hit.chunk.id for hit in kb.retrieve(QUESTION, k=3)]
    other = "Where do dogs bark?"
    messages = {
        "system": [{"role": "system", "content": pasted}, {"role": "user", "content": other}],
        "earlier": [{"role": "user", "content": pasted}, {"role": "assistant", "content": "A club."}],
        "question": [{"role": "user", "content": f"{pasted} {other}"}],
    }[place]
    messages += [{"role": "user", "content": other}] * (place == "earlier")
    answer = kb.chat(messages, k=4, sampling=rc.Sampling(max_tokens=8))
    ids = [hit.chunk.id for hit in answer.hits]
    new = [id for id in ids if id not in held]
    assert ids == ([*new, *held] if place == "question" else [*held, *new])
    assert 0 < len(new) < 4
    assert answer.text == continued(model_directory, read[0], places(read[0], answer.hits))
    assert answer.usage.cached_tokens >= sum(len(hit.chunk.token_ids) for hit in answer.hits)
    assert said() == []
    full = kb.chat(messages, k=4, method="full", sampling=ONE)
    kb._questions.finder._index.clear()
    unfound = kb.chat(messages, k=4, sampling=ONE)
    assert read[1] == read[2] == read[0]
    assert [hit.chunk.id for hit in full.hits] == [hit.chunk.id for hit in unfound.hits] == new


def test_a_quoted_passage_is_never_left_out_or_moved(kb, pasted, read):
    """Where retrieved passages are trimmed or ordered, the text is read as it stands."""
    room = kb.lm.max_positions - kb.count_tokens(pasted)
    long = [rc.Passage(f"Word {'and word ' * (room // 12)}{n}.") for n in range(3)]
    messages = [{"role": "user", "content": pasted}]
    trimmed = kb.chat(messages, passages=long, on_overflow="trim", sampling=ONE)
    assert trimmed.dropped > 0
    assert kb.lm.tokenizer.decode(read[-1]).count(pasted) == 1
    ordered = kb.chat(messages, k=4, order="shared", method="reposition", sampling=ONE)
    assert kb.lm.tokenizer.decode(read[-1]).count(pasted) == 1
    assert not {hit.chunk.text.strip() for hit in ordered.hits} & set(pasted.split("\n\n"))


def test_a_store_without_documents_retrieves_nothing(tmp_path, open_kb, said, read, kb):
    """It may hold KV of passages from elsewhere, which a prompt quotes: k changes nothing."""
    empty = open_kb(tmp_path / "empty")
    texts = list(TEXTS.values())
    empty.precompute(texts)
    messages = [{"role": "user", "content": "".join(texts) + QUESTION}]
    plain, asked = (empty.chat(messages, sampling=ONE, **more) for more in ({}, {"k": 5}))
    assert read[-1] == read[-2]
    assert (len(asked.hits), asked.text, asked.method) == (len(plain.hits), plain.text, "reposition")
    assert asked.hits
    assert said() == []


def test_labels_of_a_chain_stay_where_they_are(kb, read, model_directory):
    hits = kb.retrieve(QUESTION, k=3)
    pasted = "".join(f"Source {n}:\n{hit.chunk.text.strip()}\n" for n, hit in enumerate(hits, 1))
    answer = asked(kb, "user", f"{pasted}{QUESTION}")
    labelled = [part for n, hit in enumerate(hits, 1) for part in (f"Source {n}:\n", hit)]
    assert answer.text == asked(kb, "user", [*labelled, QUESTION]).text
    assert answer.text == continued(model_directory, read[0], places(read[0], hits))
    assert len(answer.hits) == 3


def test_the_last_token_of_a_prompt_runs_though_it_is_a_passages(kb, read, model_directory):
    *others, last = kb.retrieve(QUESTION, k=4)
    text = "\n\n".join(hit.chunk.text.strip() for hit in (*others, last)) + "\n"
    answer = kb.complete(text, sampling=ONE)
    assert [hit.chunk.id for hit in answer.hits] == [hit.chunk.id for hit in (*others, last)]
    assert answer.hits[-1].chunk.token_ids == last.chunk.token_ids[:-1]
    assert kb.lm.tokenizer.decode(read[0][1:]) == text
    assert answer.text == continued(model_directory, read[0], places(read[0], answer.hits), count=1)


TURNED = "{% for m in messages %}{{ m['content'] }}<|eos|>{% endfor %}"  # a control token between messages


@pytest.mark.parametrize(
    ("method", "alone"),
    [("reposition", 5), (get_method("epic", first_tokens=100), 0), (get_method("cacheblend", ratio=1.0), 0)],
)
def test_a_conversation_goes_on_behind_the_passages_that_its_messages_quote(tmp_path, open_kb, read, method, alone):
    """alone: passages, of five, that plain transformers reads by themselves to answer the same"""
    directory = save_tiny_llama(tmp_path / "lm", chat_template=TURNED)
    with open_kb(model=rc.load_lm(directory), method=method) as kb:
        kb.ingest(rc.Document(id, text) for id, text in TEXTS.items())
        first, second, third, fourth = kb.retrieve(QUESTION, k=4)
        messages = [{"role": "user", "content": f"{first.chunk.text}\n{second.chunk.text}{third.chunk.text}Why?"}]
        begun = kb.chat(messages, sampling=rc.Sampling(max_tokens=8))
        messages += [
            {"role": "assistant", "content": begun.text},
            {"role": "user", "content": f"{fourth.chunk.text}\n{second.chunk.text}And who?"},
        ]
        further = kb.chat(messages, sampling=rc.Sampling(max_tokens=8))
    assert [hit.chunk.id for hit in further.hits] == [one.chunk.id for one in (first, second, third, fourth, second)]
    assert further.usage.cached_tokens >= begun.usage.prompt_tokens + begun.usage.completion_tokens - 1
    assert further.text == continued(directory, read[-1], places(read[-1], further.hits)[:alone])


def test_methods_that_add_tokens_read_text_as_text(tmp_path, open_kb, said):
    """Link tokens between the passages would make another prompt of it."""
    with open_kb(model=rc.load_lm(save_tiny_llama(tmp_path / "lm", reuse=LINK)), texts=TEXTS) as kb:
        text = "".join(hit.chunk.text for hit in kb.retrieve(QUESTION, k=3)) + QUESTION
        answer = kb.complete(text, sampling=ONE)
        assert (answer.hits, answer.usage.prompt_tokens) == ([], 1 + len(text))
        assert len(said()) == 1
        assert len(kb.complete(text, method="reposition", sampling=ONE).hits) == 3


def test_a_prompt_that_is_too_long_is_refused_whatever_was_found(kb, pasted):
    """No passage of a text is left out of it, as one that was retrieved may be."""
    text = f"{pasted}\n" * 4
    with pytest.raises(ContextTooLongError, match="ask a shorter one"):
        kb.complete(text, on_overflow="trim", sampling=ONE)


# Two ways to cut text before it is merged: GPT-2's, which leaves line breaks alone, and that of Llama 3 and Qwen, which
# joins them with each other and with what ends a sentence.
GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
BPE_TEXTS = [
    "Tariff of the harbour office. A boat of up to six metres lies free for a night, and a licence costs 12",
    "A boat of up to six metres lies free for a night, and a licence costs 12\nAsk at the harbour office.",
    "The rowing club of Kelbrook meets on Monday.\r\nIts boats lie at the harbour, and it takes in members in May.",
    "The river Arno rises in the Vale hills, and it runs by the town of Kelbrook to the sea, past 12 bridges.",
]


@pytest.fixture(scope="module", params=["gpt2", "llama3"])
def bpe_kb(request, tmp_path_factory):
    """A store that has handed out all of its passages, over a tokenizer that merges across their ends."""
    directory = tmp_path_factory.mktemp(request.param)
    pattern = {"gpt2": GPT2, "llama3": LLAMA3}[request.param]
    more = [f"{text}{end}" for text in BPE_TEXTS for end in ("\n", "\n\n", "00 crowns\n", "s.\n\n", "\r\n")]
    save_tiny_llama(directory, tokenizer=bpe_tokenizer(pattern, more * 4))
    lm = rc.load_lm(directory)
    with rc.RagCache.open(directory / "kb", model=lm, embedder=BagOfWords(), method="reposition") as kb:
        kb.ingest([rc.Document(str(n), text) for n, text in enumerate(BPE_TEXTS)], split=False)
        yield kb


QUOTES = st.one_of(
    st.sampled_from(BPE_TEXTS),
    st.tuples(st.sampled_from(BPE_TEXTS), st.integers(1, 60)).map(lambda cut: cut[0][: -cut[1]]),
    st.tuples(st.sampled_from(BPE_TEXTS), st.integers(1, 60)).map(lambda cut: cut[0][cut[1] :]),
)
JOINTS = st.sampled_from(["", " ", "\n", "\n\n", "\r\n", "00 crowns\n", ".\n\n", "\n[2] ", "2", "s"])


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(parts=st.lists(st.tuples(QUOTES, JOINTS), min_size=1, max_size=5), way=st.sampled_from(["user", "complete"]))
def test_what_a_prompt_says_depends_on_it_alone(bpe_kb, read, parts, way):
    """Its ids are those that the tokenizer gives its text, whatever the store has handed out (law 15)."""
    text = "".join(part for pair in parts for part in pair) + "Who?"
    bpe_kb.retrieve("harbour", k=len(BPE_TEXTS))
    read.clear()
    answer = asked(bpe_kb, way, text, sampling=ONE)
    tokenizer, shown = bpe_kb.lm.tokenizer, f"{text}\nAnswer:" if way == "user" else text
    ids = [tokenizer.bos_token_id, *tokenizer(shown, add_special_tokens=False)["input_ids"]]
    assert read == [ids]
    assert len(places(ids, answer.hits)) == len(answer.hits)


def test_separators_that_keep_the_tokens_keep_the_reuse(bpe_kb):
    """A line break between passages does, by either tokenizer. Where an empty line is read together with what ends a
    passage, all but that passage's last tokens are found."""
    texts = [hit.chunk.text for hit in bpe_kb.retrieve("harbour", k=len(BPE_TEXTS))]
    assert len(asked(bpe_kb, "user", "\n".join(texts) + "\nWho?").hits) >= 3
    by_empty_line = asked(bpe_kb, "user", "\n\n".join(texts) + "\n\nWho?").hits
    assert len(by_empty_line) == 4
    empty_line = bpe_kb.lm.tokenizer("a.\n\nb", add_special_tokens=False)["input_ids"]
    alone = bpe_kb.lm.tokenizer("a.\n", add_special_tokens=False)["input_ids"]
    missing = [hit.chunk.whole.num_tokens - hit.chunk.num_tokens for hit in by_empty_line]
    assert all(missing) == (empty_line[: len(alone)] != alone)
    assert max(missing) <= 2


def test_what_is_found_in_part_is_cut_from_its_own_block(bpe_kb, read):
    """A passage whose last tokens differ is read as plain transformers read it under a mask: it sees itself alone."""
    texts = [hit.chunk.text.strip() for hit in bpe_kb.retrieve("harbour", k=len(BPE_TEXTS))]
    answer = asked(bpe_kb, "complete", "\n\n".join(texts) + "\n\nWho?")
    assert [len(read), len(answer.hits)] == [1, 4]
    assert answer.text == continued(bpe_kb.lm.name, read[0], places(read[0], answer.hits))


def test_a_passage_behind_other_first_tokens_is_found_behind_them(bpe_kb, monkeypatch):
    """Its KV is that of its own block, whose first tokens stand before it."""
    (hit,) = bpe_kb.retrieve("river Arno", k=1)
    own, blocks = hit.chunk.token_ids, []
    monkeypatch.setattr(
        local_engine, "prefill", lambda *given, **named: blocks.append(given[2]) or prefill(*given, **named)
    )
    ids = [*own[5:7], *own[2:], *own[:1]]
    cut = bpe_kb._questions.finder.cut
    ends, hits = cut(PromptEnds((), ids), [], parts=True)
    assert [one.chunk.token_ids for one in hits] == [own[2:]]
    assert [*ends.prefix_ids, *hits[0].chunk.token_ids, *ends.suffix_ids] == ids
    reading = bpe_kb._questions._request_options({"sampling": ONE})
    list(bpe_kb._engine.stream(bpe_kb._engine.prompts.request(ends, hits, reading, Clock(0.0))))
    (whole,) = bpe_kb._parts.block_keys.encode([own])
    torch.testing.assert_close(blocks[0][0].keys, whole.keys[:, :, 2:], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(blocks[0][0].values, whole.values[:, :, 2:], atol=1e-5, rtol=1e-5)
    assert cut(PromptEnds((), [*own[5:8], *own[3:], 1]), [], parts=True)[1] == []
    assert cut(PromptEnds((), ids), [], parts=False)[1] == []


def test_a_changed_passage_is_text(kb):
    first, *rest = [hit.chunk.text.strip() for hit in kb.retrieve(QUESTION, k=4)]
    answer = asked(kb, "user", "\n\n".join([rest[0], first.swapcase(), *rest[1:], QUESTION]))
    assert [hit.chunk.text.strip() for hit in answer.hits] == rest


def test_passages_that_are_kept_apart_are_not(kb, said):
    hits = kb.retrieve(QUESTION, k=3)
    kb.ask(QUESTION, k=3, sampling=ONE)
    kb.chat([{"role": "user", "content": [*hits, QUESTION]}], sampling=ONE)
    earlier = [{"role": "user", "content": [*hits, QUESTION]}, {"role": "assistant", "content": hits[0].chunk.text * 3}]
    kb.chat([*earlier, {"role": "user", "content": "And who else?"}], sampling=ONE)
    kb.complete([*hits, QUESTION], sampling=ONE)
    assert said() == []


def test_a_quoted_line_and_other_text_are_not(kb, said):
    line = kb.retrieve(QUESTION, k=1)[0].chunk.text.strip()
    kb.chat([{"role": "user", "content": f"Is it true that '{line}'? " + "Say so in many words. " * 4}], sampling=ONE)
    kb.chat([{"role": "user", "content": "A text from somewhere else. " * 9}], sampling=ONE)
    assert said() == []


def test_reading_whole_prompts_loses_no_reuse(kb, pasted, said):
    kb.chat([{"role": "user", "content": pasted}], method="full", sampling=ONE)
    assert said() == []


def found_in(kb, text):
    return sorted(hit.chunk.document_id for hit in kb.complete(text, sampling=ONE).hits)


def test_the_index_follows_the_documents(kb, open_kb):
    """Nobody retrieved anything: all that is stored is found, in a store that is opened again, too."""
    more = {"boats": "The boats of the club lie by the old bridge, and nobody has ever counted them.\n"}
    text = "".join([*TEXTS.values(), *more.values(), QUESTION])
    assert found_in(kb, text) == sorted(TEXTS)
    kb.ingest(rc.Document(id, text) for id, text in more.items())
    assert found_in(kb, text) == sorted([*TEXTS, *more])
    kb.delete("cats")
    assert found_in(kb, text) == sorted({*TEXTS, *more} - {"cats"})
    kb.close()
    with open_kb() as again:
        assert found_in(again, text) == sorted({*TEXTS, *more} - {"cats"})
        for _ in range(9):
            again.ingest(rc.Document("boats", more["boats"].upper()))
            again.ingest(rc.Document("boats", more["boats"]))
            assert "boats" in found_in(again, text)
        assert len(again._questions.finder._index) <= 2 * again.info().chunks + 2


def test_a_saved_index_is_used_and_what_came_since_is_added(kb, open_kb, monkeypatch):
    monkeypatch.setattr(passage_finder, "SAVED_FROM", 0)
    text = "".join([*TEXTS.values(), QUESTION])
    found_in(kb, text)
    path = kb.store.layout.passages
    assert path.exists()
    kb.ingest(rc.Document("boats", "The boats of the club lie by the old bridge, and nobody has ever counted them.\n"))
    kb.close()
    with open_kb() as again:
        added = []
        add = again._questions.finder._index.add
        monkeypatch.setattr(again._questions.finder._index, "add", lambda batch: added.extend(batch) or add(batch))
        assert found_in(again, f"{text}{again.chunks_of('boats')[0].text}.") == sorted([*TEXTS, "boats"])
        assert len(added) == 1


def inner(ids):
    """Tokens that have to stand in a prompt."""
    edge = min(EDGE, (len(ids) - WINDOW) // 2)
    return ids[edge : len(ids) - edge]


def searched(row, passages):
    """The same by comparing at every place: the longest of those that begin first."""
    found, at = [], 0
    while at < len(row):
        here = [
            (len(inner(ids)), name)
            for name, ids in passages.items()
            if len(ids) >= WINDOW and row[at : at + len(inner(ids))] == inner(ids)
        ]
        if here:
            length, name = max(here)
            found.append((at, at + length, name))
            at += length
        else:
            at += 1
    return found


def index_of(passages):
    index = ContentIndex()
    index.add(passages.items())
    return index


FEW = st.lists(st.integers(0, 2), max_size=20)


@settings(max_examples=300, deadline=None)
@given(passages=st.lists(FEW, max_size=6), order=st.lists(st.tuples(st.integers(0, 9), FEW), max_size=8))
def test_every_passage_is_found_where_it_stands_and_nowhere_else(passages, order):
    known = dict(enumerate(passages))
    row = [id for which, between in order for id in [*known.get(which, []), *between]]
    index = ContentIndex()
    for name, ids in known.items():  # in several batches, with looks between
        index.add([(name, ids)])
        index.find(row)
    assert [tuple(one) for one in index.find(row)] == searched(row, known)


def test_a_saved_index_is_the_same_and_a_damaged_one_is_none(tmp_path):
    known = {name: list(range(name, name + 30)) for name in range(0, 400, 40)}
    file, row = tmp_path / "passages.npz", [*known[40], *known[0], *known[360]]
    index_of(known).save(file, 7)
    again = index_of({9: list(range(2000, 2040))})
    assert again.load(file) == 7
    assert again.find(row) == index_of(known).find(row)
    assert again.find(range(2000, 2040)) == []
    whole = file.read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], b"PK" + whole[2:40], b"no zip"):
        file.write_bytes(damaged)
        assert again.load(file) is None
    np.savez(
        file, version=2, last=1, **{name: np.zeros(1) for name in ("anchors", "cores", "offsets", "lengths", "names")}
    )
    assert again.load(file) is None
    assert again.load(tmp_path / "none") is None
    assert len(again) == len(known)


def test_a_thousand_near_copies_are_told_apart():
    random = np.random.default_rng(0)
    copies = np.tile(random.integers(0, 50000, 200), (1000, 1))
    copies[np.arange(1000), random.integers(10, 190, 1000)] += np.arange(1000) + 1
    index = index_of(dict(enumerate(copies)))
    chosen = random.permutation(1000)[:60].tolist()
    row = np.concatenate([copies[name] for name in chosen])
    assert [one.name for one in index.find(row)] == chosen


def test_passages_of_one_token_and_of_none_cost_nothing():
    index = index_of({name: [7] * (name % WINDOW) for name in range(1000)})
    assert len(index) == 0
    assert index.find([7] * 16000) == []
    index.add((name, [7] * 300) for name in range(1000))
    assert all(one.end - one.start == 300 - 2 * EDGE for one in index.find([7] * 16000))
