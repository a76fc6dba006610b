"""Conversations, raw prompts and given passages against plain transformers."""

from __future__ import annotations

import pytest
import torch
from engine_texts import CHAT
from families import block_diagonal
from plain_oracle import greedy, plain_transformers
from tiny_model import save_tiny_llama

import ragcache as rc
from ragcache.errors import ConfigError, NoSuchDocumentError

SHORT = rc.Sampling(max_tokens=8)
CATS, DOGS = "The cat sat on the mat. It was happy there.\n", "Dogs bark at night in the town of Kelbrook.\n"
NEW = "Nobody stored this passage before."


@pytest.fixture(scope="module")
def chatty(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("chatty"), chat_template=CHAT)


@pytest.fixture(scope="module")
def lm(chatty):
    return rc.load_lm(chatty)


@pytest.fixture(scope="module")
def oracle(chatty):
    return plain_transformers(chatty)


def reading(oracle, pieces, *, causal=False):
    """What plain transformers answers to head, passages and tail, given as text, each tokenised alone."""
    model, tokenizer = oracle
    head, *passages, tail = [tokenizer(piece, add_special_tokens=False)["input_ids"] for piece in pieces]
    prompt = rc.Prompt(head, passages, tail)
    n = prompt.num_tokens
    allowed = torch.ones(n, n, dtype=torch.bool).tril() if causal else block_diagonal(prompt)
    return greedy(model, tokenizer, prompt, allowed, SHORT.max_tokens)


def bos(oracle):
    return oracle[1].bos_token


def user(*parts):
    return {"role": "user", "content": list(parts) if len(parts) > 1 else parts[0]}


def test_one_question_as_a_chat_is_the_question_asked(kb):
    for question in ("Where do dogs bark?", "Is the cat happy?"):
        asked, chatted = kb.ask(question, k=3, sampling=SHORT), kb.chat([user(question)], k=3, sampling=SHORT)
        assert (chatted.text, chatted.usage.prompt_tokens) == (asked.text, asked.usage.prompt_tokens)
        assert [hit.chunk.id for hit in chatted.hits] == [hit.chunk.id for hit in asked.hits]


def test_retrieved_passages_stand_before_the_last_question(kb, oracle):
    turns = [user("Where do dogs bark?"), {"role": "assistant", "content": "In Kelbrook."}, user("Is the cat happy?")]
    answer = kb.chat(turns, k=2, sampling=SHORT)
    assert [hit.chunk.id for hit in answer.hits] == [hit.chunk.id for hit in kb.retrieve("Is the cat happy?", 2)]
    head = f"{bos(oracle)}[user]Question: Where do dogs bark?[end][assistant]In Kelbrook.[end][user]"
    passages = [hit.chunk.text for hit in answer.hits]
    assert answer.text == reading(oracle, [head, *passages, "Question: Is the cat happy?[end][assistant]"])


def test_passages_are_read_where_they_stand(kb, oracle):
    turns = [
        {"role": "system", "content": "Be brief."},
        user("Context: ", rc.Passage("Old news."), "Old question?"),
        {"role": "assistant", "content": "Yes."},
        user("Use this:\n", rc.Passage(CATS.strip()), "  ", rc.Passage(NEW), "\nWhat now?"),
    ]
    answer = kb.chat(turns, sampling=SHORT)
    head = (
        f"{bos(oracle)}[system]Be brief.[end][user]Context: Old news.\nOld question?[end][assistant]Yes.[end][user]"
        "Use this:\n"
    )
    assert answer.text == reading(oracle, [head, CATS, f"{NEW}\n", "\nWhat now?[end][assistant]"])
    assert [hit.chunk.text.rstrip() for hit in answer.hits] == [CATS.strip(), NEW]


def labelled(oracle, pieces):
    """The same with text between passages; pieces: head, passage, label, passage, tail."""
    model, tokenizer = oracle
    head, first, label, second, tail = [tokenizer(piece, add_special_tokens=False)["input_ids"] for piece in pieces]
    prompt = rc.Prompt(head, [first, second], tail, [[], label])
    lengths = torch.tensor([len(head), len(first), len(label), len(second), len(tail)])
    owner = torch.repeat_interleave(torch.arange(5), lengths)
    apart = (owner[:, None] == owner[None, :]) | torch.isin(owner, torch.tensor([0, 2, 4]))[:, None]
    causal = torch.ones(len(owner), len(owner), dtype=torch.bool).tril()
    return greedy(model, tokenizer, prompt, apart & causal, SHORT.max_tokens)


