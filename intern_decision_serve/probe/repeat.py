"""A-vs-A stability: the same questions again, alone, in company, after a restart.

Answers are compared bit for bit, clocks left out. It never restarts anything itself:
`restart` waits for somebody to, when told to.
"""

from __future__ import annotations

import time

from .client import Client
from .findings import Findings
from .restart import check_restarted, wait_for_restart
from .results import in_short, same_answer
from .rows import Document
from .samples import fixed_set
from .session import Probe, Reply, object_of

__all__ = ["NAME", "TITLE", "measure"]

NAME = "repeat"
TITLE = "Repeat stability (A against A)"

_COMPANY = 4  # clients that ask the same at once

Question = tuple[str, str, Document]


def measure(probe: Probe, findings: Findings) -> None:
    """Ask the fixed set, then ask it again under each condition."""
    questions = fixed_set()
    rounds: int = probe.options.repeats
    findings.conditions = (
        f"{len(questions)} fixed requests, each asked {rounds} times alone and once by "
        f"each of {_COMPANY} clients at the same time."
    )
    first = [probe.ask(path, body) for _, path, body in questions]
    _alone(probe, findings, questions, first, rounds)
    _in_company(probe, findings, questions, first)
    wait: float | None = probe.options.wait_restart
    if wait is None:
        findings.skip("the same answers after a restart", "no --wait-restart")
    else:
        _after_restart(probe, findings, questions, first, wait)


def _changed(
    questions: tuple[Question, ...], one: list[Reply], two: list[Reply]
) -> list[str]:
    triples = zip(questions, one, two, strict=True)
    return [q[0] for q, before, after in triples if not same_answer(before, after)]


def _alone(
    probe: Probe,
    findings: Findings,
    questions: tuple[Question, ...],
    first: list[Reply],
    rounds: int,
) -> None:
    changed: list[str] = []
    for number in range(2, rounds + 1):
        probe.progress.step(f"repeat: round {number} of {rounds}")
        again = [probe.ask(path, body) for _, path, body in questions]
        changed += [
            f"{name} in round {number}" for name in _changed(questions, first, again)
        ]
    total = (rounds - 1) * len(questions)
    findings.facts["alone"] = {"answers": total, "changed": len(changed)}
    findings.check(
        "the same answers when asked again",
        not changed,
        in_short(changed) or f"{total} answers identical",
    )


def _in_company(
    probe: Probe,
    findings: Findings,
    questions: tuple[Question, ...],
    first: list[Reply],
) -> None:
    probe.progress.step(f"repeat: {_COMPANY} clients at once")

    def ask_all(client: Client) -> list[Reply]:
        return [object_of(path, client.post(path, body)) for _, path, body in questions]

    rounds = probe.at_once(ask_all, _COMPANY)
    changed = [name for again in rounds for name in _changed(questions, first, again)]
    total = _COMPANY * len(questions)
    findings.facts["in_company"] = {"answers": total, "changed": len(changed)}
    findings.check(
        "the same answers while others ask",
        not changed,
        in_short(changed) or f"{total} answers identical",
    )


def _after_restart(
    probe: Probe,
    findings: Findings,
    questions: tuple[Question, ...],
    first: list[Reply],
    wait: float,
) -> None:
    rule = "the same answers after a restart"
    started = time.monotonic()
    health = wait_for_restart(probe, wait)
    if health is None:
        findings.skip(rule, f"no restart was seen within {wait:.0f} s")
        return
    check_restarted(probe, findings, health)
    again = [probe.ask(path, body) for _, path, body in questions]
    changed = _changed(questions, first, again)
    seconds = time.monotonic() - started
    findings.facts["restart"] = {
        "answers": len(questions),
        "changed": len(changed),
        "seconds": seconds,
    }
    seen = (
        in_short(changed)
        or f"{len(questions)} answers identical, {seconds:.0f} s later"
    )
    findings.check(rule, not changed, seen)
