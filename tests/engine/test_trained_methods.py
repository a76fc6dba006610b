"""Stores over models that were trained for reuse: their own method, its tokens in every count, answers by an oracle."""

from dataclasses import replace

import pytest
from families import figure_2
from plain_oracle import greedy, plain_transformers
from tiny_model import LINK, save_tiny_llama

import ragcache as rc
from ragcache.errors import ConfigError, ContextTooLongError, PromptError
from ragcache.kv.block_key import block_key
from ragcache.models.trained_tokens import TrainedTokens

REORDERED = TrainedTokens("markers", doc_start_id=258, doc_end_id=259, positions="reordered")
COMPOSITE = TrainedTokens("markers", doc_start_id=258, doc_end_id=259, positions="composite")
SPECS = {"link": LINK, "reordered": REORDERED, "composite": COMPOSITE}
QUESTION = "Where do dogs bark?"
SHORT = rc.Sampling(max_tokens=10)


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    return {name: save_tiny_llama(tmp_path_factory.mktemp(name), reuse=spec) for name, spec in SPECS.items()}


@pytest.fixture
def open_trained(open_kb, directories):
    def open_one(name, **options):
        kb = open_kb(model=directories[name], **options)
        kb.ingest([rc.Document(str(n), text) for n, text in enumerate(TEXTS)])
        return kb

    return open_one


TEXTS = [
    "Dogs bark at night in the town of Kelbrook.\n",
    "The cat sat on the mat. It was happy there.\n",
    "The river Arno rises in the Vale hills.\n",
    "The rowing club of Kelbrook meets on Monday.\n",
]


