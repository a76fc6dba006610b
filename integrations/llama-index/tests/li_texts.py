"""The small corpus of these tests."""

from engine_texts import TEXTS as TEXTS

QUESTION = "Which club meets in Kelbrook?"
SHORT = {"max_tokens": 12}
