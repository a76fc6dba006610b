"""A fictional registry of people, towns, rivers and clubs: the text that the bundled mini model is trained on.

`names` composes names, `wording` holds the sentences and questions, `world` draws entities that refer to each other,
`documents` writes an entity down and asks about it, `pages` makes contexts of long passages. All draws come
from a `random.Random` that the caller seeds, so the same seed gives the same text in every process. `cases` makes
question sets from them, over entities and wordings that the model has not seen.
"""
