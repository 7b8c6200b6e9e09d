"""Writes a random program: lines of ordinary PyTorch over a few tensors, each tried on the CPU as it is written.

A program is a list of lines of Python.  ``D`` is the device, ``E`` a second one, ``sync()`` cuts.  A line that raises
stays in the program: the error is part of what must agree.  The CPU run that accompanies the writing tells the writer
which shapes and dtypes there are, so that most lines make sense; it decides nothing else.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from lazytensor.fuzz.run import namespace

FLOATS = ("torch.float32", "torch.float64", "torch.bfloat16")
INTS = ("torch.int64", "torch.int32", "torch.uint8")


class Writer:
    """Writes one program."""

    def __init__(self, seed: int, lines: int = 24) -> None:
        self.random = random.Random(seed)
        self.seed = seed
        self.lines: list[str] = []
        self.wanted = lines
        self.scope = namespace("cpu", "cpu", lambda: None)
        self.count = 0

    def write(self) -> list[str]:
        """The program."""
        torch.manual_seed(self.seed)
        for _ in range(self.random.randint(2, 4)):
            self._try(self._create())
        while len(self.lines) < self.wanted:
            line = self.random.choices(_KINDS, _WEIGHTS)[0](self)
            if line:
                self._try(line)
        return self.lines

    def _try(self, line: str) -> None:
        try:
            exec(line, self.scope)
        except Exception as error:
            # Most lines that raise say little: keep some.  What only the data decides is not known when it is recorded.
            if "ZeroDivision" in str(error) or self.random.random() < 0.8:
                return
        self.lines.append(line)

    # --- choosing ---------------------------------------------------------------------------------------------------

    def name(self) -> str:
        """A new name."""
        self.count += 1
        return f"t{self.count}"

    def tensors(self, test: Callable[[torch.Tensor], bool] = lambda t: True, prefix: str = "t") -> list[str]:
        """The names of the tensors that pass a test, on the first device unless another prefix is asked for."""
        return [
            name
            for name, value in self.scope.items()
            if name.startswith(prefix) and name[1:].isdigit() and isinstance(value, torch.Tensor) and test(value)
        ]

    def pick(self, test: Callable[[torch.Tensor], bool] = lambda t: True) -> str | None:
        """One of them."""
        found = self.tensors(test)
        return self.random.choice(found) if found else None

    def get(self, name: str) -> torch.Tensor:
        """The CPU's tensor of this name."""
        value: torch.Tensor = self.scope[name]
        return value

    def number(self) -> str:
        """A Python number."""
        return self.random.choice(
            ["2", "-1", "0", "1", "3", "1.5", "-0.25", "0.0", "-0.0", "True", "float('inf')", "1e-3", "7", "0.1"]
        )

    def shape(self) -> tuple[int, ...]:
        """A small shape: empty and 0-d ones among them."""
        dims = self.random.choices([0, 1, 2, 3, 4], [1, 3, 6, 4, 1])[0]
        return tuple(self.random.choices([0, 1, 2, 3, 4, 5], [1, 3, 6, 6, 3, 1])[0] for _ in range(dims))

    def like(self, tensor: torch.Tensor) -> str | None:
        """A tensor that broadcasts with this one."""

        def fits(other: torch.Tensor) -> bool:
            try:
                torch.broadcast_shapes(tensor.shape, other.shape)
            except RuntimeError:
                return False
            return True

        return self.pick(fits)

    # --- kinds of lines ---------------------------------------------------------------------------------------------

    def _create(self) -> str:
        r, new, shape = self.random, self.name(), self.shape()
        dtype = r.choices([*FLOATS, *INTS, "torch.bool", "torch.complex64"], [8, 3, 2, 4, 2, 1, 2, 1])[0]
        size = list(shape)
        kind = r.randrange(8)
        if kind <= 2:
            total = 1
            for n in shape:
                total *= n
            base = (
                f"(torch.arange({total}, device=D) % 11 - 4)"
                if dtype != "torch.bool"
                else f"(torch.arange({total}, device=D) % 3 == 0)"
            )
            return f"{new} = {base}.to({dtype}).reshape({size})"
        if kind == 3:
            return f"{new} = torch.{r.choice(['zeros', 'ones'])}({size}, dtype={dtype}, device=D)"
        if kind == 4:
            return f"{new} = torch.full({size}, {self.number()}, device=D)"
        if kind == 5:
            return f"{new} = torch.{r.choice(['rand', 'randn'])}({size}, device=D)"
        if kind == 6:
            return f"{new} = torch.randint(-5, 9, {size}, device=D)"
        source = self.pick()
        return (
            f"{new} = torch.{r.choice(['zeros_like', 'ones_like', 'rand_like'])}({source}, dtype=torch.float32)"
            if source
            else ""
        )

    def _unary(self) -> str:
        source = self.pick()
        op = self.random.choice(
            (
                "neg",
                "abs",
                "sin",
                "exp",
                "sqrt",
                "square",
                "sigmoid",
                "tanh",
                "relu",
                "floor",
                "round",
                "sign",
                "isnan",
                "logical_not",
                "clone",
                "contiguous",
                "reciprocal",
            )
        )
        return f"{self.name()} = {source}.{op}()"

    def _binary(self) -> str:
        source = self.pick()
        if source is None:
            return ""
        other = self.like(self.get(source)) if self.random.random() < 0.6 else None
        right = other or self.number()
        op = self.random.choice(["+", "-", "*", "/", ">", "<=", "==", "%", "**"])
        if self.random.random() < 0.15:
            return f"{self.name()} = {self.number()} {self.random.choice('+-*/')} {source}"
        return f"{self.name()} = {source} {op} {right}"

    def _promote(self) -> str:
        source = self.pick()
        dtype = self.random.choice([*FLOATS, *INTS, "torch.bool"])
        return f"{self.name()} = {source}.to({dtype})"

    def _reduce(self) -> str:
        source = self.pick(lambda t: t.dim() > 0 and t.numel() > 0)
        if source is None:
            return ""
        dim = self.random.randrange(-self.get(source).dim(), self.get(source).dim())
        op = self.random.choice(
            ["sum", "mean", "amax", "amin", "prod", "cumsum", "argmax", "logsumexp", "any", "all", "std"]
        )
        keep = ", keepdim=True" if self.random.random() < 0.4 and op not in ("cumsum",) else ""
        if self.random.random() < 0.2 and op in ("sum", "mean", "any", "all"):
            return f"{self.name()} = {source}.{op}()"
        return f"{self.name()} = {source}.{op}({dim}{keep})"

    def _several(self) -> str:
        source = self.pick(lambda t: t.dim() > 0 and t.numel() > 0)
        if source is None:
            return ""
        tensor = self.get(source)
        dim = self.random.randrange(tensor.dim())
        one, two = self.name(), self.name()
        return self.random.choice(
            [
                f"{one}, {two} = {source}.max({dim})",
                f"{one}, {two} = {source}.sort({dim}, stable=True)",
                f"{one}, *_ = {source}.chunk(2, {dim})",
                f"*_, {one} = {source}.split(2, {dim})",
                f"*_, {one} = {source}.unbind({dim})",
                f"{one}, {two} = torch.var_mean({source}.float(), {dim})",
                f"{one} = torch.cat([{source}, {source}], {dim})",
                f"{one} = torch.stack([{source}, {source} * 2], {dim})",
            ]
        )

    def _matmul(self) -> str:
        left = self.pick(lambda t: t.dim() == 2 and t.is_floating_point())
        if left is None:
            return ""
        inner, dtype = self.get(left).shape[1], self.get(left).dtype
        right = self.pick(lambda t: t.dim() in (1, 2) and t.shape[0] == inner and t.dtype is dtype)
        return f"{self.name()} = {left} @ {right}" if right else f"{self.name()} = {left} @ {left}.t()"

    def _index(self) -> str:
        source = self.pick(lambda t: t.dim() > 0 and t.numel() > 0)
        if source is None:
            return ""
        tensor = self.get(source)
        rows = [self.random.randrange(tensor.shape[0]) for _ in range(2)]
        mask = self.pick(lambda t: t.dtype is torch.bool and t.shape == tensor.shape[: t.dim()] and t.dim() > 0)
        choices = [
            f"{self.name()} = {source}[torch.tensor({rows}, device=D)]",
            f"{self.name()} = {source}.index_select(0, torch.tensor({rows}, device=D))",
            f"{source}[torch.tensor({rows[:1]}, device=D)] = 2",
            f"{source}.index_add_(0, torch.tensor({rows}, device=D), {source}[{rows}] if True else 0)",
        ]
        if mask:
            choices += [
                f"{self.name()} = {source}[{mask}]",
                f"{source}[{mask}] = 3",
                f"{source}.masked_fill_({mask}, 2)",
            ]
        return self.random.choice(choices)

    def view_of(self, name: str, tensor: torch.Tensor) -> str:
        """An expression for a view of a tensor."""
        r = self.random
        dims = tensor.dim()
        choices = [
            f"{name}.view(-1)",
            f"{name}[None]",
            f"{name}.detach()",
            f"{name}.expand(2, *{name}.shape)",
            f"{name}.data",
        ]
        if dims > 0:
            dim = r.randrange(-dims, dims)
            length = tensor.shape[dim]
            start = r.randrange(length + 1)
            choices += [
                f"{name}.narrow({dim}, {start}, {r.randrange(length - start + 1)})",
                f"{name}.transpose({dim}, {r.randrange(dims)})",
                f"{name}.unsqueeze({dim})",
                f"{name}.squeeze({dim})",
                f"{name}[{start}:]" if dim == 0 else f"{name}[..., ::2]",
                f"{name}.flatten()",
                f"{name}.permute({', '.join(map(str, r.sample(range(dims), dims)))})",
                f"{name}.as_strided({list(tensor.shape)}, {list(tensor.stride())}, {tensor.storage_offset()})",
            ]
            if length:
                choices += [
                    f"{name}.select({dim}, {r.randrange(length)})",
                    f"{name}.unfold({dim}, {r.randint(1, length)}, 1)",
                ]
        if dims >= 2:
            choices += [f"{name}.diagonal()", f"{name}.t()" if dims == 2 else f"{name}.mT"]
        if dims == 4:
            choices.append(f"{name}.contiguous(memory_format=torch.channels_last)")
        return r.choice(choices)

    def _view(self) -> str:
        source = self.pick()
        return f"{self.name()} = {self.view_of(source, self.get(source))}" if source else ""

    def _inplace(self) -> str:
        target = self.pick()
        if target is None:
            return ""
        place = target
        if self.random.random() < 0.4:
            place = self.view_of(target, self.get(target))
        tensor = self.get(target)
        other = self.like(tensor) if self.random.random() < 0.4 else None
        if other is not None and self._risky(target, other):
            other = None
        right = other or (self.number() if tensor.is_floating_point() else self.random.choice("0123"))
        return self.random.choice(
            [
                f"{place}.add_({right})",
                f"{place}.mul_({right})",
                f"{place}.sub_({right}, alpha=2)",
                f"{place}.zero_()",
                f"{place}.fill_({right if other is None else 1})",
                f"{place}.copy_({other})" if other else f"{target}.copy_({target})",
                f"{place}.clamp_(-2, 2)",
                f"{place}.neg_()",
                f"{place}.relu_()",
                f"{target} += {right}",
                f"{place}[...] = {right}",
            ]
        )

    def _risky(self, target: str, other: str) -> bool:
        """Whether eager's own result depends on the order in which it goes through memory, or on what it does not
        check."""
        one, two = self.get(target), self.get(other)
        shares = one.untyped_storage().data_ptr() == two.untyped_storage().data_ptr()
        return (shares and target != other) or (two.requires_grad and not one.is_floating_point())

    def _out(self) -> str:
        target = self.pick()
        if target is None:
            return ""
        source = self.like(self.get(target)) or target
        if self._risky(target, source):
            return ""
        place = self.view_of(target, self.get(target)) if source != target and self.random.random() < 0.4 else target
        op = self.random.choice(["add", "mul", "sub"])
        return f"torch.{op}({source}, {self.number()}, out={place})"

    def _random(self) -> str:
        target = self.pick(lambda t: t.is_floating_point())
        if target is None or self.random.random() < 0.3:
            return f"{self.name()} = torch.nn.functional.dropout({self.pick()}, 0.5)" if self.tensors() else ""
        return self.random.choice(
            [
                f"{target}.uniform_()",
                f"{target}.normal_(0, 2)",
                f"{target}.bernoulli_(0.5)",
                f"{self.name()} = torch.bernoulli({target}.sigmoid().detach().nan_to_num())",
            ]
        )

    def _read(self) -> str:
        source = self.pick()
        if source is None:
            return ""
        new = f"r{self.count}_{len(self.lines)}"
        return self.random.choice(
            [
                f"{new} = {source}.tolist()",
                f"{new} = {source}.sum().item()",
                f"{new} = str({source})",
                f"{new} = bool(({source} == 0).any())",
            ]
        )

    def _cut(self) -> str:
        return "sync()"

    def _loop(self) -> str:
        """The same step several times, with other numbers."""
        target = self.pick(lambda t: t.is_floating_point())
        if target is None:
            return ""
        numbers = self.random.sample([0.5, 1.5, -2.0, 3.0, 0.25], 3)
        body = self.random.choice([f"{target}.add_(k)", f"{target}.mul_(k).sub_(1)", f"{target} = {target} * k + 1"])
        return f"for k in {numbers}: {body}; sync()"

    def _forget(self) -> str:
        found = self.tensors()
        return f"del {self.random.choice(found)}" if len(found) > 3 else ""

    def _autograd(self) -> str:
        leaf = self.pick(lambda t: t.is_floating_point() and not t.requires_grad)
        grown = self.pick(lambda t: t.requires_grad and t.is_floating_point())
        if grown is None or self.random.random() < 0.3:
            return f"{leaf}.requires_grad_()" if leaf else ""
        return self.random.choice(
            [
                f"({grown} * {grown}).sum().backward()",
                f"{grown}.sin().mean().backward()",
                f"{self.name()} = {grown}.exp() * 2",
                f"{self.name()} = {grown} * {grown}.detach()",
                f"with torch.no_grad(): {grown}.mul_(0.5)",
                f"{self.name()}, = torch.autograd.grad(({grown} ** 2).sum(), {grown})",
            ]
        )

    def _metadata(self) -> str:
        source = self.pick()
        if source is None:
            return ""
        other = self.pick()
        # A bool of which a byte is neither 0 nor 1, which a write through another dtype makes, has no defined value.
        whole = f"({source} if {source}.dtype is not torch.bool else {source}.to(torch.uint8))"
        return self.random.choice(
            [
                f"{source}.t_()",
                f"{source}.squeeze_()",
                f"{source}.unsqueeze_(0)",
                f"{source}.data = {other}.data.clone()",
                f"{self.name()} = {whole}.view(torch.int32)",
            ]
        )

    def _wrong(self) -> str:
        one, two = self.pick(), self.pick()
        return self.random.choice(
            [
                f"{one} @ {two}",
                f"{one} + {two}",
                f"{one}.view(7, 13)",
                f"torch.cat([{one}, {two}], 1)",
                f"{one}.sum(9)",
                f"{one}.add_({two})",
                f"{one} & {two}",
            ]
        )

    def _elsewhere(self) -> str:
        """Work on the second device."""
        source = self.pick()
        there = self.tensors(prefix="u")
        if not there or self.random.random() < 0.3:
            self.count += 1
            return f"u{self.count} = {source}.to(E, copy=True)"
        other = self.random.choice(there)
        return self.random.choice(
            [
                f"{other}.add_(1)",
                f"{other} *= 2",
                f"{self.name()} = {other}.to(D, copy=True)",
                f"{other}.copy_({source})",
                f"{other}.view(-1).neg_()",
            ]
        )


_KINDS: list[Any] = [
    Writer._create,
    Writer._unary,
    Writer._binary,
    Writer._promote,
    Writer._reduce,
    Writer._several,
    Writer._matmul,
    Writer._index,
    Writer._view,
    Writer._inplace,
    Writer._out,
    Writer._random,
    Writer._read,
    Writer._cut,
    Writer._loop,
    Writer._forget,
    Writer._autograd,
    Writer._metadata,
    Writer._wrong,
    Writer._elsewhere,
]
_WEIGHTS = [6, 8, 12, 4, 6, 5, 3, 6, 16, 18, 4, 4, 4, 5, 3, 4, 10, 4, 3, 3]


def program(seed: int, lines: int = 24) -> list[str]:
    """The program of this seed."""
    return Writer(seed, lines).write()
