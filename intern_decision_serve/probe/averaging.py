"""Whether an averaged result is what the contract says; pure.

The combined numbers are recomputed here from the orderings; nothing is taken on trust.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import permutations

from .results import option_ids, problems
from .rows import Document
from .session import Reply
from .statistics import mean

__all__ = ["averaged_problems", "count_orderings"]

_CLOSE = 1e-9  # the mean of logs is recomputed in another order of operations
_FLOOR = 1e-300  # the contract's floor under a probability of 0

_COUNTS: dict[object, Callable[[int], int]] = {
    None: lambda _: 1,
    "none": lambda _: 1,
    "rotations": lambda options: options,
    "all": math.factorial,
}


def count_orderings(decision: Document) -> int:
    """How many orderings a decision asks for."""
    return _COUNTS[decision.get("orderings")](len(option_ids(decision)))


def averaged_problems(
    decision: Document, result: Reply, model: object = None
) -> list[str]:
    """What is wrong with the result of a decision that asks for several orderings."""
    ids = option_ids(decision)
    if (result["id"], result["option_ids"]) != (decision["id"], ids):
        return ["id or option_ids are not the caller's"]
    orderings = result["orderings"]
    orders = [one["option_ids"] for one in orderings]
    if not _is_every_order(ids, orders, decision["orderings"]):
        return [f"the {len(orders)} orderings are not the {decision['orderings']}"]
    found = [
        f"ordering {k}: {text}"
        for k, one in enumerate(orderings)
        for text in problems(
            _reordered(decision, one["option_ids"]),
            one,
            name=f"{decision['id']}#o{k}",
            model=model,
        )
    ]
    return found or _combined_problems(ids, result)


def _is_every_order(ids: list[str], orders: Sequence[list[str]], asked: object) -> bool:
    """The caller's order first; the others' order is told for rotations only."""
    if asked == "rotations":
        return orders == [ids[k:] + ids[:k] for k in range(len(ids))]
    every = sorted(list(order) for order in permutations(ids))
    return orders[:1] == [ids] and sorted(orders) == every


def _reordered(decision: Document, ids: Sequence[str]) -> Document:
    """The decision with its options in that order."""
    options = decision["options"]
    assert isinstance(options, list)
    by_id = {option["id"]: option for option in options}
    return {**decision, "options": [by_id[name] for name in ids]}


def _combined_problems(ids: list[str], result: Reply) -> list[str]:
    """Recompute the average, the agreement and the spread."""
    shares = [_by_id(one) for one in result["orderings"]]
    logs = [mean([math.log(max(s[name], _FLOOR)) for s in shares]) for name in ids]
    weights = [math.exp(value - max(logs)) for value in logs]
    wanted = [weight / math.fsum(weights) for weight in weights]
    combined = result["combined"]
    top = ids[wanted.index(max(wanted))]
    agreement = mean(
        [float(one["top"] == combined["top"]) for one in result["orderings"]]
    )
    spread = {
        name: {"min": min(s[name] for s in shares), "max": max(s[name] for s in shares)}
        for name in ids
    }
    found = []
    pairs = zip(combined["probabilities"], wanted, strict=True)
    if max(abs(got - want) for got, want in pairs) > _CLOSE:
        found.append("combined.probabilities are not the renormalised mean of log p")
    elif (
        combined["top"] != top
        and max(wanted) - wanted[ids.index(combined["top"])] > _CLOSE
    ):
        found.append(f"combined.top is {combined['top']!r}, not {top!r}")
    if abs(combined["agreement"] - agreement) > _CLOSE:
        found.append(f"agreement is {combined['agreement']}, not {agreement}")
    if combined["spread"] != spread:
        found.append("spread is not the least and largest probability")
    return found


def _by_id(one: Reply) -> dict[str, float]:
    return dict(zip(one["option_ids"], one["probabilities"], strict=True))
