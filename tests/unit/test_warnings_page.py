"""docs/warnings.md against the texts in the code."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tools._root import REPOSITORY

CALLS = {"warn", "print_warning", "StepError", "ReplicaMismatch", "NonFiniteSum", "UnexpectedMessage"}
WORDED = {"_why_dense", "_why_rounded", "_too_short", "_warning"}  # functions that word a warning
SOURCES = [path for package in ("edgc", "megatron/edgc") for path in sorted((REPOSITORY / package).rglob("*.py"))]
GAP = "…"


def text_of(node: ast.expr) -> str:
    """What a text says, with gaps for what is only known when it is printed."""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values))
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else GAP


def warned(tree: ast.AST) -> Iterator[ast.expr]:
    """What is printed or raised, added to a list of warnings, or returned by a function that words one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args:
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            if name in CALLS or name == "append" and ast.unparse(node.func) == "warnings.append":
                yield node.args[0]
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("message", "warning"):
            yield node.value
        elif isinstance(node, ast.FunctionDef) and node.name in WORDED:
            for one in ast.walk(node):
                if isinstance(one, ast.Return) and one.value is not None:
                    yield from one.value.elts if isinstance(one.value, ast.Tuple) else [one.value]


def printed(path: Path) -> Iterator[str]:
    for node in warned(ast.parse(path.read_text())):
        text = text_of(node)
        if re.search(r"\w \w", text):  # else the words are elsewhere
            yield text


def lines_of_page() -> list[list[str]]:
    """The fixed parts of each line that the page names."""
    rows = re.findall(r"^\| (.*?) \|", (REPOSITORY / "docs" / "warnings.md").read_text(), re.MULTILINE)
    quoted = [line for row in rows for line in re.findall(r"`([^`]+)`", row) if " " in line]
    return [[part.strip() for part in line.split(GAP) if part.strip()] for line in quoted]


def test_the_page_has_every_warning_and_every_error_of_a_step() -> None:
    patterns = [re.compile(".*".join(map(re.escape, parts))) for parts in lines_of_page()]
    texts = [text for path in SOURCES for text in printed(path)]
    assert len(texts) > 30
    assert [text for text in texts if not any(pattern.search(text) for pattern in patterns)] == []


def test_the_code_says_what_the_page_quotes() -> None:
    texts = [
        text_of(node)
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.JoinedStr | ast.Constant)
    ]
    said = "\n".join(texts)
    assert [part for parts in lines_of_page() for part in parts if part not in said] == []
