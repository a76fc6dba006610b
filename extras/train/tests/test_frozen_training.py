"""Training on frozen weights: loss and gradient against plain transformers, whole runs, and what comes out of them."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import reuse_oracle as oracle
import torch
from adapters import save_adapter
from covering import covering
from families import masks_of, oracle_model, random_prompt, save_tiny
from run_options import CHAT_LINE, INSTRUCTION_LINE, QA_LINES, engine_logits, log_of, run_options, training_row
from safetensors.torch import load_file
from tiny_model import byte_tokenizer

import ragcache as rc
from ragcache.errors import AdapterError, ConfigError
from ragcache.models.adapter import Adapter
from ragcache.models.checkpoint_digest import checkpoint_digest
from ragcache.models.trained_tokens import TrainedTokens
from ragcache.prompt import encode_text, prompt_format
from ragcache_train.frozen import FrozenModel, divergence_loss, number_rows
from ragcache_train.masked_pass import NAME, answer_logits, register
from ragcache_train.special_tokens import choose_spec
from ragcache_train.train_batches import Ask, EncodedRow, Pair, collate, collate_pairs, lay_out
from ragcache_train.trainer import train

LINK = TrainedTokens("link", "isolated", 2, 4, 199, 207, 208, first_packet_id=209, header_tokens=2)
PACKET = TrainedTokens("packet", first_packet_id=199, header_tokens=3, trailer_tokens=2)
PROMPT = random_prompt(3)
ASKS = [Ask(list(PROMPT.suffix_ids), [110, 111, 2]), Ask([101, 102, 103], [112, 2])]
USED = {*PROMPT.ids, *(id for ask in ASKS for id in (*ask.suffix, *ask.answer))}
FREE = next(id for id in range(3, 190) if not USED & {id, id + 1, id + 2})
INSIDE = TrainedTokens("packet", first_packet_id=FREE, header_tokens=2, trailer_tokens=1)
SPECS = {"link": LINK, "packet": PACKET, "reserved ids": INSIDE}
ROW = EncodedRow("qa", "", PROMPT.prefix_ids, PROMPT.chunk_ids, ASKS, None, True)


def frozen(directory, spec, seed=0):
    register()
    model = rc.load_lm(directory, packed=False).model
    model.set_attn_implementation(NAME)
    row_of = number_rows(spec)
    count = max(row_of.values()) + 1
    start = 0.3 * torch.randn(count, model.config.hidden_size, generator=torch.Generator().manual_seed(seed))
    return FrozenModel(model, row_of, start)


def tokens_of(spec, ask, given):
    """The student's sequence for one question with its first answer tokens, by hand."""
    front, back = spec.packet
    if spec.method == "packet":
        chunks = [[*front, *chunk, *back] for chunk in PROMPT.chunk_ids]
        return oracle.linked(PROMPT.prefix_ids, chunks, [[*ask.suffix, *given]], [[]] * len(chunks))
    chunks = [[*front, *chunk] for chunk in PROMPT.chunk_ids]
    links = [[199 + 2 * slot, 200 + 2 * slot] for slot in range(len(chunks))]
    return oracle.linked(PROMPT.prefix_ids, chunks, [[*ask.suffix, *given]], links, 207, 208)


def row_by_hand(spec, id):
    """The row of an added id: link tokens of all slots share theirs, everything else has one of its own."""
    if spec.method == "packet":
        return id - spec.first_packet_id
    return (id - 199) % 2 if id < 207 else 2 + id - 207


def plain_logits(model, tokens, count, rows=(), spec=None):
    """Logits of the last `count` tokens by plain transformers over embeddings, with rows for the added ids in them."""
    ids = [token.id for token in tokens]
    embed = model.get_input_embeddings()
    scale = (embed(torch.tensor([7])) / embed.weight[7]).mean().detach()
    added = spec.added_ids if spec else ()
    parts = [rows[row_by_hand(spec, id)] * scale if id in added else embed(torch.tensor(id)).detach() for id in ids]
    positions = [token.position for token in tokens]
    out = model(
        inputs_embeds=torch.stack(parts)[None],
        position_ids=torch.tensor([positions]),
        attention_mask=masks_of(model, oracle.allowed(tokens), positions),
    )
    return out.logits[0, -count:]


def softmax(logits):
    found = np.exp(logits - logits.max(-1, keepdims=True))
    return found / found.sum(-1, keepdims=True)