def test_text_between_passages_is_read_where_it_stands(kb, oracle):
    """A label runs with the question: stored blocks serve on both sides of it."""
    parts = ["[1] ", rc.Passage(CATS), "\n[2] ", rc.Passage(DOGS), "Who?"]
    kb.ask("Warm?", k=3, sampling=SHORT)
    answer = kb.chat([user(*parts)], sampling=SHORT)
    tail = "Who?[end][assistant]"
    assert answer.text == labelled(oracle, [f"{bos(oracle)}[user][1] ", CATS, "[2] ", DOGS, tail])
    assert [hit.kv for hit in answer.hits] == ["memory", "memory"]
    tokenizer = oracle[1]
    own = sum(len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in ("[2] ", tail))
    assert answer.usage.computed_tokens - answer.usage.created_tokens == own
    again = kb.complete(parts, sampling=SHORT)
    assert again.text == labelled(oracle, [f"{bos(oracle)}[1] ", CATS, "[2] ", DOGS, "Who?"])
    assert [hit.chunk.text for hit in kb.chat([user(*parts)], sampling=SHORT).hits] == [CATS, DOGS]


def test_a_passage_that_is_trimmed_takes_its_label_along(kb):
    long = rc.Passage("word " * 600)
    answer = kb.complete([rc.Passage(CATS), "[2] ", long, "So:"], on_overflow="trim", sampling=SHORT)
    assert (answer.dropped, len(answer.hits)) == (1, 1)
    assert answer.text == kb.complete([rc.Passage(CATS), "So:"], sampling=SHORT).text


def test_a_plain_chat_reads_the_conversation_alone(kb, oracle):
    answer = kb.chat([user("Say something.")], sampling=SHORT)
    assert answer.text == reading(oracle, [f"{bos(oracle)}[user]Say something.", "[end][assistant]"], causal=True)
    assert (answer.hits, answer.usage.cached_tokens) == ([], 0)
    assert answer.usage.computed_tokens == answer.usage.prompt_tokens


def test_a_raw_prompt_is_continued(kb, oracle):
    assert kb.complete("Once upon", sampling=SHORT).text == reading(
        oracle, [f"{bos(oracle)}Once", " upon"], causal=True
    )
    parts = ["Facts: ", rc.Passage(DOGS), rc.Passage(CATS), "So:"]
    expected = reading(oracle, [f"{bos(oracle)}Facts: ", DOGS, CATS, "So:"])
    assert kb.complete(parts, sampling=SHORT).text == expected
    assert kb.complete([f"{bos(oracle)}Facts: ", *parts[1:]], sampling=SHORT).text == expected


def test_a_store_behind_a_prefix_keeps_passages_there(open_kb, tmp_path, oracle):
    kb = open_kb(tmp_path / "prefixed", recipe="prefix", system="Be brief.")
    kb.ingest(rc.Document("cats", CATS))
    turns = [user("One?"), {"role": "assistant", "content": "Yes."}, user("The cat?")]
    kb.chat(turns, k=1, sampling=SHORT)
    kb._reader.contexts.forget()
    answer = kb.chat(turns, k=1, sampling=SHORT)
    head = f"{bos(oracle)}[system]Be brief.[end][user]"
    tail = "Question: One?[end][assistant]Yes.[end][user]Question: The cat?[end][assistant]"
    assert answer.text == reading(oracle, [head, CATS, tail], causal=True)
    assert answer.hits[0].kv == "memory"
    assert answer.usage.created_tokens == 0


def test_blocks_behind_another_prefix_are_computed_for_it(open_kb, tmp_path, oracle):
    kb = open_kb(tmp_path / "prefixed", recipe="prefix", system="Be brief.")
    kb.ingest(rc.Document("cats", CATS))
    turns = [{"role": "system", "content": "Shout."}, user("The cat?")]
    first = kb.chat(turns, k=1, sampling=SHORT)
    kb._reader.contexts.forget()
    second = kb.chat(turns, k=1, sampling=SHORT)
    expected = reading(
        oracle, [f"{bos(oracle)}[system]Shout.[end][user]", CATS, "Question: The cat?[end][assistant]"], causal=True
    )
    assert first.text == second.text == expected
    assert (first.hits[0].kv, second.hits[0].kv) == ("computed", "memory")
    own = kb.chunks(["cats#0"])[0].handle
    assert first.hits[0].handle != own
    assert own in kb.store.kv
    assert set(kb.store.kv.keys()) == {own}


