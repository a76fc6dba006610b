"""Small tokenizers with the chat templates and control tokens of well-known families."""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}{% if m['role'] == 'assistant' and '</think>' in m['content'] %}"
    "{{ '<|im_start|>assistant\n' + m['content'].split('</think>')[-1].lstrip('\n') + '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' "
    "+ m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + (first if loop.first else '') + m['content'] | trim + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
MISTRAL = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set rest = messages[1:] %}"
    "{% else %}{% set rest = messages %}{% endif %}{{ bos_token }}{% for m in rest %}{% if m['role'] == 'user' %}"
    "{% if loop.last and system is defined %}{{ '[INST] ' + system + '\n\n' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ '[INST] ' + m['content'] + ' [/INST]' }}{% endif %}"
    "{% else %}{{ ' ' + m['content'] | trim + eos_token }}{% endif %}{% endfor %}"
)
# The parts of well-known templates that show tools, calls and results, in the words that tell the format of calls.
TOOL_TEMPLATES = {
    path.stem: path.read_text(encoding="utf-8").removesuffix("\n")
    for path in sorted(Path(__file__).with_name("tool_templates").glob("*.jinja"))
}
# Template, special tokens (BOS, end, and others), added tokens that are not special, SentencePiece's spaces or not.
FAMILIES: dict[str, tuple[str, list[str], list[str], bool]] = {
    "chatml": (CHATML, ["<|endoftext|>", "<|im_end|>", "<|im_start|>"], ["<think>", "</think>"], False),
    "llama3": (
        LLAMA3,
        ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eos|>"],
        [],
        False,
    ),
    "gemma": (GEMMA, ["<bos>", "<end_of_turn>", "<start_of_turn>", "<eos>"], ["\n\n", "<h1>"], True),
    "mistral": (MISTRAL, ["<s>", "</s>", "[INST]", "[/INST]"], [], True),
}
WORDS = ["Who rows on the river at night? user model assistant system\n", "The boat, the oar; [a] <b> |c| is / here. "]


def template_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """BPE over a few words and all ASCII characters."""
    template, special, added, pieces = FAMILIES[family]
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    if pieces:
        tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
        tokenizer.decoder = decoders.Replace("\u2581", " ")
        if family == "mistral":
            tokenizer.normalizer = None
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        alphabet = [chr(code) for code in range(33, 127)] + ["\u2581", "\n"]
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(WORDS * 8, trainer)
    tokenizer.add_tokens([AddedToken(one, special=False, normalized=False) for one in added])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=special[0],
        eos_token=special[1],
        additional_special_tokens=special[2:],
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def controls_of(family: str) -> list[str]:
    """Spellings of the family's control tokens."""
    _, special, added, _ = FAMILIES[family]
    return [*special, *(one for one in added if "think" in one)]
