"""What operations give, kept on disk: a restarted program does not ask about each of them once more.

To record an operation that is new to the process lazytensor has to know what its results look like.  A step that is run
as it is recorded tells that by itself; one that an earlier run has compiled is only recorded, and asking takes longer
than recording (0.1 to 0.5 ms for each new operation).  The answers depend on nothing but the operation, what its
arguments look like, and what is part of the entry's name here.  So they are kept as one entry of the disk cache for
each source file of a program, signed and bounded like the compiled graphs.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from lazytensor._version import __version__
from lazytensor.backend import diskcache, graphfile
from lazytensor.trace import record, source
from lazytensor.trace.ir import Spec

_FILE = "looks.json"
MOST = 1000  # answers of one program; to read so many takes 16 ms
_asked: set[str] = set()  # source files whose entry was looked for
_kept: dict[str, int] = {}  # how many answers were kept last, by entry


def keep(file: str) -> None:
    """Keep what is known now, for the program that begins in this source file."""
    key = _key(file)
    known = list(record.known_looks().items())[:MOST]
    if _kept.get(key) == len(known):
        return
    _kept[key] = len(known)
    rows = []
    for question, answer in known:
        with contextlib.suppress(TypeError):  # it cannot be written down
            rows.append(_row(question, answer))
    folder = Path(tempfile.mkdtemp(dir=diskcache.root()))
    try:
        (folder / _FILE).write_text(json.dumps(rows, separators=(",", ":")))
        about = {"operations": len(rows), "line": f"what the operations of {file} give", "torch": torch.__version__}
        diskcache.store(key, folder, about)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def recall(file: str) -> bool:
    """Know again what was kept for the program that begins in this source file; whether there was anything."""
    if file in _asked:
        return False
    _asked.add(file)
    entry = diskcache.find(_key(file)) if diskcache.compiled_before(file) else None
    if entry is None:
        return False
    with contextlib.suppress(OSError, ValueError, TypeError, LookupError):
        for row in json.loads((entry.path / _FILE).read_text()):
            op = record.ops.get(row[0])
            if op is not None:
                record.know_look((op, 0, _read(row[1])), (_read_layout(row[2]), [_read_spec(s) for s in row[3]]))
    return True


def _recall_here() -> bool:
    """The same for the file of the user's line that is running."""
    frame = source.user_frame()
    return frame is not None and recall(frame.f_code.co_filename)


record.recall_looks = _recall_here


def _key(file: str) -> str:
    flags = (torch.backends.cpu.get_cpu_capability(), str(torch.get_default_dtype()))
    return diskcache.key_of("looks", file, torch.__version__, __version__, *flags)


# --- as plain data ----------------------------------------------------------------------------------------------------


def _row(question: tuple[Any, ...], answer: tuple[Any, list[Spec | None]]) -> list[Any]:
    op, device, looks = question
    if device != 0:
        raise TypeError("only what happens on the first device has a form here")
    layout, specs = answer
    return [op.name, _plain(looks), _plain_layout(layout), [None if s is None else _spec(s) for s in specs]]


def _spec(look: Spec) -> list[Any]:
    if look.device or look.bits:
        raise TypeError(f"{look!r} has no form here")
    return graphfile.plain_spec(look)


def _read_spec(entry: Any) -> Spec | None:
    return None if entry is None else graphfile.read_spec(entry)


def _plain(look: Any) -> Any:
    """What an argument looks like (``shapes.looks``)."""
    kind = look.__class__
    if kind is Spec:
        return {"spec": _spec(look)}
    if kind is type:
        return {"kind": look.__name__}
    return [_plain(each) for each in look] if kind is tuple else graphfile.plain_argument(look, {})


def _read(entry: Any) -> Any:
    if isinstance(entry, list):
        return tuple([_read(each) for each in entry])
    if isinstance(entry, dict):
        if "spec" in entry:
            return graphfile.read_spec(entry["spec"])
        if "kind" in entry:
            return graphfile.KINDS[entry["kind"]]
    return graphfile.read_argument(entry, [])


def _plain_layout(layout: Any) -> Any:
    """How results stand in what an operation gives: numbers in lists and tuples."""
    if isinstance(layout, tuple):
        return {"tuple": [_plain_layout(part) for part in layout]}
    return [_plain_layout(part) for part in layout] if isinstance(layout, list) else layout


def _read_layout(entry: Any) -> Any:
    if isinstance(entry, dict):
        return tuple([_read_layout(part) for part in entry["tuple"]])
    return [_read_layout(part) for part in entry] if isinstance(entry, list) else int(entry)
