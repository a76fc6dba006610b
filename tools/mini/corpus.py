"""The example corpus, of entities held out from training: `python -m tools.mini.corpus --out examples/corpus`.

Each entity has a file, most in Markdown, some in HTML and PDF (which needs reportlab). Beside the folder, a file
`<folder>_questions.jsonl` has questions about it: question, answer, hops and the files that hold the answer, in order.
"""

from __future__ import annotations

import argparse
import html
import json
import random
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from ragcache_eval.registry.documents import Article, joined, write_document
from ragcache_eval.registry.names import DataSplit
from ragcache_eval.registry.questions import answerable_questions
from ragcache_eval.registry.world import World

SEED = 7
NUM_RIVERS, TOWNS_A_RIVER, PEOPLE_A_TOWN, PEOPLE_A_CLUB = 20, (2, 3), (2, 2), 2
HTML_SHARE, PDF_SHARE = 0.12, 0.06
FOLDERS = {"person": "people", "town": "towns", "club": "clubs", "river": "rivers"}
HEADINGS = {"club": "{n}, the club of {v}", "river": "{n}, passing {v}"}
"""Of the headings that were tried, those with which the second document of a two-hop question is found most often."""
NUM_QUESTIONS = {1: 200, 2: 200}


class CorpusFile(NamedTuple):
    """A file of the corpus. source: its path below the corpus folder"""

    source: str
    document: Article


def corpus_world(seed: int = SEED) -> World:
    """Return a world of some 300 entities, all held out. A club's people come from any town."""
    rng = random.Random(f"corpus/{seed}")
    world = World(rng, DataSplit.HELD_OUT, namesakes=False, rare_share=0.0)
    rivers = [world.add_river() for _ in range(NUM_RIVERS)]
    towns = [world.add_town(river) for river in rivers for _ in range(rng.randint(*TOWNS_A_RIVER))]
    homes = [town for town in towns for _ in range(rng.randint(*PEOPLE_A_TOWN))]
    clubs = [world.add_club() for _ in range(-(-len(homes) // PEOPLE_A_CLUB))]
    places = [club for club in clubs for _ in range(PEOPLE_A_CLUB)]
    rng.shuffle(places)
    for town, club in zip(homes, places, strict=False):
        world.add_person(town, club)
    return world


def corpus_files(world: World, seed: int = SEED) -> list[CorpusFile]:
    """Return a document about each entity, with its file's path."""
    rng = random.Random(f"corpus files/{seed}")
    files = []
    for entity in world.entities.values():
        document = write_document(rng, entity, complete=True)
        if entity.kind in HEADINGS:
            named = HEADINGS[entity.kind].format(n=entity.name.removeprefix("the "), v=joined(list(document.mentions)))
            document = document._replace(title=named)
        draw = rng.random()
        suffix = "pdf" if draw < PDF_SHARE else "html" if draw < PDF_SHARE + HTML_SHARE else "md"
        slug = re.sub(r"\W+", "-", entity.name.removeprefix("the ").lower())
        files.append(CorpusFile(f"{FOLDERS[entity.kind]}/{slug}.{suffix}", document))
    return files


def corpus_questions(world: World, files: Iterable[CorpusFile], seed: int = SEED) -> list[dict[str, object]]:
    """Return questions in wordings of both splits, as lines of the questions file."""
    rng = random.Random(f"corpus questions/{seed}")
    files = list(files)
    sources = {file.document.id: file.source for file in files}
    documents = [file.document for file in files]
    lines: list[dict[str, object]] = []
    for hops, number in NUM_QUESTIONS.items():
        for wordings in DataSplit:
            asked = [q for q in answerable_questions(rng, world, documents, wordings) if q.hops == hops]
            for question in rng.sample(asked, number // 2):
                gold = [sources[name] for name in question.gold]
                lines.append(
                    {
                        "question": question.text,
                        "answer": question.answer,
                        "hops": hops,
                        "wording": wordings.value,
                        "sources": gold,
                    }
                )
    return lines


def write_corpus(out: Path, seed: int = SEED) -> None:
    """Write the corpus below `out` and its questions beside it; the same bytes each time."""
    world = corpus_world(seed)
    files = corpus_files(world, seed)
    writers: dict[str, Callable[[Path, Article], None]] = {".md": _markdown, ".html": _html, ".pdf": _pdf}
    for file in files:
        path = out / file.source
        path.parent.mkdir(parents=True, exist_ok=True)
        writers[path.suffix](path, file.document)
    lines = "".join(json.dumps(line) + "\n" for line in corpus_questions(world, files, seed))
    out.with_name(f"{out.name}_questions.jsonl").write_text(lines, encoding="utf-8")


def _markdown(path: Path, document: Article) -> None:
    path.write_text(f"# {document.title}\n\n{document.text}\n", encoding="utf-8")


def _html(path: Path, document: Article) -> None:
    title, text = html.escape(document.title), html.escape(document.text, quote=False)
    page = (
        f'<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{title}</title></head>\n'
        f"<body>\n<h1>{title}</h1>\n<p>{text}</p>\n</body>\n</html>\n"
    )
    path.write_text(page, encoding="utf-8")


def _pdf(path: Path, document: Article) -> None:
    from reportlab.lib.pagesizes import A5
    from reportlab.lib.styles import getSampleStyleSheet
    from reportlab.platypus import Paragraph, SimpleDocTemplate

    styles = getSampleStyleSheet()
    page = SimpleDocTemplate(str(path), pagesize=A5, title=document.title, invariant=1)
    page.build([Paragraph(document.title, styles["Title"]), Paragraph(document.text, styles["BodyText"])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=SEED)
    arguments = parser.parse_args()
    write_corpus(arguments.out, arguments.seed)


if __name__ == "__main__":
    main()
