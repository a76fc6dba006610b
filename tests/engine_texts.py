"""The documents of the store that most tests here ask, and a template. A module, since every folder has a conftest."""

TEXTS = {
    "cats": "The cat sat on the mat. It was happy there.\n",
    "dogs": "Dogs bark at night in the town of Kelbrook.\n",
    "rivers": "The river Arno rises in the Vale hills.\n",
    "clubs": "The rowing club of Kelbrook meets on Monday.\n",
}
CHAT = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}[end]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
