"""A3's LongBench table (arXiv 2511.17560, table 1)."""

from __future__ import annotations

from dataclasses import replace

from ragcache_eval.suites.base import Download, PaperRow, QuestionSet, Suite
from ragcache_eval.suites.forms import paragraphs, retrieved, sentences
from ragcache_eval.suites.longbench import SETS, even

LLAMA, MISTRAL = "LLaMA3-8B-Instruct", "Mistral-7B-Instruct-v0.2"
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
    rows=(
        PaperRow(LLAMA, "Vanilla", (40.52, 45.65, 48.81, 33.51, 33.11, 25.59, 68.33, 89.45, 39.82, 12.06, 57.41)),
        PaperRow(LLAMA, "FullReuse", (4.63, 5.27, 3.48, 1.71, 13.96, 7.48, 0.67, 1.55, 1.89, 4.25, 25.43)),
        PaperRow(LLAMA, "PIE", (34.71, 30.07, 38.55, 30.29, 27.55, 23.52, 61.33, 88.30, 39.30, 5.67, 64.12)),
        PaperRow(LLAMA, "CacheBlend", (35.03, 32.82, 36.97, 28.53, 28.47, 24.45, 67.67, 87.58, 39.07, 5.67, 56.29)),
        PaperRow(LLAMA, "LegoLink", (34.53, 30.79, 36.15, 30.46, 27.49, 23.96, 67.00, 87.20, 39.16, 7.00, 56.52)),
        PaperRow(LLAMA, "A3", (39.07, 36.46, 42.17, 32.56, 28.88, 24.55, 68.67, 89.25, 39.33, 8.67, 65.39)),
        PaperRow(MISTRAL, "Vanilla", (20.09, 42.59, 24.10, 18.37, 32.35, 25.43, 62.33, 88.60, 40.47, 3.92, 62.68)),
        PaperRow(MISTRAL, "FullReuse", (5.00, 5.42, 0.97, 0.39, 22.37, 21.20, 0.33, 2.36, 2.38, 1.83, 27.80)),
        PaperRow(MISTRAL, "PIE", (20.26, 38.85, 24.14, 17.15, 31.73, 25.62, 59.33, 76.95, 39.86, 5.30, 62.34)),
        PaperRow(MISTRAL, "CacheBlend", (21.72, 39.17, 25.19, 18.19, 32.24, 25.74, 59.67, 75.04, 40.16, 3.39, 61.82)),
        PaperRow(MISTRAL, "LegoLink", (21.38, 40.14, 25.46, 17.13, 32.03, 25.72, 59.67, 75.82, 40.16, 4.34, 63.57)),
        PaperRow(MISTRAL, "A3", (21.12, 39.31, 25.52, 18.38, 32.41, 25.28, 59.67, 76.44, 40.25, 3.15, 65.22)),
    ),
    names=NAMES,
    average=True,
    note="The paper says neither which LongBench nor how it was cut. Its TREC scores are thirds of a per cent, which "
    "only the 300 questions of LongBench-E give. It states no share of recomputed tokens; here it is 0.15, and for "
    "LegoLink 16 tokens at both ends of a chunk.",
)


# KVLink's answers (arXiv 2502.16002, table 1): five QA sets by accuracy, two of summaries by ROUGE-L.


SMALL, MIDDLE, LARGE = "Llama-3.2-1B", "Llama-3.2-3B", "Llama-3.1-8B"
ANSWER_TOKENS = 200
LOST = "https://raw.githubusercontent.com/nelson-liu/lost-in-the-middle/main/qa_data/10_total_documents"
NQ_FILE = "nq-open-10_total_documents_gold_at_0"

