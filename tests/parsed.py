"""Python files as syntax trees, parsed once for all tests of a process that look through the package."""

from __future__ import annotations

import ast
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


@cache
def tree_of(path: Path) -> ast.Module:
    """Return the tree of a file; no test changes it."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a file, as ``ast.walk`` yields them."""
    return tuple(ast.walk(tree_of(path)))
