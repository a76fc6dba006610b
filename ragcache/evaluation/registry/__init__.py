"""A fictional registry of people, towns, rivers and clubs: the text that the bundled mini model is trained on.

`names` composes names, `wording` holds the sentences and questions, `world` draws entities that refer to one
another, `documents` writes an entity down, `questions` asks about it, `contexts` puts passages together, `pages`
long ones. All draws come from a `random.Random` that the caller seeds, so the same seed gives the same text in every
process. `cases` makes question sets of them, over entities and wordings that the model has not seen.
"""

from ragcache.evaluation.registry.cases import PagesSettings as PagesSettings
from ragcache.evaluation.registry.cases import RegistrySettings as RegistrySettings
from ragcache.evaluation.registry.cases import pages_cases as pages_cases
from ragcache.evaluation.registry.cases import registry_cases as registry_cases
from ragcache.evaluation.registry.contexts import TextCase as TextCase
from ragcache.evaluation.registry.contexts import draw_leaning as draw_leaning
from ragcache.evaluation.registry.contexts import draw_texts as draw_texts
from ragcache.evaluation.registry.contexts import passage_text as passage_text
from ragcache.evaluation.registry.documents import Article as Article
from ragcache.evaluation.registry.documents import write_document as write_document
from ragcache.evaluation.registry.documents import write_in_two as write_in_two
from ragcache.evaluation.registry.names import DataSplit as DataSplit
from ragcache.evaluation.registry.names import is_held_out as is_held_out
from ragcache.evaluation.registry.pages import ARTICLES as ARTICLES
from ragcache.evaluation.registry.pages import PAGE_KINDS as PAGE_KINDS
from ragcache.evaluation.registry.pages import PageQuestion as PageQuestion
from ragcache.evaluation.registry.pages import Pages as Pages
from ragcache.evaluation.registry.pages import draw_pages as draw_pages
from ragcache.evaluation.registry.questions import MAX_ANSWER_TOKENS as MAX_ANSWER_TOKENS
from ragcache.evaluation.registry.questions import Question as Question
from ragcache.evaluation.registry.questions import answerable_questions as answerable_questions
from ragcache.evaluation.registry.questions import leaning_questions as leaning_questions
from ragcache.evaluation.registry.world import Entity as Entity
from ragcache.evaluation.registry.world import World as World
from ragcache.evaluation.registry.world import draw_world as draw_world
