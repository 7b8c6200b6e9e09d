"""Benchmarks: the same programs on eager, torch.compile, torch._lazy and lazytensor, measured side by side.

`workloads` says what is run, `systems` says how each system runs it, `worker` does so in a process of its own,
`runner` alternates among such processes. `trace`, `backends` and `models` are the three questions asked of them; each
has `run(...) -> dict` of plain data and `render(result, console)`.

The first three import nothing of lazytensor: a process that measures another system must not have it loaded.
"""
