"""Questions by name ("nq10", "registry:hops=2,passages=8", "pages:kind=leaning"), or a file of JSON lines."""

from __future__ import annotations

from pathlib import Path

from ragcache.errors import ConfigError
from ragcache_eval.case import Case
from ragcache_eval.public_sets import PublicSettings, public_cases
from ragcache_eval.question_files import read_entries
from ragcache_eval.registry.cases import PagesSettings, RegistrySettings, pages_cases, registry_cases
from ragcache_eval.settings import make, split_settings

GENERATED = ("registry", "pages")


def load_cases(source: str, *, directory: Path | None = None, limit: int | None = None) -> list[Case]:
    """Return the cases of a source.

    source:       a file; the name of a set in `directory`; or a name in GENERATED; settings may follow after ":"
    limit:        most questions to take; for a generator with several cells, the number of questions per cell

    Raises ConfigError naming the available sources, the wrong setting, or the line that is not a question.
    """
    path = Path(source)
    if path.is_file():
        return [entry.case for entry in read_entries(path)[:limit]]
    name, _, tail = source.partition(":")
    given = split_settings(tail)
    if name == "registry":
        return registry_cases(make(RegistrySettings, given, name), limit)
    if name == "pages":
        return pages_cases(make(PagesSettings, given, name), limit)
    if directory is None:
        raise ConfigError(
            f"{source!r} is neither a file nor one of {', '.join(GENERATED)}; name a directory of sets (--data-dir)"
        )
    return public_cases(name, directory, make(PublicSettings, given, name), limit)
