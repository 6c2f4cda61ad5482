"""A tiny random checkpoint made on the spot, with inference code of its own.

What a demo serves is never the model's answer, and its name says so. Importing this
package loads no torch.
"""

from __future__ import annotations

from intern_decision_serve.demo.checkpoint import DemoCheckpoint, make_checkpoint

__all__ = ["DemoCheckpoint", "make_checkpoint"]
