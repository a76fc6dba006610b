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
    """A package of npm, and the one module of it that the page imports. bundled: packages whose code is in that, too"""

    version: str
    module: str
    bundled: tuple[str, ...] = ()


PACKAGES = {
    "eventsource-parser": Package("3.1.1", "dist/index.js"),
    "markdown-it": Package(
        "15.0.3",
        "dist/browser/markdown-it.esm.min.mjs",
        ("entities", "linkify-it", "mdurl", "punycode.js", "uc.micro"),
    ),
}


def fetch(name: str, package: Package, folder: Path) -> dict[str, str]:
    """Write a package's module and licences to VENDOR; its entry of versions.json."""
    found = unpack(name, package.version, folder)
    # A map of the source is not shipped.
    module = re.sub(r"\s*//# sourceMappingURL=.*\s*\Z", "\n", (found / package.module).read_text(encoding="utf-8"))
    (VENDOR / f"{name}.js").write_text(module, encoding="utf-8")
    stated = json.loads((found / "package.json").read_text(encoding="utf-8"))
    places = [found, *(unpack(other, stated["dependencies"][other], folder) for other in package.bundled)]
    (VENDOR / f"{name}.LICENSE").write_text("\n\n".join(map(licence, places)) + "\n", encoding="utf-8")
    checksum = hashlib.sha256(module.encode()).hexdigest()
    return {"version": stated["version"], "license": stated["license"], "sha256": checksum}


def unpack(name: str, version: str, folder: Path) -> Path:
    """Download a package; the folder of its files."""
    place = folder / name
    place.mkdir()
    subprocess.run(["npm", "pack", "--silent", f"{name}@{version}"], cwd=place, check=True, stdout=subprocess.DEVNULL)
    (packed,) = place.glob("*.tgz")
    with tarfile.open(packed) as archive:
        archive.extractall(place, filter="data")
    return place / "package"


def licence(package: Path) -> str:
    """The licence of a package under its name and version."""
    stated = json.loads((package / "package.json").read_text(encoding="utf-8"))
    (file,) = (file for file in package.iterdir() if file.name.upper().startswith("LICEN"))
    text = file.read_text(encoding="utf-8").strip()
    return f"{stated['name']} {stated['version']} ({stated['license']})\n\n{text}"


def main() -> None:
    """Fetch all of them anew."""
    VENDOR.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        versions = {name: fetch(name, package, Path(folder)) for name, package in PACKAGES.items()}
    (VENDOR / "versions.json").write_text(json.dumps(versions, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