def test_a_growing_conversation_is_read_on(kb, oracle):
    """Only what was said since the last turn runs before the passages of the next one."""
    turns, heads = [], []
    for question in ("Where do dogs bark?", "Is the cat happy?", "Who meets on Monday?"):
        turns.append(user(question))
        answer = kb.chat(turns, k=1, sampling=SHORT)
        passage = answer.hits[0].chunk.text
        said = [f"Question: {turn['content']}" if turn["role"] == "user" else turn["content"] for turn in turns[:-1]]
        head = "".join(f"[{turn['role']}]{text}[end]" for turn, text in zip(turns, said, strict=False))
        pieces = [f"{bos(oracle)}{head}[user]", passage, f"Question: {question}[end][assistant]"]
        heads.append(len(oracle[1](pieces[0], add_special_tokens=False)["input_ids"]))
        assert answer.text == reading(oracle, pieces)
        turns.append({"role": "assistant", "content": answer.text})
        new = heads[-1] - (heads[-2] if len(heads) > 1 else 0)
        assert answer.usage.created_tokens <= new + 2  # where two texts meet they may be cut otherwise
    assert heads[0] < heads[1] < heads[2]


# Given passages


def test_a_passage_is_found_by_its_text_id_or_handle(kb):
    chunk = kb.chunks(["dogs#0"])[0]
    given = {
        "text": rc.Passage(DOGS.strip()),
        "id": rc.Passage(id="dogs#0"),
        "handle": rc.Passage(handle=chunk.handle),
        "all": rc.Passage(DOGS, "dogs#0", chunk.handle, score=0.5),
        "wrong handle": rc.Passage(DOGS, handle="0" * 64),
        "unknown id": rc.Passage(DOGS, id="mine"),
    }
    for name, passage in given.items():
        kb._reader.contexts.forget()
        source = kb.ask("Where?", hits=[passage], sampling=SHORT).hits[0]
        assert (source.handle, source.kv) == (chunk.handle, "memory"), name
        assert source.chunk.text.strip() == DOGS.strip()
        assert source.chunk.id == ("" if name in ("text", "wrong handle") else passage.id or "dogs#0"), name
    assert kb.ask("Where?", hits=[given["all"]], sampling=SHORT).hits[0].score == 0.5


def test_an_altered_text_is_what_is_read(kb, oracle):
    chunk = kb.chunks(["dogs#0"])[0]
    answer = kb.chat([user(rc.Passage(NEW, "dogs#0", chunk.handle), "What?")], sampling=SHORT)
    assert answer.text == reading(oracle, [f"{bos(oracle)}[user]", f"{NEW}\n", "What?[end][assistant]"])
    assert answer.hits[0].handle != chunk.handle


def test_a_passage_from_outside_is_kept_in_memory_only(kb):
    on_disk = set(kb.store.kv.keys())
    first = kb.ask("Where?", hits=[rc.Passage(NEW)], sampling=SHORT)
    kb._reader.contexts.forget()
    second = kb.ask("Where?", hits=[rc.Passage(NEW)], sampling=SHORT)
    assert first.text == second.text
    assert (first.hits[0].kv, second.hits[0].kv) == ("computed", "memory")
    tokens = len(first.hits[0].chunk.token_ids)
    assert first.usage.created_tokens >= tokens
    assert second.usage.created_tokens == 0
    assert second.usage.computed_tokens == first.usage.computed_tokens - first.usage.created_tokens
    assert set(kb.store.kv.keys()) == on_disk


