"""The documents of the store that most tests here ask, questions, a template, options, and messages. A module, since
every folder has a conftest."""

TEXTS = {
    "cats": "The cat sat on the mat. It was happy there.\n",
    "dogs": "Dogs bark at night in the town of Kelbrook.\n",
    "rivers": "The river Arno rises in the Vale hills.\n",
    "clubs": "The rowing club of Kelbrook meets on Monday.\n",
}
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


def user(*parts):
    return {"role": "user", "content": list(parts) if len(parts) > 1 else parts[0]}


def said(answer):
    """An answer, or its text."""
    return {"role": "assistant", "content": getattr(answer, "text", answer)}
