"""The server that its own tests run."""

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