@pytest.mark.parametrize(("family", "name"), covering(["llama", "gemma3"], SPECS))
def test_the_loss_and_its_gradient_are_those_of_the_oracle(family, name, tmp_path):
    spec = SPECS[name]
    directory = save_tiny(family, str(tmp_path))
    ours, plain = frozen(directory, spec), oracle_model(directory).requires_grad_(False)
    other = ROW._replace(chunks=ROW.chunks[:2], asks=ASKS[:1])  # a shorter row in the same batch
    pairs = [Pair(lay_out(row, spec, True), lay_out(row, None, False)) for row in (ROW, other)]
    batch = collate_pairs(pairs[:1])
    loss = divergence_loss(ours, ours, batch)
    loss.backward()
    rows = ours.rows.detach().clone().requires_grad_(True)
    total, expected = torch.zeros(()), 0.0
    for ask in ASKS:
        count, given = len(ask.answer), ask.answer[:-1]
        whole = oracle.together(PROMPT.prefix_ids, PROMPT.chunk_ids, [[*ask.suffix, *given]])
        with torch.no_grad():
            teacher = plain_logits(plain, whole, count)
        student = plain_logits(plain, tokens_of(spec, ask, given), count, rows, spec)
        p, q = softmax(teacher.double().numpy()), softmax(student.detach().double().numpy())
        expected += float((p * (np.log(p) - np.log(q))).sum())
        total = total + (teacher.softmax(-1) * (teacher.log_softmax(-1) - student.log_softmax(-1))).sum()
    labels = sum(len(ask.answer) for ask in ASKS)
    assert float(loss.detach()) == pytest.approx(expected / labels, rel=1e-4)
    (total / labels).backward()
    torch.testing.assert_close(ours.rows.grad, rows.grad, atol=1e-5 * float(rows.grad.abs().max()), rtol=1e-3)
    unused = (rows.grad.abs().sum(1) == 0).sum()
    assert unused == 0 or family == "gemma3", "every row is used that no window hides"
    both = divergence_loss(ours, ours, collate_pairs(pairs))  # padded, it is the mean over all labels
    alone = divergence_loss(ours, ours, collate_pairs(pairs[1:]))
    torch.testing.assert_close(both * (labels + 3), loss * labels + alone * 3, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("family", "name"), covering(["llama", "gemma4", "granite"], SPECS))
def test_a_loaded_adapter_is_what_was_trained(family, name, tmp_path):
    """Gemma 4 looks ids up in a second table, where new ones have no row of their own."""
    spec = SPECS[name]
    directory = save_tiny(family, str(tmp_path / "base"))
    model = frozen(directory, spec)
    rows = {id: model.rows[row].detach() for id, row in number_rows(spec).items()}
    save_adapter(tmp_path / "adapter", tmp_path / "base", spec, rows=rows)
    lm = rc.load_lm(tmp_path / "adapter")
    assert rc.load_lm(tmp_path / "adapter").fingerprint == lm.fingerprint
    row = ROW._replace(asks=[Ask(PROMPT.suffix_ids, [5])])
    with torch.no_grad():
        expected = answer_logits(model, model, collate([lay_out(row, spec, True)]))[0]
    kept = [id for id in range(199) if id not in spec.added_ids]
    ours = rc.fuse(lm, PROMPT, spec.method).next_logits
    torch.testing.assert_close(ours[kept], expected[kept], atol=2e-4, rtol=2e-4)


def test_only_the_rows_can_change(tmp_path):
    model = frozen(save_tiny("llama", str(tmp_path)), PACKET)
    assert [name for name, _ in model.named_parameters()] == ["rows"] == list(model.state_dict())
    divergence_loss(
        model, model, collate_pairs([Pair(lay_out(ROW, PACKET, True), lay_out(ROW, None, False))])
    ).backward()
    assert all(parameter.grad is None for parameter in model.base.parameters())


def test_link_tokens_of_all_slots_share_their_rows():
    row_of = number_rows(LINK)
    assert row_of.keys() == LINK.added_ids
    assert [row_of[id] for id in range(199, 207)] == [0, 1] * 4
    assert sorted(row_of[id] for id in (207, 208, 209, 210)) == [2, 3, 4, 5]


LINES = [*QA_LINES, CHAT_LINE, INSTRUCTION_LINE]


def options_of(base, folder):
    return run_options(base, folder, LINES, freeze=True)


@pytest.fixture
def options(base, tmp_path):
    return options_of(base, tmp_path)


@pytest.fixture(scope="module")
def trained(base, tmp_path_factory):
    """Three steps by link."""
    return train(replace(options_of(base, tmp_path_factory.mktemp("trained")), steps=3))


