"""When a block that a tier has is loaded, and when it is computed."""

from __future__ import annotations

AUTO, ALWAYS, NEVER = "auto", "always", "never"
LOADS = (AUTO, ALWAYS, NEVER)
