"""Cartridges: the engine's answer, the loss and its gradient against plain transformers, whole runs, and bad input."""

from dataclasses import replace

import pytest
import torch
from families import oracle_model, random_prompt, save_tiny
from safetensors.torch import load_file
from tiny_model import save_tiny_llama
from transformers import AutoTokenizer, DynamicCache

import ragcache as rc
from ragcache.errors import AdapterError, ConfigError, UnsupportedModelError
from ragcache.prompt import encode_text, prompt_format
from ragcache_demo.bag_of_words import BagOfWords
from ragcache_train.cartridge import DIRECTORY, Cartridge, CartridgeKV
from ragcache_train.frozen import divergence_loss
from ragcache_train.masked_pass import NAME, register
from ragcache_train.row_encoder import passage_text
from ragcache_train.self_study import CartridgeModel, DrawnConversations, begin_cartridge
from ragcache_train.train_batches import Ask, Draw, EncodedRow, collate_pairs
from ragcache_train.train_options import TrainOptions
from ragcache_train.trainer import train

PROMPT = random_prompt(3)
CORPUS = random_prompt(4, chunks=(12,)).chunk_ids[0]
ASKS = [Ask(list(PROMPT.suffix_ids), [110, 111, 2]), Ask([101, 102, 103], [112, 2])]
ROW = EncodedRow("qa", "", PROMPT.prefix_ids, PROMPT.chunk_ids[:1], ASKS, None, False)
FAMILIES = ["llama", "gemma3", "gpt_oss", "deepseek_v3"]


def begun(lm, seed=0):
    """KV that a cartridge of 13 tokens might have: the model's own, and noise on all but the first token."""
    ids = (*PROMPT.prefix_ids, *CORPUS)[:13]
    context, generator = lm.read(ids), torch.Generator().manual_seed(seed)
    layers = []
    for layer in range(lm.shape.num_layers):
        pair = [one[0].clone() for one in context.layer_state(layer)[:2]]
        for one in pair:
            one[:, 1:] += 0.3 * torch.randn(one[:, 1:].shape, generator=generator)
        layers.append(tuple(pair))
    return CartridgeKV(str(lm.name), lm.fingerprint, "/nowhere/corpus.txt", "", len(PROMPT.prefix_ids), ids, layers)


def plain_cache(layers):
    """The KV as plain transformers takes it. layers: [num_kv_heads, num_tokens, head_dim] each"""
    cache = DynamicCache()
    for layer, (keys, values) in enumerate(layers):
        cache.update(keys[None], values[None], layer)
    return cache


