"""A process that checks entries for the long run: a crash or a hang costs one check, not the run.

It reads chunks from its standard input, one JSON object a line, and writes each outcome as a line to its standard
output.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from lazytensor.conformance import opinfo
from lazytensor.conformance.expected import judged


def serve(target: opinfo.Target, judge: Callable[[opinfo.Outcome], opinfo.Outcome]) -> None:
    """Check chunks on the target until the input ends; ``judge`` says what of it was expected."""
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what an operator prints must not come between the results
    torch.set_num_threads(1)  # the CPU's own sums depend on how many threads share them
    known = opinfo.entries()
    print(json.dumps({"ready": True}), file=results)
    for line in sys.stdin:
        chunk = json.loads(line)
        entry, dtype = known[chunk["op"]], getattr(torch, chunk["dtype"])
        try:
            checks = opinfo.check_entry(
                entry, dtype, target, chunk["limit"], tuple(chunk["forms"]), chunk["skip"], chunk["every"]
            )
            for outcome in checks:
                print(json.dumps(as_row(judge(outcome))), file=results)
            print(json.dumps({"done": True}), file=results)
        except Exception as error:
            print(json.dumps({"broken": f"{type(error).__name__}: {error}"}), file=results)


def as_row(outcome: opinfo.Outcome) -> dict[str, Any]:
    """An outcome as a JSON object without what is empty."""
    return {k: v for k, v in dataclasses.asdict(outcome).items() if v not in ("", ())}


if __name__ == "__main__":
    logging.getLogger("lazytensor").setLevel(logging.ERROR)  # fallbacks are counted, not told
    serve(opinfo.ltc(sys.argv[1]), judged)
