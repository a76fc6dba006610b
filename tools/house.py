"""The yardstick of the package: how large each room is, how large it may be, and what still has to go.

    python -m tools.house

A room is a package of `ragcache/`, its top level, or an annex: a package of its own in the same wheel. Budgets are
upper bounds, and `tests/test_house.py` holds them. The commit that makes a room smaller lowers its budget; a commit
that needs a larger one raises it and says why.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
HOUSE = "ragcache"
BESIDE = ("extras/*", "integrations/*", "apps/*", "benchmarks", "examples", "tools")


class Room(NamedTuple):
    """Lines and files that a room may have today, and those that it is to have in the end."""

    lines: int
    files: int
    target_lines: int
    target_files: int


ROOMS = {
    "ragcache": Room(1_455, 7, 1_120, 7),
    "ragcache/kv": Room(2_485, 10, 1_870, 9),
    "ragcache/models": Room(6_580, 30, 4_900, 22),
    "ragcache/codecs": Room(1_310, 8, 2_321, 15),
    "ragcache/fusion": Room(1_983, 12, 1_863, 15),
    "ragcache/store": Room(5_690, 28, 5_559, 30),
    "ragcache/retrieval": Room(1_304, 6, 1_776, 9),
    "ragcache/ingest": Room(3_150, 16, 3_348, 21),
    "ragcache/engine": Room(8_009, 32, 5_518, 26),
    "ragcache/server": Room(3_760, 20, 3_620, 20),
    "ragcache/cli": Room(1_617, 9, 1_448, 8),
    # Annexes.
    "extras/demo/ragcache_demo": Room(347, 3, 310, 2),
    "extras/documents/ragcache_documents": Room(705, 6, 347, 5),
    "extras/eval/ragcache_eval": Room(5_319, 31, 5_150, 23),
    "extras/train/ragcache_train": Room(3_226, 15, 2_390, 12),
    "extras/plan/ragcache_plan": Room(1_652, 8, 1_540, 8),
    "extras/papers/ragcache_papers": Room(3_870, 26, 1_280, 10),
    "extras/watch/ragcache_watch": Room(172, 3, 150, 3),
    "integrations/completions/ragcache_completions": Room(463, 4, 300, 3),
    "integrations/mcp/ragcache_mcp": Room(391, 5, 320, 4),
    "integrations/ollama/ragcache_ollama": Room(786, 3, 725, 3),
    "integrations/openai/ragcache_openai": Room(2_511, 12, 2_340, 11),
    "integrations/postgres/ragcache_postgres": Room(279, 2, 270, 2),
    "integrations/ray/ragcache_ray": Room(546, 3, 529, 3),
    "integrations/remote/ragcache_remote": Room(360, 3, 348, 3),
    "integrations/vllm/ragcache_vllm": Room(2_422, 15, 2_125, 13),
}
ANNEXES = tuple(path for path in ROOMS if path.split("/")[0] != HOUSE)

# Still to go. Each list names what is there today; new entries are refused, and so are entries that are gone.
TWICE: dict[str, int] = {}
"""Names of files of `ragcache/` that occur more than once, and how often."""
ING: set[str] = set()
"""Files of `ragcache/` whose names end in -ing."""
CIRCLES: set[tuple[str, ...]] = set()
"""Modules that import each other, directly or through others."""

RENAMED = {
    "Additions": "AddedTokens",
    "Ahead": "Prefetch",
    "AnswerSoFar": "OutputProcessor",
    "Ballot": "SnapKVObserver",
    "BlockNames": "BlockKeys",
    "Choices": "OpenOptions",
    "Chooser": "Sampler",
    "Complaints": "WarnOnce",
    "Contexts": "SharedPrefixes",
    "EngineRequest": "CompletionRequest",
    "Fused": "FuseOutput",
    "HandedOut": "PassageFinder",
    "Job": "PrefillRequest",
    "JointPass": "BatchedPass",
    "Keeper": "BlockLoader",
    "KeptConversation": "ConversationContext",
    "KnownDocuments": "DocumentChanges",
    "Lease": "PrefixMatch",
    "Library": "Store",
    "Loan": "BufferHandle",
    "Member": "ScheduledRequest",
    "Need": "MemoryNeed",
    "OpenQuestion": "Request",
    "Piece": "Segment",
    "Pieces": "BlockPartition",
    "Prefilled": "PrefillOutput",
    "Prefix": "PrefixKV",
    "PrefixTree": "PrefixCache",
    "Prepared": "PendingDocument",
    "ReadOptions": "GenerationOptions",
    "Ready": "ResolvedKV",
    "RecentPassages": "PassageFinder",
    "RemoteReader": "VllmEngine",
    "ReuseSpec": "TrainedTokens",
    "RunPiece": "ScheduledTokens",
    "Seat": "SharedPrefixRef",
    "StoredCuts": "StoredSplits",
    "Supply": "KVLookup",
    "TextStream": "Detokenizer",
    "TurnMemory": "ConversationCache",
    "WholeTexts": "PassthroughSplitter",
    "WorkHere": "LocalWorkers",
    "Workbench": "Worker",
    "Worth": "KVzipScorer",
    "drop_least": "evict_lowest",
    "foresee": "on_candidates",
    "held_by_layer": "tokens_by_layer",
    "keeps_all": "is_dense",
    "let_go": "release_reference",
    "read_behind": "replay_ids",
    "unsaid_ids": "suppress_tokens",
}
"""The glossary: class names that are gone, and those in their place."""
SPEAKING = ("ragcache", "integrations", "extras", "apps", "examples", "docs", "README.md")
"""Where the glossary holds."""


def files(path: Path, own: bool = False) -> list[Path]:
    """Python files below a directory; own: those right in it. None where there is no such directory."""
    return sorted(path.glob("*.py") if own else path.rglob("*.py"))


def size(found: list[Path]) -> tuple[int, int]:
    """Lines and files."""
    return sum(file.read_text(encoding="utf-8").count("\n") for file in found), len(found)


def measure(root: Path = ROOT) -> dict[str, tuple[int, int]]:
    """Lines and files of every room, 0 and 0 where it does not exist."""
    return {path: size(files(root / path, own=path == HOUSE)) for path in ROOMS}


def twins(house: Path) -> dict[str, int]:
    """File names without .py that occur more than once in a package, and how often; `__init__` does not count."""
    names = Counter(file.stem for file in files(house) if file.stem != "__init__")
    return {name: count for name, count in names.items() if count > 1}


def named_ing(house: Path) -> set[str]:
    """Files of a package whose names end in -ing, relative to it and without .py."""
    return {file.relative_to(house).with_suffix("").as_posix() for file in files(house) if file.stem.endswith("ing")}


def modules(house: Path) -> dict[str, Path]:
    """Every module of a package by its dotted name."""
    found = {file: file.relative_to(house.parent).with_suffix("").parts for file in files(house)}
    return {".".join(parts[:-1] if parts[-1] == "__init__" else parts): file for file, parts in found.items()}


def imported(tree: ast.Module, package: str) -> Iterator[tuple[str, str]]:
    """(module, name) of every import in a file, wherever it stands; the name is "" for `import module`.

    package: what relative imports of the file are relative to
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((module, alias.name) for alias in node.names)


