"""Intern-Decision behind semif-serve's HTTP surface; importing it loads no torch."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.2.0"
