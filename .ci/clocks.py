"""A check of tests: no verdict by seconds, and no sleep above 50 ms.

    python .ci/clocks.py [PATH …]    tests/, or these files and folders; exits 1 at a finding

In a test a bound in seconds is a hang guard of 30 s at least. This finds, in the source:

- a sleep that is longer than 50 ms, or whose length is not a number;
- a comparison of elapsed time with less than 30 s, and a deadline that is less than 30 s away;
- a wait (`wait`, `wait_for`, `join`, `result`, `communicate`, `get`, `acquire`, `run`, …) for less
  than 30 s: a busy host decides what it returns.

What is left is in `EXCEPTIONS`, each with its reason. An exception that nothing needs is a finding.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

GUARD_S = 30.0
SLEEP_S = 0.05

CLOCKS = {"monotonic", "perf_counter", "time", "monotonic_ns", "perf_counter_ns"}
WAITS = {
    "wait", "wait_for", "join", "result", "communicate", "acquire", "run", "exception", "timeout",
    "check_output", "check_call", "call", "get", "put",
}  # fmt: skip
ONLY_BY_NAME = {"run", "check_output", "check_call", "call", "get", "put", "communicate", "acquire"}
"""Calls whose bound is the argument `timeout`; elsewhere it is the last positional one, too."""

EXCEPTIONS = {
    "tests/chaos/engine/outage.py::suffer": "paces an outage's prompts; --whole takes its length",
    "tests/chaos/long_runs/memory_soak.py::soak": "paces samples and faults; it judges bytes",
}
"""`path::function`, and why its seconds decide nothing about the product."""

Finding = tuple[int, str, str]
"""The line, the function around it, and what is wrong."""


class Reader(ast.NodeVisitor):
    """The findings of one file."""

    def __init__(self, tree: ast.Module) -> None:
        self.findings: list[Finding] = []
        self._numbers = dict(_named_numbers(tree))
        self._elapsed: set[str] = set()
        self._functions: list[str] = []

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._functions.append(node.name)
        before, self._elapsed = self._elapsed, set(self._elapsed)
        self.generic_visit(node)
        self._elapsed = before
        self._functions.pop()

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_Assign(self, node: ast.Assign) -> None:
        if self._is_elapsed(node.value):
            self._elapsed |= {name.id for name in node.targets if isinstance(name, ast.Name)}
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        sides = [node.left, *node.comparators]
        if any(map(self._is_elapsed, sides)):
            for bound in map(self._number, sides):
                if bound is not None and 0 < bound < GUARD_S:
                    self._find(node, f"elapsed time compared with {bound:g} s")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if isinstance(node.op, ast.Add) and _is_clock(node.left):
            until = self._number(node.right)
            if until is not None and 0 < until < GUARD_S:
                self._find(node, f"a deadline in {until:g} s")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = _name_of(node.func)
        if name == "sleep" and node.args:
            length = self._number(node.args[0])
            if length is None:
                self._find(node, "a sleep of no fixed length")
            elif length > SLEEP_S:
                self._find(node, f"a sleep of {length:g} s")
        elif name in WAITS:
            bound = self._bound(node, name)
            if bound is not None and 0 < bound < GUARD_S:
                self._find(node, f"a wait of {bound:g} s")
        self.generic_visit(node)

    def _bound(self, call: ast.Call, name: str) -> float | None:
        for argument in call.keywords:
            if argument.arg in ("timeout", "timeout_s", "longest_s"):
                return self._number(argument.value)
        if name in ONLY_BY_NAME or not call.args:
            return None
        return self._number(call.args[-1])

    def _is_elapsed(self, node: ast.expr) -> bool:
        match node:
            case ast.Name(id=name):
                return name in self._elapsed
            case ast.BinOp(op=ast.Sub(), left=left):
                return _is_clock(left)
        return False

    def _number(self, node: ast.expr) -> float | None:
        match node:
            case ast.Constant(value=int() | float() as value):
                return float(value)
            case ast.Name(id=name):
                return self._numbers.get(name)
            case ast.UnaryOp(op=ast.USub()):
                return None
            case ast.BinOp(left=left, op=op, right=right):
                a, b = self._number(left), self._number(right)
                if a is None or b is None:
                    return None
                match op:
                    case ast.Mult():
                        return a * b
                    case ast.Add():
                        return a + b
                    case ast.Div() if b:
                        return a / b
        return None

    def _find(self, node: ast.expr, what: str) -> None:
        self.findings.append((node.lineno, ".".join(self._functions) or "<module>", what))


def _named_numbers(tree: ast.Module) -> Iterator[tuple[str, float]]:
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=value)) if (
                isinstance(value, int | float)
            ):
                yield name, float(value)


def _name_of(function: ast.expr) -> str:
    match function:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""


def _is_clock(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and _name_of(node.func) in CLOCKS


def findings_in(source: str) -> list[Finding]:
    tree = ast.parse(source)
    reader = Reader(tree)
    reader.visit(tree)
    return reader.findings


def main(arguments: list[str]) -> int:
    paths = [Path(argument) for argument in arguments or ["tests"]]
    unused, count = set(EXCEPTIONS), 0
    for path in (file for start in paths for file in _files_of(start)):
        for line, function, what in findings_in(path.read_text()):
            place = f"{path}::{function}"
            unused.discard(place)
            if place not in EXCEPTIONS:
                print(f"{path}:{line}: {function}: {what}")
                count += 1
    for place in sorted(unused) if not arguments else []:
        print(f"{place}: nothing there needs its exception")
        count += 1
    return 1 if count else 0


def _files_of(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
