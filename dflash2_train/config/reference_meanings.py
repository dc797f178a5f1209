"""What the comments of the schema say: the one source of every key's meaning.

A field's meaning is the comment behind it, after the comment lines right above it. A comment line that stands apart
from the next field, by an empty line, says nothing about it.
"""

from __future__ import annotations

import ast
import inspect
import io
import textwrap
import tokenize


def meanings(schema: type) -> dict[str, str]:
    """Field name -> what its comments say, for a dataclass and those that it extends; "" without a comment."""
    found: dict[str, str] = {}
    for part in reversed(schema.__mro__[:-1]):
        found.update(_own_meanings(part))
    return found


def _own_meanings(schema: type) -> dict[str, str]:
    source = textwrap.dedent(inspect.getsource(schema))
    comments, alone = _comments(source)
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for statement in tree.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            above: list[str] = []
            line = statement.lineno - 1
            while line in alone:
                above.insert(0, comments[line])
                line -= 1
            behind = comments.get(statement.end_lineno or statement.lineno, "")
            found[statement.target.id] = " ".join([*above, behind]).strip()
    return found


def _comments(source: str) -> tuple[dict[int, str], set[int]]:
    """Text of every comment by line, and the lines that hold nothing else."""
    texts, alone = {}, set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            texts[token.start[0]] = token.string.lstrip("# ").rstrip()
            if token.line.lstrip().startswith("#"):
                alone.add(token.start[0])
    return texts, alone
