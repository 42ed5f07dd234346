"""The rules of design sections 2 and 7 that a reader relies on, checked on the source itself."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import networkx as nx
import pytest

from npusim.config.load import list_devices, load_device

if TYPE_CHECKING:
    from collections.abc import Collection

PACKAGE = Path(__file__).resolve().parents[1] / "npusim"
SOURCES = sorted(PACKAGE.rglob("*.py"))

#: From low to high; parts of one layer do not import one another unless listed in WITHIN.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("units", "errors", "sanitize", "cache"),
    ("formats", "frames", "layout"),
    ("config",),
    ("ir",),
    ("numerics", "timing"),
    ("algorithms", "machines"),
    ("node", "ttir"),
    ("schedules",),
    ("kernel", "machine", "simulation"),
    ("report", "explore", "tune", "invariance", "validate", "stress", "probe", "baseline", "pytest_plugin"),
    ("run", "cli"),
    ("__main__",),
)
#: (who, whom) within one layer: ``report`` shows what the others return.
WITHIN = frozenset(
    {
        # A machine runs the form of an algorithm; no algorithm knows a machine.
        ("machines", "algorithms"),
        ("report", "validate"),
        ("report", "explore"),
        ("report", "tune"),
        ("tune", "explore"),
        ("pytest_plugin", "baseline"),
        ("pytest_plugin", "explore"),
        ("baseline", "report"),
        ("baseline", "explore"),
        ("validate", "invariance"),
        ("validate", "explore"),
        # Random vectors are read and held to bits in one way.
        ("probe", "validate"),
        ("report", "invariance"),
        # Choices that would hold are the changes that `diff` tries; points are tasks of a search's executors.
        ("stress", "validate"),
        ("stress", "explore"),
        ("report", "stress"),
    }
)

#: What a part may import of a lower one, where that is not all of it: a schedule builds programs and
#: knows neither meaning of them; bytes and kernels of a node progress by the code of `timing.link`
#: (design section 4), into a result that reports read like any other.
ONLY_THESE: dict[tuple[str, str], frozenset[str]] = {
    ("schedules", "numerics"): frozenset(),
    ("schedules", "timing"): frozenset(),
    ("algorithms", "numerics"): frozenset(),
    ("algorithms", "timing"): frozenset(),
    ("machines", "numerics"): frozenset(),
    ("machines", "timing"): frozenset(),
    ("node", "algorithms"): frozenset({"npusim.algorithms.split_rules"}),
    ("node", "machines"): frozenset(),
    ("node", "numerics"): frozenset(
        {"npusim.numerics.evaluate", "npusim.numerics.executor", "npusim.numerics.reference", "npusim.numerics.result"}
    ),
    ("node", "timing"): frozenset({"npusim.timing.link", "npusim.timing.result"}),
}

#: Library -> the only files (or folders) that may import it.
ONLY_IN: dict[str, tuple[str, ...]] = {
    "simpy": ("timing/des.py", "timing/link.py", "timing/gpu_pipes.py", "node/"),
    "networkx": ("node/topology.py",),
    "pydantic": ("config/",),
    "pydantic_core": ("config/",),
    "ruamel": ("config/",),
    "yaml": (),
    "typer": ("cli/", "cli.py"),
    "altair": ("report/charts.py",),
    "jinja2": ("report/page.py",),
    "vl_convert": ("report/page.py",),
    "triton": ("ttir/child.py", "ttir/compiler.py", "ttir/record.py"),
    "scipy": ("validate/least_squares.py",),
}


#: Faults that are known and reported, by rule: none other may come, and what is mended is struck off.
OUTSTANDING: dict[str, frozenset[str]] = {}


def assert_only_known(rule: str, wrong: set[str]) -> None:
    known = OUTSTANDING.get(rule, frozenset())
    assert not wrong - known, "\n".join(sorted(wrong - known))
    assert not known - wrong, f"mended: strike off OUTSTANDING[{rule!r}] {sorted(known - wrong)}"


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=name_of(path))


@cache
def nodes_of(tree: ast.Module) -> tuple[ast.AST, ...]:
    """Return all nodes of a file: many tests look through them."""
    return tuple(ast.walk(tree))


def imported(path: Path) -> list[tuple[int, str]]:
    """Return (line, full module name) of every import of a file."""
    return imports_of(parsed(path), name_of(path))


@cache
def imports_of(tree: ast.Module, name: str) -> list[tuple[int, str]]:
    """Return (line, full module name) of every import: in functions, for type checkers, by ``import_module``."""
    found = []
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name}:{node.lineno}: relative import"
            module = node.module or ""
            if module == "npusim":
                found += [(node.lineno, f"npusim.{alias.name}") for alias in node.names]
            else:
                found.append((node.lineno, module))
        elif isinstance(node, ast.Call) and _callee(node) == "import_module":
            found += [(node.lineno, a.value) for a in node.args if isinstance(a, ast.Constant)]
    return found


def module_of(path: Path) -> str:
    return ".".join(["npusim", *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(".__init__")


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def layer_of(part: str) -> int:
    for rank, parts in enumerate(LAYERS):
        if part in parts:
            return rank
    raise AssertionError(f"npusim/{part} belongs to no layer: add it to LAYERS")


def test_each_layer_imports_only_from_those_below() -> None:
    wrong = set()
    for path in SOURCES:
        own = part_of(path)
        if own == "__init__":
            continue  # the package's own lazy table of names
        for _, module in imported(path):
            if not module.startswith("npusim."):
                continue
            other = module.split(".")[1]
            if other == own or (own, other) in WITHIN or other.startswith("__"):
                continue
            allowed = ONLY_THESE.get((own, other))
            if layer_of(other) >= layer_of(own) or (allowed is not None and module not in allowed):
                wrong.add(f"{own} imports {other}")
    assert_only_known("layer", wrong)


def circles(modules: dict[str, ast.Module]) -> list[str]:
    """Return the folders and parts (``machines.ascend``, ``run``) that import one another in a circle.

    Every import counts: inside a function, for type checkers only, or by its name as text.
    """
    graph: nx.DiGraph[str] = nx.DiGraph()
    for name, tree in modules.items():
        own = folder_of(name, modules)
        for _, module in imports_of(tree, name):
            other = folder_of(module, modules)
            if other not in (own, ""):
                graph.add_edge(own, other)
    return sorted(" <-> ".join(sorted(c)) for c in nx.strongly_connected_components(graph) if len(c) > 1)


def folder_of(module: str, modules: Collection[str]) -> str:
    """Return the folder of a module or of a name in one; a file beside the folders stands for itself.

    Empty for what is none of ``modules``.
    """
    while module and module not in modules:
        module = module.rpartition(".")[0]
    is_folder = any(other.startswith(f"{module}.") for other in modules)
    folder = module.rpartition(".")[0]
    return module if is_folder or folder == "npusim" else folder


def test_no_folder_imports_another_in_a_circle() -> None:
    assert not circles({module_of(p): parsed(p) for p in SOURCES if part_of(p) != "__init__"})


def test_no_files_import_one_another_in_a_longer_circle() -> None:
    """Two files may name each other's types; a folder's own file, which repeats names of others, is none of them."""
    modules = {module_of(p): parsed(p) for p in SOURCES if p.stem != "__init__"}
    graph: nx.DiGraph[str] = nx.DiGraph()
    for name, tree in modules.items():
        graph.add_edges_from((name, other) for _, other in imports_of(tree, name) if other in modules)
    assert [c for c in nx.simple_cycles(graph) if len(c) > 2] == []


def run_time_circles(modules: dict[str, ast.Module]) -> list[str]:
    """Return the files that import one another when they are loaded or called: all imports but those for type checkers.

    A folder's own file repeats names of others, and is none of them.
    """
    graph: nx.DiGraph[str] = nx.DiGraph()
    for name, tree in modules.items():
        typed = {id(node) for guard in nodes_of(tree) if _is_for_types(guard) for node in guarded(guard)}
        for node in (n for n in nodes_of(tree) if id(n) not in typed):
            graph.add_edges_from((name, other) for other in named_by(node) if other in modules)
    return sorted(" <-> ".join(sorted(c)) for c in nx.strongly_connected_components(graph) if len(c) > 1)


def named_by(node: ast.AST) -> list[str]:
    """Return the modules that a statement or a call imports, by all names that may be files."""
    if isinstance(node, ast.ImportFrom):
        return [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    is_by_name = isinstance(node, ast.Call) and _callee(node) == "import_module"
    return [str(a.value) for a in node.args if isinstance(a, ast.Constant)] if is_by_name else []


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def guarded(guard: ast.AST) -> list[ast.AST]:
    """Return all nodes of the body of a condition."""
    assert isinstance(guard, ast.If)
    return [node for statement in guard.body for node in ast.walk(statement)]


def test_no_two_files_import_one_another_at_run_time() -> None:
    assert not run_time_circles({module_of(p): parsed(p) for p in SOURCES if p.stem != "__init__"})


@pytest.mark.parametrize(
    ("back", "is_circle"),
    [
        ("from npusim.a import first", True),
        ("from npusim import a", True),
        ("import npusim.a", True),
        ("def later():\n    from npusim.a import first", True),
        ("def later():\n    import_module('npusim.a')", True),
        ("if TYPE_CHECKING:\n    x = 1\nelse:\n    from npusim.a import first", True),
        ("if TYPE_CHECKING:\n    from npusim.a import First", False),
        ("x = 1", False),
    ],
)
def test_the_search_for_run_time_circles_finds_one(back: str, *, is_circle: bool) -> None:
    sources = {"npusim.a": "from npusim.b import second", "npusim.b": "from npusim.c import third", "npusim.c": back}
    found = run_time_circles({name: ast.parse(text) for name, text in sources.items()})
    assert found == (["npusim.a <-> npusim.b <-> npusim.c"] if is_circle else [])


@pytest.mark.parametrize(
    "back",
    [
        "def show():\n    from npusim.report.text import plain",
        "class R:\n    def show(self):\n        import npusim.report.text",
        "if TYPE_CHECKING:\n    from npusim.report import text",
        "import_module('npusim.report.text')",
    ],
)
def test_the_search_for_circles_finds_one(back: str) -> None:
    forth = {"npusim.report": "", "npusim.report.text": "from npusim.timing import des"}
    sources = {**forth, "npusim.timing": "", "npusim.timing.des": "from npusim.timing import link", "npusim.run": back}
    assert circles({name: ast.parse(text) for name, text in sources.items()}) == []
    sources["npusim.timing.link"] = back
    assert circles({name: ast.parse(text) for name, text in sources.items()}) == ["npusim.report <-> npusim.timing"]


@pytest.mark.parametrize("library", ONLY_IN)
def test_a_library_is_imported_only_where_it_belongs(library: str) -> None:
    wrong = [
        f"{name_of(path)}:{line}"
        for path in SOURCES
        for line, module in imported(path)
        if module.split(".")[0] == library and not name_of(path).startswith(ONLY_IN[library] or "-")
    ]
    assert not wrong, "\n".join(wrong)


def test_formats_knows_no_hardware_file_and_no_other_library() -> None:
    allowed = {"numpy", "ml_dtypes", "numba", "llvmlite", "npusim", "__future__"}
    wrong = [
        f"{name_of(path)}:{line}: {module}"
        for path in SOURCES
        if part_of(path) == "formats"
        for line, module in imported(path)
        if module.split(".")[0] not in allowed | set(sys.stdlib_module_names)
    ]
    assert not wrong, "\n".join(wrong)


def test_only_the_command_line_prints() -> None:
    wrong = [
        f"{name_of(path)}:{node.lineno}"
        for path in SOURCES
        if part_of(path) != "cli"
        for node in nodes_of(parsed(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not wrong, "\n".join(wrong)


# ---------------------------------------------------------------- parts of devices


#: Where parts of a device are named outside machines/, and why.
NAMES_PARTS = {
    "config/device.py": "the kinds of core that a file of a family must have, checked where its lines are known",
    "config/cases.py": "quantities of measurement files, as profilers call them",
    "formats/mma_arithmetic.py": "names of arithmetic: ascend.cube.k16.f16.f32",
}
#: Names of parts that are words of their own too: sought neither in sentences nor in identifiers.
WORDS = frozenset({"fma", "l1", "rf", "scalar", "sm", "tensor", "vector", "warps"})


@cache
def parts_of_devices() -> frozenset[str]:
    """Return the cores, engines (whose queues are called so too) and buffers of the packaged devices."""
    cores = [core for name in list_devices() for core in load_device(name).cores.items()]
    return frozenset(part for name, core in cores for part in (name, *core.engines, *core.buffers))


def named_parts(tree: ast.Module) -> set[str]:
    """Return the parts of devices that code names in text or identifiers; what documents it does not count."""
    documents = {id(node.body[0]) for node in nodes_of(tree) if isinstance(getattr(node, "body", None), list)}
    texts, identifiers = set[str](), set[str]()
    for node in nodes_of(tree):
        if isinstance(node, ast.Expr) and id(node) in documents:
            documents.add(id(node.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documents:
            words = set(re.findall(r"[A-Za-z0-9]+", node.value))
            texts |= words if " " not in node.value else {word for word in words if word.lower() not in WORDS}
        else:
            for field in ("id", "attr", "arg", "name"):
                identifiers |= set(str(getattr(node, field, "")).lower().split("_"))
    parts = parts_of_devices()
    special = {part for part in parts if part.lower() not in WORDS}
    return parts & texts | {part for part in special if part.lower() in texts | identifiers}


def test_only_machines_name_a_devices_queues_pipes_and_buffers() -> None:
    found = {name_of(p) for p in SOURCES if part_of(p) != "machines" and named_parts(parsed(p))}
    assert found == set(NAMES_PARTS), {name: named_parts(parsed(PACKAGE / name)) for name in found - set(NAMES_PARTS)}


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("queue = 'aic.CUBE'", 2),
        ("if pipe == 'MTE2': pass", 1),
        ("spec.buffers['UB']", 1),
        ("ub_bytes = 1", 1),
        ("def f(l0c): pass", 1),
        ("fits(in_l0a=1)", 1),
        ("f'{core}.VECTOR'", 1),
        ("place = 'ub'", 1),
        ("vector = tensor_parallel", 0),
        ("x = 'a vector of tensors'", 0),
        ("import npusim.machines.sm", 0),
        ('def f():\n    """Through UB."""', 0),
    ],
)
def test_the_search_for_parts_finds_them(source: str, count: int) -> None:
    assert len(named_parts(ast.parse(source))) == count


# ---------------------------------------------------------------- state of modules


MUTABLE_CALLS = frozenset(
    {"list", "dict", "set", "defaultdict", "deque", "Counter", "OrderedDict", "bytearray", "WeakKeyDictionary"}
)


def mutable_values(module: ast.Module) -> list[str]:
    """Return the names under which a module keeps something that can be changed."""
    names = []
    for node in module.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(isinstance(t, ast.Name) and t.id == "__all__" for t in targets):
            continue
        value = node.value
        kinds = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
        is_call = isinstance(value, ast.Call) and _callee(value) in MUTABLE_CALLS
        if isinstance(value, kinds) or is_call:
            names.append(ast.unparse(targets[0]))
    return names


def _callee(call: ast.Call) -> str:
    func = call.func
    return func.id if isinstance(func, ast.Name) else func.attr if isinstance(func, ast.Attribute) else ""


def test_modules_keep_no_state_that_can_change() -> None:
    assert_only_known("state", {f"{name_of(p)}: {n}" for p in SOURCES for n in mutable_values(parsed(p))})


def test_no_function_rebinds_a_modules_name() -> None:
    wrong = [
        f"{name_of(path)}:{node.lineno}: global {', '.join(node.names)}"
        for path in SOURCES
        for node in nodes_of(parsed(path))
        if isinstance(node, ast.Global)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("A = {}", 1),
        ("A: dict[str, int] = {'a': 1}", 1),
        ("A = [1]", 1),
        ("A = set()", 1),
        ("A = [x for x in y]", 1),
        ("A = MappingProxyType({})", 0),
        ("A = (1, 2)", 0),
        ("A = frozenset({1})", 0),
        ("__all__ = ['a']", 0),
        ("def f():\n    a = {}", 0),
    ],
)
def test_the_search_for_state_finds_what_can_change(source: str, count: int) -> None:
    assert len(mutable_values(ast.parse(source))) == count


# ---------------------------------------------------------------- sizes


def test_a_class_name_stands_for_one_thing() -> None:
    where: dict[str, list[str]] = {}
    for path in SOURCES:
        for node in nodes_of(parsed(path)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where.setdefault(node.name, []).append(name_of(path))
    assert not {name: paths for name, paths in where.items() if len(paths) > 1}


def test_functions_have_at_most_60_lines() -> None:
    wrong = {
        f"{name_of(path)}: {node.name}"
        for path in SOURCES
        for node in nodes_of(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 - lines_of_docstring(node) > 60
    }
    assert_only_known("length", wrong)


def lines_of_docstring(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the lines of a docstring: one that describes every parameter makes no function long."""
    first = node.body[0]
    is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return (first.end_lineno or 0) - first.lineno + 1 if is_text else 0


