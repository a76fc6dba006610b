"""Models of the families, loaded when a test asks for one."""

from collections import defaultdict
from pathlib import Path

import pytest
from families import FAMILIES, FEW_FAMILIES, METHOD_FAMILIES, tiny
from kit.makers import each, made_by

HERE = Path(__file__).parent
PAPERS = HERE.parents[1] / "extras" / "papers" / "tests"
LAWS = HERE / "test_laws.py"
MECHANISMS = {"test_link.py", "test_recompute.py", "test_kvzip.py"}
MECHANISMS |= {"test_sixteen_bits.py"}
"""The ways of reuse that other methods share: own tokens, tokens that run again, what is dropped, rows in front; and
the rounding of each trait."""


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items):
    """The laws run over all families each time, a method of each mechanism over those with traits of their own, the
    others over a few; with `scripts/test --all` each runs over all. A test that names its families runs over these."""
    families = defaultdict(lambda: defaultdict(list))
    for item in items:
        chosen = getattr(item, "callspec", None)
        for one in (
            chosen.params.values() if chosen and item.path.parent in (HERE, PAPERS) and item.path != LAWS else ()
        ):
            if isinstance(one, str) and one in FAMILIES:
                families[item.path, item.originalname][one].append(item)
    for (path, _), found in families.items():
        every = len(found) < len(METHOD_FAMILIES) or path.name in MECHANISMS
        kept = METHOD_FAMILIES if every else FEW_FAMILIES
        for name in found.keys() - set(kept):
            for item in found[name]:
                item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def load():
    return tiny


llama = made_by(tiny, "llama", scope="session")
lm = made_by(lambda: tiny("llama")[0], scope="session")
family = each(sorted(FAMILIES), tiny, scope="module")
