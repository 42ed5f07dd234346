"""Finds values that Python code passes from one iteration of a loop to the next, and code whose results cannot be
followed.

A proof for every length repeats the iterations of a loop, so that an iteration may depend only on the loop's number.
The body of such a loop consists of a few kinds of statements, which have no state of their own, and reads no name that
an earlier iteration has set.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType

#: Kinds of statements and expressions that the body of a loop may contain.
_STATEMENTS = (ast.Expr, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.If, ast.For, ast.With, ast.Pass, ast.Continue)
_EXPRESSIONS = (
    *(ast.Name, ast.Constant, ast.BinOp, ast.UnaryOp, ast.Compare, ast.BoolOp, ast.IfExp, ast.Subscript, ast.Slice),
    *(ast.Tuple, ast.List, ast.Attribute, ast.Call, ast.keyword, ast.Starred),
)
_PARTS = (ast.operator, ast.unaryop, ast.cmpop, ast.boolop, ast.expr_context, ast.withitem, ast.arguments, ast.arg)
_FUNCTIONS = frozenset({"min", "max", "range", "len", "abs"})
_ATTRIBUTES = frozenset({"shape", "dtype"})
#: Functions that can distinguish a growing integer from another integer, or that have a state.
_BANNED = frozenset(
    [
        "type",
        "hasattr",
        "getattr",
        "setattr",
        "vars",
        "id",
        "repr",
        "format",
        "eval",
        "exec",
        "next",
        "iter",
        "issubclass",
    ]
)


def _tree(path: str) -> ast.Module:
    return _parsed(Path(path).read_text(encoding="utf-8"))


@cache
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


def of_function(path: str, line: int) -> Iterator[str]:
    """Yield reasons why the function of a kernel, or an enclosing function, may treat a growing integer differently
    from an integer.
    """
    for top in _tree(path).body:
        if isinstance(top, ast.FunctionDef) and _first_line(top) <= line <= (top.end_lineno or 0):
            for node in ast.walk(top):
                name = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
                if isinstance(node, ast.Try) or name in _BANNED:
                    yield f"line {getattr(node, 'lineno', line)}: {name or 'try'} is code that a proof does not follow"


def of_loop(path: str, line: int, names: Mapping[str, object]) -> Iterator[str]:
    """Yield reasons why iterations of the loop that begins at a line may depend on earlier ones.

    ``names``: the values of names where the loop begins.
    """
    every = list(ast.walk(_tree(path)))
    loops = [n for n in every if isinstance(n, ast.For) and n.iter.lineno <= line <= (n.iter.end_lineno or 0)]
    loop = loops[-1] if loops else None
    is_word = loop is not None and isinstance(loop.iter, ast.Call) and _is_word(loop.iter.func, names)
    if loop is None or not is_word or not isinstance(loop.target, ast.Name):
        yield f"line {line}: a loop that grows must be written as for t in T.serial(...)"
        return
    functions = {n.name: n for n in every if isinstance(n, ast.FunctionDef)}
    yield from _kinds(loop.body, names, functions, set())
    stored = {n.id for s in loop.body for n in ast.walk(s) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    carried = list[str]()
    always = _known(loop.body, {loop.target.id}, stored, carried)
    own = {id(n) for s in loop.body for n in ast.walk(s)}
    for other in (n for n in every if isinstance(n, ast.For) and isinstance(n.target, ast.Name) and id(n) not in own):
        target = other.target.id if isinstance(other.target, ast.Name) else ""
        own |= {id(n) for s in other.body for n in ast.walk(s) if isinstance(n, ast.Name) and n.id == target}
    after = {n.id for n in every if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load) and id(n) not in own}
    for name in dict.fromkeys([*carried, *sorted((stored - always) & after)]):
        yield f"line {loop.lineno}: {name} may have a value of an earlier iteration"


def _first_line(function: ast.FunctionDef) -> int:
    return min([function.lineno, *(d.lineno for d in function.decorator_list)])


def _kinds(
    body: Sequence[ast.stmt], names: Mapping[str, object], functions: Mapping[str, ast.FunctionDef], seen: set[str]
) -> Iterator[str]:
    """Yield the statements and expressions that may have a state, also those of called functions."""
    for node in (n for s in body for n in ast.walk(s)):
        line = getattr(node, "lineno", 0)
        if not isinstance(node, (*_STATEMENTS, *_EXPRESSIONS, *_PARTS, ast.Return)) or (
            isinstance(node, ast.Return) and not seen
        ):
            yield f"line {line}: {type(node).__name__} is code that a proof does not follow in a loop"
        elif isinstance(node, ast.Call):
            yield from _call(node, names, functions, seen)
        elif isinstance(node, ast.Attribute) and not _is_word(node, names) and node.attr not in _ATTRIBUTES:
            yield f"line {line}: .{node.attr} is code that a proof does not follow in a loop"
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            of = node.value.id if isinstance(node.value, ast.Name) else ""
            if isinstance(names.get(of), list | dict | set) or of not in names:
                yield f"line {line}: a loop that grows stores to an element of an object other than a buffer"


def _call(
    node: ast.Call, names: Mapping[str, object], functions: Mapping[str, ast.FunctionDef], seen: set[str]
) -> Iterator[str]:
    if _is_word(node.func, names) or (isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS - names.keys()):
        return
    name = node.func.id if isinstance(node.func, ast.Name) else ast.unparse(node.func)
    if not isinstance(names.get(name), FunctionType) or name not in functions:
        yield f"line {node.lineno}: {name} is a function that a proof does not follow in a loop"
    elif name not in seen:
        seen.add(name)
        yield from _kinds(functions[name].body, names, functions, seen)


def _is_word(node: ast.expr, names: Mapping[str, object]) -> bool:
    """Return whether an expression is a word of the language, such as ``T.tile.add``."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and isinstance(names.get(node.id), ModuleType)


def _known(body: Sequence[ast.stmt], known: set[str], stored: set[str], carried: list[str]) -> set[str]:
    """Return the names that an iteration has set after these statements; add those that it reads before it sets
    them.
    """
    for statement in body:
        if isinstance(statement, ast.If):
            _read(statement.test, known, stored, carried)
            known = _known(statement.body, set(known), stored, carried) & _known(
                statement.orelse, set(known), stored, carried
            )
        elif isinstance(statement, ast.For):
            _read(statement.iter, known, stored, carried)
            targets = {n.id for n in ast.walk(statement.target) if isinstance(n, ast.Name)}
            _known(statement.body, known | targets, stored, carried)
        elif isinstance(statement, ast.With):
            for item in statement.items:
                _read(item.context_expr, known, stored, carried)
            known = _known(statement.body, set(known), stored, carried)
        elif isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets_of = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
                carried += [statement.target.id] if statement.target.id not in known else []
            for part in ([statement.value] if statement.value else []) + targets_of:
                _read(part, known, stored, carried)
            known = known | {n.id for x in targets_of for n in ast.walk(x) if isinstance(n, ast.Name)}
        else:
            _read(statement, known, stored, carried)
    return known


def _read(node: ast.AST, known: set[str], stored: set[str], carried: list[str]) -> None:
    loads = (n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load))
    carried += [name for name in loads if name in stored and name not in known]
