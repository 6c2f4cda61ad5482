"""The questions the probe brings along: sane rows, the fixed set, filler text.

The built-in rows are a sanity set written for this probe, not a benchmark: any model
that decides at all gets nearly all of them. The fixed set is what `repeat` asks again
and `--expect` compares, so a change here makes every recorded expectation stale.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from itertools import count

from .rows import Document, Row

__all__ = [
    "FIXED_SET_VERSION",
    "built_in_rows",
    "criterion",
    "filler",
    "fixed_set",
    "run_numbers",
]

FIXED_SET_VERSION = 1

# state | question | options, the right one marked with * | an option's text follows "="
_ROWS = """
The parcel arrived with a cracked screen. I want my money back. | What does the customer ask for? | *refund=the money back; repair=the device repaired; advice=help with using it
Order 5521 has not moved for nine days and tracking is silent. | Which desk handles this? | billing=charges and invoices; *shipping=parcels and tracking; sales=new purchases
My card was charged twice for the same month. | Which desk handles this? | *billing=charges and invoices; shipping=parcels and tracking; sales=new purchases; legal=contracts
Please tell me the price for forty more seats. | Which desk handles this? | billing=open invoices; shipping=parcels; *sales=offers and new purchases
The pump ran at 41 C all night; its limit is 80 C. | Is the pump overheating? | yes=it is above its limit; *no=it is below its limit
The pump ran at 97 C all night; its limit is 80 C. | Is the pump overheating? | *yes=it is above its limit; no=it is below its limit
Backup finished at 02:14, 0 errors, checksum verified. | Did the backup succeed? | *yes=it finished without errors; no=it failed or stopped early
Backup stopped at 02:14: no space left on device. | Did the backup succeed? | yes=it finished without errors; *no=it failed or stopped early
rm -rf /var/lib/postgresql | Is this command destructive? | *yes=it deletes data; no=it only reads
ls -l /var/lib/postgresql | Is this command destructive? | yes=it deletes data; *no=it only reads
Der Zug nach Bern hat zwanzig Minuten Verspaetung. | Which language is this? | french=French; *german=German; english=English; spanish=Spanish
Le train pour Berne a vingt minutes de retard. | Which language is this? | *french=French; german=German; english=English; spanish=Spanish
The train to Berne is twenty minutes late. | Which language is this? | french=French; german=German; *english=English; spanish=Spanish
El tren a Berna lleva veinte minutos de retraso. | Which language is this? | french=French; german=German; english=English; *spanish=Spanish
The room is booked 10:00 to 11:00. A guest asks for 10:30. | Does the request collide with the booking? | *yes=the times overlap; no=the times are apart
The room is booked 10:00 to 11:00. A guest asks for 15:30. | Does the request collide with the booking? | yes=the times overlap; *no=the times are apart
Great hotel, friendly staff, we will come again! | What is the mood of the review? | *good=pleased; mixed=undecided; bad=displeased
The food was fine but the wait was far too long. | What is the mood of the review? | good=only pleased; *mixed=both pleased and displeased; bad=only displeased
Dirty room, rude staff, never again. | What is the mood of the review? | good=pleased; mixed=undecided; *bad=displeased
Door 3 is open and the alarm is armed. | What should the guard do first? | sleep=go to bed; *check=look at door 3; paint=paint the fence
Stock: 0 bolts. Reorder level: 50. | Should bolts be reordered? | *yes=stock is under the level; no=stock is over the level
Stock: 900 bolts. Reorder level: 50. | Should bolts be reordered? | yes=stock is under the level; *no=stock is over the level
Invoice 77 is due on 1 March. Today is 20 March. It is unpaid. | What is the state of the invoice? | paid=the money came; open=not due yet; *overdue=due and not paid
Invoice 78 is due on 1 May. Today is 20 March. It is unpaid. | What is the state of the invoice? | paid=the money came; *open=not due yet; overdue=due and not paid
"""  # noqa: E501

_TOPICS = (
    "late", "urgent", "polite", "complete", "signed", "paid", "local", "new", "safe",
    "broken", "heavy", "public", "legal", "shared", "old", "quiet", "fast", "empty",
    "sealed", "warm", "exact", "known", "open", "long", "rare", "clean", "even", "firm",
    "loud", "near", "plain", "ready", "short", "steep", "thin", "true", "vast", "wide",
    "young", "dry",
)  # fmt: skip

_WORDS = (
    "the gate opened at noon and a cart with nine crates of copper wire went down to "
    "the quay where two clerks wrote its weight in a book before the boat was loaded "
    "for the far bank while rain fell on the roof of the long shed"
).split()


def _read(number: int, line: str) -> Row:
    state, question, options = (part.strip() for part in line.split("|"))
    pairs = [option.strip().split("=", 1) for option in options.split(";")]
    label = next(name[1:] for name, _ in pairs if name.startswith("*"))
    return Row(
        id=f"built-in-{number:02d}",
        state=state,
        question=question,
        options=tuple((name.lstrip("*"), text) for name, text in pairs),
        label=label,
    )


def built_in_rows() -> tuple[Row, ...]:
    """The sanity rows, in a fixed order."""
    lines = _ROWS.strip().splitlines()
    return tuple(_read(number, line) for number, line in enumerate(lines, start=1))


def criterion(number: int) -> Document:
    """The `number`-th binary criterion; 40 of them differ, then they are numbered."""
    topic = _TOPICS[number % len(_TOPICS)]
    turn = number // len(_TOPICS)
    again = f" (reading {turn + 1})" if turn else ""
    return {
        "id": f"criterion-{number}",
        "question": f"Is the matter {topic}{again}?",
        "options": [
            {"id": "yes", "description": f"it is {topic}"},
            {"id": "no", "description": f"it is not {topic}"},
        ],
    }


def filler(words: int, number: int = 0) -> str:
    """A text of `words` words; `number` makes it another text.

    Numbers of as many digits make texts of the same size.
    """
    body = (_WORDS[place % len(_WORDS)] for place in range(words))
    return " ".join([f"Record {number:06d}:", *body])


def run_numbers() -> Iterator[int]:
    """Numbers of twelve digits that no other run is likely to use; any thread's."""
    return count(secrets.randbelow(900_000) * 1_000_000 + 100_000_000_000)


def _shared(count: int) -> Document:
    decisions = [criterion(number) for number in range(count)]
    return {"state": filler(40), "decisions": decisions}


def fixed_set() -> tuple[tuple[str, str, Document], ...]:
    """Name, path and body of the questions whose answers are compared exactly."""
    rows = built_in_rows()
    jev: Document = {
        "state": {"temperature": 41.5, "door": "open", "log": [1, 2, None, "ä"]},
        "questions": {
            "alarm": {"type": "noul", "instructions": "Is there a reason for alarm?"},
            "act": {
                "type": "choice",
                "instructions": "What comes first?",
                "criteria": {"close": "close the door", "wait": "wait", "call": "call"},
            },
            "heat": {
                "type": "score",
                "instructions": "How hot is it?",
                "criteria": ["cold", "mild", "hot"],
            },
        },
    }
    plain = [(f"plain {row.id}", "/decide", row.request()) for row in rows[:16:5]]
    return (
        *plain,
        ("rotations", "/decide", rows[2].request("rotations")),
        ("shared, 5 decisions", "/decide/shared", _shared(5)),
        ("shared, 17 decisions", "/decide/shared", _shared(17)),
        ("systemone, 3 questions", "/v1/systemone", jev),
    )
