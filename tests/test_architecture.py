"""The rules of design sections 2 and 7 that a reader relies on, checked on the source itself."""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import networkx as nx
import pytest

from npusim.config.family import FAMILIES, Processor
from npusim.config.load import list_devices, load_device
from tests.parsed import docstrings_and_comments, nodes_in, nodes_of, nodes_of_kind, tree_of

if TYPE_CHECKING:
    from collections.abc import Collection

PACKAGE = Path(__file__).resolve().parents[1] / "npusim"
SOURCES = sorted(PACKAGE.rglob("*.py"))

#: From low to high; a folder in a folder stands for itself where it is listed. Parts of one layer do not import one
#: another unless listed in WITHIN.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("late_methods",),
    ("units", "errors", "sanitize", "cache", "identity"),
    ("formats", "frames"),
    ("config",),
    ("program", "program.ir"),
    ("program.numerics", "program.timing"),
    ("kernels", "kernels.form"),
    ("kernels.attention",),
    ("machines",),
    ("machines.node",),
    ("kernels.declare",),
    ("kernels.triton",),
    ("kernels.tilelang",),
    ("kernel", "machine"),
    ("library",),
    ("simulation",),
    ("report", "studies", "pytest_plugin"),
    ("run", "cli"),
    ("__main__",),
)
#: (who, whom) within one layer: ``report`` shows what studies return, which check the words of its tables.
WITHIN = frozenset({("report", "studies"), ("studies", "report"), ("pytest_plugin", "studies")})
#: Which study uses which, at most six: those whose tasks are computed elsewhere use `workers`, which is no study.
STUDIES = frozenset(
    {
        ("baseline", "explore"),
        ("probe", "validate"),
        ("stress", "validate"),
        *(("evaluate", other) for other in ("validate", "stress", "tune")),
    }
)

#: What a part may import of a lower one, where that is not all of it: a schedule builds programs and
#: knows neither meaning of them; bytes and kernels of a node progress by the code of `timing.link`
#: (design section 4), into a result that reports read like any other.
ONLY_THESE: dict[tuple[str, str], frozenset[str]] = {
    **{
        (part, meaning): frozenset()
        for part in ("kernels.form", "kernels.attention", "kernels.declare", "machines", "library")
        for meaning in ("program.numerics", "program.timing")
    },
    ("machines.node", "kernels.attention"): frozenset({"npusim.kernels.attention.split_rules"}),
    ("machines.node", "kernels.form"): frozenset(),
    ("machines.node", "machines"): frozenset(),
    ("machines.node", "program.numerics"): frozenset(
        {
            "npusim.program.numerics.evaluate",
            "npusim.program.numerics.executor",
            "npusim.program.numerics.reference",
            "npusim.program.numerics.bits_result",
        }
    ),
    ("machines.node", "program.timing"): frozenset(
        {"npusim.program.timing.link", "npusim.program.timing.timing_result"}
    ),
}

#: Library -> the only files (or folders) that may import it.
ONLY_IN: dict[str, tuple[str, ...]] = {
    "simpy": ("program/timing/des.py", "program/timing/link.py", "program/timing/gpu_pipes.py", "machines/node/"),
    "networkx": ("machines/node/topology.py",),
    "pydantic": ("config/",),
    "pydantic_core": ("config/",),
    "ruamel": ("config/",),
    "yaml": (),
    "typer": ("cli/", "cli.py"),
    "altair": ("report/charts.py",),
    "jinja2": ("report/page.py",),
    "vl_convert": ("report/page.py", "report/plot.py"),
    "tilelang": ("kernels/tilelang/recording.py", "kernels/tilelang/prim_func.py"),
    "tvm": ("kernels/tilelang/recording.py", "kernels/tilelang/prim_func.py"),
    "triton": (
        "kernels/triton/compiler_process.py",
        "kernels/triton/compiler.py",
        "kernels/triton/recording.py",
        "kernels/triton/releases.py",
    ),
    "mcp": ("cli/server.py",),
    "uvicorn": ("cli/server.py",),
    "scipy": ("studies/validate/least_squares.py",),
}


#: Faults that are known and reported, by rule: none other may come, and what is mended is struck off.
OUTSTANDING: dict[str, frozenset[str]] = {}