QA = (
    QuestionSet(
        "nq",
        "NQ",
        metric="accuracy",
        max_tokens=ANSWER_TOKENS,
        form=retrieved,
        files=("nq", NQ_FILE, "nq10"),
        download=Download("json", data_files=f"{LOST}/{NQ_FILE}.jsonl.gz"),
        by_hand=f"{LOST}/{NQ_FILE}.jsonl.gz",
    ),
    QuestionSet(
        "2wikimqa",
        "2WikiMQA",
        metric="accuracy",
        max_tokens=ANSWER_TOKENS,
        form=sentences,
        files=("2wikimqa", "2wiki"),
        download=Download("xanhho/2WikiMultihopQA", split="validation", revision="refs/convert/parquet"),
        by_hand="dev.json of https://huggingface.co/datasets/xanhho/2WikiMultihopQA",
    ),
    QuestionSet(
        "triviaqa",
        "TriviaQA",
        metric="accuracy",
        max_tokens=ANSWER_TOKENS,
        form=retrieved,
        files=("triviaqa",),
        by_hand="TriviaQA with retrieved passages (the test.json that get-data.sh of "
        "https://github.com/facebookresearch/FiD makes, or what a retriever of yours found as its field ctxs)",
    ),
    QuestionSet(
        "hotpotqa",
        "HotpotQA",
        metric="accuracy",
        max_tokens=ANSWER_TOKENS,
        form=sentences,
        files=("hotpotqa", "hotpot_dev_distractor_v1"),
        download=Download("hotpotqa/hotpot_qa", "distractor", "validation"),
        by_hand="distractor/validation of https://huggingface.co/datasets/hotpotqa/hotpot_qa",
    ),
    QuestionSet(
        "musique",
        "MuSiQue",
        metric="accuracy",
        max_tokens=ANSWER_TOKENS,
        form=paragraphs,
        files=("musique", "musique_ans_v1.0_dev"),
        download=Download("dgslibisey/MuSiQue", split="validation"),
        by_hand="musique_ans_v1.0_dev.jsonl of https://huggingface.co/datasets/dgslibisey/MuSiQue",
    ),
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
    rows=(
        PaperRow(SMALL, "Original Llama", (44.6, 61.8, 61.6, 49.3, 13.8, 0.197, 0.301)),
        PaperRow(SMALL, "Finetuned Upperbound", (46.9, 71.9, 68.7, 56.5, 19.9, 0.193, 0.291)),
        PaperRow(SMALL, "PromptCache", (18.6, 19.5, 34.9, 20.5, 1.4, 0.179, 0.199)),
        PaperRow(SMALL, "CacheBlend", (25.7, 31.0, 52.0, 28.7, 3.7, 0.126, 0.074)),
        PaperRow(SMALL, "BlockAttention", (39.0, 64.3, 64.6, 48.3, 14.3, 0.193, 0.247)),
        PaperRow(SMALL, "KVLink 0", (40.8, 62.2, 63.6, 48.1, 13.5, 0.193, 0.256)),
        PaperRow(SMALL, "KVLink 1", (43.8, 64.9, 65.7, 52.9, 16.0, 0.194, 0.257)),
        PaperRow(SMALL, "KVLink 5", (45.0, 66.0, 66.3, 55.6, 19.2, 0.196, 0.256)),
        PaperRow(MIDDLE, "Original Llama", (69.4, 60.4, 72.6, 69.3, 34.8, 0.200, 0.328)),
        PaperRow(MIDDLE, "Finetuned Upperbound", (69.7, 74.1, 76.2, 74.3, 41.5, 0.199, 0.352)),
        PaperRow(MIDDLE, "PromptCache", (24.7, 27.8, 55.7, 24.6, 2.2, 0.203, 0.224)),
        PaperRow(MIDDLE, "CacheBlend", (42.6, 47.6, 64.0, 32.7, 5.5, 0.191, 0.146)),
        PaperRow(MIDDLE, "BlockAttention", (58.8, 70.3, 72.9, 64.3, 28.3, 0.204, 0.317)),
        PaperRow(MIDDLE, "KVLink 0", (62.1, 70.0, 73.3, 65.9, 28.8, 0.203, 0.316)),
        PaperRow(MIDDLE, "KVLink 1", (64.0, 70.9, 73.6, 68.8, 32.5, 0.203, 0.318)),
        PaperRow(MIDDLE, "KVLink 5", (64.4, 71.2, 73.7, 69.5, 35.8, 0.204, 0.320)),
        PaperRow(LARGE, "Original Llama", (71.3, 77.2, 76.2, 77.6, 49.1, 0.204, 0.348)),
        PaperRow(LARGE, "Finetuned Upperbound", (75.1, 78.5, 77.9, 78.2, 46.5, 0.166, 0.353)),
        PaperRow(LARGE, "PromptCache", (28.9, 42.2, 62.6, 36.5, 6.7, 0.203, 0.329)),
        PaperRow(LARGE, "CacheBlend", (55.2, 45.9, 68.8, 40.8, 6.0, 0.207, 0.320)),
        PaperRow(LARGE, "BlockAttention", (70.8, 73.6, 76.6, 72.2, 38.7, 0.166, 0.342)),
        PaperRow(LARGE, "KVLink 0", (71.0, 73.3, 76.4, 72.7, 39.9, 0.163, 0.342)),
        PaperRow(LARGE, "KVLink 1", (72.4, 74.7, 76.6, 73.6, 38.9, 0.170, 0.340)),
        PaperRow(LARGE, "KVLink 5", (72.5, 73.8, 76.6, 73.8, 40.8, 0.168, 0.345)),
    ),
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


MISTRAL, LLAMA = "Mistral 7B Instruct", "Llama 3.1 8B Instruct"

SAMKV = Suite(
    "samkv",
    "table 3 of Sparse Attention across Multiple-context KV Cache",
    (SETS["2wikimqa"], SETS["musique"], SETS["hotpotqa"]),
    methods=(
        "concat",
        "infllm",
        "cacheblend:ratio=0.15",
        "epic:last_tokens=16",
        "samkv-overwrite=samkv:block_size=64:update=overwrite",
        "samkv-fusion=samkv:block_size=64:update=fusion",
    ),
    rows=(
        PaperRow(MISTRAL, "Recompute", (25.06, 19.94, 37.70)),
        PaperRow(MISTRAL, "Reuse", (6.33, 1.92, 2.32)),
        PaperRow(MISTRAL, "Multi-InfLLM", (23.47, 15.77, 38.61)),
        PaperRow(MISTRAL, "CacheBlend", (20.42, 17.44, 33.98)),
        PaperRow(MISTRAL, "EPIC", (19.40, 17.22, 32.23)),
        PaperRow(MISTRAL, "SamKV-overwrite", (27.04, 17.20, 39.10)),
        PaperRow(MISTRAL, "SamKV-fusion", (27.88, 18.54, 37.66)),
        PaperRow(LLAMA, "Recompute", (21.48, 14.56, 24.12)),
        PaperRow(LLAMA, "Reuse", (3.66, 2.23, 2.80)),
        PaperRow(LLAMA, "Multi-InfLLM", (16.20, 12.70, 29.04)),
        PaperRow(LLAMA, "CacheBlend", (19.12, 12.33, 22.18)),
        PaperRow(LLAMA, "EPIC", (17.36, 13.01, 23.04)),
        PaperRow(LLAMA, "SamKV-overwrite", (23.13, 13.04, 35.27)),
        PaperRow(LLAMA, "SamKV-fusion", (22.41, 12.47, 30.52)),
    ),
    names={
        "full": ("Recompute",),
        "concat": ("Reuse",),
        "infllm": ("Multi-InfLLM",),
        "cacheblend": ("CacheBlend",),
        "epic": ("EPIC",),
        "samkv-overwrite": ("SamKV-overwrite",),
        "samkv-fusion": ("SamKV-fusion",),
        "samkv": ("SamKV-overwrite", "SamKV-fusion"),
    },
    average=True,
    note="EPIC runs 16 tokens again at both ends of a chunk. DuReader, which table 4 adds, is Chinese and left out.",
)
