"""A short soak in the suite; `python tests/soak.py` runs a minute of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from soak import Footprint, Outcome, soak

MOST_GROWTH_MIB = 16.0  # the allocator's arenas settle within this


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    if not Path("/proc/self/fd").exists():
        pytest.skip("footprints are read from /proc")
    return soak(seconds=4.5)


@pytest.fixture(scope="module")
def footprints(outcome: Outcome) -> tuple[Footprint, Footprint]:
    assert outcome.before is not None
    assert outcome.after is not None
    return outcome.before, outcome.after


def test_every_good_request_is_answered_right_and_every_other_as_it_must(
    outcome: Outcome,
) -> None:
    assert outcome.wrong == []
    kinds = {name.split()[0] for name in outcome.answers}
    assert kinds == {"good", "slow", "bad", "vanishing", "oversized"}


def test_no_thread_descriptor_slot_or_connection_is_left(
    footprints: tuple[Footprint, Footprint],
) -> None:
    before, after = footprints
    assert after.threads == before.threads
    assert after.descriptors == before.descriptors
    assert (before.admitted, after.admitted) == (0, 0)
    assert (before.connections, after.connections) == (0, 0)


def test_memory_does_not_grow(footprints: tuple[Footprint, Footprint]) -> None:
    before, after = footprints
    assert after.resident_mib - before.resident_mib < MOST_GROWTH_MIB
