"""`python -m intern_decision_serve`."""

from __future__ import annotations

from .cli import entry

if __name__ == "__main__":
    entry()
