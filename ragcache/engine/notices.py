"""A notice for the bundled models over text that they were never trained to read."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ragcache.retrieval.retriever import Hit

log = logging.getLogger(__name__)
# The bundled tokenizer knows the registry's words and few others. Over its passages it takes 0.19 to 0.24 tokens
# per character, over encyclopedias, questions and program documentation 0.40 to 0.90.
MOST_TOKENS_PER_CHARACTER = 0.32
MINI_NOTICE = (
    "the bundled model %r knows one made-up registry, that of examples/corpus, and these passages are other text: do "
    "not expect answers. Make a store with a model of the hub, such as HuggingFaceTB/SmolLM2-360M-Instruct (0.7 GB of "
    "memory in bfloat16), Qwen/Qwen3-0.6B (1.2 GB) or meta-llama/Llama-3.2-1B-Instruct (2.5 GB): model=..., or --model"
)


def is_other_text(hits: Sequence[Hit]) -> bool:
    characters = sum(len(hit.chunk.text) for hit in hits)
    return sum(hit.chunk.num_tokens for hit in hits) > MOST_TOKENS_PER_CHARACTER * characters
