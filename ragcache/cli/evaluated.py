"""Options of the commands that measure a model: which one, and progress on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, TypeVar

from ragcache.cli.options import option
from ragcache.cli.output import on_terminal

if TYPE_CHECKING:
    from ragcache import LanguageModel
    from ragcache.prompt import PromptFormat

T = TypeVar("T")


@dataclass(frozen=True)
class EvaluatedModel:
    """The model that is measured."""

    model: Annotated[str | None, option("--model", "Bundled name, directory or hub id; the store's own, or mini.")] = (
        None
    )
    dtype: Annotated[str | None, option("--dtype", "float32, bfloat16, float16 or auto; float32.")] = None
    device: Annotated[str, option("--device", "Where the model runs: cpu or cuda.")] = "cpu"
    system: Annotated[str | None, option("--system", "System prompt, before all passages.")] = None
    question_format: Annotated[
        str | None, option("--question-format", "Text behind the passages, with {question} in it.")
    ] = None

    def load(self, default: str = "mini", dtype: str = "float32") -> LanguageModel:
        """default, dtype: what is loaded where nothing was asked for."""
        from ragcache import load_lm

        return load_lm(self.model or default, dtype=self.dtype or dtype, device=self.device)

    def prompt_format(self, lm: LanguageModel) -> PromptFormat:
        from ragcache.prompt import prompt_format

        return prompt_format(lm.tokenizer, system=self.system, question_format=self.question_format)


def progress(items: Iterable[T], total: int, label: str) -> Iterator[T]:
    """The items, with a bar on standard error where that is a terminal."""
    if not on_terminal():
        yield from items
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(items, description=label, total=total, console=Console(stderr=True))