@pytest.fixture(scope="module")
def untouched(base, tmp_path_factory):
    """A packet's rows as they start: a step of a rate that changes nothing."""
    options = options_of(base, tmp_path_factory.mktemp("untouched"))
    return train(replace(options, reuse="packet", steps=1, learning_rate=1e-9)).out


def rows_of(out):
    return load_file(out / "adapter.safetensors")["rows"]


def logits_as_trained(out):
    """Logits of the first answer token, by the training forward over the base with the adapter's rows."""
    adapter = Adapter.find(out)
    lm = rc.load_lm(adapter.base.name, packed=False)
    row = training_row(rc.load_lm(out).tokenizer)
    register()
    lm.model.set_attn_implementation(NAME)
    rows = adapter.rows()
    model = FrozenModel(lm.model, {id: n for n, id in enumerate(rows)}, torch.stack(list(rows.values())))
    with torch.no_grad():
        return answer_logits(model, model, collate([lay_out(row, adapter.spec, True)]))[0]


@pytest.mark.parametrize(
    ("changes", "spec"),
    [
        ({}, TrainedTokens("link", "isolated", 2, 4, 258, 266, 267, first_packet_id=268, header_tokens=8)),
        pytest.param(
            {"header_tokens": 0}, TrainedTokens("link", "isolated", 2, 4, 258, 266, 267), marks=pytest.mark.slow
        ),
        pytest.param(
            {"reuse": "packet", "freeze": False, "trailer_tokens": 3},
            TrainedTokens("packet", first_packet_id=258, header_tokens=8, trailer_tokens=3),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["link", "link alone", "packet"],
)
def test_a_run_brings_the_model_nearer_to_its_own_full_prefill(options, base, changes, spec):
    before = checkpoint_digest(str(base))
    report = train(replace(options, steps=16, batch_tokens=2000, **changes))
    losses = [line["loss"] for line in log_of(report.out)]
    assert losses[-1] < 0.75 * losses[0]
    assert checkpoint_digest(str(base)) == before
    assert sorted(path.name for path in report.out.glob("*.safetensors")) == ["adapter.safetensors"]
    lm = rc.load_lm(report.out)
    assert lm.reuse == spec
    ours = engine_logits(report.out, spec.method)[:258]
    torch.testing.assert_close(ours, logits_as_trained(report.out), atol=2e-4, rtol=2e-4)
    full = engine_logits(report.out, "full")[:258]
    torch.testing.assert_close(full, engine_logits(base, "full"), atol=1e-5, rtol=1e-5)


def test_the_weights_are_bit_identical_after_training(trained, base):
    after, start = rc.load_lm(trained.out).model.state_dict(), rc.load_lm(base).model.state_dict()
    for name, tensor in start.items():
        assert torch.equal(after[name][: tensor.shape[0]], tensor), name


def test_passages_alone_are_learned_from_and_other_lines_are_named(trained):
    assert trained.rows == 3
    assert [line.where for line in trained.bad] == [f"{trained.out.with_name('rows.jsonl')}:4"]
    assert "no passages to read apart" in trained.bad[0].reason


def test_a_checkpoint_holds_the_rows_alone(options):
    report = train(replace(options, steps=1, save_every=1))
    (checkpoint,) = (report.out / "checkpoints").iterdir()
    assert list(load_file(checkpoint / "model.safetensors")) == ["rows"]
    assert {group["betas"] for group in torch.load(checkpoint / "optimizer.pt")["param_groups"]} == {(0.9, 0.98)}


def test_bfloat16_weights_train_float32_rows(options):
    report = train(replace(options, steps=2, precision="bfloat16"))
    assert rows_of(report.out).dtype == torch.float32
    assert not torch.equal(rows_of(report.out), rows_of(report.out).bfloat16().float())


def test_recomputed_activations_change_nothing(options, trained):
    again = train(replace(options, steps=3, checkpointing=True))
    torch.testing.assert_close(rows_of(trained.out), rows_of(again.out), atol=1e-5, rtol=1e-4)


def test_rows_start_as_the_prefix_and_as_a_lines_end(untouched, base):
    lm = rc.load_lm(base)
    table = lm.model.get_input_embeddings().weight
    (bos,) = prompt_format(lm.tokenizer).prefix_ids
    (newline,) = encode_text(lm.tokenizer, "\n")
    words = table[[bos] * 8 + [newline] * 8]
    found = rows_of(untouched)
    assert (found - words).std() == pytest.approx(0.1 * float(table.std()), rel=0.2)
    assert len(found.unique(dim=0)) == 16


def test_ids_of_a_packet_stand_beside_those_of_links():
    tokenizer = byte_tokenizer()
    spec = choose_spec(tokenizer, "link", 2, 2, "reordered", 3, 1)
    assert spec == TrainedTokens(
        "link", "isolated", 2, 2, 258, 262, 263, first_packet_id=264, header_tokens=3, trailer_tokens=1
    )
    names = ["<|header_1|>", "<|header_2|>", "<|header_3|>", "<|trailer_1|>"]
    assert tokenizer.convert_ids_to_tokens(list(range(264, 268))) == names
    spec.check(268, tokenizer, "it")
    reserved = byte_tokenizer()
    reserved.add_special_tokens({"additional_special_tokens": [f"<|reserved_{n}|>" for n in range(10)]})
    spec = choose_spec(reserved, "link", 2, 1, "reordered", 3, 1)
    assert (spec.first_link_id, spec.first_packet_id, len(reserved)) == (258, 262, 268)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"lora_rank": 4}, "lora_rank is 4 and the weights are frozen"),
        ({"reuse": "markers"}, "'markers'; frozen weights can be trained for packet or link"),
        ({"reuse": "none"}, "'none'; frozen weights"),
        ({"link_tokens": 0}, "leaves nothing to train on frozen weights; try reuse='packet'"),
        ({"reuse": "packet", "header_tokens": 0, "trailer_tokens": 0}, "leaves nothing to train"),
        ({"header_tokens": -1}, "header_tokens is -1"),
        ({"freeze": False, "header_tokens": 8}, "go with frozen weights; add freeze"),
        ({"freeze": False, "store": "kb"}, "go with frozen weights; add freeze"),
        ({"rows": 0}, "rows is 0"),
    ],
)
def test_options_that_do_not_go_together_are_named(options, changes, reason):
    with pytest.raises(ConfigError, match=reason):
        replace(options, **changes)


