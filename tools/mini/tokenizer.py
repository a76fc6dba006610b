r"""The mini model's tokenizer: byte-level BPE over the registry's words, and the chat template.

It is byte-level, so any text can be encoded. A word has the same token everywhere: the normalizer puts a space before
the first word of a text and of a line, and the decoder removes it (otherwise a name at the beginning of a passage would
be another token than the same name in a question). A year is a single token.

The chat template renders messages into exactly the format that the model was trained on:

    <|bos|>Answer from the registry.\n{context}Question: {question}\nAnswer:

`{context}Question: {question}` is the user message; `context` is the passages, each ending in "\n" and each tokenised
alone. A system message, if there is one, takes the place of the line "Answer from the registry.".
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from ragcache_eval.registry import names, wording

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
SPECIAL_TOKENS = (BOS, EOS, PAD, *(f"<|reserved_{index}|>" for index in range(64)))
VOCAB_SIZE = 4096
MAX_LENGTH = 4096

SYSTEM_LINE = "Answer from the registry."
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% if messages[0]['role'] == 'system' %}"
    "{{ messages[0]['content'] }}\n{% set turns = messages[1:] %}"
    "{% else %}"
    f"{SYSTEM_LINE}\n{{% set turns = messages %}}"
    "{% endif %}"
    "{% for message in turns %}"
    "{% if message['role'] == 'user' %}{{ message['content'] }}\n"
    "{% else %}Answer: {{ message['content'] }}{{ eos_token }}\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}Answer:{% endif %}"
)
OTHER_WORDS = "an which She He It Her His Its Lake Hills Question Answer"
WORD_PATTERN = r"'s| ?\p{L}+| ?\p{N}{1,4}| ?[^\s\p{L}\p{N}]+|\s"


def build_tokenizer() -> Tokenizer:
    """Learn merges for every word of the registry; the same bytes each time."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteLevel(), decoders.Replace(Regex(r"\n (?=\S)"), "\n"), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_vocabulary_text(), trainer)
    tokenizer.normalizer = _space_before_lines()  # after training: name tails have no space before them
    return tokenizer


def _space_before_lines() -> normalizers.Normalizer:
    """Return a normalizer that puts a space before each line that does not begin with white space."""
    return normalizers.Sequence(
        [
            normalizers.Prepend(" "),
            normalizers.Replace("\n", "\n "),
            normalizers.Replace(Regex(r"\A (?=\s|\z)"), ""),
            normalizers.Replace(Regex(r"\n (?=\s|\z)"), "\n"),
        ]
    )


def token_id(token: str) -> int:
    """Return the id of a special token. Special tokens have the first ids, in order."""
    return SPECIAL_TOKENS.index(token)


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write the files that `AutoTokenizer.from_pretrained(directory)` reads."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "model_max_length": MAX_LENGTH,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _vocabulary_text() -> list[str]:
    """Return texts with every word of sentences, questions and names, often enough for each to become a token."""
    sentences = [text for group in _wordings() for text in group]
    words = [word for text in sentences for word in text.replace("{", " {").split() if "{" not in word]
    words += [word.strip(".,?") for word in words] + [word.capitalize() for word in words]
    surnames = _composed(names.SURNAME_HEADS, names.SURNAME_TAILS)
    towns = _composed(names.TOWN_HEADS, names.TOWN_TAILS)
    rivers = _composed(names.RIVER_HEADS, names.RIVER_TAILS)
    clubs = [part for activity in names.CLUB_ACTIVITIES for part in activity.split(":")]
    people = (names.FEMALE_NAMES, names.MALE_NAMES, surnames)
    places = (towns, rivers, names.CLUB_EMBLEMS, names.TOWN_QUALIFIERS, names.RIVER_QUALIFIERS, clubs)
    values = (names.LAKES, names.HILLS, names.PROFESSIONS, names.PRODUCTS, names.WEEKDAYS)
    listed: tuple[tuple[str, ...] | list[str], ...] = (*people, *places, *values)
    words += [word for group in listed for word in group]
    words += [*OTHER_WORDS.split(), *SYSTEM_LINE.split()]
    spaced = " " + " ".join(words)
    years = " ".join(str(year) for year in (*range(1500, 1700), *range(1900, 2000)))
    return [spaced, " " + years] * 4


def _composed(heads: tuple[str, ...], tails: tuple[str, ...]) -> list[str]:
    return [head + tail for head in heads for tail in tails]


def _wordings() -> list[tuple[str, ...]]:
    tables = (wording.PREDICATES, wording.MENTIONS, wording.QUESTIONS, wording.BRIDGES)
    groups = [group for table in tables for group in table.values()]
    return [*groups, wording.FILLERS, tuple(wording.ANSWERS.values())]
