"""Short training runs: data and options, the files that they write, and a run that is stopped and resumed."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ragcache as rc
from ragcache.prompt import encode_text, prompt_format
from ragcache_train.row_encoder import passage_text
from ragcache_train.train_batches import Ask, EncodedRow
from ragcache_train.train_options import TrainOptions
from ragcache_train.trainer import TrainReport, train

PASSAGES = ["Ann lives in Oslo.", "Bob has a red boat.", "The club meets on Monday."]
QUESTION = "Where is Ann?"
ASKED = [{"question": QUESTION, "answer": "Oslo"}, {"question": "What has Bob?", "answer": "boat"}]
MESSAGES = [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, "abcd", strict=True)]
QA_LINES = [
    {"type": "qa", "passages": PASSAGES, "questions": ASKED},
    {"type": "qa", "passages": PASSAGES[:2], "question": "Who has a boat?", "answer": "Bob"},
]
CHAT_LINE = {"type": "chat", "messages": MESSAGES}
INSTRUCTION_LINE = {"type": "instruction", "instruction": "Say yes.", "output": "yes"}


def run_options(base: Path, folder: Path, lines: Iterable[object], **more: Any) -> TrainOptions:
    """Return the options of a run over these lines, on the CPU and with few link tokens."""
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    common = {"link_tokens": 2, "link_slots": 4, "batch_tokens": 400, "log_every": 1, "device": "cpu"}
    return TrainOptions(model=base, data=(data,), out=folder / "out", **common, **more)


def log_of(out: Path, name: str = "training_log.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / name).read_text(encoding="utf-8").splitlines()]


def timeless(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key not in ("seconds", "tokens_per_s")} for line in lines]


def resumed(options: TrainOptions, out: Path, step: int) -> tuple[TrainReport, list[int]]:
    """Stop a run in this step and resume it; return its report and the steps that were logged after the stop."""

    def stop(line: dict[str, Any]) -> None:
        if line["step"] == step:
            raise KeyboardInterrupt

    stopped, after = replace(options, out=out), list[int]()
    with pytest.raises(KeyboardInterrupt):
        train(stopped, show=stop)
    report = train(replace(stopped, resume=True), show=lambda line: after.append(line["step"]))
    return report, after


def engine_prompt(tokenizer: Any) -> rc.Prompt:
    """Return the first line's first question as the engine reads it."""
    form = prompt_format(tokenizer)
    chunks = [encode_text(tokenizer, passage_text(text)) for text in PASSAGES]
    return rc.Prompt(form.prefix_ids, chunks, form.suffix_ids(tokenizer, QUESTION))


def training_row(tokenizer: Any) -> EncodedRow:
    """Return the same prompt as a training row with a single label: the first answer token."""
    prompt = engine_prompt(tokenizer)
    ask = Ask(list(prompt.suffix_ids), [1])
    return EncodedRow("qa", "", prompt.prefix_ids, list(prompt.chunk_ids), [ask], None, True)


def engine_logits(out: Path, method: str) -> Any:
    lm = rc.load_lm(out)
    return rc.fuse(lm, engine_prompt(lm.tokenizer), method).next_logits