def go_on(options, first, **changes):
    """The rows before the first step: a step of a rate that changes nothing."""
    again = replace(options, model=first, out=options.out.with_name("again"), steps=1, learning_rate=1e-12, **changes)
    return Adapter.find(train(again).out)


@pytest.mark.slow
@pytest.mark.parametrize("reuse", ["link", "packet"])
def test_training_goes_on_from_an_adapter(options, reuse, base, trained, untouched):
    """Not from rows of its own: those of another seed would be others."""
    first = trained.out if reuse == "link" else untouched
    again = go_on(replace(options, reuse=reuse, seed=5), first)
    assert again.base == Adapter.find(first).base
    assert again.base.name == str(base)
    torch.testing.assert_close(rows_of(again.directory), rows_of(first), atol=1e-9, rtol=0)


def test_link_tokens_beyond_those_of_an_adapter_repeat_them_and_slots_do_not_count(options, trained):
    first = Adapter.find(trained.out)
    again = go_on(options, first.directory, link_tokens=5, link_slots=6)
    old, new = first.rows(), again.rows()
    start = [old[id] for id in first.spec.link_ids(0)]
    for slot in range(6):
        rows = [new[id] for id in again.spec.link_ids(slot)]
        torch.testing.assert_close(rows[:2], start, atol=1e-9, rtol=0)
        for place, row in enumerate(rows[2:], start=2):
            spread = (row - start[place % 2]).std() / start[place % 2].std()
            assert 0.05 < spread < 0.2  # like rows have to part
    torch.testing.assert_close(new[again.spec.kv_start_id], old[first.spec.kv_start_id], atol=1e-9, rtol=0)


def test_an_adapter_of_another_reuse_gives_nothing_to_go_on_from(options, untouched):
    with pytest.raises(
        ConfigError, match=r"trained for packet and has nothing that link could go on from; .* its base"
    ):
        train(replace(options, model=untouched, header_tokens=0))


def test_an_adapter_whose_base_has_changed_is_refused(options, base, trained, tmp_path):
    model, first = shutil.copytree(base, tmp_path / "base"), shutil.copytree(trained.out, tmp_path / "first")
    for path, old, new in (
        (model / "config.json", '"rms_norm_eps": 1e-06', '"rms_norm_eps": 0.5'),
        (first / "adapter.json", str(base), str(model)),
    ):
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
    with pytest.raises(AdapterError, match="trained beside other weights"):
        train(replace(options, model=first))


def test_a_directory_that_holds_an_adapter_is_not_overwritten(options, trained):
    (shutil.copytree(trained.out, options.out) / "training_options.json").unlink()
    with pytest.raises(ConfigError, match="holds a trained model already"):
        train(replace(options, steps=1))
