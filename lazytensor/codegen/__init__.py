"""The code generator: from PyTorch's op schemas and a backend's YAML to readable Python.

`device` loads the device's own kernels, which come out of `device.yaml`; `run` generates a backend author's package.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .package import Result

__all__ = ["run"]


def run(
    source_yaml: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    dry_run: bool = False,
    impl_path: str | os.PathLike[str] | None = None,
    shape_inference: str | os.PathLike[str] | None = None,
    node_base: str | None = None,
    backend_name: str | None = None,
    gen_ts_lowerings: bool = True,
) -> Result:
    """Generate a backend's package from its YAML: what ``lazytensor codegen`` does (`run_gen_lazy_tensor`).

    Returns what was written.  Raises `CodegenErrors` with everything that is wrong, and then nothing is written.
    """
    from .package import run  # torchgen and yaml are needed when generating, not when importing lazytensor

    return run(source_yaml, output_dir, dry_run, impl_path, shape_inference, node_base, backend_name, gen_ts_lowerings)
