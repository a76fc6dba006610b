"""A fictional registry of people, towns, rivers and clubs: the text that the bundled mini model is trained on.

`names` composes names, `wording` holds the sentences and questions, `world` draws entities that refer to each other,
`documents` writes an entity down and asks about it, `pages` makes contexts of long passages. All draws come
from a `random.Random` that the caller seeds, so the same seed gives the same text in every process. `cases` makes
question sets from them, over entities and wordings that the model has not seen.
"""

from ragcache_eval.registry.cases import PagesSettings as PagesSettings
from ragcache_eval.registry.cases import RegistrySettings as RegistrySettings
from ragcache_eval.registry.cases import pages_cases as pages_cases
from ragcache_eval.registry.cases import registry_cases as registry_cases
from ragcache_eval.registry.contexts import TextCase as TextCase
from ragcache_eval.registry.contexts import draw_leaning as draw_leaning
from ragcache_eval.registry.contexts import draw_texts as draw_texts
from ragcache_eval.registry.contexts import passage_text as passage_text
from ragcache_eval.registry.documents import Article as Article
from ragcache_eval.registry.documents import write_document as write_document
from ragcache_eval.registry.documents import write_in_two as write_in_two
from ragcache_eval.registry.names import DataSplit as DataSplit
from ragcache_eval.registry.names import is_held_out as is_held_out
from ragcache_eval.registry.pages import ARTICLES as ARTICLES
from ragcache_eval.registry.pages import PAGE_KINDS as PAGE_KINDS
from ragcache_eval.registry.pages import PageQuestion as PageQuestion
from ragcache_eval.registry.pages import Pages as Pages
from ragcache_eval.registry.pages import draw_pages as draw_pages
from ragcache_eval.registry.questions import MAX_ANSWER_TOKENS as MAX_ANSWER_TOKENS
from ragcache_eval.registry.questions import Question as Question
from ragcache_eval.registry.questions import answerable_questions as answerable_questions
from ragcache_eval.registry.questions import leaning_questions as leaning_questions
from ragcache_eval.registry.world import Entity as Entity
from ragcache_eval.registry.world import World as World
from ragcache_eval.registry.world import draw_world as draw_world