def test_no_file_is_called_utils_or_helpers() -> None:
    vague = {"utils", "util", "helpers", "helper", "misc", "common", "manager", "data_utils"}
    assert not [name_of(p) for p in SOURCES if p.stem in vague]


def test_every_public_module_class_and_function_says_what_it_is() -> None:
    wrong = set()
    for path in SOURCES:
        tree = parsed(path)
        if tree.body and not ast.get_docstring(tree):
            wrong.add(name_of(path))
        for node in tree.body:
            is_public = isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")
            if is_public and not ast.get_docstring(node):
                wrong.add(f"{name_of(path)}: {node.name}")
    assert_only_known("docstring", wrong)


# ---------------------------------------------------------------- numbers


#: Numbers that need no source anywhere (design section 4; -1 is the last element of a sequence).
PLAIN_NUMBERS = frozenset({-1, 0, 1, 2, -1.0})
#: Unit conversions and identities that are no hardware facts.
CONVERSIONS = frozenset({1e6, 1e9, 1e12, 1e-6, 8, 100})


def unsourced_numbers(text: str) -> list[tuple[int, str]]:
    """Return (line, number) of the literals without a comment or docstring beside them.

    Beside is: on the line, on a comment line directly above the statement, or in the docstring of
    the function or class it stands in (which then must mention that very number).  A setting that
    users change says what it is: ``Field(..., description=...)``.
    """
    tree = ast.parse(text)
    comments = {t.start[0] for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type == tokenize.COMMENT}
    found: list[tuple[int, str]] = []
    _visit(tree, [], "", comments, found)
    return found


