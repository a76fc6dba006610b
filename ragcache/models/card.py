"""The description of a language model without its weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ragcache.errors import ConfigError, ContextTooLongError, PromptError, check_text
from ragcache.kv.block_key import PRIMER, Recipe
from ragcache.kv.cache_shape import keeps_state
from ragcache.models.primer import DEFAULT_PRIMER, check_primer, text_ids, visible
from ragcache.models.trained_tokens import TrainedTokens
from ragcache.prompt import exceeds

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase


@dataclass(eq=False, repr=False)
class ModelCard:
    """A language model's configuration, tokenizer and name in block keys: enough to lay out prompts and name blocks.

    config, generation_config: transformers' own objects
    fingerprint:   SHA-256 that names the model in block keys
    max_positions: longest prompt that the model accepts, in tokens
    reuse:         how the checkpoint was trained for reuse; None if it was not
    is_recurrent:  True if some layers keep a state instead of keys and values
    """

    config: PreTrainedConfig
    generation_config: GenerationConfig | None
    _tokenizer: PreTrainedTokenizerBase | None
    vocab_size: int
    fingerprint: str
    name: str
    reuse: TrainedTokens | None = None

    def __post_init__(self) -> None:
        text = self.config.get_text_config(decoder=True)
        self.num_layers = int(text.num_hidden_layers)
        self.is_recurrent = any(map(keeps_state, getattr(text, "layer_types", None) or ()))
        self.max_positions, self._ends = longest_alike(text)
        self._checked: Recipe | None = None  # the last recipe with a primer: each question names it several times

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer. Raises ConfigError if the model's directory has none."""
        if self._tokenizer is None:
            raise ConfigError(f"{self.name} has no tokenizer files; only token ids can be used with it")
        return self._tokenizer

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    def recipe(self, recipe: str | Recipe) -> Recipe:
        """Return the recipe with its primer as this model's ids, cut to the tokens that a chunk can attend to.

        Raises ConfigError for an unknown recipe, a primer that leaves no room for a passage, and a primer that holds
        control tokens or ids outside the vocabulary.
        """
        recipe = Recipe.of(recipe)
        if recipe.name != PRIMER or recipe == self._checked:
            return recipe
        if isinstance(recipe.primer, str):
            ids = text_ids(recipe.primer or DEFAULT_PRIMER, self.tokenizer)
        else:
            ids = recipe.primer
            if self.has_tokenizer:
                check_primer(ids, self.tokenizer)
        ids = visible(ids, self.config.get_text_config(decoder=True))
        if len(ids) > self.max_positions // 2:
            raise ConfigError(
                f"the primer has {len(ids)} tokens and {self.name} takes {self.max_positions}; give one of half of "
                "them at most, so that passages have room behind it"
            )
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise ConfigError(
                f"the primer holds ids outside the vocabulary of {self.name} (0 to {self.vocab_size - 1}): they are "
                "another model's; give the primer as a text"
            )
        self._checked = replace(recipe, primer=ids)
        return self._checked

    @property
    def default_method(self) -> str:
        """Return the fusion method that the checkpoint was trained for.

        An untrained model gets a method that stays close to full prefill on real models (docs/methods.md); a model with
        recurrent layers gets the method that joins their states.
        """
        untrained = "reposition" if self.is_recurrent else "cacheblend"
        return untrained if self.reuse is None else self.reuse.method

    @property
    def default_options(self) -> dict[str, Any]:
        """Return the options of `default_method` for an untrained model.

        The ratio keeps it within 0.2 nats a token of full prefill on real models; the paper's 0.16 does not
        (docs/methods.md).
        """
        return {"ratio": 0.3} if self.default_method == "cacheblend" else {}

    @property
    def suppress_tokens(self) -> frozenset[int]:
        """Return the ids that training for reuse added; no answer may contain them."""
        return self.reuse.added_ids if self.reuse is not None else frozenset()

    def check_ids(self, ids: Sequence[int], subject: str) -> None:
        """Raise PromptError for ids outside the vocabulary, ContextTooLongError for too many ids."""
        if len(ids) > self.max_positions:
            raise ContextTooLongError(
                f"{subject} has {len(ids)} tokens and {self.name} takes {self.max_positions}{self._ends}; use fewer or "
                "shorter chunks"
            )
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            bad = next(i for i in ids if not 0 <= i < self.vocab_size)
            raise PromptError(f"{subject} holds token id {bad}; {self.name} has ids 0 to {self.vocab_size - 1}")

    def check_text(self, text: str, subject: str) -> None:
        """Raise ContextTooLongError if a text has far more tokens than the model reads, without tokenising all of it.

        A text that passes may still have too many tokens. Raises PromptError for half of a surrogate pair.
        """
        check_text(text)
        if len(text) > self.max_positions * self._longest_token or exceeds(text, self.max_positions, self.count_text):
            raise ContextTooLongError(
                f"{subject} has {len(text):,} characters, which is more than the {self.max_positions:,} tokens that "
                f"{self.name} takes{self._ends}; shorten it"
            )

    @cached_property
    def _longest_token(self) -> int:
        """Return the number of characters of the longest token.

        A text with more characters than that for each position certainly does not fit.
        """
        return max(map(len, self.tokenizer.get_vocab()), default=1)

    def count_text(self, text: str) -> int:
        """Count the tokens of a text, without special tokens."""
        return len(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def longest_alike(text: PreTrainedConfig) -> tuple[int, str]:
    """Return the number of positions within which the model computes the same KV before RoPE for a passage wherever it
    begins, and the words that an error adds about this limit.

    Beyond the limit a token's KV depends on its final position, so KV that was computed at another would be wrong.
    """
    ends = [(int(getattr(text, "max_position_embeddings", 0)) or 1 << 20, "")]
    stated = getattr(text, "rope_parameters", None) or {}
    for rope in [item for item in stated.values() if isinstance(item, dict)] or [stated]:
        first = int(rope.get("original_max_position_embeddings") or ends[0][0])
        if rope.get("rope_type") == "longrope" and rope.get("short_factor") != rope.get("long_factor"):
            way_out = "with long_factor in place of short_factor in config.json it reads all prompts by those"
            ends.append((first, f" by its short factors (LongRoPE takes other frequencies beyond; {way_out})"))
        if rope.get("llama_4_scaling_beta"):
            ends.append((first, " before its queries grow with their position"))
    if "chunked_attention" in (getattr(text, "layer_types", None) or ()):
        ends.append((int(text.attention_chunk_size), " in one chunk of its attention"))
    if getattr(text, "attn_temperature_tuning", False):
        ends.append((int(text.floor_scale) - 1, " before its queries grow with their position"))
    return min(ends)


def eos_token_ids(card: ModelCard) -> tuple[int, ...]:
    """Return the ids that end an answer: the generation configuration's, the model's and the tokenizer's."""
    found: set[int] = set()
    for source in (card.generation_config, card.config, card.tokenizer):
        value = getattr(source, "eos_token_id", None)
        found.update([value] if isinstance(value, int) else value or ())
    return tuple(sorted(found))
