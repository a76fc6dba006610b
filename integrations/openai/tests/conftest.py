"""The server that its own tests run."""

import pytest
from openai_clients import client_of

from tests.server.conftest import (  # noqa: F401
    _no_settings_from_outside,
    agent,
    kb,
    lm,
    made,
    mini,
    mini_kb,
    serve,
    served,
    shared,
    shared_client,
    shared_kb,
)
from tests.store.conftest import url  # noqa: F401


@pytest.fixture
def client(served):  # noqa: F811
    with client_of(served) as client:
        yield client