def _is_described(call: ast.Call) -> bool:
    return any(k.arg == "description" for k in call.keywords)


def _visit(
    node: ast.AST, statements: list[ast.stmt], words: str, comments: set[int], found: list[tuple[int, str]]
) -> None:
    if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
        words += " " + (ast.get_docstring(node) or "")
    if isinstance(node, ast.Call) and _callee(node) == "Field" and _is_described(node):
        return
    if isinstance(node, ast.stmt):
        statements = [*statements, node]
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        here = {node.lineno, *(s.lineno - 1 for s in statements[-1:])}
        value = node.value
        spelt = {str(value), f"{value:,}"}
        is_named = any(re.search(rf"(?<![\d.]){re.escape(s)}(?![\d]|\.\d)", words) for s in spelt)
        if value not in PLAIN_NUMBERS | CONVERSIONS and not is_named and not here & comments:
            found.append((node.lineno, str(value)))
    for child in ast.iter_child_nodes(node):
        _visit(child, statements, words, comments, found)


def test_numbers_in_timing_machines_and_schedules_cite_where_they_come_from() -> None:
    wrong = {
        f"{name_of(path)}: {number}"
        for path in SOURCES
        if part_of(path) in ("timing", "algorithms", "machines", "schedules")
        for _, number in unsourced_numbers(path.read_text(encoding="utf-8"))
    }
    assert_only_known("number", wrong)


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("x = 2 * y + 1 - 1", 0),
        ("x = 17 * y", 1),
        ("x = 17 * y  # ascend.md 1.5", 0),
        ("# ascend.md 1.5\nx = 17 * y", 0),
        ("# ascend.md 1.5\n\nx = 17 * y", 1),
        ('def f():\n    """Return 17 times y (ascend.md 1.5)."""\n    return 17 * y', 0),
        ('def f():\n    """Return 170 times y."""\n    return 17 * y', 1),
        ("x = Field(default=17, description='rows of a slice')", 0),
        ("x = Field(default=17)", 1),
    ],
)
def test_the_search_for_numbers_finds_those_without_a_source(source: str, count: int) -> None:
    assert len(unsourced_numbers(source)) == count