def graph(house: Path) -> dict[str, set[str]]:
    """The modules of a package that each of its modules imports: under TYPE_CHECKING and inside functions too.

    The package's front (`ragcache/__init__.py`) imports a module when one of its names is first used. So
    `from ragcache import Name` counts as an import of the module that has the name. The front itself imports nothing
    here, and `import ragcache` alone does not count. A module that is imported by a computed name is not seen.
    """
    known, front = modules(house), house.name
    trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in known.items()}
    home = {name: module for module, name in imported(trees[front], front)}
    found: dict[str, set[str]] = {front: set()}
    for own, tree in trees.items():
        if own == front:
            continue
        package = own if known[own].stem == "__init__" else own.rpartition(".")[0]
        found[own] = set()
        for module, name in imported(tree, package):
            full = f"{module}.{name}"
            target = full if full in known else home.get(name, module) if module == front else module
            found[own] |= {target} & (known.keys() - {own, front})
    return found


def circles(imports: Mapping[str, set[str]]) -> set[tuple[str, ...]]:
    """Groups of modules that reach each other by imports: the strongly connected components of more than one."""
    reached = {name: _reach(name, imports) for name in imports}
    groups = {tuple(sorted({other for other in reached[name] if name in reached[other]})) for name in imports}
    return {group for group in groups if len(group) > 1}


