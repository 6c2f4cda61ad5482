"""Measures replay of CUDA graphs on a real GPU, with a checkpoint of the 4B's size.

    PYTHONPATH=. python tests/gpu/replay.py exact restart      [--out FOLDER]
    PYTHONPATH=. python tests/gpu/replay.py speed once memory floods

Each of these ends within eight minutes on an H200. A section runs in a process of its
own and writes FOLDER/SECTION.json; a short table of all of them comes last. With
`--device cpu --size tiny` the scripts can be tried out without a GPU (nothing is
replayed then, and the numbers mean nothing). Sections:

    exact     500 requests over 40 recurring shapes, all endpoints, against eager calls;
              again while shapes are evicted, after an OOM, and eager after a broken
              capture, which ends replay
    restart   the first 120 of them in a fresh process: equal again, the same answers
    speed     medians through HTTP with and without, 24 orderings, predict() by length
    once      shapes seen once, with and without
    memory    200 shapes under the default bounds and under a narrow one
    floods    a replayed call beside refused requests, against the same stream alone
"""

from __future__ import annotations

import sys

from replay_bounds import measure_floods, measure_memory
from replay_exact import measure_exact, measure_restart
from replay_speed import measure_once, measure_speed
from sections import Sections, run_sections

SECTIONS: Sections = {
    "exact": measure_exact,
    "restart": measure_restart,
    "speed": measure_speed,
    "once": measure_once,
    "memory": measure_memory,
    "floods": measure_floods,
}

if __name__ == "__main__":
    sys.exit(run_sections(__file__, SECTIONS))
