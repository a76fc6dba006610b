"""A store that is read whole, against a plain pass over all of it, in this process and after a restart."""

import pytest
from engine_texts import TEXTS
from plain_oracle import greedy

import ragcache as rc
from ragcache.codecs import CODECS
from ragcache.errors import ContextTooLongError

SHORT = rc.Sampling(max_tokens=6)
QUESTION, OTHER = "Where do dogs bark?", "Is the cat happy?"
ALONE = rc.StoreConfig(prefix_bytes=0)  # prompts' own KV is not kept beside the whole's


def prompt_of(kb, question, texts):
    """All passages by their documents' ids, tokenised alone."""
    form, tokenizer = rc.prompt_format(kb.lm.tokenizer), kb.lm.tokenizer
    chunks = [tokenizer(texts[id], add_special_tokens=False)["input_ids"] for id in sorted(texts)]
    return rc.Prompt(form.prefix_ids, chunks, form.suffix_ids(tokenizer, question))


def expected(kb, oracle, question, texts=TEXTS):
    return greedy(*oracle, prompt_of(kb, question, texts), None, SHORT.max_tokens)


def ask(kb, question=QUESTION, **options):
    return kb.ask(question, whole=True, sampling=SHORT, **options)


def whole_handles(kb):
    """Blocks on disk that belong to no passage."""
    return set(kb.store.kv.foreign.keys())


@pytest.mark.parametrize("config", [rc.StoreConfig(), ALONE], ids=["tree", "no tree"])
def test_answers_are_those_of_a_plain_pass_over_everything(open_kb, oracle, config):
    kb = open_kb(store=config, texts=TEXTS)
    first, second = ask(kb), ask(kb, OTHER)
    assert (first.text, second.text) == (expected(kb, oracle, QUESTION), expected(kb, oracle, OTHER))
    prompt = prompt_of(kb, OTHER, TEXTS)
    assert second.usage.prompt_tokens == prompt.num_tokens
    assert second.usage.computed_tokens <= len(prompt.suffix_ids)
    assert [hit.chunk.document_id for hit in first.hits] == sorted(TEXTS)
    assert {hit.kv for hit in first.hits} == {"computed"}
    assert {hit.kv for hit in second.hits} == {"exact"}
    assert first.method == "full"


def test_the_kv_outlives_the_process(open_kb, oracle):
    kb = open_kb(store=ALONE, texts=TEXTS)
    assert ask(kb).usage.created_tokens == prompt_of(kb, QUESTION, TEXTS).context_tokens
    (handle,) = whole_handles(kb)
    kb.close()
    again = open_kb(store=ALONE)
    answer = ask(again, OTHER)
    assert answer.text == expected(again, oracle, OTHER)
    assert answer.usage.created_tokens == 0
    assert answer.usage.computed_tokens == len(prompt_of(again, OTHER, TEXTS).suffix_ids)
    assert answer.timings.load_s > 0
    assert whole_handles(again) == {handle}
    assert again.doctor().sound


def test_it_is_computed_again_where_its_file_is_damaged(open_kb, oracle):
    kb = open_kb(store=ALONE, texts=TEXTS)
    ask(kb)
    (handle,) = whole_handles(kb)
    (path,) = kb.store.layout.foreign.rglob(f"{handle}*")
    kb.close()
    path.write_bytes(path.read_bytes()[:-4] + b"\0\0\0\0")
    again = open_kb(store=ALONE)
    answer = ask(again)
    assert (answer.text, answer.usage.created_tokens > 0) == (expected(again, oracle, QUESTION), True)


@pytest.mark.parametrize("change", ["delete", "replace", "add"])
def test_a_change_of_any_document_takes_it_away(open_kb, oracle, change):
    kb = open_kb(store=ALONE, texts=TEXTS)
    ask(kb)
    (old,) = whole_handles(kb)
    texts = dict(TEXTS)
    if change == "delete":
        del texts["cats"]
        kb.delete(["cats"])
    else:
        name = "cats" if change == "replace" else "mice"
        texts[name] = "Mice eat cheese in the barn.\n"
        kb.ingest(rc.Document(name, texts[name]))
    assert not whole_handles(kb)
    assert old not in kb.store.kv
    assert ask(kb).text == expected(kb, oracle, QUESTION, texts)
    assert old not in whole_handles(kb)


def test_nothing_is_kept_of_documents_that_change_meanwhile(open_kb, monkeypatch):
    kb = open_kb(store=ALONE, texts=TEXTS)
    documents, put, blocks = kb.store.documents, kb.store.kv.foreign.put, []

    def put_late(*given):
        documents.delete_documents(["cats"])
        blocks.append(put(*given))
        return blocks[0]

    monkeypatch.setattr(kb.store.kv.foreign, "put", put_late)
    ask(kb)
    assert len(blocks) == 1
    assert not whole_handles(kb)


LOSSY = [name for name in CODECS if not CODECS[name].lossless]


@pytest.mark.parametrize("codec", [pytest.param(one, marks=[pytest.mark.slow] * (one != "int8")) for one in LOSSY])
def test_it_is_kept_bit_for_bit_whatever_the_codec(open_kb, oracle, codec):
    config = rc.StoreConfig(codec=codec, prefix_bytes=0)
    with open_kb(store=config, texts=TEXTS) as kb:
        first = ask(kb)
        assert (first.text, first.usage.created_tokens > 0) == (expected(kb, oracle, QUESTION), True)
    again = open_kb(store=config)
    second = ask(again, OTHER)
    assert (second.text, second.usage.created_tokens) == (expected(again, oracle, OTHER), 0)


def test_a_store_that_keeps_nothing_on_disk_reads_it_anew(open_kb, oracle):
    kb = open_kb(store=rc.StoreConfig(foreign_cache=0, prefix_bytes=0), texts=TEXTS)
    for _ in range(2):
        answer = ask(kb)
        assert (answer.text, answer.usage.created_tokens > 0) == (expected(kb, oracle, QUESTION), True)


def test_a_store_that_does_not_fit_is_refused_by_name(kb):
    kb.ingest(rc.Document("long", "It rained all day in the valley. " * 40))
    for options in ({}, {"on_overflow": "trim"}):
        with pytest.raises(
            ContextTooLongError, match=r"the whole store has \d+ passages of \d+ tokens, .*ask without whole"
        ):
            ask(kb, **options)
    assert not whole_handles(kb)


def test_collections_and_system_prompts_have_their_own(open_kb, oracle):
    kb = open_kb(store=ALONE, texts=TEXTS)
    ask(kb)
    other = kb.collection("b")
    other.ingest(rc.Document(id, text) for id, text in TEXTS.items())
    assert ask(other).usage.created_tokens > 0
    assert len(whole_handles(other)) == 1  # the first is gone with the change of the documents
    assert ask(other).usage.created_tokens == 0
    kb.close()
    assert ask(open_kb(system="Be brief.", store=ALONE)).usage.created_tokens > 0