def put_together(spec, tokenizer, question, texts):
    """Ids, what each of them sees, and positions, by hand."""

    def ids(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    parts = [("text", [tokenizer.bos_token_id, *([264] if spec is LINK else [])])]
    for rank, text in enumerate(texts):
        parts.append(("chunk", ids(text) if spec is LINK else [258, *ids(text), 259]))
        if spec is LINK:
            parts.append(("text", [258 + 2 * rank, 259 + 2 * rank]))
    parts.append(("text", [*([265] if spec is LINK else []), *ids(f"Question: {question}\nAnswer:")]))
    tokens, allowed = figure_2(parts)
    positions = list(range(len(tokens)))
    if spec is COMPOSITE:
        lengths = [len(part) for kind, part in parts if kind == "chunk"]
        behind = 1 + max(lengths)
        chunks = [n for length in lengths for n in range(1, 1 + length)]
        positions = [0, *chunks, *range(behind, behind + len(parts[-1][1]))]
    return tokens, allowed, positions


def oracle_answer(directory, spec, question, texts, count):
    """The answer of plain transformers, in which added ids are ruled out, and the prompt's length."""
    model, tokenizer = plain_transformers(directory)
    ids, allowed, positions = put_together(spec, tokenizer, question, texts)
    prompt = rc.Prompt(ids[:1], [], ids[1:])
    answer = greedy(model, tokenizer, prompt, allowed, count, positions=positions, never=spec.added_ids)
    return answer, len(ids)


@pytest.mark.parametrize("name", SPECS)
def test_the_models_own_method_answers(open_trained, directories, name):
    kb = open_trained(name)
    kb.ask(QUESTION, k=3, sampling=SHORT)  # computes the prefix's block
    answers = []
    for _ in range(2):
        kb._engine.contexts.clear()
        answers.append(kb.ask(QUESTION, k=3, sampling=SHORT))
    texts = [hit.chunk.text for hit in answers[0].hits]
    expected, size = oracle_answer(directories[name], SPECS[name], QUESTION, texts, SHORT.max_tokens)
    suffix = len(kb.lm.tokenizer(f"Question: {QUESTION}\nAnswer:", add_special_tokens=False)["input_ids"])
    computed = suffix + (3 * 2 + 1 if name == "link" else 0)
    for answer in answers:
        assert answer.text == expected
        assert answer.method == SPECS[name].method
        assert (answer.usage.prompt_tokens, answer.usage.cached_tokens) == (size, size - computed)
        assert answer.usage.computed_tokens == computed
        assert {source.kv for source in answer.hits} == {"memory"}
    shared = kb.ask(QUESTION, k=3, sampling=SHORT)
    assert (shared.text, shared.usage.computed_tokens) == (expected, suffix)


@pytest.mark.parametrize("name", SPECS)
def test_blocks_survive_the_store(open_trained, open_kb, name):
    """What was read from disk in the next process answers as what was made."""
    kb = open_trained(name)
    made = kb.ask(QUESTION, k=2, sampling=SHORT)
    kb.close()
    again = open_kb(model=kb.lm).ask(QUESTION, k=2, sampling=SHORT)
    assert again.text == made.text
    assert {source.kv for source in again.hits} == {"disk"}


def test_other_methods_read_a_link_store(open_trained):
    kb = open_trained("link")
    for method in ("full", "reposition"):
        answer = kb.ask(QUESTION, k=2, method=method, sampling=SHORT)
        assert answer.method == method
        assert answer.usage.prompt_tokens == kb.ask(QUESTION, k=2, sampling=SHORT).usage.prompt_tokens - 2 - 2 * 2
    same = kb.ask(QUESTION, k=2, method="link", method_options={"link_tokens": 0}, sampling=SHORT)
    assert same.text == answer.text
    assert kb.ask(QUESTION, k=2, method_options={"link_tokens": 0}, sampling=SHORT).text == answer.text


def test_blocks_with_markers_are_for_their_method(open_trained, open_kb):
    kb = open_trained("reordered")
    assert kb.ask(QUESTION, k=2, method="full", sampling=SHORT).text
    with pytest.raises(ConfigError, match=r"'reposition' needs blocks of recipe 'isolated'.*markers 258 and 259"):
        kb.ask(QUESTION, k=2, method="reposition")
    kb.close()
    plain = open_kb(model=kb.lm, method="reposition")
    assert {source.kv for source in plain.ask(QUESTION, k=2, sampling=SHORT).hits} == {"computed"}
    with pytest.raises(ConfigError, match=r"'markers'.*opened for 'isolated'; open it with method='markers'"):
        plain.ask(QUESTION, k=2, method="markers")


def test_more_passages_than_link_slots(open_trained):
    kb = open_trained("link")
    with pytest.raises(PromptError, match=r"4 passages.*3 at most.*k=3"):
        kb.ask(QUESTION, k=4, sampling=SHORT)
    trimmed = kb.ask(QUESTION, k=4, on_overflow="trim", sampling=SHORT)
    assert trimmed.dropped == 1
    assert trimmed.text == kb.ask(QUESTION, k=3, sampling=SHORT).text


def test_link_tokens_count_where_the_context_ends(open_trained):
    """Passages that fit alone and not with what the method adds to them."""
    kb = open_trained("link")
    hits = kb.retrieve(QUESTION, 3)
    tokens = kb.ask(QUESTION, hits=hits, sampling=SHORT).usage.prompt_tokens
    kb.lm.max_positions = tokens
    assert kb.ask(QUESTION, hits=hits, sampling=SHORT).usage.completion_tokens == 0
    kb.lm.max_positions = tokens - 1
    with pytest.raises(ContextTooLongError, match=f"prompt of {tokens} tokens.*k=2"):
        kb.ask(QUESTION, hits=hits, sampling=SHORT)
    assert kb.ask(QUESTION, hits=hits, on_overflow="trim", sampling=SHORT).dropped == 1
    assert kb.ask(QUESTION, hits=hits, method="full", sampling=SHORT).usage.prompt_tokens == tokens - 8


def test_a_method_without_its_training_is_refused_at_once(kb, open_kb):
    with pytest.raises(ConfigError, match="no trained link tokens"):
        kb.ask(QUESTION, method="link")
    kb.close()
    with pytest.raises(ConfigError, match="no trained markers"):
        open_kb(method="markers")


def test_the_recipe_follows_the_training(open_kb, tmp_path):
    directory = save_tiny_llama(tmp_path / "model", reuse=replace(LINK, recipe="prefix"))
    kb = open_kb(model=directory, texts={"dogs": TEXTS[0]})
    bos, chunk = kb.lm.tokenizer.bos_token_id, kb.retrieve(QUESTION, 1)[0].chunk
    (source,) = kb.ask(QUESTION, k=1, sampling=SHORT).hits
    assert source.kv == "memory"
    assert source.handle == block_key(kb.lm.fingerprint, rc.Recipe("prefix"), [bos, 264], chunk.token_ids)
    with pytest.raises(ConfigError, match="another prefix"):
        kb.ask(QUESTION, k=1, method="reposition")


@pytest.mark.parametrize("name", SPECS)
def test_full_prefill_goes_on_from_what_it_read_before(open_trained, name):
    """It reads no markers, so they must not count where an earlier prompt and this one part."""
    kb = open_trained(name)
    hits = kb.retrieve(QUESTION, k=2)
    kb.ask(QUESTION, hits=hits, method="full", sampling=SHORT)
    for question in ("Which river rises in the hills?", "Where does the cat sit?"):
        known, whole = (
            kb.ask(question, hits=hits, method="full", method_options={"reuse": reuse}, sampling=SHORT)
            for reuse in (True, False)
        )
        assert known.text == whole.text
        assert known.usage.cached_tokens >= known.usage.prompt_tokens - len(f"ich {question}\nAnswer:")
        assert whole.usage.cached_tokens == 0


@pytest.mark.parametrize("name", SPECS)
def test_a_prompt_without_passages(open_trained, name):
    kb = open_trained(name)
    answers = [kb.ask(QUESTION, hits=[], method=method, sampling=SHORT) for method in (SPECS[name].method, "full")]
    assert answers[0].text == answers[1].text
    assert {one.usage.prompt_tokens for one in answers} == {1 + len(f"Question: {QUESTION}\nAnswer:")}
