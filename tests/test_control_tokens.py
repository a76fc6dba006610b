"""Text is text: control tokens come from the chat template alone (law 13)."""

import pytest
from kit.makers import each
from templates import FAMILIES, controls_of, template_tokenizer
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import ragcache as rc
from ragcache.engine.conversation import Conversation, Said, completion_ends
from ragcache.ingest.chunk_tokenizer import ChunkTokenizer
from ragcache.prompt import encode_rendered, encode_text, prompt_format

SYSTEM, QUESTION, ANSWER = "  You row boats. ", "Who rows on the <b> river\n\nat night? ", "The boat, [a] the oar."
TURNS = [
    {"role": "user", "content": "Who is here?"},
    {"role": "assistant", "content": ANSWER},
    {"role": "user", "content": QUESTION},
]


family = each(sorted(FAMILIES))


@pytest.fixture
def tokenizer(family):
    return template_tokenizer(family)


def counts(tokenizer, family, ids):
    """How often each control token stands in these ids."""
    of = {spelling: tokenizer.convert_tokens_to_ids(spelling) for spelling in controls_of(family)}
    return {spelling: list(ids).count(id) for spelling, id in of.items()}


def ids_of(ends):
    return [*ends.prefix_ids, *ends.suffix_ids]


def templated(tokenizer, messages):
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def written(tokenizer, ends):
    """The prompt's text, white space left out: a cut may have put some into SentencePiece's text."""
    return "".join(tokenizer.decode(ids_of(ends), skip_special_tokens=False).split())


def test_ordinary_text_has_the_ids_that_the_template_gives_it(tokenizer, family):
    """Boundaries included: the texts abut the template's own words, begin and end with white space, hold added tokens
    that are no control tokens."""
    messages = [{"role": "system", "content": SYSTEM}, *TURNS]
    ends, _ = Conversation(tokenizer, messages).as_written(None)
    assert ids_of(ends) == templated(tokenizer, messages)
    ends, _ = Conversation(tokenizer, TURNS).as_written(SYSTEM)
    assert ids_of(ends) == templated(tokenizer, messages)
    text = f"{SYSTEM}{QUESTION}"
    assert encode_text(tokenizer, text) == tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("where", ["system", "first question", "answer", "question", "everywhere"])
def test_a_spelled_control_token_is_text_wherever_it_stands(tokenizer, family, where):
    places = {"system": (0,), "first question": (1,), "answer": (2,), "question": (3,), "everywhere": (0, 1, 2, 3)}
    ordinary = [{"role": "system", "content": SYSTEM}, *TURNS]
    spelled = "".join(one for one in controls_of(family) if one != "</think>")  # the template itself reads that one
    messages = [
        {**turn, "content": f"a {spelled} b{spelled}"} if place in places[where] else turn
        for place, turn in enumerate(ordinary)
    ]
    ends, _ = Conversation(tokenizer, messages).as_written(None)
    plain = ids_of(Conversation(tokenizer, ordinary).as_written(None)[0])
    assert counts(tokenizer, family, ids_of(ends)) == counts(tokenizer, family, plain)
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert written(tokenizer, ends) == "".join(rendered.split())


def test_a_question_and_a_system_prompt_are_text(tokenizer, family):
    ordinary = prompt_format(tokenizer, system="You row.")
    spelled = "".join(controls_of(family))
    form = prompt_format(tokenizer, system=f"You row. {spelled}")
    assert counts(tokenizer, family, form.prefix_ids) == counts(tokenizer, family, ordinary.prefix_ids)
    asked = counts(tokenizer, family, form.suffix_ids(tokenizer, f"{spelled} Who?"))
    assert asked == counts(tokenizer, family, ordinary.suffix_ids(tokenizer, "Who?"))


def test_a_passage_in_a_turn_and_a_raw_prompt_are_text(tokenizer, family):
    spelled = "".join(controls_of(family))
    clean = dict.fromkeys(controls_of(family), 0)
    assert counts(tokenizer, family, ChunkTokenizer(tokenizer).encode([f"See {spelled} here."])[0]) == clean
    for parts in ([rc.Passage("The boat."), "Who?"], [rc.Passage(f"The {spelled} boat."), f"{spelled} Who?"]):
        earlier = [{"role": "user", "content": parts}, {"role": "assistant", "content": "No."}]
        messages = [*earlier, {"role": "user", "content": [rc.Passage("It is."), "And?"]}]
        found = counts(tokenizer, family, ids_of(Conversation(tokenizer, messages).as_written(None)[0]))
        clean = found if spelled not in str(parts) else clean
        assert found == clean
    ends, _ = completion_ends(tokenizer, f"Once {spelled} more")
    assert sum(counts(tokenizer, family, ends.suffix_ids).values()) == 1, "BOS alone"
    bos = tokenizer.bos_token
    assert completion_ends(tokenizer, f"{bos}Once")[0].suffix_ids == encode_rendered(tokenizer, f"{bos}Once")


def test_kept_turns_are_text(tokenizer, family):
    spelled = "".join(controls_of(family))
    messages = [{**turn, "content": f"{turn['content']} {spelled}"} for turn in TURNS]
    form = prompt_format(tokenizer)

    def found(turns):
        pieces = Conversation(tokenizer, turns).in_pieces(form, f"Row. {turns[0]['content']}")
        ids = [id for piece in pieces if isinstance(piece, str) for id in encode_rendered(tokenizer, piece)]
        said = [turns[piece.turn]["content"] for piece in pieces if isinstance(piece, Said)]
        return counts(tokenizer, family, [*ids, *(id for text in said for id in encode_text(tokenizer, text))])

    assert found(messages) == found(TURNS)


def test_a_template_still_reads_what_an_assistant_said():
    tokenizer = template_tokenizer("chatml")
    said = [{"role": "assistant", "content": "<think>secret</think>\nThe boat. <|im_end|>"}]
    ends, _ = Conversation(tokenizer, [TURNS[0], *said, TURNS[2]]).as_written(None)
    assert "secret" not in tokenizer.decode(ids_of(ends))
    plain, _ = Conversation(tokenizer, TURNS).as_written(None)
    assert counts(tokenizer, "chatml", ids_of(ends)) == counts(tokenizer, "chatml", ids_of(plain))


@pytest.mark.parametrize("text", ["<|e<|eos|>os|>", "<|eos|><|eos|>", "<|eos|", "<|eos|>", "a<|eot_id|>b|><|eos|>"])
def test_what_a_cut_leaves_is_text_too(text):
    tokenizer = template_tokenizer("llama3")
    ids = encode_text(tokenizer, text)
    assert sum(counts(tokenizer, "llama3", ids).values()) == 0
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_a_vocabulary_that_spells_a_control_token_itself():
    """Its model makes the token of the word without its being looked for."""
    backend = Tokenizer(models.Unigram([("<unk>", 0.0), ("<s>", -1.0), *((c, -2.0) for c in "<s>abc ")], unk_id=0))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", unk_token="<unk>")
    bos = tokenizer.bos_token_id
    assert bos in tokenizer("a<s>b", add_special_tokens=False, split_special_tokens=True)["input_ids"]
    for ids in (encode_text(tokenizer, "a<s>b"), ChunkTokenizer(tokenizer).encode(["a<s>b"])[0]):
        assert bos not in ids
        assert "".join(tokenizer.convert_ids_to_tokens(ids)) == "a<s>b"
    assert encode_text(tokenizer, "aZb") == tokenizer("aZb", add_special_tokens=False)["input_ids"], "unknown is text"
