"""Fetch the chat page's libraries from npm, each with its licence, at the version named here.

    python -m tools.vendor

Needs `npm`, which checks what it downloads. What comes out is committed; `tests/test_install.py` holds the files to the
checksums in `versions.json`.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import NamedTuple

VENDOR = Path(__file__).resolve().parent.parent / "apps/chatbot/ragcache_chatbot/page/vendor"


class Package(NamedTuple):
    """A package of npm, and the one module of it that the page imports."""

    version: str
    module: str


PACKAGES = {
    "eventsource-parser": Package("3.1.1", "dist/index.js"),
    "markdown-it": Package("15.0.3", "dist/browser/markdown-it.esm.min.mjs"),
}


def fetch(name: str, package: Package, folder: Path) -> dict[str, str]:
    """Write a package's module and licence to VENDOR; its entry of versions.json."""
    subprocess.run(["npm", "pack", "--silent", f"{name}@{package.version}"], cwd=folder, check=True)
    with tarfile.open(folder / f"{name}-{package.version}.tgz") as archive:
        archive.extractall(folder / name, filter="data")
    found = folder / name / "package"
    # A map of the source is not shipped.
    module = re.sub(r"\s*//# sourceMappingURL=.*\s*\Z", "\n", (found / package.module).read_text(encoding="utf-8"))
    (VENDOR / f"{name}.js").write_text(module, encoding="utf-8")
    (VENDOR / f"{name}.LICENSE").write_bytes((found / "LICENSE").read_bytes())
    stated = json.loads((found / "package.json").read_text(encoding="utf-8"))
    checksum = hashlib.sha256(module.encode()).hexdigest()
    return {"version": stated["version"], "license": stated["license"], "sha256": checksum}


def main() -> None:
    """Fetch all of them anew."""
    VENDOR.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        versions = {name: fetch(name, package, Path(folder)) for name, package in PACKAGES.items()}
    (VENDOR / "versions.json").write_text(json.dumps(versions, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
