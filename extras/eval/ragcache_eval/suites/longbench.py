"""LongBench's English sets (Bai et al. 2024, arXiv 2308.14508).

Cuts, metrics and lengths of answers are LongBench's; the words that ask are this project's own. A number before a
passage ("Passage 3:") is left out, since a block serves every rank; where the question is about numbers, it stays.
"""

from __future__ import annotations

from dataclasses import replace

from ragcache_eval.suites.base import Download, Form, QuestionSet
from ragcache_eval.suites.forms import longbench

ARCHIVE = "https://huggingface.co/datasets/THUDM/LongBench/resolve/main/data.zip"
NUMBERED = r"^Passage \d+:\n"
BRIEFLY = "Reply with the shortest answer that the passages above give, and with nothing else.\nQuestion: {question}"


def _set(name: str, title: str, metric: str, max_tokens: int, asked: str, form: Form) -> QuestionSet:
    return QuestionSet(
        name,
        title,
        metric=metric,
        max_tokens=max_tokens,
        asked=asked,
        form=form,
        files=(name,),
        download=Download("json", data_files=f"zip://data/{name}.jsonl::{ARCHIVE}"),
        by_hand=f"{name}.jsonl of {ARCHIVE} (hf download THUDM/LongBench data.zip --repo-type dataset)",
    )


ARTICLE = (
    "Reply to this question about the article above with a phrase, with yes or with no, or with the word unanswerable "
    "if the article does not say.\nQuestion: {question}"
)
TEXT = "Reply to this question about the text above with the answer alone.\nQuestion: {question}"
REPORT = "Sum the report above up on one page."
NEWS = "Sum all of the news above up on one page."
TYPE = "Name the type of this question as in the examples above.\n{question}"
TRIVIA = "Answer as in the examples above, with nothing but the answer.\n{question}"
DIALOGUE = "Sum this dialogue up in a few short sentences, as in the examples above.\n{question}"
COUNT = "Some of the paragraphs above are repeated. How many different ones are there? Reply with a number alone."
LINE = "Write the next line of the code above."
PARAGRAPH = r"(?=^Paragraph \d+:)"
SETS = {
    one.name: one
    for one in (
        _set("qasper", "Qasper", "f1", 128, ARTICLE, longbench()),
        _set("multifieldqa_en", "MultiFieldQA", "f1", 64, TEXT, longbench()),
        _set("hotpotqa", "HotpotQA", "f1", 32, BRIEFLY, longbench(NUMBERED)),
        _set("2wikimqa", "2WikiMQA", "f1", 32, BRIEFLY, longbench(NUMBERED)),
        _set("musique", "MuSiQue", "f1", 32, BRIEFLY, longbench(NUMBERED)),
        _set("gov_report", "GovReport", "longbench_rouge", 512, REPORT, longbench()),
        _set("multi_news", "MultiNews", "longbench_rouge", 512, NEWS, longbench(NUMBERED)),
        _set("trec", "TREC", "classification", 64, TYPE, longbench("(?=^Question:)", together=True)),
        _set("triviaqa", "TriviaQA", "first_line_f1", 32, TRIVIA, longbench("(?=^Passage:)")),
        _set("samsum", "SAMSum", "first_line_rouge", 128, DIALOGUE, longbench("(?=^Dialogue:)")),
        _set("passage_count", "PassageCount", "number_share", 32, COUNT, longbench(PARAGRAPH)),
        _set("lcc", "LCC", "code_similarity", 64, LINE, longbench()),
    )
}


def even(name: str, title: str) -> QuestionSet:
    """Return the set as LongBench-E has it: 300 questions, evenly spread over lengths."""
    one = SETS[name]
    file = f"{name}_e"
    download = Download("json", data_files=f"zip://data/{file}.jsonl::{ARCHIVE}")
    return replace(one, title=title, files=(file,), download=download, by_hand=one.by_hand.replace(name, file, 1))