#: Functions outside ``simulation/`` that take a request: verbs, a search's words, and two examinations of a run.  There
#: were 27 before a search, a plan and words of a command line were objects of their own.  Four came with stress
#: and `diff --judge`, two with tune, one with launches in sequence.
MOST_OF_REQUESTS = 16


def test_few_functions_outside_simulation_take_a_request() -> None:
    takers = {
        f"{name_of(path)}: {node.name}"
        for path in SOURCES
        if part_of(path) != "simulation"
        for node in nodes_of(parsed(path))
        if isinstance(node, ast.FunctionDef)
        for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        if a.annotation is not None and re.search(r"\bRequest\b", ast.unparse(a.annotation).partition("[")[0])
    }
    assert "cli/run.py: run" in takers
    assert len(takers) <= MOST_OF_REQUESTS, sorted(takers)


def test_what_a_device_is_is_asked_of_its_machine() -> None:
    # Files of devices and nodes are told apart where they are read, nowhere else.
    wrong = {
        f"{name_of(path)}:{node.lineno}"
        for path in SOURCES
        if name_of(path) != "config/node.py"
        for node in nodes_of(parsed(path))
        if isinstance(node, ast.Call) and _callee(node) == "isinstance" and "NodeDevice" in ast.unparse(node.args[1])
    }
    assert_only_known("device", wrong)


#: A test of a problem's kind: of an object, or of a schedule's class of problems.
ASKS_FOR_KIND = re.compile(r"is(instance|subclass)\([^)]*Problem\b")
#: Lines with such a test, by file: each may lose some, and no file may begin.  A problem answers for itself.
ASKED: dict[str, int] = {"machines/ascend/machine.py": 2, "simulation/node.py": 5, "simulation/plan.py": 5}


def test_a_problem_is_not_asked_for_its_kind() -> None:
    found = {name_of(path): len(ASKS_FOR_KIND.findall(path.read_text(encoding="utf-8"))) for path in SOURCES}
    assert {name: count for name, count in found.items() if count > ASKED.get(name, 0)} == {}
    assert sum(ASKED.values()) <= 12
