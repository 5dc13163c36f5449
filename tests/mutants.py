"""Mutants of a Python module: each changes one node of the syntax tree that decides what the program does."""

from __future__ import annotations

import ast
import collections
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

#: Calls that inform people, and keywords that do: what they are given is not mutated.
SPOKEN = re.compile(r"print|log|LOG|warn|debug|info|exception|add_argument|ArgumentParser|TypeVar|cast")
SPOKEN_KEYWORDS = {"help", "description", "prog", "color", "alpha", "fontsize", "linewidth", "label", "metavar"}
#: In these modules no text is changed: most of it is markup and words.
PRESENTATION = re.compile(r"fedtta\.(server\.report|benchmarks\.tables\.(plots|pages|index)|simulation\.__main__)")
SYMMETRIC = {"max", "min", "isclose", "allclose", "gcd", "isdisjoint", "maximum", "minimum"}

NEGATED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
SHIFTED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
}  # fmt: skip
SWAPPED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One change of a module: the bytes from `start` to `end` of its file become `after`."""

    module: str
    line: int
    kind: str
    before: str
    after: str
    start: int
    end: int

    def apply(self, source: str) -> str:
        """Return the source with this change; all other bytes stay."""
        raw = source.encode()
        return (raw[: self.start] + self.after.encode() + raw[self.end :]).decode()


def changes(node: ast.AST, texts: bool = True) -> Iterator[tuple[str, ast.AST]]:
    """Yield (kind, replacement) for each change of a single node."""
    match node:
        case ast.Compare(ops=[op], left=left, comparators=others):
            for kind, table in (("comparison", NEGATED), ("boundary", SHIFTED)):
                if type(op) in table:
                    yield kind, ast.Compare(left, [table[type(op)]()], others)
        case ast.BinOp(left, op, right) if type(op) in SWAPPED:
            yield "arithmetic", ast.BinOp(left, SWAPPED[type(op)](), right)
        case ast.AugAssign(target, op, value) if type(op) in SWAPPED:
            yield "arithmetic", ast.AugAssign(target, SWAPPED[type(op)](), value)
        case ast.BoolOp(op, values):
            yield "boolean", ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "boolean", operand
        case ast.Constant(value=bool() as value):
            yield "boolean", ast.Constant(not value)
        case ast.Constant(value=int() | float() as value):
            yield "number", ast.Constant(value + 1)
        case ast.Constant(value=str() as value) if texts and " " not in value:  # a space: words for people
            yield "text", ast.Constant(value + "x")
        case ast.Return(value=value) if value is not None and not _is_none(value):
            yield "return", ast.Return(ast.Constant(None))
        case ast.Expr(value=ast.Call()):
            yield "call", ast.Pass()
        case ast.Raise():
            yield "raise", ast.Pass()
        case ast.Call(func, [ast.expr() as a, ast.expr() as b, *rest], keywords):
            starred = isinstance(a, ast.Starred) or isinstance(b, ast.Starred)
            alike = isinstance(a, ast.Constant) == isinstance(b, ast.Constant)  # f(x, 1): an error of any type
            if alike and not starred and ast.dump(a) != ast.dump(b) and _called(node) not in SYMMETRIC:
                yield "arguments", ast.Call(func, [b, a, *rest], keywords)
        case ast.If(test=ast.Name() | ast.Call() | ast.Attribute() as test):
            yield "condition", ast.UnaryOp(ast.Not(), test)


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _called(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below and at this one that decide what the program does.

    Left out are docstrings, annotations, decorators, texts of errors, reports to people, formatted strings, imports.
    """
    match node:
        case ast.Import() | ast.ImportFrom() | ast.JoinedStr() | ast.Expr(value=ast.Constant()):
            return
        case ast.If(test=test) if re.search("TYPE_CHECKING|__name__", ast.unparse(test)):
            return
        case ast.Assign(targets=[ast.Name(id="__all__" | "paper" | "papers" | "title" | "adapts")]):
            return
        case ast.Expr(value=ast.Call() as call) | (ast.Call() as call) if SPOKEN.match(_called(call)):
            return
        case ast.Subscript(value=ast.Name(id="Literal")) | ast.keyword(arg=str()) if (
            not isinstance(node, ast.keyword) or node.arg in SPOKEN_KEYWORDS
        ):
            return
    yield node
    if isinstance(node, ast.Raise):
        return
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "msg", "type_comment"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _code(child)


def mutants(module: str, source: str) -> list[Mutant]:
    """Return every mutant of a module, in the order of the file."""
    lines = [0]
    for line in source.encode().splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    found = []
    for node in _code(ast.parse(source)):
        for kind, new in changes(node, texts=not PRESENTATION.match(module)):
            target = node.test if kind == "condition" else node  # type: ignore[attr-defined]
            start = lines[target.lineno - 1] + target.col_offset
            end = lines[target.end_lineno - 1] + target.end_col_offset
            after = ast.unparse(new)
            after = f"({after})" if isinstance(new, ast.expr) and not isinstance(new, ast.Constant) else after
            before = source.encode()[start:end].decode()
            found.append(Mutant(module, target.lineno, kind, before, after, start, end))
    return found


def chosen(module: str, source: str, count: int, seed: int) -> list[Mutant]:
    """Return `count` mutants of a module, of as many kinds as there are; the same for each seed."""
    draw = random.Random(f"{seed}:{module}")
    kinds = collections.defaultdict(list)
    for one in mutants(module, source):
        kinds[one.kind].append(one)
    for same in kinds.values():
        draw.shuffle(same)
    order = sorted(kinds)
    draw.shuffle(order)
    taken = [(turn, place, one) for place, kind in enumerate(order) for turn, one in enumerate(kinds[kind])]
    return [one for _, _, one in sorted(taken, key=lambda entry: entry[:2])[:count]]
