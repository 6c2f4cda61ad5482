"""Measures the engine on a real GPU with a random checkpoint of the 4B's size.

    PYTHONPATH=. python tests/gpu/measure.py cold kept answers [--out FOLDER]
    PYTHONPATH=. python tests/gpu/measure.py service throughput over_cap
    PYTHONPATH=. python tests/gpu/measure.py kernels lost

Each of these ends within ten minutes on an H200. A section runs in a process of its own
and writes FOLDER/SECTION.json; a short table of all of them comes last. With
`--device cpu --size tiny` the scripts can be tried out without a GPU: those numbers
mean nothing. Sections, in order:

    cold      load and warm up with an empty Triton cache, first requests, answers
    kept      the same again with the cache that `cold` filled; answers must be equal
    bare      an empty cache and no ladder: what clients would wait for without it
    answers   HTTP against direct predict(), repeats, before and after the tower swap
    service   latency shapes, 1,000-request soak
    throughput  8 clients against the bare loop, long prompts and short ones
    over_cap  50 over-cap requests: 503, memory back, next request 200
    kernels   fla hidden: refused; with the switch: served
    lost      a device-side assert: 503, exit status 70
"""

from __future__ import annotations

import sys

from faults import measure_kernels, measure_lost, measure_over_cap
from sections import Sections, run_sections
from served_sections import measure_answers, measure_service, measure_throughput
from startup import measure_startup

SECTIONS: Sections = {
    "cold": measure_startup,
    "kept": measure_startup,
    "bare": lambda options: measure_startup(options, with_ladder=False),
    "answers": measure_answers,
    "service": measure_service,
    "throughput": measure_throughput,
    "over_cap": measure_over_cap,
    "kernels": measure_kernels,
    "lost": measure_lost,
}

if __name__ == "__main__":
    sys.exit(
        run_sections(
            __file__,
            SECTIONS,
            default=[name for name in SECTIONS if name != "bare"],
            caches={"bare": "triton-bare"},
            cold=("cold", "bare"),
            hidden=("kernels", "warmup", "stages"),
        )
    )
