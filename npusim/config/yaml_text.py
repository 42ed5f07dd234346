"""Strict YAML 1.2: text as plain data, with the line of every key.

One pass composes the node graph, which carries line numbers and shows duplicate keys; plain values are built from the
graph, so that error messages need no second, slower round-trip parse.
"""

from __future__ import annotations

import re
import warnings
from types import MappingProxyType
from typing import TYPE_CHECKING

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, ReusedAnchorWarning, YAMLError
from ruamel.yaml.nodes import MappingNode, ScalarNode, SequenceNode

from npusim.errors import SpecError

if TYPE_CHECKING:
    from ruamel.yaml.constructor import SafeConstructor

_TAG = "tag:yaml.org,2002:"
#: Number of values of one file, with aliases expanded: the largest packaged file has 1,500.
MOST_VALUES = 100_000
#: Characters of a number; Python writes no integer of more than 4,300 digits, hexadecimal ones included.
MOST_DIGITS = 400
#: Words of ruamel's parser, and what they mean in the file.
_WORDS = MappingProxyType(
    {
        "but got '<stream end>'": "but the file ends",
        "but found '<stream end>'": "but the file ends",
        "got '<stream end>'": "the file ends",
        "found unexpected end of stream": "the file ends before the closing quote",
        "expected <block end>": "expected a key or an item with the indentation of the first one",
        "but found '<block mapping start>'": "but found a deeper indentation",
        "but found '<block sequence start>'": "but found a deeper indentation",
        "but found '<scalar>'": "but found a value",
        "but got '<scalar>'": "but got a value",
        "expected the node content": "expected a value",
        "mapping values are not allowed here": "a key is not allowed here: check the indentation; quote text with ': '",
        "could not find expected ':'": "no ':' after a key",
    }
)


def parse_mapping(text: str, *, file: str) -> tuple[dict[str, object], dict[str, int]]:
    """Return the content of YAML text, which errors call ``file``, and the line of each dotted key (``""``: 1).

    Raises `SpecError` if the text has more than `MOST_VALUES` values, is not YAML 1.2, is empty or not a mapping, or
    has a key twice.
    """
    yaml = YAML(typ="safe", pure=True)
    root = _composed(yaml, text, file)
    if not isinstance(root, MappingNode):
        what = "is empty" if root is None else "is not a mapping of keys to values"
        raise SpecError(f"{file}:1  the file {what}")
    lines = {"": 1}
    try:
        return _Builder(file, lines, yaml.constructor).mapping("", root), lines
    except RecursionError:
        raise SpecError(f"{file}:1  an alias is inside its own anchor") from None


def _composed(yaml: YAML, text: str, file: str) -> object:
    """Return the root node of YAML text, None if it is empty; raise `SpecError` if it is faulty."""
    try:
        with warnings.catch_warnings():
            # A second anchor with the same name would silently change the meaning of later aliases.
            warnings.simplefilter("error", ReusedAnchorWarning)
            root: object = yaml.compose(text)
            return root
    except ReusedAnchorWarning as error:
        # The text of the error: "found duplicate anchor 'x' first occurrence ... second occurrence ... line 3".
        line = re.findall(r"line (\d+)", str(error))[-1]
        name = re.findall(r"anchor (\S+)", str(error))[0]
        raise SpecError(f"{file}:{line}  duplicate anchor {name}") from None
    except MarkedYAMLError as error:
        raise SpecError(f"{file}:{_fault(error)}") from None
    except YAMLError as error:
        raise SpecError(f"{file}:1  not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise SpecError(f"{file}:1  nested too deeply") from None


def _fault(error: MarkedYAMLError) -> str:
    """Return the line of an error, where the faulty part starts, and what is missing there."""
    mark, start = error.problem_mark or error.context_mark, error.context_mark
    line = mark.line + 1 if mark else 1
    starts = f" (it starts in line {start.line + 1})" if start and start.line + 1 != line else ""
    context = f"{error.context}{starts}" if error.context else ""
    problem = error.problem or ""
    for parser_words, words in _WORDS.items():
        problem = problem.replace(parser_words, words)
    return f"{line}  not valid YAML: {', '.join(part for part in (context, problem) if part)}"


def parse_scalar(text: str) -> object:
    """Return ``text`` as YAML 1.2 reads it as a value: number, true/false, or the text itself."""
    yaml = YAML(typ="safe", pure=True)
    try:
        root = yaml.compose(text)
        if isinstance(root, ScalarNode):
            return _Builder("", {}, yaml.constructor).scalar("", root)
    except (YAMLError, SpecError, RecursionError):  # nested too deeply: not a scalar
        pass
    return text


class _Builder:
    """Plain values from composed nodes; stores the line of each key, and refuses a duplicate key."""

    def __init__(self, file: str, lines: dict[str, int], constructor: SafeConstructor) -> None:
        self.file = file
        self.lines = lines
        self.constructor = constructor
        self.count = 0

    def value(self, key: str, node: object) -> object:
        self.count += 1
        if self.count > MOST_VALUES:
            first = key.partition(".")[0]
            raise SpecError(
                f"{self.file}:{self.lines[first]}  {first}: more than {MOST_VALUES:,} values up to here; do "
                "aliases multiply the values?"
            )
        match node:
            case MappingNode():
                return self.mapping(key, node)
            case SequenceNode():
                return self.sequence(key, node)
            case ScalarNode():
                return self.scalar(key, node)
        raise TypeError(f"not a YAML node: {node!r}")

    def mapping(self, key: str, node: MappingNode) -> dict[str, object]:
        result: dict[str, object] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, ScalarNode):
                raise SpecError(f"{self.file}:{line}  {key}: a key must be plain text")
            name = str(key_node.value)
            path = f"{key}.{name}" if key else name
            if name in result:
                first = self.lines[path]
                raise SpecError(f"{self.file}:{line}  {path}: duplicate key; first given in line {first}")
            self.lines[path] = line
            result[name] = self.value(path, value_node)
        return result

    def sequence(self, key: str, node: SequenceNode) -> list[object]:
        items: list[object] = []
        for index, item in enumerate(node.value):
            path = f"{key}.{index}"
            self.lines[path] = item.start_mark.line + 1
            items.append(self.value(path, item))
        return items

    def scalar(self, key: str, node: ScalarNode) -> object:
        kind = str(node.tag).removeprefix(_TAG)
        # YAML 1.2 has no dates: a value that looks like one is text.
        if kind in ("str", "timestamp"):
            return str(node.value)
        line = node.start_mark.line + 1
        if kind not in ("null", "bool", "int", "float"):
            raise SpecError(f"{self.file}:{line}  {key}: tag {node.tag} is not supported")
        try:
            if len(node.value) > MOST_DIGITS:
                raise ValueError(kind)
            return self.constructor.construct_object(node)
        except (YAMLError, ValueError, LookupError):
            text = node.value[:MOST_DIGITS]
            raise SpecError(f"{self.file}:{line}  {key}: {text!r} cannot be read as {kind}") from None
