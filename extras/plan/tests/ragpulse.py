"""Logs in the format of RAGPulse."""

import gzip
import json
from pathlib import Path

from ragcache_plan.logs import KINDS


def write_ragpulse(directory: Path, requests: list[dict[str, list[int]]], lengths: dict[int, int], end: str) -> None:
    """Write requests, a second apart, as RAGPulse does."""
    opened = gzip.open if end else open
    kinds = dict(zip(KINDS, ("1_sys_prompt", "2_passages", "3_history", "5_web_search", "4_user_input"), strict=True))
    for kind, name in kinds.items():
        used = sorted({hash for request in requests for hash in request.get(kind, [])})
        with opened(directory / f"{name}.jsonl{end}", "wt") as file:
            file.writelines(json.dumps({f"{kind}_id": hash, "token_length": lengths[hash]}) + "\n" for hash in used)
    with opened(directory / f"0_trace.jsonl{end}", "wt") as file:
        for at, hashes in enumerate(requests):
            line = {"timestamp": str(at), "input_length": 1, "output_length": 2, "hash_ids": hashes, "session_id": "x"}
            file.write(json.dumps(line) + "\n")
