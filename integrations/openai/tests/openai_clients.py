"""The official client of a server, and files that it sends."""

from openai import OpenAI

TEXT = b"Jonas wears a green hat in Kelbrook."


def client_of(served, key="none") -> OpenAI:
    return OpenAI(base_url=served.base_url, api_key=key, max_retries=0)


def send(client, name="hat.md", content=TEXT) -> str:
    return client.files.create(file=(name, content), purpose="assistants").id


def attach(client, store, file, **more):
    """The file in the vector store, when it is indexed."""
    client.vector_stores.files.create(store, file_id=file, **more)
    return client.vector_stores.files.poll(file, vector_store_id=store, poll_interval_ms=20)
