"""A-vs-A stability: the same questions again, alone, in company, after a restart.

Answers are compared bit for bit, clocks left out. It never restarts anything itself:
`restart` waits for somebody to, when told to.
"""

from __future__ import annotations

import time

from .client import Client
from .contract import answer_problems
from .findings import Findings
from .fitting import Question, answered
from .restart import check_restarted, wait_for_restart
from .results import in_short, same_answer
from .samples import fixed_set
from .session import Probe, Reply, object_of

__all__ = ["NAME", "TITLE", "measure"]

NAME = "repeat"
TITLE = "Repeat stability (A against A)"

Kept = list[tuple[Question, Reply]]  # what was asked and first answered

_COMPANY = 4  # clients that ask the same at once


def measure(probe: Probe, findings: Findings) -> None:
    """Ask the fixed set, then ask it again under each condition."""
    rounds: int = probe.options.repeats
    kept, left_out = answered(probe, fixed_set())
    company = min(_COMPANY, probe.queue_places())
    findings.conditions = (
        f"{len(kept)} fixed requests, each asked {rounds} times alone and once by "
        f"each of {company} clients at the same time."
    )
    for name, reason in left_out.items():
        findings.skip(f"repeating {name}", reason)
    if not kept:
        return
    _check_contract(probe, findings, kept)
    _alone(probe, findings, kept, rounds)
    _in_company(probe, findings, kept, company)
    wait: float | None = probe.options.wait_restart
    if wait is None:
        findings.skip("the same answers after a restart", "no --wait-restart")
    else:
        _after_restart(probe, findings, kept, wait)


def _check_contract(probe: Probe, findings: Findings, kept: Kept) -> None:
    """The fixed set asks each path and each kind of question."""
    model = probe.health.get("model")
    found = [
        f"{name}: {text}"
        for (name, path, body), reply in kept
        for text in answer_problems(path, body, reply, model)
    ]
    seen = in_short(found) or f"{len(kept)} answers on all paths"
    findings.check("every answer is the contract's", not found, seen)


def _changed(kept: Kept, again: list[Reply]) -> list[str]:
    pairs = zip(kept, again, strict=True)
    return [
        name
        for ((name, _, _), before), after in pairs
        if not same_answer(before, after)
    ]


def _alone(
    probe: Probe,
    findings: Findings,
    kept: Kept,
    rounds: int,
) -> None:
    changed: list[str] = []
    for number in range(2, rounds + 1):
        probe.progress.step(f"repeat: round {number} of {rounds}")
        again = [probe.ask(path, body) for (_, path, body), _ in kept]
        changed += [f"{name} in round {number}" for name in _changed(kept, again)]
    total = (rounds - 1) * len(kept)
    findings.facts["alone"] = {"answers": total, "changed": len(changed)}
    findings.check(
        "the same answers when asked again",
        not changed,
        in_short(changed) or f"{total} answers identical",
    )


def _in_company(
    probe: Probe,
    findings: Findings,
    kept: Kept,
    company: int,
) -> None:
    rule = "the same answers while others ask"
    if company < 2:
        findings.skip(rule, "the queue has one place")
        return
    probe.progress.step(f"repeat: {company} clients at once")

    def ask_all(client: Client) -> list[Reply]:
        return [object_of(path, client.post(path, body)) for (_, path, body), _ in kept]

    rounds = probe.at_once(ask_all, company)
    changed = [name for again in rounds for name in _changed(kept, again)]
    total = company * len(kept)
    findings.facts["in_company"] = {"answers": total, "changed": len(changed)}
    seen = in_short(changed) or f"{total} answers identical"
    findings.check(rule, not changed, seen)


def _after_restart(
    probe: Probe,
    findings: Findings,
    kept: Kept,
    wait: float,
) -> None:
    rule = "the same answers after a restart"
    started = time.monotonic()
    health = wait_for_restart(probe, wait)
    if health is None:
        findings.skip(rule, f"no restart was seen within {wait:.0f} s")
        return
    check_restarted(probe, findings, health)
    again, left_out = answered(probe, [question for question, _ in kept])
    for name, reason in left_out.items():
        findings.skip(f"{rule}: {name}", reason)
    after = {name: reply for (name, _, _), reply in again}
    changed = [
        name
        for (name, _, _), reply in kept
        if name in after and not same_answer(reply, after[name])
    ]
    seconds = time.monotonic() - started
    findings.facts["restart"] = {
        "answers": len(after),
        "changed": len(changed),
        "seconds": seconds,
    }
    seen = in_short(changed) or f"{len(after)} answers identical, {seconds:.0f} s later"
    findings.check(rule, not changed, seen)