def assert_only_known(rule: str, wrong: set[str]) -> None:
    known = OUTSTANDING.get(rule, frozenset())
    assert not wrong - known, "\n".join(sorted(wrong - known))
    assert not known - wrong, f"mended: strike off OUTSTANDING[{rule!r}] {sorted(known - wrong)}"


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def imported(path: Path) -> list[tuple[int, str]]:
    """Return (line, full module name) of every import of a file."""
    return imports_of(tree_of(path), name_of(path))


@cache
def imports_of(tree: ast.Module, name: str) -> list[tuple[int, str]]:
    """Return (line, full module name) of every import: in functions, for type checkers, by ``import_module``."""
    found = [(node.lineno, alias.name) for node in nodes_of_kind(tree, ast.Import) for alias in node.names]
    for node in nodes_of_kind(tree, ast.ImportFrom):
        assert not node.level, f"{name}:{node.lineno}: relative import"
        module = node.module or ""
        if module == "npusim":
            found += [(node.lineno, f"npusim.{alias.name}") for alias in node.names]
        else:
            found.append((node.lineno, module))
    calls = [call for call in nodes_of_kind(tree, ast.Call) if _callee(call) == "import_module"]
    return found + [(call.lineno, str(a.value)) for call in calls for a in call.args if isinstance(a, ast.Constant)]


