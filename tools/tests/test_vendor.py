"""The libraries of the chat page are those that tools/vendor.py names."""

import hashlib
import json

from tools.vendor import PACKAGES, VENDOR


def test_the_pages_libraries_are_those_of_their_versions():
    stated = json.loads((VENDOR / "versions.json").read_text(encoding="utf-8"))
    assert {name: one["version"] for name, one in stated.items()} == {
        name: one.version for name, one in PACKAGES.items()
    }
    for name, one in stated.items():
        assert hashlib.sha256((VENDOR / f"{name}.js").read_bytes()).hexdigest() == one["sha256"]
        assert f"{name} {one['version']} ({one['license']})" in (VENDOR / f"{name}.LICENSE").read_text(encoding="utf-8")
