"""Needle in a Haystack and RULER's 13 tasks (arXiv 2404.06654); the paper's rows are A3's (its appendix has RULER)."""

from __future__ import annotations

from ragcache_eval.suites.base import Download, Form, QuestionSet, Suite
from ragcache_eval.suites.forms import paragraph, sentences
from ragcache_eval.suites.papers import METHODS, NAMES

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
    names=NAMES,
    note="The paper states no length and has no QA-1 and QA-2, and its needles are pictures. A dash in its table is a "
    "zero. Haystacks here are generated prose.",
)
