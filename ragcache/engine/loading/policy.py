"""The choice between loading a block that a tier has and computing it."""

from __future__ import annotations

AUTO, ALWAYS, NEVER = "auto", "always", "never"
LOADS = (AUTO, ALWAYS, NEVER)