def module_of(path: Path) -> str:
    return ".".join(["npusim", *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(".__init__")


def part_of(path: Path) -> str:
    """Return the part of a file: the longest prefix of its module that `LAYERS` has, or its first folder."""
    return part_of_module(module_of(path)) or path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def part_of_module(module: str) -> str:
    names = module.removeprefix("npusim.").split(".")
    known = {part for parts in LAYERS for part in parts}
    return next((p for n in range(len(names), 0, -1) if (p := ".".join(names[:n])) in known), "")


def room_of(path: Path) -> str:
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
            other = part_of_module(module) or module.split(".")[1]
            if other == own or (own, other) in WITHIN or other.startswith("__"):
                continue
            allowed = ONLY_THESE.get((own, other))
            if layer_of(other) >= layer_of(own) or (allowed is not None and module not in allowed):
                wrong.add(f"{own} imports {other}")
    assert_only_known("layer", wrong)


def test_studies_use_one_another_where_it_is_listed() -> None:
    used = {
        (name_of(path).split("/")[1], module.split(".")[2])
        for path in SOURCES
        if part_of(path) == "studies" and name_of(path).count("/") > 1
        for _, module in imported(path)
        if module.startswith("npusim.studies.")
    }
    assert {(one, other) for one, other in used if other not in (one, "workers")} == STUDIES
    assert len(STUDIES) <= 6
    assert not {other for one, other in used if one == "workers"} - {"workers"}


def circles(modules: dict[str, ast.Module]) -> list[str]:
    """Return the folders and parts (``machines.ascend``, ``run``) that import one another in a circle.

    Every import counts: inside a function, for type checkers only, or by its name as text.
    """
    graph: nx.DiGraph[str] = nx.DiGraph()
    folders = {module[:at] for module in modules for at, letter in enumerate(module) if letter == "."}
    for name, tree in modules.items():
        own = folder_of(name, modules, folders)
        for _, module in imports_of(tree, name):
            other = folder_of(module, modules, folders)
            if other not in (own, ""):
                graph.add_edge(own, other)
    return sorted(" <-> ".join(sorted(c)) for c in nx.strongly_connected_components(graph) if len(c) > 1)


def folder_of(module: str, modules: Collection[str], folders: Collection[str]) -> str:
    """Return the folder of a module or of a name in one; a file beside the folders stands for itself.

    Empty for what is none of ``modules``; ``folders`` are all that have one of them.
    """
    while module and module not in modules:
        module = module.rpartition(".")[0]
    folder = module.rpartition(".")[0]
    return module if module in folders or folder == "npusim" else folder


def test_no_folder_imports_another_in_a_circle() -> None:
    assert not circles({module_of(p): tree_of(p) for p in SOURCES if part_of(p) != "__init__"})


def test_no_files_import_one_another_in_a_longer_circle() -> None:
    """Two files may name each other's types; a folder's own file, which repeats names of others, is none of them."""
    modules = {module_of(p): tree_of(p) for p in SOURCES if p.stem != "__init__"}
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
        guards = filter(_is_for_types, nodes_of_kind(tree, ast.If))
        typed = {id(node) for guard in guards for node in guarded(guard)}
        kinds = ast.ImportFrom, ast.Import, ast.Call
        for node in (n for kind in kinds for n in nodes_of_kind(tree, kind) if id(n) not in typed):
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


def _is_for_types(node: ast.If) -> bool:
    return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def guarded(guard: ast.If) -> list[ast.AST]:
    """Return all nodes of the body of a condition."""
    return [node for statement in guard.body for node in ast.walk(statement)]


def test_no_two_files_import_one_another_at_run_time() -> None:
    assert not run_time_circles({module_of(p): tree_of(p) for p in SOURCES if p.stem != "__init__"})


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
    forth = {"npusim.report": "", "npusim.report.text": "from npusim.program.timing import des"}
    sources = {
        **forth,
        "npusim.program.timing": "",
        "npusim.program.timing.des": "from npusim.program.timing import link",
        "npusim.run": back,
    }
    assert circles({name: ast.parse(text) for name, text in sources.items()}) == []
    sources["npusim.program.timing.link"] = back
    found = circles({name: ast.parse(text) for name, text in sources.items()})
    assert found == ["npusim.program.timing <-> npusim.report"]


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
        for node in nodes_of(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not wrong, "\n".join(wrong)


# ---------------------------------------------------------------- parts of devices


#: Where parts of a device are named outside machines/, and why.
NAMES_PARTS = {
    "config/family.py": "the entry points of npusim's own families, one of which is a folder named after its core",
    "config/cases.py": "quantities of measurement files, as profilers call them",
    "formats/mma_arithmetic.py": "names of arithmetic: ascend.cube.k16.f16.f32",
    "kernels/tilelang/prim_func.py": "a key of TileLang's, min_blocks_per_sm",
    "kernels/tilelang/expert.py": "words of TileLang-Ascend: memories and pipes that a program's text names",
    "kernels/tilelang/ascend_words.py": "words of TileLang-Ascend: allocations, and modes of an instruction",
}
#: Fields of syntax nodes that hold identifiers.
IDENTIFIERS = frozenset({"id", "attr", "arg", "name"})
#: Names of parts that are words of their own too: sought neither in sentences nor in identifiers.
WORDS = frozenset({"fma", "l1", "rf", "scalar", "sm", "tensor", "vector", "warps"})


@cache
def parts_of_devices() -> frozenset[str]:
    """Return the cores, engines (whose queues are called so too) and buffers of the packaged devices."""
    cores = [core for name in list_devices() for core in load_device(name).cores.items()]
    return frozenset(part for name, core in cores for part in (name, *core.engines, *core.buffers))


@cache
def _identifiers(kind: type[ast.AST]) -> tuple[str, ...]:
    """Return the fields of a kind of nodes that are identifiers."""
    return tuple(IDENTIFIERS.intersection(kind._fields))


def named_parts(tree: ast.Module) -> set[str]:
    """Return the parts of devices that code names in text or identifiers; what documents it does not count."""
    documents = {id(node.body[0]) for node in nodes_in(tree) if isinstance(getattr(node, "body", None), list)}
    texts, identifiers = set[str](), set[str]()
    for node in nodes_in(tree):
        if isinstance(node, ast.Expr) and id(node) in documents:
            documents.add(id(node.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documents:
            words = set(re.findall(r"[A-Za-z0-9]+", node.value))
            texts |= words if " " not in node.value else {word for word in words if word.lower() not in WORDS}
        else:
            identifiers.update(str(getattr(node, field)) for field in _identifiers(type(node)))
    identifiers = {part for one in identifiers for part in one.lower().split("_")}
    parts = parts_of_devices()
    special = {part for part in parts if part.lower() not in WORDS}
    return parts & texts | {part for part in special if part.lower() in texts | identifiers}


def test_only_machines_name_a_devices_queues_pipes_and_buffers() -> None:
    room = "machines/", "library/published/"  # decisions of kernels on a family's parts
    found = {name_of(p) for p in SOURCES if not name_of(p).startswith(room) and named_parts(tree_of(p))}
    assert found == set(NAMES_PARTS), {name: named_parts(tree_of(PACKAGE / name)) for name in found - set(NAMES_PARTS)}


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
    assert_only_known("state", {f"{name_of(p)}: {n}" for p in SOURCES for n in mutable_values(tree_of(p))})


def test_no_function_rebinds_a_modules_name() -> None:
    wrong = [
        f"{name_of(path)}:{node.lineno}: global {', '.join(node.names)}"
        for path in SOURCES
        for node in nodes_of_kind(tree_of(path), ast.Global)
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


# ---------------------------------------------------------------- searches


def test_nodes_comments_and_docstrings_are_those_of_python() -> None:
    source = 'a = "# no"  # one\nb = r"""two \\"""", f"""{a}""", b"""c""", \'"""\'  # "three"\nc = """f\'#"""\n'
    found = [piece for _, piece in docstrings_and_comments(source)]
    assert found == ["# one", '"""two \\""""', '# "three"', '"""f\'#"""']
    tree = ast.parse(Path(__file__).read_text(encoding="utf-8"))
    assert list(nodes_in(tree)) == list(ast.walk(tree))
    assert nodes_of_kind(tree, ast.Call) == [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


# ---------------------------------------------------------------- sizes


def test_a_class_name_stands_for_one_thing() -> None:
    where: dict[str, list[str]] = {}
    for path in SOURCES:
        for node in nodes_of_kind(tree_of(path), ast.ClassDef):
            if not node.name.startswith("_"):
                where.setdefault(node.name, []).append(name_of(path))
    assert not {name: paths for name, paths in where.items() if len(paths) > 1}


def test_functions_have_at_most_60_lines() -> None:
    wrong = {
        f"{name_of(path)}: {node.name}"
        for path in SOURCES
        for kind in (ast.FunctionDef, ast.AsyncFunctionDef)
        for node in nodes_of_kind(tree_of(path), kind)
        if node.end_lineno is not None and node.end_lineno - node.lineno + 1 - lines_of_docstring(node) > 60
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


#: Names of files that stand in two folders: none may come.
TWICE = frozenset({"__init__", "evaluation", "fa4", "recording"})


def test_a_file_name_stands_for_one_file() -> None:
    stems = [p.stem for p in SOURCES]
    assert {stem for stem in stems if stems.count(stem) > 1} == TWICE


def test_every_public_module_class_and_function_says_what_it_is() -> None:
    wrong = set()
    for path in SOURCES:
        tree = tree_of(path)
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
    places = [place for place, found in docstrings_and_comments(text) if found[0] == "#"]
    comments = {text.count("\n", 0, place) + 1 for place in places}
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
        if value in PLAIN_NUMBERS or value in CONVERSIONS or here & comments:
            return
        spelt = {str(value), f"{value:,}"}
        if not any(re.search(rf"(?<![\d.]){re.escape(s)}(?![\d]|\.\d)", words) for s in spelt):
            found.append((node.lineno, str(value)))
    for child in ast.iter_child_nodes(node):
        _visit(child, statements, words, comments, found)


#: Parts where a number needs a source beside it.
CITES = ("program.timing", "kernels.form", "kernels.attention", "kernels.declare", "machines", "library")


def test_numbers_in_timing_machines_and_schedules_cite_where_they_come_from() -> None:
    wrong = {
        f"{name_of(path)}: {number}"
        for path in SOURCES
        if part_of(path) in CITES
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
MOST_OF_REQUESTS = 17


def test_few_functions_outside_simulation_take_a_request() -> None:
    takers = {
        f"{name_of(path)}: {node.name}"
        for path in SOURCES
        if part_of(path) != "simulation"
        for node in nodes_of_kind(tree_of(path), ast.FunctionDef)
        for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        if a.annotation is not None and re.search(r"\bRequest\b", ast.unparse(a.annotation).partition("[")[0])
    }
    assert "cli/run_command.py: run" in takers
    assert len(takers) <= MOST_OF_REQUESTS, sorted(takers)


def test_what_a_device_is_is_asked_of_its_machine() -> None:
    # Files of devices and nodes are told apart where they are read, nowhere else.
    wrong = {
        f"{name_of(path)}:{node.lineno}"
        for path in SOURCES
        if name_of(path) != "config/node_file.py"
        for node in nodes_of_kind(tree_of(path), ast.Call)
        if _callee(node) == "isinstance" and "NodeDevice" in ast.unparse(node.args[1])
    }
    assert_only_known("device", wrong)


def test_a_device_and_a_node_run_on_one_path() -> None:
    """`run_plan` builds every result; what differs is in two classes that have the methods of one protocol alone."""
    built, methods = set[str](), dict[str, set[str]]()
    for path in SOURCES:
        calls = nodes_of_kind(tree_of(path), ast.Call)
        built |= {f"{name_of(path)}:{call.lineno}" for call in calls if _callee(call) == "RunData"}
        for node in nodes_of_kind(tree_of(path), ast.ClassDef):
            if node.name in ("RunParts", "DeviceParts", "NodeParts"):
                public = {f.name for f in node.body if isinstance(f, ast.FunctionDef) and not f.name.startswith("_")}
                methods[node.name] = public
    assert len(built) == 1, built
    assert (
        methods["RunParts"] == methods["DeviceParts"] == methods["NodeParts"] == {"estimate", "timing", "bits", "notes"}
    )


# ---------------------------------------------------------------- core families

#: Files outside machines/ with lines that name a core family of the package or import its machine, and how many there
#: are at most: they only become fewer.
NAMES_FAMILIES = {
    "config/family.py": 1,  # the entry points
    "kernel.py": 1,  # public classes of its fields
    "machine.py": 1,
    "library/fa4.py": 1,  # kernels of one family
    "library/two_level.py": 2,
    "library/volta_flash.py": 1,
    "kernels/triton/launch.py": 3,  # the code that Triton compiles for a GPU; a preset called "ascend"
    "kernels/triton/compiler.py": 2,
    "kernels/triton/releases.py": 1,  # a folder of Triton's called "nvidia"
    "kernels/triton/recording.py": 2,
}


def lines_with_families(tree: ast.Module, families: Collection[str]) -> set[int]:
    """Return the lines of text that is a family's name, and of imports of a family's machine."""
    folders = "ascend", "sm"
    imports = rf"npusim\.machines(\.| import )({'|'.join(folders)})\b"
    texts = [node for node in nodes_of_kind(tree, ast.Constant) if isinstance(node.value, str)]
    imported = [*nodes_of_kind(tree, ast.Import), *nodes_of_kind(tree, ast.ImportFrom)]
    return {node.lineno for node in texts if node.value in families} | {
        node.lineno for node in imported if re.search(imports, ast.unparse(node))
    }


def test_few_lines_outside_machines_name_a_family() -> None:
    families = set(FAMILIES) - set(get_args(Processor))
    found = {name_of(p): lines_with_families(tree_of(p), families) for p in SOURCES if room_of(p) != "machines"}
    counts = {name: len(lines) for name, lines in found.items() if lines}
    assert counts == NAMES_FAMILIES, {n: sorted(found[n]) for n in counts if counts[n] != NAMES_FAMILIES.get(n)}


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("if device.family == 'ascend': pass", 1),
        ("families = ['ascend', 'nvidia']", 1),
        ("from npusim.machines.sm.core import GroupFields", 1),
        ("def f():\n    from npusim.machines.ascend import plan", 1),
        ("from npusim.machines.base import Machine", 0),
        ("what = 'cores of ascend devices'", 0),
    ],
)
def test_the_search_for_families_finds_them(source: str, count: int) -> None:
    assert len(lines_with_families(ast.parse(source), {"ascend", "nvidia"})) == count


def test_a_file_of_the_library_imports_the_public_surface_and_numpy_alone() -> None:
    """As a user's file does: the package's own look-up and the standard library are all that there is besides."""
    allowed = {"numpy", "__future__", *sys.stdlib_module_names}
    files = [p for p in SOURCES if part_of(p) == "library" and p.stem != "__init__"]
    wrong = {
        f"{name_of(p)}:{line}: {module}"
        for p in files
        for line, module in imported(p)
        if module not in ("npusim.kernel", "npusim.machine") and module.split(".")[0] not in allowed
    }
    assert len(files) >= 30
    assert not wrong, "\n".join(sorted(wrong))


def test_a_kernel_declares_its_own_fields_alone() -> None:
    """Fields of machines are joined to a kernel's when it runs: no class of a schedule derives from a machine's."""
    of_machines = {
        node.name
        for p in SOURCES
        if room_of(p) == "machines"
        for node in tree_of(p).body
        if isinstance(node, ast.ClassDef)
    }
    assert "GroupFields" in of_machines
    wrong = {
        f"{name_of(p)}: {node.name}"
        for p in SOURCES
        if part_of(p) in ("kernels.declare", "library")
        for node in nodes_of_kind(tree_of(p), ast.ClassDef)
        if of_machines & {ast.unparse(base) for base in node.bases}
    }
    assert not wrong


def test_a_manifest_is_one_value_that_imports_no_machine() -> None:
    """`registered` imports the folder of a family; what the machine needs comes with the machine."""
    for folder in ("ascend", "sm"):
        path = PACKAGE / "machines" / folder / "__init__.py"
        modules = {module for _, module in imported(path) if module.startswith("npusim")}
        assert modules <= {"npusim.config.family", "npusim.machines.decisions"}, modules
    places = [tuple(place.split(":")) for place in FAMILIES.values()]
    assert len(set(places)) == len(FAMILIES)
    manifests = {
        (f"npusim.{name_of(p).removesuffix('/__init__.py').removesuffix('.py').replace('/', '.')}", target.id)
        for p in SOURCES
        for node in tree_of(p).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and _callee(node.value) == "CoreFamily"
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    assert manifests == {*places, ("npusim.machines.node_family", "NODE")}


# ---------------------------------------------------------------- kinds of problems


#: A test of a problem's kind: of an object, or of a schedule's class of problems.
ASKS_FOR_KIND = re.compile(r"is(instance|subclass)\([^)]*Problem\b")
#: Lines with such a test, by file of the one room that has them: each may lose some, and no file may begin.  A problem
#: answers for itself.
ASKED: dict[str, int] = {"simulation/node_run.py": 5, "simulation/plan.py": 4}


def test_a_problem_is_not_asked_for_its_kind() -> None:
    found = {name_of(path): len(ASKS_FOR_KIND.findall(path.read_text(encoding="utf-8"))) for path in SOURCES}
    assert {name: count for name, count in found.items() if count > ASKED.get(name, 0)} == {}
    assert len({name.split("/")[0] for name in ASKED}) == 1
    assert sum(ASKED.values()) <= 9


# ---------------------------------------------------------------- types


#: Names without a type, `Any`: a ceiling that only falls.
UNTYPED = 391


def test_names_have_types() -> None:
    found = sum(len(re.findall(r": Any\b", path.read_text(encoding="utf-8"))) for path in SOURCES)
    assert found <= UNTYPED, f"{found} names are Any: name the class, or a Protocol; object where a check narrows it"


# ---------------------------------------------------------------- what a run imports

#: Rooms whose files runs import: their dataclasses are compiled when they are used (`npusim.late_methods`).
OF_RUNS = "formats", "config", "program", "simulation", "report"
#: The same, of rooms in other rooms.
OF_RUNS_WITHIN = "kernels/form/", "kernels/attention/", "kernels/declare/", "machines/ascend/", "machines/sm/"


def test_dataclasses_that_runs_import_are_compiled_on_use() -> None:
    wrong = {
        name_of(path)
        for path in SOURCES
        if room_of(path) in OF_RUNS or name_of(path).startswith(OF_RUNS_WITHIN)
        for node in tree_of(path).body
        if isinstance(node, ast.ImportFrom) and node.module == "dataclasses"
        for alias in node.names
        if alias.name == "dataclass"
    }
    assert not wrong, f"import dataclass from npusim.late_methods: {sorted(wrong)}"


# ---------------------------------------------------------------- documents

#: Calls that write JSON from an object without declared columns: only fewer may come.  None of them is a row of a
#: table: the table writes each in words, in labelled lines or a sentence (the cost of a chain, a problem that a kernel
#: computes instead, a changed choice, the rank of a group, a judgement, the surviving units), or a figure draws it
#: (the sizes of scores).
FROM_OBJECTS = {
    "cli/check_commands.py": 1,
    "cli/probe_command.py": 1,
    "report/findings.py": 3,
    "report/layouts.py": 1,
    "report/worst_inputs.py": 1,
}


def test_rows_of_documents_are_written_from_declared_columns() -> None:
    """`Columns` declares a row of a table and of its JSON document once."""
    found: dict[str, int] = {}
    for path in SOURCES:
        if room_of(path) in ("report", "cli"):
            calls = [n for n in nodes_of_kind(tree_of(path), ast.Call) if _callee(n) == "asdict"]
            found |= {name_of(path): len(calls)} if calls else {}
    assert found == FROM_OBJECTS


# ---------------------------------------------------------------- names in docstrings

#: A module of the package, or a name in one, as docstrings and comments write it; two rooms are gone.
ROOMS = *(p.name for p in PACKAGE.iterdir() if p.is_dir()), "ir", "numerics", "timing", "schedules", "algorithms"
NAMED_MODULE = re.compile(rf"`(?:npusim\.)?((?:{'|'.join(ROOMS)})(?:\.\w+)+)`")
#: Names with a dot that are no modules: files, and an attribute of a result.
NO_MODULES = ("config.json", "report.html", "numerics.error.rmse", "numerics.output")


def _names_something(parts: list[str], folder: Path) -> bool:
    """Return whether a dotted name leads to a folder, a file, or a name in a file, from ``folder`` on."""
    for number, part in enumerate(parts):
        file = folder / f"{part}.py"
        if (folder / part).is_dir():
            folder /= part
        else:
            rest = parts[number + 1 :] if file.exists() else parts[number:]
            file = file if file.exists() else folder / "__init__.py"
            text = file.read_text(encoding="utf-8") if file.exists() and (number or file.name != "__init__.py") else ""
            return bool(text) and (not rest or re.search(rf"\b{rest[0]}\b", text) is not None)
    return True


def test_modules_that_docstrings_name_exist() -> None:
    named = [(name_of(path), m[1]) for path in SOURCES for m in NAMED_MODULE.finditer(path.read_text(encoding="utf-8"))]
    assert len(named) > 20
    bases = PACKAGE, PACKAGE / "program"
    lost = {
        both
        for both in named
        if both[1] not in NO_MODULES and not any(_names_something(both[1].split("."), base) for base in bases)
    }
    assert not lost


# ---------------------------------------------------------------- the page

PAGE = (PACKAGE / "README.md").read_text(encoding="utf-8")


def test_the_tree_of_the_page_is_the_packages_and_fits_a_screen() -> None:
    tree = re.search(r"```\nnpusim/\n(.*?)```", PAGE, re.DOTALL)
    assert tree
    lines, above, shown = tree[1].splitlines(), dict[int, Path](), set[str]()
    for line in lines:
        depth = len(line) - len(line.lstrip())
        for name in re.findall(r"^ *((?:[a-z]+/ ?)+)", line)[0].split():
            above[depth] = above.get(depth - 2, Path()) / name if depth > 2 else Path(name)
            shown.add(above[depth].as_posix())
    folders = {p.relative_to(PACKAGE) for p in PACKAGE.rglob("*") if p.is_dir() and p.name != "__pycache__"}
    assert shown == {p.as_posix() for p in folders}
    assert len(lines) <= 50
    assert max(map(len, lines)) <= 80


def test_files_and_names_of_the_page_exist() -> None:
    """Files by their path in the repository or the package, names by their text in the package's sources."""
    quoted = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL))
    files = {q for q in quoted if re.fullmatch(r"[\w./]+(/|\.(py|yaml|csv|md|toml))", q) and q != ".yaml"}
    bases = PACKAGE, PACKAGE.parent, *(p for p in PACKAGE.rglob("*") if p.is_dir())
    assert len(files) > 50
    assert {f for f in files if not any((base / f).exists() for base in bases)} == {"config.json"} & files
    names = {q for q in quoted if re.fullmatch(r"[A-Za-z_][\w.]*", q) and q not in files}
    texts = [p.read_text(encoding="utf-8") for root in ("npusim", "tests", "hwconfigs") for p in _texts(root)]
    words = {word for text in texts for word in re.findall(r"\w+", text)}
    assert len(names) > 80
    assert {n for n in names if not set(n.split(".")) <= words} == set()


def _texts(root: str) -> list[Path]:
    return [p for p in (PACKAGE.parent / root).rglob("*") if p.suffix in (".py", ".yaml")]
