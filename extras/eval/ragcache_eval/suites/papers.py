"""A3's LongBench table (arXiv 2511.17560, table 1)."""

from __future__ import annotations

from dataclasses import replace

from ragcache_eval.suites.base import Download, Form, QuestionSet, Suite
from ragcache_eval.suites.forms import paragraphs, retrieved, sentences
from ragcache_eval.suites.longbench import SETS, even

METHODS = ("concat", "reposition", "cacheblend:ratio=0.15", "epic:last_tokens=16", "a3:ratio=0.15")
NAMES = {
    "full": ("Vanilla",),
    "concat": ("FullReuse",),
    "reposition": ("PIE",),
    "cacheblend": ("CacheBlend",),
    "epic": ("LegoLink",),
    "a3": ("A3",),
}

A3 = Suite(
    "a3",
    "table 1 of arXiv 2511.17560",
    (
        even("qasper", "Qasper"),
        even("multifieldqa_en", "MultiQ"),
        even("hotpotqa", "Hotpot"),
        even("2wikimqa", "2WikiM"),
        even("gov_report", "GovRep"),
        even("multi_news", "MultiN"),
        even("trec", "TREC"),
        even("triviaqa", "TriviaQ"),
        even("samsum", "SAMSum"),
        even("passage_count", "PCount"),
        even("lcc", "LCC"),
    ),
    methods=METHODS,
    names=NAMES,
    average=True,
    note="The paper says neither which LongBench nor how it was cut. Its TREC scores are thirds of a per cent, which "
    "only the 300 questions of LongBench-E give. It states no share of recomputed tokens; here it is 0.15, and for "
    "LegoLink 16 tokens at both ends of a chunk.",
)


# KVLink's answers (arXiv 2502.16002, table 1): five QA sets by accuracy, two of summaries by ROUGE-L.


LOST = "https://raw.githubusercontent.com/nelson-liu/lost-in-the-middle/main/qa_data/10_total_documents"
NQ_FILE = "nq-open-10_total_documents_gold_at_0"
HOTPOT_FILE, MUSIQUE_FILE = "hotpot_dev_distractor_v1", "musique_ans_v1.0_dev"


def _qa(name: str, title: str, form: Form, by_hand: str, download: Download | None = None, *files: str) -> QuestionSet:
    own = QuestionSet(name, title, metric="accuracy", max_tokens=200, form=form, files=(name, *files))
    return replace(own, download=download, by_hand=by_hand)


NQ = Download("json", data_files=f"{LOST}/{NQ_FILE}.jsonl.gz")
TWO_WIKI = Download("xanhho/2WikiMultihopQA", split="validation", revision="refs/convert/parquet")
HOTPOT = Download("hotpotqa/hotpot_qa", "distractor", "validation")
MUSIQUE = Download("dgslibisey/MuSiQue", split="validation")
FID = (
    "TriviaQA with retrieved passages (the test.json that get-data.sh of https://github.com/facebookresearch/FiD "
    "makes, or what a retriever of yours found as its field ctxs)"
)
HUB = "https://huggingface.co/datasets"
QA = (
    _qa("nq", "NQ", retrieved, f"{LOST}/{NQ_FILE}.jsonl.gz", NQ, NQ_FILE, "nq10"),
    _qa("2wikimqa", "2WikiMQA", sentences, f"dev.json of {HUB}/{TWO_WIKI.path}", TWO_WIKI, "2wiki"),
    _qa("triviaqa", "TriviaQA", retrieved, FID),
    _qa("hotpotqa", "HotpotQA", sentences, f"distractor/validation of {HUB}/{HOTPOT.path}", HOTPOT, HOTPOT_FILE),
    _qa("musique", "MuSiQue", paragraphs, f"{MUSIQUE_FILE}.jsonl of {HUB}/{MUSIQUE.path}", MUSIQUE, MUSIQUE_FILE),
)
SUMMARIES = (
    replace(SETS["multi_news"], title="MultiNews", metric="rouge_l", unit=1.0),
    replace(SETS["samsum"], title="Samsum", metric="rouge_l", unit=1.0),
)

KVLINK = Suite(
    "kvlink",
    "table 1 of arXiv 2502.16002",
    (*QA, *SUMMARIES),
    methods=("reposition", "cacheblend:ratio=0.18", "link"),
    names={
        "full": ("Original Llama", "Finetuned Upperbound"),
        "reposition": ("PromptCache", "BlockAttention"),
        "cacheblend": ("CacheBlend",),
        **{f"link K={number}": (f"KVLink {number}",) for number in (0, 1, 5)},
    },
    note="The paper's PromptCache moves its blocks as reposition does; BlockAttention is reposition on a model trained "
    "for it. Link tokens stand beside the paper's row of as many. Summaries are over LongBench's contexts, where "
    "CacheBlend took its own from; the paper names no source.",
)


# SamKV's table of answers (table 3): three sets of LongBench, F1.


SAMKV = Suite(
    "samkv",
    "table 3 of Sparse Attention across Multiple-context KV Cache",
    (SETS["2wikimqa"], SETS["musique"], SETS["hotpotqa"]),
    methods=(
        "concat",
        "cacheblend:ratio=0.15",
        "epic:last_tokens=16",
        "samkv-overwrite=samkv:block_size=64:update=overwrite",
        "samkv-fusion=samkv:block_size=64:update=fusion",
    ),
    names={
        "full": ("Recompute",),
        "concat": ("Reuse",),
        "cacheblend": ("CacheBlend",),
        "epic": ("EPIC",),
        "samkv-overwrite": ("SamKV-overwrite",),
        "samkv-fusion": ("SamKV-fusion",),
        "samkv": ("SamKV-overwrite", "SamKV-fusion"),
    },
    average=True,
    note="EPIC runs 16 tokens again at both ends of a chunk. DuReader, which table 4 adds, is Chinese and left out.",
)
