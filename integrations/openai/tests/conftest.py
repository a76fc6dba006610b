"""The server that its own tests run."""

import pytest
from openai_clients import client_of

from tests.server.conftest import *  # noqa: F403
from tests.server.conftest import _no_settings_from_outside  # noqa: F401
from tests.store.conftest import url  # noqa: F401


@pytest.fixture
def client(served):
    with client_of(served) as client:
        yield client
