"""The documents of the store that most tests here ask, questions, a template, options, and messages. A module, since
every folder has a conftest."""

TEXTS = {
    "cats": "The cat sat on the mat. It was happy there.\n",
    "dogs": "Dogs bark at night in the town of Kelbrook.\n",
    "rivers": "The river Arno rises in the Vale hills.\n",
    "clubs": "The rowing club of Kelbrook meets on Monday.\n",
}
PAGES = {
    "light": "The lighthouse of Brenholm was built of oak, and burnt down in a night of May, as the town records tell.",
    "ferry": "A ferry goes from Brenholm to the island every second hour, but not on Sundays, when the captain sleeps.",
    "mill": "The mill behind the harbour grinds barley in winter and stands still while the herring are in the bay.",
}
"""Passages of a user's own index, long enough to be found again in a prompt."""
QUESTIONS = [
    "Where do dogs bark?",
    "Where does the river rise?",
    "When does the rowing club meet?",
    "Is the cat happy?",
]
CHAT = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}[end]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
READ = {
    "method": "full",
    "method_options": {"reuse": False},
    "on_overflow": "trim",
    "order": "shared",
    "hint": False,
    "reasoning_effort": "low",
    "enable_thinking": True,
    "thinking_budget": 7,
    "chat_template_kwargs": {"a": 1},
}
"""How an answer is read: each option of the engine but the sampling, the time and the cancelling, at another value than
its own."""


SAMPLED = {
    "max_tokens": 7, "temperature": 0.9, "top_p": 0.8, "top_k": 50, "seed": 3, "min_p": 0.2, "presence_penalty": 1.5,
    "frequency_penalty": 1.0, "repetition_penalty": 1.8, "logit_bias": {70: 50.0}, "stop_token_ids": [70, 71],
    "logprobs": 2, "stop": ["x"],
}  # fmt: skip
FORMS = {"json_schema": {"type": "object"}, "regex": "a", "choices": ["a"]}
"""Fields of the sampling of which there may be one; the others are in `SAMPLED`."""


def user(*parts):
    return {"role": "user", "content": list(parts) if len(parts) > 1 else parts[0]}


def said(answer):
    """An answer, or its text."""
    return {"role": "assistant", "content": getattr(answer, "text", answer)}
