"""Stores over a model that was trained with anchors: blocks hold these alone, answers by one plain forward a token."""

import pytest
import torch
from kit.makers import each
from tiny_model import save_tiny_llama
from transformers import AutoModelForCausalLM

import ragcache as rc
from extras.train.tests import reuse_oracle as oracle
from ragcache.codecs import get_codec
from ragcache.engine.probe import probe_prefill
from ragcache.engine.verdict import MethodVerdict, Verdict, save_verdict
from ragcache.errors import ConfigError, ContextTooLongError
from ragcache.models.trained_tokens import TrainedTokens
from ragcache_eval.methods import default_methods

STATED = {"anchor_tokens": 3, "anchor_segment": 12}
SPECS = {
    "link": TrainedTokens("link", "isolated", 2, 4, 258, 266, 267, first_anchor_id=268, **STATED),
    "reposition": TrainedTokens("reposition", first_anchor_id=258, **STATED),
}
QUESTION = "Where do dogs bark at night?"
TEXTS = [
    "Dogs bark at night in the town of Kelbrook.\n",
    "The cat sat on the mat. It was happy there.\n",
    "The river Arno rises in the Vale hills.\n",
]
SHORT = rc.Sampling(max_tokens=8)


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    return {name: save_tiny_llama(tmp_path_factory.mktemp(name), reuse=spec) for name, spec in SPECS.items()}


name = each(SPECS)


@pytest.fixture
def anchored(open_kb, directories, name):
    kb = open_kb(model=directories[name])
    kb.ingest(rc.Document(str(n), text) for n, text in enumerate(TEXTS))
    return kb


def ask(kb, k=3, **options):
    return kb.ask(QUESTION, k=k, **{"sampling": SHORT, **options})


