"""The libraries of the chat page equal those that package.json names, as scripts/vendor copies them."""

import hashlib
import json
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
VENDOR = HERE / "ragcache_chatbot" / "page" / "vendor"


def test_vendored_libraries_are_those_of_package_json():
    versions = json.loads((HERE / "package.json").read_text(encoding="utf-8"))["dependencies"]
    assert {file.stem for file in VENDOR.glob("*.js")} == set(versions)
    for name, version in versions.items():
        assert f"{name} {version} (" in (VENDOR / f"{name}.LICENSE").read_text(encoding="utf-8")
    for line in (VENDOR / "SHA256SUMS").read_text(encoding="utf-8").splitlines():
        checksum, name = line.split()
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == checksum, name