def _reach(start: str, imports: Mapping[str, set[str]]) -> set[str]:
    """The modules that one imports, directly or through others."""
    seen: set[str] = set()
    left = [start]
    while left:
        new = imports[left.pop()] - seen
        seen |= new
        left += new
    return seen


def old_words(root: Path = ROOT, renamed: Mapping[str, str] | None = None) -> set[str]:
    """Names of the glossary's left column that are still in use, as "file: old -> new".

    A name is in use where it is an identifier of Python code, or stands in backticks or in an indented line of a page.
    The front `ragcache/__init__.py` may keep it as an alias.
    """
    renamed = RENAMED if renamed is None else renamed
    found = set()
    for file in (file for place in SPEAKING if renamed for file in [root / place, *(root / place).rglob("*")]):
        if "tests" in file.parts or file.suffix not in (".py", ".md"):
            continue
        if file.is_file() and file != root / HOUSE / "__init__.py":
            text = file.read_text(encoding="utf-8")
            used = _identifiers(text) if file.suffix == ".py" else set()
            code = r"`[^`\n]+`" if file.suffix == ".py" else r"```.*?```|`[^`\n]+`|(?m:^ {4}.*$)"
            used |= {word for part in re.findall(code, text, re.DOTALL) for word in re.findall(r"\w+", part)}
            found |= {f"{file.relative_to(root)}: {old} -> {renamed[old]}" for old in used & renamed.keys()}
    return found


def _identifiers(text: str) -> set[str]:
    """Every name, attribute, definition and import of a Python file."""
    fields = ("id", "attr", "name", "asname", "arg")
    named = [getattr(node, field, None) for node in ast.walk(ast.parse(text)) for field in fields]
    return {part for name in named if isinstance(name, str) for part in name.split(".")}


def table(root: Path = ROOT) -> str:
    """The rooms with what they hold, may hold and are to hold, and the totals."""
    sizes = measure(root)
    house = [path for path in ROOMS if path not in ANNEXES]
    there = [path for path in ANNEXES if (root / path).is_dir()]
    rows: list[tuple[str, ...]] = [("room", "files", "budget", "target", "lines", "budget", "target")]
    for paths, name in ((house, "all of ragcache/"), (there, "annexes")):
        rows += [_row(path, sizes[path], ROOMS[path]) for path in paths]
        lines, number = (sum(sizes[path][column] for path in paths) for column in range(2))
        total = Room(*(sum(ROOMS[path][column] for path in paths) for column in range(4)))
        rows.append(_row(name, (lines, number), total))
    tests, beside = files(root / "tests"), [file for path in BESIDE for file in root.glob(f"{path}/tests/**/*.py")]
    programs = {folder: set(files(root / folder)) - set(beside) for folder in ("benchmarks", "tools")}
    for folder, found in {"tests": tests, "tests of packages beside it": beside, **programs}.items():
        lines, number = size(list(found))
        rows.append((folder, f"{number:,}", "", "", f"{lines:,}", "", ""))
    return "\n".join(f"{row[0]:<32}" + "".join(f"{cell:>8}" for cell in row[1:]) for row in rows)


def _row(name: str, measured: tuple[int, int], room: Room) -> tuple[str, ...]:
    lines, number = measured
    counts = (number, room.files, room.target_files, lines, room.lines, room.target_lines)
    return (name, *(f"{count:,}" for count in counts))


def main() -> None:
    """Print the table, and how much is still to go."""
    print(table())
    house = ROOT / HOUSE
    names, groups = twins(house), circles(graph(house))
    print(f"\nstill to go: {len(names)} names twice, {len(named_ing(house))} *ing files, {len(groups)} import circles")


if __name__ == "__main__":
    main()