def tokens_of(kb, name, texts, answer=()):
    """The whole prompt by hand, text and anchors by turns."""
    spec, tokenizer = SPECS[name], kb.lm.tokenizer

    def ids(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    links = [[258 + 2 * slot, 259 + 2 * slot] if name == "link" else [] for slot in range(len(texts))]
    around = (266, 267) if name == "link" else (None, None)
    first = spec.first_anchor_id
    question = [*ids(f"Question: {QUESTION}\nAnswer:"), *answer]
    chunks, anchors = [ids(text) for text in texts], range(first, first + 3)
    return oracle.compressed([tokenizer.bos_token_id], chunks, [question], links, anchors, 12, *around)


def expected(kb, name, directory, texts):
    """Token by token, each a plain forward of everything under an explicit mask; added ids are ruled out."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    made = []
    while len(made) < SHORT.max_tokens:
        tokens = tokens_of(kb, name, texts, made)
        bias = torch.zeros(len(tokens), len(tokens)).masked_fill(~oracle.allowed(tokens), -1e30)[None, None]
        with torch.no_grad():
            ids = torch.tensor([[token.id for token in tokens]])
            logits = model(input_ids=ids, attention_mask=bias).logits[0, -1]
        logits[sorted(SPECS[name].added_ids)] = -torch.inf
        made.append(int(logits.argmax()))
        if made[-1] == kb.lm.tokenizer.eos_token_id:
            made.pop()
            break
    return kb.lm.tokenizer.decode(made)


def test_answers_are_the_oracles_from_every_tier(anchored, open_kb, directories, name):
    ask(anchored)  # reads the prefix
    answer = ask(anchored)
    texts = [hit.chunk.text for hit in answer.hits]
    assert answer.text == expected(anchored, name, directories[name], texts)
    assert answer.method == name
    assert answer.usage.prompt_tokens == len(tokens_of(anchored, name, texts))
    run = [token for token in tokens_of(anchored, name, texts) if token.part in ("link", "end", "question")]
    assert answer.usage.computed_tokens == len(run)
    anchored.close()
    again = ask(open_kb(model=directories[name], store=rc.StoreConfig(load="always")))
    assert (again.text, {source.kv for source in again.hits}) == (answer.text, {"disk"})


def test_blocks_hold_the_share_and_codecs_foretell_their_bytes(anchored):
    for chunk in anchored.chunks([hit.chunk.id for hit in anchored.retrieve(QUESTION, 3)]):
        block = anchored.store.kv.get(chunk.handle).block
        count = -(-len(chunk.token_ids) * 3 // 12)
        assert (set(block.tokens_by_layer), block.num_tokens) == ({count}, len(chunk.token_ids) + count)
        for codec in ("raw", "int8"):
            tensors = get_codec(codec).encode(block)
            size = sum(tensor.nbytes for tensor in tensors.values())
            foretold = get_codec(codec).expected_bytes(anchored.lm.shape.layers, len(chunk.token_ids), 4, 0.25)
            assert foretold == pytest.approx(size, rel=0.01)


def test_estimates_know_the_share(anchored, open_kb, tmp_path):
    kb = open_kb(tmp_path / "plain")
    documents = [rc.Document(str(n), "The cat sat on the mat. " * 20) for n in range(4)]
    whole, less = kb.estimate_kv(documents), anchored.estimate_kv(documents)
    assert 0.25 * whole.num_bytes < less.num_bytes < 0.27 * whole.num_bytes
    assert anchored.full_prefill_samples == 0  # passages with their anchors are no measure of a full prefill


def test_anchors_count_where_the_context_ends(anchored, name):
    hits = anchored.retrieve(QUESTION, 3)
    tokens = len(tokens_of(anchored, name, [hit.chunk.text for hit in hits]))
    anchored.lm.max_positions = tokens
    assert ask(anchored, hits=hits, k=None).usage.completion_tokens == 0
    anchored.lm.max_positions = tokens - 1
    with pytest.raises(ContextTooLongError, match=f"prompt of {tokens} tokens.*k=2"):
        ask(anchored, hits=hits, k=None)
    assert ask(anchored, hits=hits, k=None, on_overflow="trim").dropped == 1


def test_many_askers_and_conversations(anchored):
    questions = [QUESTION, "Is the cat happy?", QUESTION]
    alone = [anchored.ask(question, k=3, sampling=SHORT).text for question in questions]
    assert [one.text for one in anchored.ask_many(questions, k=3, sampling=SHORT)] == alone
    messages = [{"role": "user", "content": QUESTION}]
    first = anchored.chat(messages, k=2, context="keep", sampling=SHORT)
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "Is the cat happy?"}]
    again = [anchored.chat(messages, k=2, context="keep", sampling=SHORT).text for _ in range(2)]
    assert again[0] == again[1]


def test_what_computing_takes_is_measured_with_anchors(directories, name, monkeypatch):
    lm = rc.load_lm(directories[name])
    lm.max_positions, encode, read = 64, lm.encode, []
    monkeypatch.setattr(lm, "encode", lambda chunks, recipe: read.append((chunks, recipe)) or encode(chunks, recipe))
    recipe = rc.Recipe(anchors=SPECS[name].anchors)
    probe_prefill(lm, 60.0, recipe)
    assert {used for _, used in read} == {recipe}
    assert max(len(chunk) for chunks, _ in read for chunk in chunks) == 31  # room for as many anchors


def test_methods_that_need_all_kv_are_refused_and_left_out(anchored, open_kb, directories, name, tmp_path):
    with pytest.raises(ConfigError, match=r"cacheblend.*all of them.*'full'"):
        ask(anchored, method="cacheblend")
    with pytest.raises(ConfigError, match="epic"):
        open_kb(tmp_path / "other", model=directories[name], method="epic")
    names = {spec.name for spec in default_methods(anchored.lm)}
    assert {"full", "reposition", name} <= names
    assert not names & {"cacheblend", "epic", "a3", "samkv"}
    assert ask(anchored, method="full").text


def test_auto_goes_by_the_check_of_the_models_own_blocks(anchored, open_kb, directories, name):
    safe = MethodVerdict("reposition", {}, "isolated", True, "", 0.1, {"kl_answer": 0.0})
    save_verdict(anchored.store.layout.root, Verdict(anchored.lm.fingerprint, "tiny", "tests", 10, {}, (safe,)))
    assert ask(anchored, method="auto").text == ask(anchored, method="reposition").text
    anchored.close()
    assert ask(open_kb(model=directories[name], method="auto")).method == "reposition"


def test_half_of_the_anchors_cannot_be_kept(open_kb, directories, name, tmp_path):
    with pytest.raises(ConfigError, match="anchors and kept below 1 do not go together"):
        open_kb(tmp_path / "other", model=directories[name], recipe=rc.Recipe(kept=0.5))


def test_neighbours_are_refused(open_kb, directories, name, tmp_path):
    with pytest.raises(ConfigError, match="anchors and neighbours do not go together"):
        open_kb(tmp_path / "other", model=directories[name], store=rc.StoreConfig(neighbours=2))
