"""Rows of `ragcache train` whose passages LLMLingua-2 has shortened, as table 3 of KVLink trains that row:

    python -m tools.compress_rows rows.jsonl --compress DIR --compress-keep 0.5 --out compressed.jsonl

Passages of "qa" rows lose words; their titles, questions and answers stay, and so do all other rows.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ragcache_papers.llmlingua2 import Compressor


def shortened(row: dict[str, Any], compressor: Compressor) -> dict[str, Any]:
    """The row with shorter passages; one that would lose all of its words keeps them."""
    if row.get("type") != "qa":
        return row
    return {**row, "passages": [_passage(one, compressor) for one in row["passages"]]}


def _passage(given: str | dict[str, str], compressor: Compressor) -> str | dict[str, str]:
    text = given if isinstance(given, str) else given["text"]
    left = compressor.compress(text)
    left = left if left.strip() else text
    return left if isinstance(given, str) else {**given, "text": left}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--compress", required=True, metavar="DIR", help="a token classifier of LLMLingua-2's form")
    parser.add_argument("--compress-keep", type=float, default=0.5, help="share of its tokens that stay")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(arguments)
    compressor = Compressor(given.compress, given.compress_keep)
    with given.rows.open(encoding="utf-8") as rows, given.out.open("w", encoding="utf-8") as out:
        for line in rows:
            if line.strip():
                out.write(json.dumps(shortened(json.loads(line), compressor), ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
