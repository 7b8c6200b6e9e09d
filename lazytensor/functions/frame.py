"""The statements and expressions of Python that a pure function may have, run one after the other on real values.

What they do to tensors, objects and functions is the evaluator's to say (:mod:`evaluate`); a kind of statement that has
no method here refuses the function.
"""

# ruff: noqa: D102  (the methods are named after what they run)

from __future__ import annotations

import ast
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from lazytensor.functions import allowed
from lazytensor.functions.reads import Refused

if TYPE_CHECKING:
    from lazytensor.functions.evaluate import Evaluator

SECONDS = 1.0  # that one evaluation may take


class Return_(Exception):
    """The function has returned this value."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Break_(Exception):
    """The loop is left."""


class Continue_(Exception):
    """The loop goes on with its next turn."""


class Frame:
    """The running of one function's statements, with its variables."""

    def __init__(self, evaluator: Evaluator, namespace: dict[str, Any], variables: dict[str, Any]) -> None:
        self.evaluator = evaluator
        self.namespace = namespace
        self.variables = variables

    # --- statements

    def run(self, body: list[ast.stmt]) -> None:
        for statement in body:
            if time.perf_counter() > self.evaluator.deadline:
                raise Refused(f"it takes more than {SECONDS} s to look at")
            method = getattr(self, type(statement).__name__, None)
            if method is None:
                raise Refused(f"it has {_named(statement)}")
            method(statement)

    def Pass(self, statement: ast.Pass) -> None:
        pass

    def Expr(self, statement: ast.Expr) -> None:
        self.value(statement.value)

    def Return(self, statement: ast.Return) -> None:
        raise Return_(None if statement.value is None else self.value(statement.value))

    def Break(self, statement: ast.Break) -> None:
        raise Break_

    def Continue(self, statement: ast.Continue) -> None:
        raise Continue_

    def Assign(self, statement: ast.Assign) -> None:
        value = self.value(statement.value)
        for target in statement.targets:
            self.assign(target, value)

    def AnnAssign(self, statement: ast.AnnAssign) -> None:
        if statement.value is not None:
            self.assign(statement.target, self.value(statement.value))

    def AugAssign(self, statement: ast.AugAssign) -> None:
        if not isinstance(statement.target, ast.Name):
            raise Refused(f"it writes to {ast.unparse(statement.target)}")
        before = self.name(statement.target.id)
        if not allowed.is_data(before):
            raise Refused(f"it changes {statement.target.id} in place")
        self.variables[statement.target.id] = self.binary(statement.op, before, self.value(statement.value))

    def assign(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            self.variables[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List) and not any(isinstance(e, ast.Starred) for e in target.elts):
            parts = self.items(value)
            if len(parts) != len(target.elts):
                raise Refused("it unpacks another number of values")
            for each, part in zip(target.elts, parts, strict=True):
                self.assign(each, part)
        else:
            raise Refused(f"it writes to {ast.unparse(target)}")

    def items(self, value: Any) -> list[Any]:
        if isinstance(value, torch.Tensor):
            return list(self.evaluator.operate(lambda a, k: a[0].unbind(0), [value], {}))
        return self.evaluator.items(value)

    def If(self, statement: ast.If) -> None:
        self.run(statement.body if self.truth(statement.test) else statement.orelse)

    def Assert(self, statement: ast.Assert) -> None:
        if not self.truth(statement.test):
            raise Refused("an assertion does not hold")

    def For(self, statement: ast.For) -> None:
        for each in self.items(self.value(statement.iter)):
            self.assign(statement.target, each)
            if self.leaves(statement.body):
                return
        self.run(statement.orelse)

    def While(self, statement: ast.While) -> None:
        while self.truth(statement.test):
            if self.leaves(statement.body):
                return
        self.run(statement.orelse)

    def leaves(self, body: list[ast.stmt]) -> bool:
        """Run the body of a loop once; whether it leaves the loop."""
        try:
            self.run(body)
        except Break_:
            return True
        except Continue_:
            pass
        return False

    # --- expressions

    def value(self, expression: ast.expr) -> Any:
        method = getattr(self, type(expression).__name__, None)
        if method is None:
            raise Refused(f"it has {_named(expression)}")
        return method(expression)

    def truth(self, expression: ast.expr) -> bool:
        return self.evaluator.truth(self.value(expression))

    def Constant(self, expression: ast.Constant) -> Any:
        return expression.value

    def Name(self, expression: ast.Name) -> Any:
        return self.name(expression.id)

    def name(self, name: str) -> Any:
        if name in self.variables:
            return self.variables[name]
        return self.evaluator.reads.global_variable(self.namespace, name)

    def Tuple(self, expression: ast.Tuple) -> Any:
        return tuple(self.values(expression.elts))

    def List(self, expression: ast.List) -> Any:
        return self.evaluator.own(self.values(expression.elts))

    def values(self, expressions: list[ast.expr]) -> list[Any]:
        found: list[Any] = []
        for each in expressions:
            if isinstance(each, ast.Starred):
                found += self.items(self.value(each.value))
            else:
                found.append(self.value(each))
        return found

    def Attribute(self, expression: ast.Attribute) -> Any:
        return self.evaluator.attribute(self.value(expression.value), expression.attr)

    def Subscript(self, expression: ast.Subscript) -> Any:
        return self.evaluator.item(self.value(expression.value), self.value(expression.slice))

    def Slice(self, expression: ast.Slice) -> Any:
        parts = (expression.lower, expression.upper, expression.step)
        return slice(*(None if part is None else self.value(part) for part in parts))

    def IfExp(self, expression: ast.IfExp) -> Any:
        return self.value(expression.body if self.truth(expression.test) else expression.orelse)

    def BoolOp(self, expression: ast.BoolOp) -> Any:
        wanted = isinstance(expression.op, ast.Or)
        found = None
        for each in expression.values:
            found = self.value(each)
            if each is expression.values[-1] or self.evaluator.truth(found) == wanted:
                break
        return found

    def UnaryOp(self, expression: ast.UnaryOp) -> Any:
        value = self.value(expression.operand)
        if isinstance(expression.op, ast.Not):
            return not self.evaluator.truth(value)
        run = allowed.UNARY[type(expression.op).__name__]
        if isinstance(value, torch.Tensor):
            return self.evaluator.operate(lambda a, k: run(a[0]), [value], {})
        if not allowed.is_data(value):
            raise Refused(f"it computes with a {type(value).__name__}")
        return run(value)

    def BinOp(self, expression: ast.BinOp) -> Any:
        return self.binary(expression.op, self.value(expression.left), self.value(expression.right))

    def binary(self, operator: ast.operator, left: Any, right: Any) -> Any:
        return self.compute(allowed.BINARY[type(operator).__name__], left, right)

    def compute(self, run: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
        if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
            return self.evaluator.operate(lambda a, k: run(a[0], a[1]), [left, right], {})
        if allowed.is_data(left) and allowed.is_data(right):
            return run(left, right)
        kind = left.__class__
        if kind in (list, tuple) and right.__class__ is kind:
            made = run(kind(self.items(left)), kind(self.items(right)))
            return self.evaluator.own(made) if made.__class__ is list else made
        raise Refused(f"it computes with a {kind.__name__} and a {type(right).__name__}")

    def Compare(self, expression: ast.Compare) -> Any:
        if len(expression.ops) != 1:
            parts = [expression.left, *expression.comparators]
            for left, operator, right in zip(parts, expression.ops, parts[1:], strict=False):
                found = self.compare(operator, self.value(left), self.value(right))
                if not self.evaluator.truth(found):
                    break
            return found
        return self.compare(expression.ops[0], self.value(expression.left), self.value(expression.comparators[0]))

    def compare(self, operator: ast.cmpop, left: Any, right: Any) -> Any:
        if isinstance(operator, ast.Is | ast.IsNot):
            if not any(side is None or isinstance(side, bool | type) for side in (left, right)):
                raise Refused("it compares objects by identity")
            return (left is right) == isinstance(operator, ast.Is)
        if isinstance(operator, ast.In | ast.NotIn):
            if not allowed.is_data(left) or not all(map(allowed.is_data, self.items(right))):
                raise Refused("it looks for an object")
            found = left in (right if right.__class__ is str else self.items(right))
            return found == isinstance(operator, ast.In)
        return self.compute(allowed.COMPARISONS[type(operator).__name__], left, right)

    def Call(self, expression: ast.Call) -> Any:
        function = self.value(expression.func)
        args = self.values(expression.args)
        kwargs = {}
        for each in expression.keywords:
            if each.arg is None:
                raise Refused("it calls with a dictionary of arguments")
            kwargs[each.arg] = self.value(each.value)
        return self.evaluator.call(function, args, kwargs)

    def ListComp(self, expression: ast.ListComp | ast.GeneratorExp) -> Any:
        inner = Frame(self.evaluator, self.namespace, dict(self.variables))
        return self.evaluator.own(list(inner.generated(expression.generators, expression.elt)))

    GeneratorExp = ListComp  # when it is run cannot be told, since nothing changes

    def generated(self, generators: list[ast.comprehension], element: ast.expr) -> Iterable[Any]:
        if not generators:
            yield self.value(element)
            return
        first, *rest = generators
        if first.is_async:
            raise Refused("it has an asynchronous loop")
        for each in self.items(self.value(first.iter)):
            self.assign(first.target, each)
            if all(self.truth(condition) for condition in first.ifs):
                yield from self.generated(rest, element)


def _named(node: ast.AST) -> str:
    return f"a {type(node).__name__} in line {getattr(node, 'lineno', '?')} of its source"
