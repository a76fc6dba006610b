"""The training forward pass equals plain transformers under the papers' mask in every family, and the engine on the
same prompt.
"""

import pytest
import reuse_oracle as oracle
import torch
from covering import covering
from families import method_families, oracle_logits_of, oracle_model, random_prompt, save_tiny

import ragcache as rc
from ragcache.models.trained_tokens import TrainedTokens
from ragcache_train.masked_pass import NAME, answer_logits, answer_loss, register
from ragcache_train.train_batches import Ask, EncodedRow, collate, lay_out

LINK = TrainedTokens("link", "isolated", 2, 8, 20, 60, 61)
MARKERS = {
    name: TrainedTokens("markers", doc_start_id=70, doc_end_id=71, positions=name)
    for name in ("reordered", "composite")
}
SPECS = {"link": LINK, "reposition": TrainedTokens("reposition"), **MARKERS}
PROMPT = random_prompt(3)
QUESTIONS = [list(PROMPT.suffix_ids), [101, 102, 103], [104, 105, 106, 107]]
ANSWERS = [[110, 111, 2], [112, 2], [113, 114, 115, 2]]
ROW = EncodedRow(
    "qa",
    "",
    PROMPT.prefix_ids,
    PROMPT.chunk_ids,
    [Ask(question, answer) for question, answer in zip(QUESTIONS, ANSWERS, strict=True)],
    None,
    True,
)


def trainable(directory: str):
    register()
    model = rc.load_lm(directory).model
    model.set_attn_implementation(NAME)
    return model.requires_grad_(True).train()


def training_logits(model, batch):
    """Return the logits of every labelled token, in order: [num_labels, vocab_size]."""
    with torch.no_grad():
        return answer_logits(model, model, batch)


def papers_tokens(spec: TrainedTokens, questions: list[list[int]]) -> list[oracle.Tok]:
    prefix, chunks = list(PROMPT.prefix_ids), [list(chunk) for chunk in PROMPT.chunk_ids]
    if spec.method == "markers":
        return oracle.marked(prefix, chunks, questions, (70, 71), spec.positions == "composite")
    links = [[20 + 2 * slot, 21 + 2 * slot] for slot in range(len(chunks))]
    if spec.method == "link":
        return oracle.linked(prefix, chunks, questions, links, 60, 61)
    return oracle.linked(prefix, chunks, questions, [[]] * len(chunks))


def oracle_training_logits(model, spec: TrainedTokens):
    """Return the logits of each answer token by a separate forward pass, with each question alone after the context."""
    found = []
    for question, answer in zip(QUESTIONS, ANSWERS, strict=True):
        for given in range(len(answer)):
            tokens = papers_tokens(spec, [[*question, *answer[:given]]])
            ids, positions = [token.id for token in tokens], [token.position for token in tokens]
            found.append(oracle_logits_of(model, ids, oracle.allowed(tokens), positions))
    return torch.stack(found)


@pytest.mark.parametrize("family", method_families(without="stablelm"))  # which is refused
def test_training_is_a_plain_forward_under_the_papers_mask(family, tmp_path):
    directory = save_tiny(family, str(tmp_path))
    other = ROW._replace(chunks=ROW.chunks[:2])  # a shorter row in the same batch
    batch = collate([lay_out(ROW, LINK, True), lay_out(other, LINK, True)])
    ours = training_logits(trainable(directory), batch)
    theirs = oracle_training_logits(oracle_model(directory), LINK)
    torch.testing.assert_close(ours[: len(theirs)], theirs, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(("family", "name"), covering(["llama", "gemma3"], SPECS))
def test_so_is_every_way_of_reuse(family, name, tmp_path):
    spec = SPECS[name]
    directory = save_tiny(family, str(tmp_path))
    ours = training_logits(trainable(directory), collate([lay_out(ROW, spec, True)]))
    theirs = oracle_training_logits(oracle_model(directory), spec)
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "mixtral"])
def test_training_sees_what_the_engine_will_see(family, tmp_path):
    directory = save_tiny(family, str(tmp_path))
    lm = rc.load_lm(directory)
    ask = Ask(PROMPT.suffix_ids, [5])  # one label: the first answer token
    row = ROW._replace(asks=[ask])
    ours = {name: collate([lay_out(row, spec, True)]) for name, spec in SPECS.items()}
    whole = collate([lay_out(row, LINK, False)])
    links = [[20 + 2 * slot, 21 + 2 * slot] for slot in range(len(PROMPT.chunk_ids))]
    # link_ids adds link tokens only: KV-START and KV-END are given here as part of prefix and suffix
    around = rc.Prompt([*PROMPT.prefix_ids, 60], PROMPT.chunk_ids, [61, *PROMPT.suffix_ids])
    fused = {
        "link": rc.fuse(lm, around, method="link", link_ids=links),
        "reposition": rc.fuse(lm, PROMPT, method="reposition"),
        **{n: rc.fuse(lm, PROMPT, method="markers", doc_start_id=70, doc_end_id=71, positions=n) for n in MARKERS},
    }
    full = rc.fuse(lm, PROMPT, method="full").next_logits
    model = trainable(directory)
    for name, batch in ours.items():
        torch.testing.assert_close(
            training_logits(model, batch)[0], fused[name].next_logits, atol=2e-4, rtol=2e-4, msg=lambda m, n=name: n + m
        )
    torch.testing.assert_close(training_logits(model, whole)[0], full, atol=2e-4, rtol=2e-4)


def test_loss_and_gradients_are_those_of_the_oracle(tmp_path):
    directory = save_tiny("llama", str(tmp_path))
    model, plain = trainable(directory), oracle_model(directory).requires_grad_(True)
    loss = answer_loss(model, model, collate([lay_out(ROW, LINK, True)]))
    loss.backward()
    losses = []
    for question, answer in zip(QUESTIONS, ANSWERS, strict=True):
        tokens = papers_tokens(LINK, [[*question, *answer[:-1]]])
        mask = torch.zeros(len(tokens), len(tokens)).masked_fill(~oracle.allowed(tokens), float("-inf"))
        logits = plain(
            input_ids=torch.tensor([[token.id for token in tokens]]),
            position_ids=torch.tensor([[token.position for token in tokens]]),
            attention_mask=mask[None, None],
        ).logits[0, -len(answer) :]
        losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(answer), reduction="sum"))
    expected = torch.stack(losses).sum() / sum(len(answer) for answer in ANSWERS)
    expected.backward()
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-5, rtol=1e-3, msg=lambda m, n=name: n + m)


def test_recomputed_activations_change_nothing(tmp_path):
    model = trainable(save_tiny("gemma3", str(tmp_path)))
    batch = collate([lay_out(ROW, LINK, True)])
    gradients = []
    for recompute in (False, True):
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.zero_grad()
        answer_loss(model, model, batch).backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for before, after in zip(*gradients, strict=True):
        torch.testing.assert_close(after, before, atol=1e-6, rtol=1e-5)


def test_a_model_that_drops_its_masks_is_refused(tmp_path):
    """StableLM's layer does not pass further arguments on to its attention."""
    with pytest.raises(rc.UnsupportedModelError, match="StableLmAttention does not get the masks"):
        training_logits(trainable(save_tiny("stablelm", str(tmp_path))), collate([lay_out(ROW, LINK, True)]))
