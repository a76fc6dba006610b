"""Needle in a Haystack and RULER's 13 tasks (arXiv 2404.06654); the paper's rows are A3's (its appendix has RULER)."""

from __future__ import annotations

from ragcache_eval.suites.base import Download, Form, PaperRow, QuestionSet, Suite
from ragcache_eval.suites.forms import paragraph, sentences
from ragcache_eval.suites.papers import LLAMA, METHODS, MISTRAL, NAMES

CASES = 100
BRIEFLY = "Reply with the shortest answer that the documents above give, and with nothing else.\nQuestion: {question}"


def _task(name: str, title: str, task: str, max_tokens: int) -> QuestionSet:
    source = f"ruler:task={task},lengths={{length}},passage={{passage}},questions={CASES}"
    return QuestionSet(name, title, metric="all_contained", max_tokens=max_tokens, generated=source)


def _qa(name: str, form: Form, files: tuple[str, ...], download: Download) -> QuestionSet:
    return QuestionSet(
        name,
        name.upper().replace("_", "-"),
        metric="any_contained",
        max_tokens=32,
        asked=BRIEFLY,
        form=form,
        files=files,
        download=download,
        by_hand=f"the {download.split} split of https://huggingface.co/datasets/{download.path}",
        questions=CASES,
        filled=True,
    )


NEEDLE = QuestionSet(
    "needle",
    "Needle",
    metric="accuracy",
    max_tokens=50,
    generated="needle:lengths={length},depths=0/10/20/30/40/50/60/70/80/90/100,passage={passage},questions=10",
)

RULER = Suite(
    "ruler",
    "the RULER table in appendix A of arXiv 2511.17560",
    (
        _task("niah_single_1", "Single-1", "single_noise", 128),
        _task("niah_single_2", "Single-2", "single", 128),
        _task("niah_single_3", "Single-3", "single_uuid", 128),
        _task("niah_multikey_1", "Multi-1", "multi_key", 128),
        _task("niah_multikey_2", "Multi-2", "multi_key_lines", 128),
        _task("niah_multikey_3", "Multi-3", "multi_key_uuids", 128),
        _task("niah_multiquery", "MQuery", "multi_query", 128),
        _task("niah_multivalue", "MValue", "multi_value", 128),
        _task("cwe", "CWE", "common_words", 120),
        _task("fwe", "FWE", "frequent_words", 50),
        _task("vt", "VT", "variable_tracking", 30),
        _qa("qa_1", paragraph, ("squad", "squad_v2"), Download("rajpurkar/squad_v2", split="validation")),
        _qa(
            "qa_2",
            sentences,
            ("hotpotqa", "hotpot_dev_distractor_v1"),
            Download("hotpotqa/hotpot_qa", "distractor", "validation"),
        ),
        NEEDLE,
    ),
    methods=METHODS,
    rows=(
        PaperRow(LLAMA, "Vanilla", (100.0, 100.0, 100.0, 99.33, 99.67, 98.0, 91.33, 99.08, 99.73, 93.11, 99.53)),
        PaperRow(LLAMA, "FullReuse", (71.67, 83.67, 21.00, 29.33, 2.00, 0.00, 27.25, 41.50, 37.23, 96.33, 59.13)),
        PaperRow(LLAMA, "PIE", (94.33, 81.00, 99.00, 56.67, 55.00, 59.33, 57.08, 40.92, 99.40, 98.44, 64.80)),
        PaperRow(LLAMA, "CacheBlend", (100.0, 97.00, 99.67, 78.33, 67.00, 69.67, 81.17, 58.67, 99.70, 98.22, 82.87)),
        PaperRow(LLAMA, "LegoLink", (99.67, 90.00, 99.33, 71.67, 58.67, 65.67, 68.00, 54.75, 99.60, 98.44, 73.40)),
        PaperRow(LLAMA, "A3", (98.33, 97.33, 100.0, 79.00, 65.00, 71.00, 80.00, 65.50, 99.70, 98.22, 88.33)),
        PaperRow(MISTRAL, "Vanilla", (94.67, 95.0, 63.67, 96.0, 8.33, 0.0, 83.50, 53.25, 67.93, 89.00, 85.60)),
        PaperRow(MISTRAL, "FullReuse", (97.33, 0.0, 0.0, 0.0, 0.67, 0.0, 0.0, 0.08, 87.90, 67.33, 43.33)),
        PaperRow(MISTRAL, "PIE", (99.00, 0.0, 0.0, 0.33, 53.33, 0.0, 0.08, 0.42, 90.60, 71.56, 14.07)),
        PaperRow(MISTRAL, "CacheBlend", (99.33, 0.0, 0.0, 0.0, 43.33, 0.0, 0.17, 0.17, 87.80, 73.33, 28.87)),
        PaperRow(MISTRAL, "LegoLink", (99.33, 0.0, 0.0, 0.33, 51.00, 0.0, 0.0, 0.33, 89.93, 70.44, 30.93)),
        PaperRow(MISTRAL, "A3", (99.33, 0.33, 0.0, 0.33, 56.67, 0.0, 0.08, 0.50, 90.70, 70.56, 46.53)),
    ),
    names=NAMES,
    note="The paper states no length and has no QA-1 and QA-2, and its needles are pictures. A dash in its table is a "
    "zero. Haystacks here are generated prose.",
)
