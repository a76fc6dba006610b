"""A store whose model llama.cpp runs: answers, blocks, concurrent askers, and refusals."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from typer.testing import CliRunner

import ragcache as rc
from ragcache import errors
from ragcache.cli.commands import build_app
from ragcache.engine.answer import Token
from ragcache.fusion import get_method
from ragcache.fusion.fuse import PromptPlan
from ragcache.kv.opaque_block import OpaqueBlock
from ragcache.models.ollama import MODEL_LAYER

pytest.importorskip("llama_cpp", reason="needs llama-cpp-python, which is built from source")
from ragcache_llamacpp import context
from ragcache_llamacpp.options import LlamaOptions

QUESTION = "When does the rowing club of Kelbrook meet?"
SHORT = rc.Sampling(max_tokens=8)


def test_answers_come_from_stored_states_after_reopening(open_llama):
    kb = open_llama(method="reposition")
    first = kb.ask(QUESTION, k=3, sampling=SHORT)
    assert {source.kv for source in first.hits} <= {"memory", "disk"}
    assert first.usage.cached_tokens > 0
    kb.close()
    again = open_llama(model=None, engine=None, method="reposition")
    answer = again.ask(QUESTION, k=3, sampling=SHORT)
    assert answer.text == first.text
    assert {source.kv for source in answer.hits} == {"disk"}, "the store remembers its engine"


def test_a_recipe_of_company_is_the_default(open_llama):
    kb = open_llama(engine="llama.cpp:threads=1,n_ctx=2048", store=rc.StoreConfig(neighbours=1), recipe="isolated")
    assert kb.ask(QUESTION, k=2, sampling=SHORT, method="epic").method == "epic"
    assert kb.doctor().sound
    assert kb._parts.block_keys.recipe.neighbours == 1


def test_link_tokens_of_the_vocabulary_run_between_passages(open_llama, files):
    """The embedded engine reads the same weights in the same way; a converted file has its link tokens only by name."""
    kb = open_llama(model=files["linked"])
    assert kb.ask(QUESTION, k=2, sampling=SHORT).method == "link"
    lm = rc.load_lm(str(files["linked"]), dtype="float32")
    lm.reuse = kb.lm.reuse
    assert (lm.reuse.link_slots, lm.reuse.link_tokens, lm.reuse.link_ids(2)) == (3, 2, [265, 266])
    prompt = rc.Prompt([1, 40, 41], [list(range(50, 90)), list(range(60, 95))], [70, 71, 72])
    plan = PromptPlan.of(kb.lm, get_method("link"), prompt)
    found = kb.lm.prefill(plan, kb.lm.encode(prompt.chunk_ids), 8)
    expected = rc.fuse(lm, prompt, "link").logits.log_softmax(-1)
    assert found.layout.num_tokens == 3 + 40 + 35 + 3 + 2 * 2 + 2
    kl = (expected.exp() * (expected - found.logits.float().log_softmax(-1))).sum()
    apart = rc.fuse(lm, prompt, "reposition").logits.log_softmax(-1)
    assert kl < 0.01 < (expected.exp() * (expected - apart)).sum()
    found.cache.release()


@pytest.mark.parametrize("method", ["full", "reposition", "epic"])
def test_streams_join_to_the_answer_and_repeat(open_llama, method):
    kb = open_llama(method=method)
    events = list(kb.stream(QUESTION, 2, sampling=SHORT))
    text = "".join(event.text for event in events if isinstance(event, Token))
    assert text == events[-1].answer.text
    repeated = kb.ask(QUESTION, k=2, sampling=SHORT)
    assert repeated.text == text
    assert repeated.usage.computed_tokens < events[-1].answer.usage.computed_tokens, "the context was kept"


def test_eight_askers_get_what_each_gets_alone(open_llama):
    kb = open_llama(method="reposition")
    questions = [f"{QUESTION} Number {number}." for number in range(8)]
    alone = [kb.ask(one, k=3, sampling=SHORT).text for one in questions]
    kb._parts.engine.clear()
    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(lambda one: kb.ask(one, k=3, sampling=SHORT).text, questions))
    same = sum(one == other for one, other in zip(alone, together, strict=True))
    assert same >= 7, "batches round otherwise, so that one may differ"
    assert max(kb.pass_stats().members) > 1, "answers shared passes"
    assert not kb.lm.sequences._active


def test_more_askers_than_places_wait_for_their_turn(open_llama):
    kb = open_llama(engine="llama.cpp:threads=1,parallel=1,n_ctx=512", method="reposition")
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda _: kb.ask(QUESTION, k=1, sampling=SHORT), range(4)))
    assert len({answer.text for answer in answers}) == 1


def test_a_cancelled_answer_gives_its_cells_back(open_llama):
    kb = open_llama(method="reposition")
    stop = threading.Event()
    events = kb.stream(QUESTION, 2, sampling=rc.Sampling(max_tokens=500), cancelled=stop)
    next(event for event in events if isinstance(event, Token))
    stop.set()
    with pytest.raises(errors.CancelledError):
        list(events)
    assert not kb.lm.sequences._active
    assert kb.lm.sequences._num_free() == kb.lm.sequences.num_cells - kb.lm.sequences.kept_tokens
    left = kb.stream(QUESTION, 2, sampling=rc.Sampling(max_tokens=500))
    next(event for event in left if isinstance(event, Token))
    left.close()
    assert not kb.lm.sequences._active


def test_answers_keep_a_given_form_scores_and_options(open_llama):
    pytest.importorskip("llguidance")
    kb = open_llama(method="reposition")
    schema = {"type": "object", "properties": {"day": {"type": "integer"}}, "required": ["day"]}
    answer = kb.ask(QUESTION, k=2, sampling=rc.Sampling(json_schema=schema, logprobs=2, max_tokens=60))
    assert len(answer.logprobs) == answer.usage.completion_tokens
    assert answer.text.startswith('{"day":') or answer.text.startswith('{"day": ')
    chosen = kb.ask(QUESTION, k=2, sampling=rc.Sampling(choices=("Monday", "Friday")))
    assert chosen.text in ("Monday", "Friday")
    drawn = rc.Sampling(max_tokens=8, temperature=1.5, top_p=0.9, seed=3, repetition_penalty=1.2)
    assert kb.ask(QUESTION, k=2, sampling=drawn).text == kb.ask(QUESTION, k=2, sampling=drawn).text


def test_an_answer_without_a_length_grows_to_the_context(open_llama):
    kb = open_llama(engine="llama.cpp:threads=1,n_ctx=512", method="full")
    answer = kb.ask(QUESTION, k=1, sampling=rc.Sampling(logit_bias={258: -100.0, 259: -100.0}))
    assert answer.finish_reason == "length"
    assert answer.usage.completion_tokens + answer.usage.prompt_tokens >= 511


def test_a_conversation_extends_its_context(open_llama):
    kb = open_llama(method="reposition", recipe="primer", engine="llama.cpp:threads=1,n_ctx=2048")
    messages = [{"role": "user", "content": QUESTION}]
    first = kb.chat(messages, k=2, context="keep", sampling=SHORT)
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And the mill?"}]
    second = kb.chat(messages, k=2, context="keep", sampling=SHORT)
    assert second.usage.computed_tokens < second.usage.prompt_tokens / 2


# Blocks


def test_a_block_is_opaque_bytes_that_every_codec_stores_unchanged(open_llama):
    kb = open_llama(store=rc.StoreConfig(codec="int8"), method="reposition")
    handle = kb.chunks()[0].handle
    block = kb.store.kv.get(handle).block
    assert isinstance(block, OpaqueBlock)
    assert kb.doctor().sound
    fresh = kb.lm.encode([kb.chunks()[0].token_ids])[0]
    assert len(fresh.data) == len(block.data)


def test_blocks_of_another_build_are_computed_anew(open_llama, monkeypatch):
    kb = open_llama(method="reposition")
    old = {chunk.handle for chunk in kb.chunks()}
    kb.close()
    monkeypatch.setattr(context.api, "__version__", "0.0.1")
    kb = open_llama(method="reposition")
    answer = kb.ask(QUESTION, k=3, sampling=SHORT)
    assert {source.kv for source in answer.hits} == {"computed"}
    assert not old & {source.handle for source in answer.hits}


def test_deleted_documents_leave_the_kept_sequences(open_llama):
    kb = open_llama(method="reposition")
    kb.ask(QUESTION, k=3, sampling=SHORT)
    assert kb.lm.sequences.kept_tokens
    kb.delete("clubs")
    assert not kb.lm.sequences.kept_tokens
    assert "clubs" not in {source.chunk.document_id for source in kb.ask(QUESTION, k=3, sampling=SHORT).hits}


def test_a_state_of_another_model_is_refused_by_name(open_llama, files):
    kb = open_llama(method="reposition")
    other = context.LlamaContext(files["gemma3"], LlamaOptions(n_ctx=512, threads=1), 512, 5)
    other.decode([context.Row(1, 0, [1, 2, 3, 4])])
    state = other.state(1)
    with pytest.raises(errors.StaleBlockError, match="another model's"):
        kb.lm.call(lambda: kb.lm.context.place(state, 0, 4, 1, 0))
    assert kb.ask(QUESTION, k=1, sampling=SHORT).usage.prompt_tokens


# What is refused


def test_other_methods_and_options_are_refused_by_name(open_llama):
    kb = open_llama(method="reposition")
    with pytest.raises(errors.ConfigError, match=r"'cacheblend'.*full, reposition or epic"):
        kb.ask(QUESTION, method="cacheblend")
    with pytest.raises(errors.ConfigError, match="leave ray out"):
        kb.ingest(rc.Document("more", "More text."), ray=True)
    with pytest.raises(errors.ConfigError, match="leave"):
        open_llama("other", method="reposition", recipe=rc.Recipe(kept=0.5))


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ("llama.cpp:n_ctx=many", "n_ctx=many is no number"),
        ("llama.cpp:context=7", "no option 'context'"),
        ("llama.cpp:kv=q3", "kv"),
        ("llama.cpp:kv=q8_0", "64"),
        ("llama.cpp:parallel=1000", "parallel=1000"),
        ("llama.cpp:kv=q8_0,flash=0", "flash"),
        ("lama.cpp", "vllm://host:port, several with commas, or llama.cpp"),
    ],
)
def test_a_wrong_address_is_refused_by_name(open_llama, engine, said):
    with pytest.raises(errors.ConfigError, match=said):
        open_llama(engine=engine)


def test_a_file_that_is_no_model_is_refused_by_name(open_llama, tmp_path, files):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(files["llama"].read_bytes()[:-20_000])
    with pytest.raises((errors.UnsupportedModelError, errors.ModelNotFoundError), match=r"broken\.gguf"):
        open_llama(model=broken)
    with pytest.raises(errors.ModelNotFoundError, match="names no GGUF file"):
        open_llama(model="mini")
    with pytest.raises(errors.ModelNotFoundError, match="there is no file"):
        open_llama(model=tmp_path / "absent.gguf")


def test_a_store_keeps_its_model_and_its_engine(open_llama, files):
    open_llama().close()
    with pytest.raises(errors.ModelMismatchError, match=r"llama\.gguf in llama\.cpp"):
        open_llama(model=files["wide"])


def test_a_prompt_that_no_context_holds_is_refused(open_llama):
    kb = open_llama(engine="llama.cpp:threads=1,n_ctx=256", method="full")
    kb.lm.max_positions = 4096
    with pytest.raises(errors.AnswerTooLargeError, match="n_ctx="):
        kb.complete("word " * 200, sampling=rc.Sampling(max_tokens=8))


def test_the_engine_is_the_oracle_of_its_own_logprobs(open_llama):
    """Greedy tokens have the highest log-probability."""
    kb = open_llama(method="full")
    answer = kb.ask(QUESTION, k=1, sampling=rc.Sampling(max_tokens=4, logprobs=3))
    for token in answer.logprobs:
        assert token.logprob == max(one.logprob for one in token.top)
    assert torch.tensor([token.logprob for token in answer.logprobs]).le(0).all()


def test_a_model_that_ollama_has_is_read_by_name(open_llama, files, tmp_path, monkeypatch):
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    manifest = tmp_path / "ollama/manifests/registry.ollama.ai/library/tiny/latest"
    manifest.parent.mkdir(parents=True)
    digest = "sha256:" + "cd" * 32
    manifest.write_text(json.dumps({"layers": [{"mediaType": MODEL_LAYER, "digest": digest}]}))
    blob = tmp_path / "ollama/blobs" / digest.replace(":", "-")
    blob.parent.mkdir()
    blob.write_bytes(files["llama"].read_bytes())
    assert open_llama(model="ollama:tiny", method="full").ask(QUESTION, k=1, sampling=SHORT).text


def test_the_command_line_ingests_and_answers(tmp_path, files):
    (tmp_path / "clubs.txt").write_text("The rowing club of Kelbrook meets on Monday.")
    store = ["--store", str(tmp_path / "kb")]
    engine = ["--engine", "llama.cpp:threads=1", "--model", str(files["llama"]), "--method", "reposition"]
    run = CliRunner().invoke
    made = run(build_app(), ["ingest", str(tmp_path / "clubs.txt"), *store, *engine])
    assert made.exit_code == 0, made.output
    assert "1 added" in made.output
    asked = run(build_app(), ["ask", QUESTION, *store, "--method", "reposition", "--max-tokens", "4", "--json"])
    assert asked.exit_code == 0, asked.output
    assert '"method": "reposition"' in asked.stdout
    limits = ["--min-agreement", "0", "--min-same-answer", "0", "--max-kl", "99", "--max-accuracy-drop", "1"]
    checked = run(
        build_app(), ["check", *store, "--methods", "epic,cacheblend", "--max-tokens", "3", *limits, "--json"]
    )
    assert checked.exit_code == 0, checked.output
    epic, cacheblend = json.loads(checked.stdout)["methods"]
    assert epic["safe"]
    assert 0 < epic["computed_share"] < 1
    assert "llama.cpp runs it without" in cacheblend["reason"]
    by_verdict = run(build_app(), ["ask", QUESTION, *store, "--method", "auto", "--max-tokens", "4", "--json"])
    assert '"method": "epic"' in by_verdict.stdout
