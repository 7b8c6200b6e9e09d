"""Which functions are recorded as a whole, how often that spared recording them, and why others are not."""

from __future__ import annotations

from lazytensor.functions import whole
from lazytensor.inspect import places
from lazytensor.inspect.render import Report, Table


def whole_functions() -> Report:
    """Every function that was looked at: how many of its calls were looked up, or why it is recorded op by op."""
    data = [
        {
            "function": each.name,
            "file": each.place[0],
            "line": each.place[1],
            "calls": each.hits,
            "ways": len(each.proofs),
            "reason": each.reason,
        }
        for each in whole.wholes
    ]
    rows = [
        [
            row["function"],
            f"{places.short(str(row['file']))}:{row['line']}",
            row["calls"],
            row["reason"] or ("recorded as a whole" if row["ways"] else "not looked at yet"),
        ]
        for row in data
    ]
    found = sum(row["reason"] is None for row in data)
    notes = [f"{found} of {len(data)} functions that record much are recorded as a whole"]
    table = Table("By function", ["function", "line", ">calls looked up", "what is known"], rows)
    return Report("lazytensor: functions recorded as a whole", notes, [table], data)
