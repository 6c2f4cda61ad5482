"""A restart seen from outside: waited for on `/health`, and what it changed.

It never restarts anything itself: it says when somebody should, and then only looks.
"""

from __future__ import annotations

import sys
import time

from .findings import Findings
from .rows import canonical
from .session import SETTINGS, Probe, Reply

__all__ = ["check_restarted", "wait_for_restart"]

_POLL_SECONDS = 0.1
_AWAY = (0, 200, 502, 503)  # what a look at a server that restarts may get


def wait_for_restart(probe: Probe, wait: float) -> Reply | None:
    """Ask for a restart and watch `/health`; the new one, None for none in `wait` s.

    Where `/health` reports its age, only a younger server is another one: an absence
    alone may be a balancer's or a moment's. Where it does not, an absence is enough.
    """
    age = _age(probe.read_health())  # before anybody is told to restart it
    sys.stderr.write(f"probe: restart the server now (waiting {wait:.0f} s)\n")
    ends = time.monotonic() + wait
    away = False
    while time.monotonic() < ends:
        probe.progress.step("repeat: waiting for a restart")
        answer = probe.client.get("/health", expected=_AWAY)
        if answer.status != 200 or not isinstance(answer.document, dict):
            away = True
        else:
            now = _age(answer.document)
            if away if age is None or now is None else now < age:
                return answer.document
            age = now
        time.sleep(_POLL_SECONDS)
    return None


def _age(health: Reply) -> float | None:
    """Seconds the server has lived, where `/health` reports them."""
    age = health.get("uptime_seconds")
    return float(age) if isinstance(age, int | float) else None


def check_restarted(probe: Probe, findings: Findings, health: Reply) -> None:
    """Compare the restarted server's `/health` and measure by it from now on.

    Another model fails; other settings are shown, since a restart may change them.
    """
    before, probe.health = probe.health, health
    pins, now = before.get("model"), health.get("model")
    if pins != now:
        probe.scored.clear()  # another model's answers
    probe.refused.clear()  # by another's limits
    seen = "model as before" if pins == now else f"{_shown(pins)}, then {_shown(now)}"
    findings.check("the same pins after a restart", pins == now, seen)
    changed = [
        (name, _shown(before.get(name)), _shown(health.get(name)))
        for name in ("version", *SETTINGS)
        if before.get(name) != health.get(name)
    ]
    findings.facts["changed_by_restart"] = [name for name, _, _ in changed]
    if changed:
        note = "What this report says on top held until the restart."
        columns = ("setting", "before", "after")
        findings.table("Changed by the restart", columns, changed, note)


def _shown(value: object) -> str:
    return "not reported" if value is None else canonical(value)