def saved_layers(path):
    held = load_file(path)
    return [(held[f"keys.{n}"], held[f"values.{n}"]) for n in range(len(held) // 2)]


def plain_logits(model, layers, ids):
    """Logits of all ids behind the KV by plain transformers: [num_ids, vocab_size]."""
    start = layers[0][0].shape[1]
    positions = torch.arange(start, start + len(ids))[None]
    out = model(input_ids=torch.tensor([ids]), past_key_values=plain_cache(layers), position_ids=positions)
    return out.logits[0]


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    monkeypatch.setenv(DIRECTORY, str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("passages", [False, True], ids=["in their place", "before them"])
@pytest.mark.parametrize("family", FAMILIES[:-1])
def test_the_prompt_is_read_behind_the_saved_tensors(family, passages, shelf):
    directory = save_tiny(family, str(shelf / "base"))
    begun(rc.load_lm(directory)).write(shelf / "cartridge.safetensors")
    lm = rc.load_lm(directory)
    fused = rc.fuse(lm, PROMPT, "cartridge", passages=passages)
    chunks = [id for chunk in PROMPT.chunk_ids for id in chunk] if passages else []
    behind = [*chunks, *PROMPT.suffix_ids]
    with torch.no_grad():
        expected = plain_logits(oracle_model(directory), saved_layers(shelf / "cartridge.safetensors"), behind)[-1]
    torch.testing.assert_close(fused.next_logits, expected, atol=2e-4, rtol=2e-4)
    assert set(fused.computed_tokens) == {len(behind)}
    assert fused.prompt_tokens == 13 + len(behind)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_and_its_gradient_are_those_of_plain_transformers(family, tmp_path):
    directory = save_tiny(family, str(tmp_path))
    lm = rc.load_lm(directory, packed=False)
    start = begun(lm)
    register()
    lm.model.set_attn_implementation(NAME)
    layers = [tuple(one[None] for one in pair) for pair in start.layers]
    model = CartridgeModel(lm.model, layers)
    short = ROW._replace(asks=ASKS[1:])  # rows of one batch do not see each other
    rows = DrawnConversations([ROW, short], start.num_tokens)
    loss = divergence_loss(model, model, collate_pairs([rows[Draw(n, False, 0)] for n in range(2)]))
    loss.backward()
    if family == "deepseek_v3":  # plain transformers keeps its heads' keys and values, made of what we keep
        assert all(one.grad.abs().sum() > 0 for one in model.rest)
        return
    plain = oracle_model(directory).requires_grad_(False)
    leaves = [one.clone().requires_grad_(True) for pair in start.layers for one in pair]
    held = list(zip(leaves[::2], leaves[1::2], strict=True))
    total, count = torch.zeros(()), 0
    for ask in (*ROW.asks, *short.asks):
        whole = [*ask.suffix, *ask.answer]
        context = [*ROW.prefix, *ROW.chunks[0], *whole[:-1]]
        teacher = plain(input_ids=torch.tensor([context])).logits[0, -len(whole) + 1 :]
        student = plain_logits(plain, held, whole[:-1])
        total = total + (teacher.softmax(-1) * (teacher.log_softmax(-1) - student.log_softmax(-1))).sum()
        count += len(whole) - 1
    assert float(loss.detach()) == pytest.approx(float(total.detach()) / count, rel=1e-4)
    (total / count).backward()
    for ours, theirs in zip(model.rest, leaves, strict=True):
        wanted = theirs.grad[None, :, 1:]
        torch.testing.assert_close(ours.grad, wanted, atol=1e-5 * float(wanted.abs().max()) + 1e-9, rtol=2e-3)


def test_all_but_the_first_token_can_change(tmp_path):
    lm = rc.load_lm(save_tiny("llama", str(tmp_path)), packed=False)
    model = CartridgeModel(lm.model, [tuple(one[None] for one in pair) for pair in begun(lm).layers])
    assert {name.split(".")[0] for name, _ in model.named_parameters()} == {"rest"}
    assert all(one.shape[2] == 12 for one in model.state_dict().values())


# Whole runs


TEXT = "Ann has 3 red boats. Bob has 7 blue kites. Cy has 5 green hats. Dora has 9 old cars."
EVALUATED = ("Who has boats?", "How many kites has Bob?", "Whose hats are green?", "What has Dora?")
ANSWERS = ("Ann has 3.", "7 blue kites", "Cy has them", "9 old cars")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run over a short corpus, which each of its conversations is about as a whole."""
    place = tmp_path_factory.mktemp("trained")
    base = save_tiny_llama(place / "base")
    (place / "corpus.txt").write_text(TEXT, encoding="utf-8")
    options = TrainOptions(
        base,
        (),
        place / "out",
        reuse="cartridge",
        corpus=place / "corpus.txt",
        cartridge_tokens=24,
        study_tokens=200,
        rows=1,
        steps=40,
        log_every=10,
        learning_rate=0.1,
    )
    lines = []
    report = train(options, show=lines.append)
    return options, report, [line["loss"] for line in lines]


def divergence(options, layers):
    """KL(plain full prefill with the corpus || plain transformers behind the KV) along answers that nobody trained on;
    layers: None: nothing stands before the question but the prompt's beginning."""
    model, tokenizer = oracle_model(str(options.model)), AutoTokenizer.from_pretrained(options.model)
    form = prompt_format(tokenizer)
    whole = [*form.prefix_ids, *encode_text(tokenizer, passage_text(TEXT))]
    found = []
    for question, answer in zip(EVALUATED, ANSWERS, strict=True):
        suffix, said = form.suffix_ids(tokenizer, question), encode_text(tokenizer, answer)
        with torch.no_grad():
            teacher = model(input_ids=torch.tensor([[*whole, *suffix, *said]])).logits[0, -len(said) :].log_softmax(-1)
            if layers is None:
                ids = torch.tensor([[*form.prefix_ids, *suffix, *said]])
                student = model(input_ids=ids).logits[0, -len(said) :].log_softmax(-1)
            else:
                student = plain_logits(model, layers, [*suffix, *said])[-len(said) :].log_softmax(-1)
        found.append(float((teacher.exp() * (teacher - student)).sum(-1).mean()))
    return sum(found) / len(found)


@pytest.mark.slow
def test_training_brings_answers_nearer_to_full_prefill_over_the_corpus(trained):
    options, report, losses = trained
    assert losses[-1] < 0.8 * losses[0]
    lm = rc.load_lm(options.model)
    ids = [*prompt_format(lm.tokenizer).prefix_ids, *encode_text(lm.tokenizer, passage_text(TEXT))][:24]
    context = lm.read(ids)
    first = [tuple(one[0] for one in context.layer_state(layer)[:2]) for layer in range(lm.shape.num_layers)]
    layers = saved_layers(report.out / "cartridge.safetensors")
    after, before, without = (divergence(options, one) for one in (layers, first, None))
    assert after < 0.85 * min(before, without), (after, before, without)
    for ours, begun_as in zip(layers, first, strict=True):
        for one, other in zip(ours, begun_as, strict=True):
            assert torch.equal(one[:, 0], other[:, 0]), "the sink is frozen"
            assert not torch.equal(one[:, 1], other[:, 1])
    held = CartridgeKV.read(report.out / "cartridge.safetensors")
    assert (list(held.ids), held.model, held.fingerprint) == (ids, str(options.model), lm.fingerprint)


def test_a_store_answers_with_it(trained, tmp_path, monkeypatch):
    options, report, _ = trained
    monkeypatch.setenv(DIRECTORY, str(report.out))
    sampling = rc.Sampling(max_tokens=8)
    with rc.RagCache.open(tmp_path / "kb", model=options.model, embedder=BagOfWords(), method="cartridge") as kb:
        kb.ingest([rc.Document("a", "Something else.")])
        answer = kb.ask("Who has boats?", k=1, sampling=sampling)
        given = kb.ask("Who has boats?", hits=kb.retrieve("boats", k=1), sampling=sampling)
        exact = kb.ask("Who has boats?", k=1, sampling=sampling, method="full")
        tokenizer = kb.lm.tokenizer
    model, layers = oracle_model(str(options.model)), saved_layers(report.out / "cartridge.safetensors")
    ids = prompt_format(tokenizer).suffix_ids(tokenizer, "Who has boats?")
    made = []
    while len(made) < 8:
        with torch.no_grad():
            made.append(int(plain_logits(model, layers, [*ids, *made])[-1].argmax()))
    assert answer.text == given.text == tokenizer.decode(made)
    assert (answer.hits, given.hits, len(exact.hits)) == ([], [], 1), "sources are what was read"
    assert answer.method == "cartridge"
    assert answer.usage.prompt_tokens == 24 + len(ids)
    assert exact.method == "full"


def test_a_conversation_goes_on_behind_it_and_its_passages(trained, tmp_path, monkeypatch):
    run, report, _ = trained
    monkeypatch.setenv(DIRECTORY, str(report.out))
    options = {"k": 1, "context": "keep", "sampling": rc.Sampling(max_tokens=4)}
    turns = [{"role": "user", "content": "Who has boats?"}]
    behind = Cartridge(passages=True)
    with rc.RagCache.open(tmp_path / "kb", model=run.model, embedder=BagOfWords(), method=behind) as kb:
        kb.ingest([rc.Document("a", "Something else.")])
        first = kb.chat(turns, **options)
        turns += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And kites?"}]
        again = kb.chat(turns, **options)
        with pytest.raises(ConfigError, match="'cartridge' cannot keep the context"):
            kb.chat(turns, method="cartridge", **options)
        alone = kb.chat(turns[:1], method="cartridge", sampling=options["sampling"])
    assert {first.method, again.method} == {"cartridge(passages=True)"}
    assert (len(first.hits), alone.hits) == (1, [])
    assert first.usage.prompt_tokens < again.usage.prompt_tokens < 2 * first.usage.prompt_tokens
    assert alone.usage.cached_tokens == 24
    assert 24 < alone.usage.prompt_tokens < first.usage.prompt_tokens, "no passage is read in its place"


# Bad input


def test_a_cartridge_of_another_model_is_refused(shelf):
    begun(rc.load_lm(save_tiny("llama", str(shelf / "a")))).write(shelf / "cartridge.safetensors")
    other = rc.load_lm(save_tiny("qwen3", str(shelf / "b")))
    with pytest.raises(AdapterError, match=r"'cartridge' was trained with .*/a .* and this is .*/b"):
        rc.fuse(other, PROMPT, "cartridge")


@pytest.mark.parametrize("harm", ["cut", "changed", "another file", "missing", "newer"])
def test_a_damaged_file_is_named(harm, shelf):
    lm = rc.load_lm(save_tiny("llama", str(shelf / "base")))
    path = shelf / "cartridge.safetensors"
    begun(lm).write(path)
    whole = path.read_bytes()
    if harm == "cut":
        path.write_bytes(whole[:-100])
    elif harm == "changed":
        path.write_bytes(whole[:-100] + bytes(100))
    elif harm == "another file":
        path.write_bytes((shelf / "base" / "model.safetensors").read_bytes())
    elif harm == "missing":
        path.unlink()
    else:
        from ragcache.codecs.container import read_container, write_container

        held = read_container(path)
        write_container(
            path, held.tensors, {"cartridge": held.metadata["cartridge"].replace('"version": 1', '"version": 2')}
        )
    with pytest.raises(AdapterError, match=rf"{path} (is missing, damaged or no cartridge|has version 2)"):
        rc.fuse(lm, PROMPT, "cartridge")


def test_a_corpus_that_has_changed_is_named(trained, monkeypatch):
    options, report, _ = trained
    corpus = options.corpus
    try:
        corpus.write_text(TEXT.replace("3", "4"), encoding="utf-8")
        with pytest.raises(AdapterError, match=r"corpus.txt has changed since .*cartridge.safetensors was trained"):
            CartridgeKV.read(report.out / "cartridge.safetensors")
        with pytest.raises(ConfigError, match=r"was trained with corpus='.*SHA-256"):
            train(replace(options, resume=True))
    finally:
        corpus.write_text(TEXT, encoding="utf-8")


def test_a_prompt_that_begins_in_another_way_is_refused(shelf):
    lm = rc.load_lm(save_tiny("llama", str(shelf / "base")))
    begun(lm).write(shelf / "cartridge.safetensors")
    with pytest.raises(ConfigError, match="another system prompt"):
        rc.fuse(lm, replace(PROMPT, prefix_ids=[9]), "cartridge")


def test_a_cartridge_is_named_and_no_path(shelf, monkeypatch):
    for name in ("../cartridge", "/etc/passwd", "a/b", ".x", "", 3, None):
        with pytest.raises(ConfigError, match="give the name of a cartridge"):
            Cartridge(file=name)
    with pytest.raises(ConfigError, match="true or false"):
        Cartridge(passages="yes")
    monkeypatch.delenv(DIRECTORY)
    lm = rc.load_lm(save_tiny("llama", str(shelf / "base")))
    with pytest.raises(ConfigError, match=f"ragcache train --reuse cartridge.*{DIRECTORY}"):
        rc.fuse(lm, PROMPT, "cartridge")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"corpus": None}, "go together"),
        ({"reuse": "link", "freeze": True}, "go together"),
        ({"data": ("rows.jsonl",)}, "on its corpus alone"),
        ({"header_tokens": 3}, "on its corpus alone"),
        ({"lora_rank": 2}, "the weights are frozen"),
        ({"cartridge_tokens": 1}, "cartridge_tokens"),
        ({"study_tokens": 0}, "study_tokens"),
    ],
)
def test_options_that_do_not_go_together_are_named(changes, words):
    with pytest.raises(ConfigError, match=words):
        TrainOptions(**{"model": "mini", "data": (), "out": "o", "reuse": "cartridge", "corpus": "c.txt", **changes})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read"),
        (b"\xff\xfe\xff", "cannot be read"),
        (b" \n", "is empty"),
        (b"x" * 2048, "is longer than 0 MiB"),
        (b"short", r"cartridge_tokens is 24; the prompt's beginning has 1 tokens, and 7 with .*c.txt"),
    ],
)
def test_a_corpus_that_cannot_be_used_is_named(trained, content, words, tmp_path, monkeypatch):
    options, _, _ = trained
    monkeypatch.setattr("ragcache_train.self_study.MAX_LINE_BYTES", 1024)
    if content is not None:
        (tmp_path / "c.txt").write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        train(replace(options, corpus=tmp_path / "c.txt", out=tmp_path / "out"))


def test_a_model_without_keys_and_values_in_every_layer_takes_none(tmp_path):
    lm, corpus = rc.load_lm(save_tiny("llama", str(tmp_path))), tmp_path / "c.txt"
    corpus.write_text("Some text.", encoding="utf-8")
    lm.config.num_hidden_layers += 1  # as where layers share those of others
    with pytest.raises(UnsupportedModelError, match="layers without keys and values of their own"):
        begin_cartridge(lm, ROW, corpus, 3)