def test_an_evicted_block_is_computed_again_and_a_deleted_passage_read_from_its_text(kb):
    hit = kb.retrieve("Where do dogs bark?", 1)[0]
    expected = kb.ask("Where?", hits=[hit], sampling=SHORT).text
    kb.store.kv.delete(hit.handle)
    kb._reader.contexts.forget()
    again = kb.ask("Where?", hits=[rc.Passage(DOGS, hit.chunk.id, hit.handle)], sampling=SHORT)
    assert (again.text, again.hits[0].kv) == (expected, "computed")
    assert hit.handle in set(kb.store.kv.keys())
    kb.delete("dogs")
    after = kb.ask("Where?", hits=[rc.Passage(DOGS, hit.chunk.id, hit.handle)], sampling=SHORT)
    assert (after.text, after.hits[0].kv) == (expected, "computed")
    assert hit.handle not in set(kb.store.kv.keys())


def test_another_tenants_handle_serves_nothing(open_kb, tmp_path, kb):
    other = open_kb(tmp_path / "other", tenant="b")
    chunk = kb.chunks(["dogs#0"])[0]
    with pytest.raises(rc.UnknownHandleError):
        other.ask("Where?", hits=[rc.Passage(handle=chunk.handle)])
    source = other.ask("Where?", hits=[rc.Passage(DOGS, handle=chunk.handle)], sampling=SHORT).hits[0]
    assert source.kv == "computed"
    assert source.handle != chunk.handle


# Documents that are passages already


def test_whole_documents_keep_text_and_id(kb):
    text = "  # Not a heading to cut at\n\nand\r\nthe rest  \n\n"
    report = kb.ingest([rc.Document("mine", text, {"a": 1}), rc.Document("long", "word " * 4000)], split=False)
    assert report.added == ["mine"]
    assert [failure.source for failure in report.failed] == ["long"]
    (chunk,) = kb.chunks_of("mine")
    assert (chunk.id, chunk.text, chunk.metadata) == ("mine", text, {"a": 1})
    assert chunk.token_ids == kb.lm.tokenizer(text.rstrip() + "\n", add_special_tokens=False)["input_ids"]
    assert kb.ingest(rc.Document("mine", text, {"a": 1}), split=False).unchanged == ["mine"]
    assert kb.ask("What?", hits=[rc.Passage(text)], sampling=SHORT).hits[0].kv in ("memory", "disk")
    assert [one.id for one in kb.chunks(["mine", "nothing", "cats#0"])] == ["mine", "cats#0"]
    vectors = kb.vectors(["cats#0", "mine"])
    assert (vectors == kb.embedder.embed([CATS, text])).all()
    assert kb.vectors(["nothing"]).shape == (0, kb.embedder.dimension)
    assert kb.delete("mine") == ["mine"]
    with pytest.raises(NoSuchDocumentError):
        kb.store.documents.set_handle("mine", None)


def test_a_call_may_have_a_system_prompt_of_its_own(open_kb, oracle, tmp_path):
    kb = open_kb(tmp_path / "own", system="Be brief.")
    kb.ingest([rc.Document("cats", CATS)])
    question, options = "The cat?", {"k": 1, "sampling": SHORT}
    for system, head in (("Shout.", "[system]Shout.[end]"), ("", ""), (None, "[system]Be brief.[end]")):
        expected = reading(oracle, [f"{bos(oracle)}{head}[user]", CATS, f"Question: {question}[end][assistant]"])
        asked = kb.ask(question, **options, system=system)
        assert (asked.text, [hit.kv for hit in asked.hits]) == (expected, ["memory"])
        for context in ("last", "keep"):
            chatted = kb.chat([user(question)], **options, system=system, context=context)
            assert (chatted.text, chatted.usage.prompt_tokens) == (expected, asked.usage.prompt_tokens), context
        whole = kb.ask(question, whole=True, sampling=SHORT, system=system)
        assert whole.usage.prompt_tokens == asked.usage.prompt_tokens
    with pytest.raises(ConfigError, match="exclude each other"):
        kb.chat([{"role": "system", "content": "Shout."}, user(question)], system="Be brief.")


def test_blocks_behind_a_system_prompt_serve_no_other(open_kb, tmp_path):
    kb = open_kb(tmp_path / "prefixed", recipe="prefix", system="Be brief.")
    kb.ingest([rc.Document("cats", CATS)])
    for call in (kb.ask, lambda question, **options: kb.chat([user(question)], k=1, **options)):
        with pytest.raises(ConfigError, match="recipe isolated"):
            call("The cat?", system="Shout.", sampling=SHORT)
    assert kb.ask("The cat?", 1, system="Shout.", method="full", sampling=SHORT).text
