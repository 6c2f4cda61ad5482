"""`python -m intern_decision_serve.demo DIRECTORY SIZE DEVICE`: make the checkpoint.

A process of its own, so that what drawing the weights leaves on a card (a context,
cached memory) is gone before the one that serves them loads (INV-2, INV-4).
"""

from __future__ import annotations

import sys
from pathlib import Path

from intern_decision_serve.demo.checkpoint import make_checkpoint

if __name__ == "__main__":
    directory, size, device = sys.argv[1:]
    make_checkpoint(Path(directory), size=size, device=device)
