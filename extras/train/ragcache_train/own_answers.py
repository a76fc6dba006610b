"""Questions and answers that the model makes itself, for rows that have none.

A question is made from a single passage, an answer is the greedy answer of full prefill over all passages. They are
kept in `own_answers.jsonl`, a line for each row, so that a resumed run trains on the same rows.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

from ragcache.errors import PromptError
from ragcache.fusion.fuse import fuse
from ragcache.ingest.chunk_tokenizer import ChunkTokenizer
from ragcache.kv.block_key import digest
from ragcache.kv.buffers import SharedContext
from ragcache.models.card import eos_token_ids
from ragcache.models.generate import decode
from ragcache.models.language_model import LanguageModel
from ragcache.models.sampler import Sampling
from ragcache.prompt import Prompt, PromptFormat, prompt_format
from ragcache_train.row_encoder import passage_text
from ragcache_train.train_options import EncodingOptions
from ragcache_train.train_rows import Asked, BadLine, DataRow

FILE = "own_answers.jsonl"
INSTRUCTION = "Write one question that the text above answers. Reply with the question alone."
QUESTIONS = 4
"""Questions made for a row, each from another passage; fewer if the row has fewer passages."""
QUESTION_TOKENS, ANSWER_TOKENS = 48, 64
AT_ONCE = 8
"""Rows that are answered at a time: their decoding steps share forward passes."""
WAIT_S = 1.0


class OwnAnswers:
    """Fills rows with the model's own questions and answers.

    path: the file that keeps them; options: how prompts are laid out; seed: of the questions
    """

    def __init__(self, lm: LanguageModel, path: Path, options: EncodingOptions, seed: int) -> None:
        self.lm, self.path, self.options, self.seed = lm, path, options, seed
        self._chunks = ChunkTokenizer(lm.tokenizer)
        self._eos = eos_token_ids(lm)

    def fill(self, rows: Sequence[DataRow]) -> list[DataRow | BadLine]:
        """Return the rows, each with an answer to each of its questions, and the rows that cannot have an answer.

        Of several processes (torchrun) the first makes the missing answers; the others wait for it.
        """
        known = self._read()
        missing = {self._key(row): row for row in rows if _lacks(row) and self._key(row) not in known}
        if missing and int(os.environ.get("RANK", 0)) == 0:
            for key, asked in self._make(missing):
                known[key] = asked
        while missing.keys() - known.keys():
            time.sleep(WAIT_S)
            known = self._read()
        return [self._filled(row, known[self._key(row)]) if _lacks(row) else row for row in rows]

    def _make(self, missing: dict[str, DataRow]) -> Iterator[tuple[str, list[Asked]]]:
        """Make the missing entries; write each to the file, and yield it with its row's key."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file, ThreadPoolExecutor(AT_ONCE) as pool:
            for key, asked in zip(missing, pool.map(self._ask_about, missing.values()), strict=True):
                file.write(json.dumps({"row": key, "asked": [list(one) for one in asked]}) + "\n")
                file.flush()
                yield key, asked

    def _read(self) -> dict[str, list[Asked]]:
        """Return the entries made before, by row. A line that a killed run left unfinished is ignored."""
        if not self.path.exists():
            return {}
        found = {}
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                held = json.loads(line)
            except ValueError:
                continue
            found[str(held["row"])] = [Asked(*one) for one in held["asked"]]
        return found

    def _key(self, row: DataRow) -> str:
        """Return a digest of everything that a row's answers depend on."""
        options = [self.options.system, self.options.question_format, self.seed, INSTRUCTION, QUESTIONS]
        return digest([self.lm.fingerprint, options, asdict(replace(row, where=""))])

    def _filled(self, row: DataRow, asked: Sequence[Asked]) -> DataRow | BadLine:
        if asked:
            return replace(row, asked=tuple(asked))
        reason = "it does not fit the model, or the model made no question of it; write less text, or a question"
        return BadLine(row.where, reason)

    def _ask_about(self, row: DataRow) -> list[Asked]:
        """Return questions with answers; none if the row does not fit the model."""
        form = self._form(row, self.options.question_format)
        chunks = self._chunks.encode([passage_text(text) for text in row.passages])
        try:
            asked = row.asked or [Asked(question, "") for question in self._questions(row, chunks)]
            context: SharedContext | None = None
            found = []
            for one in asked:
                text = one.answer
                if not text:
                    prompt = Prompt(form.prefix_ids, chunks, form.suffix_ids(self.lm.tokenizer, one.question))
                    text, context = self._answer(prompt, Sampling(ANSWER_TOKENS), context)
                found.append(Asked(one.question, text))
        except PromptError:
            return []
        return found

    def _questions(self, row: DataRow, chunks: Sequence[Sequence[int]]) -> Iterator[str]:
        """Yield a question about each of a few passages, sampled with the seed."""
        form = self._form(row, "{question}")
        rng = random.Random(f"{self.seed}/{self._key(row)}")
        ranks = rng.sample(range(len(chunks)), min(QUESTIONS, len(chunks)))
        suffix = form.suffix_ids(self.lm.tokenizer, INSTRUCTION)
        for rank in ranks:
            sampling = Sampling(QUESTION_TOKENS, temperature=1.0, top_p=0.9, seed=rng.getrandbits(32))
            text, _ = self._answer(Prompt(form.prefix_ids, [chunks[rank]], suffix), sampling)
            first = next((line.strip() for line in text.splitlines() if line.strip()), "")
            if question := first.removeprefix("Question:").strip():
                yield question

    def _form(self, row: DataRow, question_format: str | None) -> PromptFormat:
        system = self.options.system if row.system is None else row.system
        return prompt_format(self.lm.tokenizer, system=system, question_format=question_format)

    def _answer(
        self, prompt: Prompt, sampling: Sampling, context: SharedContext | None = None
    ) -> tuple[str, SharedContext]:
        """Return the model's answer by full prefill, and its context for other questions over the same passages."""
        fused = fuse(self.lm, prompt, "full", base=context, reserve_tokens=sampling.max_tokens or 0)
        shared = fused.share() if context is None else context
        steps = decode(self.lm, fused.cache, fused.next_logits, fused.next_position, sampling, eos_ids=self._eos)
        text: str = self.lm.tokenizer.decode(list(steps), skip_special_tokens=True)
        return text.strip(), shared


def _lacks(row: DataRow) -> bool:
    return row.kind == "qa" and (not row.asked or not all(one.answer for one in row.asked))
