"""The front door of the ``lazytensor`` command: it loads ``lazytensor/cli`` without importing lazytensor around it.

Importing the package imports PyTorch and registers a device, which takes seconds; ``lazytensor --help`` needs neither.
So the folder ``lazytensor/cli`` is the content of this package too, and its commands import lazytensor when they run.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

_found = importlib.util.find_spec("lazytensor")  # finds the folder, imports nothing
if _found is None or _found.origin is None:
    raise ImportError("the package lazytensor is not installed beside its command")
__path__ = [str(Path(_found.origin).parent / "cli")]


def main() -> None:
    """Run the command line."""
    importlib.import_module("lazytensor_cli.app").main()


if __name__ == "__main__":
    main()
