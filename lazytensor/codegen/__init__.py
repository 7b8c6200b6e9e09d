"""The code generator: from PyTorch's op schemas and a backend's YAML to readable Python.

`device` loads the device's own kernels, which come out of `device.yaml`; `run` generates a backend author's package.
"""

from __future__ import annotations
