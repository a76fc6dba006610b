"""A fictional registry of people, towns, rivers and clubs: the text that the bundled mini model is trained on.

`names` composes names, `wording` holds the sentences and questions, `world` draws entities that refer to one
another, `documents` writes an entity down, `questions` asks about it, `contexts` puts passages together. All draws come
from a `random.Random` that the caller seeds, so the same seed gives the same text in every process. `cases` is the
question set of that name, over entities and wordings that the model has not seen.
"""

from ragcache.evaluation.registry.cases import RegistrySettings, registry_cases
from ragcache.evaluation.registry.contexts import KINDS, TextCase, draw_leaning, draw_texts, passage_text
from ragcache.evaluation.registry.documents import Article, write_document, write_in_two
from ragcache.evaluation.registry.names import DataSplit, is_held_out
from ragcache.evaluation.registry.questions import MAX_ANSWER_TOKENS, Question, answerable_questions, leaning_questions
from ragcache.evaluation.registry.world import Entity, World, draw_world

__all__ = [
    "KINDS",
    "MAX_ANSWER_TOKENS",
    "Article",
    "DataSplit",
    "Entity",
    "Question",
    "RegistrySettings",
    "TextCase",
    "World",
    "answerable_questions",
    "draw_leaning",
    "draw_texts",
    "draw_world",
    "is_held_out",
    "leaning_questions",
    "passage_text",
    "registry_cases",
    "write_document",
    "write_in_two",
]
