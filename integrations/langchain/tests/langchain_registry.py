"""Passages of the kind that the bundled model reads, and small functions for tests."""

import json

from langchain_core.documents import Document

REGISTRY = {
    "lansen": "Jonas Lansen belongs to the Rowing Club Heron.",
    "belson": "Rosa Belson works as a clockmaker.",
    "heron": "The Rowing Club Heron always meets on Mondays.",
    "hartford": "Upper Hartford lies on the Green Tisune.",
    "torley": "Henrik Torley works as a bricklayer.",
    "dorden": "Conrad Dorden now lives in High Rushton.",
}
QUESTION = "Which club does Jonas Lansen belong to?"


def registry_documents() -> list[Document]:
    return [
        Document(id=id, page_content=text, metadata={"line": line, "kind": "person" if line % 2 else "place"})
        for line, (id, text) in enumerate(REGISTRY.items())
    ]


def is_json(value: object) -> bool:
    return json.loads(json.dumps(value)) == value
