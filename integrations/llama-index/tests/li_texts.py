"""The small corpus of these tests."""

TEXTS = {
    "cats": "The cat sat on the mat. It was happy there.\n",
    "dogs": "Dogs bark at night in the town of Kelbrook.\n",
    "rivers": "The river Arno rises in the Vale hills.\n",
    "clubs": "The rowing club of Kelbrook meets on Monday.\n",
}
QUESTION = "Which club meets in Kelbrook?"
SHORT = {"max_tokens": 12}
