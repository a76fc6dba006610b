"""A primer's content gets into no answer: a real model is asked about facts that only the primer states."""

import gzip
import json
import os
from pathlib import Path
from statistics import fmean

import pytest

import ragcache as rc
from ragcache.models.named import cached
from ragcache.models.primer import PRIMERS
from ragcache.prompt import encode_text, prompt_format
from ragcache_eval.case import Case, CasePassage
from ragcache_eval.methods import MethodSpec
from ragcache_eval.reading import PromptReader, forced_logits, write_answer

CORPUS = Path(__file__).parents[4] / "shared" / "data" / "corpus" / "xquad_en.jsonl.gz"
BASE = "RAGCACHE_TEST_SMOLLM2"
PASSAGES, ANSWER_TOKENS = 4, 24
ASKED = {  # by the shortest primer that states the answer: question, answer
    "64": [
        ("What forms where rock weathers and living things leave their remains?", "Soil"),
        ("Which soils dry quickly and warm early in spring?", "Sandy soils"),
        ("What mixes the layers of the ground?", "Worms and roots"),
    ],
    "128": [
        ("When do the prices at the market fall?", "Towards noon"),
        ("What happens at the market when it rains?", "The stalls move closer together under the roof of the hall"),
    ],
    "256": [
        ("Who kept the bag of letters dry with his charts?", "The captain of a ship"),
        ("What did the rider change at each inn?", "Horses"),
        ("What gives shade to the fish in the river?", "Trees along the water"),
    ],
}


@pytest.fixture(scope="module")
def lm():
    where = os.environ.get(BASE) or cached("smollm2")
    if where is None or not Path(where).is_dir() or not CORPUS.is_file():
        pytest.skip(f"SmolLM2 ({BASE} names its directory) or ../shared/data/corpus/{CORPUS.name} is not here")
    return rc.load_lm(str(where), dtype="float32")


def asked_of(primer: str) -> list[tuple[str, str]]:
    return [pair for name in ASKED if int(name) <= int(primer) for pair in ASKED[name]]


@pytest.mark.slow
@pytest.mark.parametrize("primer", PRIMERS)
def test_no_answer_is_taken_from_the_primer(lm, primer):
    """Passages that state an answer raise its log-probability. A primer must not raise it as the same text does as a
    passage, and no answer may contain it unless full prefill without the text contains it, too.
    """
    form = prompt_format(lm.tokenizer)
    texts = [json.loads(line)["text"] for line in gzip.decompress(CORPUS.read_bytes()).splitlines()]
    others = [CasePassage(text) for text in texts[:: len(texts) // PASSAGES][:PASSAGES]]
    behind = MethodSpec.parse(f"reposition:recipe=primer:primer={primer}")
    without = MethodSpec.parse("reposition:recipe=prefix")
    gains, seen_gains = [], []
    for question, answer in asked_of(primer):
        ids = encode_text(lm.tokenizer, answer)

        def read(spec, passages, question=question, ids=ids):
            reader = PromptReader.of(lm, Case("leak", question, tuple(passages), ()), form, ANSWER_TOKENS)
            fused, _ = reader.read(spec.method(), spec.recipe, primer=spec.primer)
            chosen = forced_logits(lm, fused, ids).log_softmax(-1)[range(len(ids)), ids]
            written = write_answer(lm, fused, ANSWER_TOKENS).text
            fused.cache.release()
            return float(chosen.mean()), written.casefold()

        alone, _ = read(without, others)
        primed, written = read(behind, others)
        seen, _ = read(without, [*others, CasePassage(PRIMERS[primer])])
        _, whole = read(MethodSpec("full", "full"), others)
        assert answer.casefold() not in written or answer.casefold() in whole, (question, written)
        gains.append(primed - alone)
        seen_gains.append(seen - alone)
    print(f"primer {primer}: {fmean(gains):.2f} nats a token; as a passage {fmean(seen_gains):.2f}")
    assert fmean(seen_gains) > 0.5  # otherwise the questions cannot show a leak
    assert fmean(gains) < 0.2 * fmean(seen_gains)
