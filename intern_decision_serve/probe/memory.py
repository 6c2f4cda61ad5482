"""The VRAM cap from outside: over it is a 503, and the memory comes back.

Only `/health` is read. Where the server has no cap, or its largest legal call fits
under it, that is said and nothing is claimed.
"""

from __future__ import annotations

from .findings import Findings
from .fitting import OverLimits, ask_fitting
from .samples import filler
from .session import Probe, Reply, Unanswered
from .shapes import Sizer, one_question

__all__ = ["check_memory"]

_RULE = "over the VRAM cap is a 503, and memory returns to the baseline"
_EXPECTED = (200, 503)
_TOP_SHARE = 0.95
_SLACK_MIB = 512  # the contract's default RELEASE_SLACK_MIB


def check_memory(probe: Probe, findings: Findings) -> None:
    """Ask the largest legal call of a capped server; look at memory afterwards."""
    findings.facts["memory_before"] = probe.health_part("memory") or None
    cap = probe.health.get("vram_cap_gib")
    if cap is None:
        findings.skip(_RULE, "the server has no VRAM cap")
        return
    probe.progress.step("limits: the largest call under the VRAM cap")
    wanted = round(probe.limit("max_tokens", 8192) * _TOP_SHARE)
    try:
        words = Sizer(probe, one_question, _EXPECTED).words_for(wanted)
        path, body = one_question(filler(words, next(probe.numbers)))
        answer = ask_fitting(probe, path, body, _EXPECTED)
    except OverLimits as error:
        findings.skip(_RULE, str(error))
        return
    except Unanswered as error:
        answer = error.answer  # already the sizing call was too large for the cap
    memory = probe.health_part("memory")
    findings.facts["memory_after"] = memory or None
    if answer.status == 503 and answer.code == "out_of_memory":
        _check_returned(findings, memory)
    elif answer.status == 200:
        _check_peak(findings, memory, float(cap) * 1024)
    else:
        findings.check(_RULE, False, f"the largest legal call got {answer.named}")


def _check_returned(findings: Findings, memory: Reply) -> None:
    baseline, reserved = memory.get("baseline_mib"), memory.get("reserved_mib")
    if baseline is None or reserved is None:
        findings.skip(_RULE, "503 out_of_memory came; /health does not report memory")
        return
    findings.check(
        _RULE,
        reserved <= baseline + _SLACK_MIB,
        f"503 out_of_memory; reserved {reserved} MiB, baseline {baseline} MiB",
    )


def _check_peak(findings: Findings, memory: Reply, cap_mib: float) -> None:
    """The largest legal call fitted: then its peak must have been under the cap."""
    peak = memory.get("peak_mib")
    if peak is not None and peak > cap_mib:
        seen = f"200 at a peak of {peak} MiB under a cap of {cap_mib:.0f} MiB"
        findings.check(_RULE, False, seen)
        return
    shown = "not reported" if peak is None else f"{peak} MiB of {cap_mib:.0f} MiB"
    findings.skip(_RULE, f"not reached: the largest legal call fits, peak {shown}")
