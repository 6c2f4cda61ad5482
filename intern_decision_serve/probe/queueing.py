"""The queue from outside: full, it refuses at once; left, it forgets.

Places are held by requests that have sent their head and keep their body: admission
comes before the body, so the queue is full without the model doing anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from .client import Answer
from .findings import Findings
from .fitting import OverLimits, ask_fitting
from .rawpost import RawPost
from .results import in_short
from .rows import Document
from .samples import built_in_rows, criterion, filler
from .sampling import HealthWatch
from .session import Probe, Reply
from .statistics import percentile

__all__ = ["check_closed_clients", "check_full_queue"]

_RETRY_DIGITS = 5  # seconds: nobody waits longer than a day for a place
_SHOWN_LETTERS = 20
_EXTRA = 3  # requests past the full queue
_LOOKS = 20  # at /health while it is full
_SETTLE_SECONDS = 5.0
_POLL_SECONDS = 0.01
_LEAVERS = 6
_ROUNDS = 3  # a busy machine makes one round slow, a wrong server all of them
_HEAVY = ((300, 64), (40, 64), (40, 16), (40, 6), (40, 2))  # words, questions
_MEASURABLE_SECONDS = 0.02  # for one request; less drowns in the noise of connecting
_NOISE_SECONDS = 0.03
# Far over what a look takes on a busy machine (0.3 ms on an idle one), and under what
# waiting for a model takes.
_SLOW_HEALTH_SECONDS = 0.25
_LATE_HEALTH_SECONDS = 0.1


def check_full_queue(probe: Probe, findings: Findings) -> None:
    """Hold every place, ask past them, look at `/health`, then let all go on."""
    places = probe.queue_places()
    probe.progress.step(f"limits: holding {places} places")
    body = built_in_rows()[0].request()
    longest_call = max(probe.ask_timed("/decide", body)[1] for _ in range(3))
    held: list[RawPost] = []
    try:
        for _ in range(places):
            held.append(_post(probe, "/decide", body))
            held[-1].send_head()
        _wait(probe, lambda queue: queue.get("slots_free") == 0)
        _check_refused(probe, findings, body)
        _check_health(probe, findings, longest_call)
        for post in held:
            post.send_body()
        answers = [_read(probe, post, (200,)) for post in held]
    finally:
        for post in held:
            post.close()
    others = [answer.named for answer in answers if answer.status != 200]
    seen = in_short(others) or f"{places} held requests answered"
    findings.check("every admitted request is answered", not others, seen)
    findings.facts["queue_places"] = places


def _post(probe: Probe, path: str, body: Document) -> RawPost:
    seconds: float = probe.options.deadline
    return RawPost(probe.target, probe.token, path, body, seconds)


def _read(probe: Probe, post: RawPost, expected: tuple[int, ...]) -> Answer:
    seconds: float = probe.options.deadline
    return post.read(probe.tally, expected=expected, seconds=seconds)


def _wait(
    probe: Probe, settled: Callable[[Reply], bool], patience: float | None = None
) -> float | None:
    """Poll `/health` until its queue is as wanted; seconds, or None if never."""
    started = time.monotonic()
    ends = started + (_SETTLE_SECONDS if patience is None else patience)
    while time.monotonic() < ends:
        queue = probe.health_part("queue")
        if not queue:
            return None
        if settled(queue):
            return time.monotonic() - started
        time.sleep(_POLL_SECONDS)
    return None


def _check_refused(probe: Probe, findings: Findings, body: Document) -> None:
    """Past the queue: 429 `busy` with a Retry-After, though no body was sent."""
    found, waits = [], []
    for _ in range(_EXTRA):
        post = _post(probe, "/decide", body)
        try:
            post.send_head()
            answer = post.read(probe.tally, expected=(429,), seconds=_SETTLE_SECONDS)
        finally:
            post.close()
        wait = answer.headers.get("retry-after", "")
        if (answer.status, answer.code) != (429, "busy"):
            found.append(f"got {answer.named}")
        elif not (wait.isascii() and wait.isdigit() and len(wait) <= _RETRY_DIGITS):
            found.append(f"Retry-After is {wait[:_SHOWN_LETTERS]!r}")
        waits.append(wait)
        if not answer.status:
            break  # it waits for the body: so would the next
    seen = in_short(found) or f"Retry-After {', '.join(waits)}"
    findings.facts["retry_after"] = waits
    findings.check("429 past the queue, before the body is read", not found, seen)


def _check_health(probe: Probe, findings: Findings, longest_call: float) -> None:
    """Twenty looks, judged by their median: a busy machine makes single ones slow."""
    answers = [probe.client.get("/health") for _ in range(_LOOKS)]
    times = [answer.seconds for answer in answers]
    fine = all(answer.status == 200 for answer in answers)
    queue = probe.health_part("queue")
    held = "not reported" if not queue else f"{queue.get('admitted')} admitted"
    findings.facts["health_while_full_ms"] = max(times) * 1000
    findings.check(
        "/health answers while the queue is full",
        fine and percentile(times, 0.5) <= max(_SLOW_HEALTH_SECONDS, longest_call),
        f"{_LOOKS} looks, the longest {max(times) * 1000:.1f} ms, queue {held}",
    )


def check_closed_clients(probe: Probe, findings: Findings) -> None:
    """Clients that left must not be scored: a live one comes through in their stead."""
    rule = "a client that closes frees its place"
    leavers = min(_LEAVERS, probe.queue_places() - 1)
    if leavers < 3:
        findings.skip(rule, "the queue is too short to tell")
        return
    probe.progress.step("limits: clients that close")
    heavy = _heaviest(probe)
    if heavy is None:
        findings.skip(rule, "no long request fits the server's limits")
        return
    light = built_in_rows()[0].request()
    alone, own = _time_alone(probe, findings, heavy, light)
    for _ in range(_ROUNDS):
        freed, waited, left = _leave(probe, heavy, light, alone, leavers)
        is_prompt = waited - own < alone * leavers / 2 + _NOISE_SECONDS
        if is_prompt or left:
            break
    _check_places(findings, left)
    if alone < _MEASURABLE_SECONDS:
        findings.skip(rule, f"requests of {alone * 1000:.0f} ms are too short to tell")
        return
    findings.facts["closed_clients"] = {
        "clients": leavers,
        "seconds_of_one_alone": alone,
        "place_free_after_seconds": freed,
        "live_answer_after_seconds": waited,
    }
    free = "not reported" if freed is None else f"{freed:.2f} s"
    findings.check(
        rule,
        is_prompt,
        f"{leavers} clients left requests of {alone:.2f} s each: places free after "
        f"{free}, a live answer after {waited:.2f} s",
    )


def _time_alone(
    probe: Probe, findings: Findings, heavy: Callable[[], Document], light: Document
) -> tuple[float, float]:
    """Seconds of a long request and of a short one; `/health` is watched beside."""
    rule = "/health answers while a call runs"
    with HealthWatch(probe) as watch:
        times = [probe.ask_timed("/decide/shared", heavy())[1] for _ in range(3)]
    alone, own = percentile(times, 0.5), probe.ask_timed("/decide", light)[1]
    looks = [look.seconds for look in watch.samples]
    if not looks:
        findings.check(rule, False, "no look was answered")
        return alone, own
    look = percentile(looks, 0.5)
    findings.facts["health_while_scoring_ms"] = look * 1000
    findings.check(
        rule,
        look <= max(_LATE_HEALTH_SECONDS, alone / 2),
        f"half of {len(looks)} looks within {look * 1000:.1f} ms, "
        f"a request took {alone * 1000:.0f} ms",
    )
    return alone, own


def _check_places(findings: Findings, left: object) -> None:
    """After everybody left or was answered, no place may be held any more."""
    rule = "no client that left keeps a place"
    if left is None:
        findings.skip(rule, "/health does not report the queue")
    else:
        findings.check(rule, left == 0, f"{left} places held")


def _heaviest(probe: Probe) -> Callable[[], Document] | None:
    """A maker of the longest of some requests that fits the server, each another."""
    most = probe.limit("max_decisions", 64)
    for words, count in _HEAVY:
        make = partial(_heavy, probe, words, min(count, most))
        try:
            ask_fitting(probe, "/decide/shared", make())
        except OverLimits:
            continue
        return make
    return None


def _heavy(probe: Probe, words: int, count: int) -> Document:
    decisions = [criterion(number) for number in range(count)]
    return {"state": filler(words, next(probe.numbers)), "decisions": decisions}


def _leave(
    probe: Probe,
    heavy: Callable[[], Document],
    light: Document,
    alone: float,
    leavers: int,
) -> tuple[float | None, float, int | None]:
    """Seconds until places are free, and until a live client is answered.

    Then the places still held; None where `/health` does not report them.
    """
    idle = _admitted(probe.health_part("queue"))
    posts = [_post(probe, "/decide/shared", heavy()) for _ in range(leavers)]
    try:
        for post in posts:
            post.send_head()
            post.send_body()
        patience = min(_SETTLE_SECONDS, 2 * leavers * alone)  # or all are answered
        full = leavers + idle
        if _wait(probe, lambda queue: _admitted(queue) >= full, patience) is None:
            time.sleep(alone / 4)  # not reported: give them time to enter
    finally:
        for post in posts:
            post.close()
    left = time.monotonic()
    live = _post(probe, "/decide", light)
    try:
        live.send_head()
        live.send_body()
        # the call that was running keeps its place until it ends; the live one has one
        freed = _wait(probe, lambda queue: _admitted(queue) <= idle + 2)
        answer = _read(probe, live, (200,))
    finally:
        live.close()
    waited = time.monotonic() - left if answer.status == 200 else float("inf")
    patience = max(_SETTLE_SECONDS, 3 * alone)
    settled = _wait(probe, lambda queue: _admitted(queue) <= idle, patience)
    queue = probe.health_part("queue")
    held = max(_admitted(queue) - idle, 0) if settled is None else 0
    if "admitted" not in queue:
        return freed, waited, None
    return freed, waited, held


def _admitted(queue: Reply) -> int:
    """The requests that hold a place, 0 where that is not told."""
    count = queue.get("admitted")
    return count if isinstance(count, int) else 0
