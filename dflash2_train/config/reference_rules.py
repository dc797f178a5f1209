"""What the checks of the schema demand, read out of their calls of ``require`` without running them.

Only what those calls need is evaluated: constants of the module, loops over them, and f-strings. What is known at run
time alone stays as its source text: ``train.init_layers`` names "a target layer (0..target.num_layers - 1)".
"""

from __future__ import annotations

import ast
import inspect
import sys
from dataclasses import dataclass, field
from types import ModuleType

KEY, RULE, NUM_ARGUMENTS = 1, 3, 5  # places in require(condition, key, value, rule, next_step)


@dataclass(frozen=True)
class Rule:
    """One rule of one key."""

    key: str  # as the message names it; parts that are known at run time alone in braces
    text: str
    schema: str  # class whose method checks it; "" in a function

    def about(self, path: str, owners: set[str], name: str) -> bool:
        """Whether it binds field ``name`` of a class among ``owners``, that stands at ``path``."""
        plain = self.key.replace("[*]", "")
        if "{" not in plain:
            return plain in (path, f"{path}.name")  # a list of named parts is checked as a whole
        return self.schema in owners and plain.rsplit(".", 1)[-1] == name


@dataclass(frozen=True)
class _Unknown:
    """An expression that is known at run time alone."""

    source: str


@dataclass
class _Reader:
    """Goes through the statements of one function."""

    names: dict[str, object]
    schema: str
    rules: list[Rule] = field(default_factory=list)

    def read(self, body: list[ast.stmt]) -> None:
        for statement in body:
            if isinstance(statement, ast.For):
                self._loop(statement)
            elif isinstance(statement, ast.If):
                self.read(statement.body)
                self.read(statement.orelse)
            elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
                self._bind(statement.targets[0], self.value(statement.value))
            elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
                self._call(statement.value)

    def _loop(self, loop: ast.For) -> None:
        values = self.value(loop.iter)
        for one in values if isinstance(values, tuple | list) else [_Unknown(ast.unparse(loop.target))]:
            self._bind(loop.target, one)
            self.read(loop.body)

    def _bind(self, target: ast.expr, value: object) -> None:
        if isinstance(target, ast.Name):
            self.names[target.id] = value
        elif isinstance(target, ast.Tuple):
            parts = value if isinstance(value, tuple) else [_Unknown(ast.unparse(part)) for part in target.elts]
            for part, one in zip(target.elts, parts, strict=True):
                self._bind(part, one)

    def _call(self, call: ast.Call) -> None:
        if isinstance(call.func, ast.Name) and call.func.id == "require" and len(call.args) == NUM_ARGUMENTS:
            key, rule = self.text(call.args[KEY], brackets=True), self.text(call.args[RULE])
            self.rules.append(Rule(key, rule, self.schema))

    def value(self, node: ast.expr) -> object:
        """Value of an expression as far as the module's constants tell."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return self.names.get(node.id, _Unknown(node.id))
        if isinstance(node, ast.Tuple | ast.List):
            return tuple(self.value(part) for part in node.elts)
        if isinstance(node, ast.JoinedStr):
            return self.text(node, brackets=True)
        return _Unknown(ast.unparse(node).replace("self.", ""))

    def text(self, node: ast.expr, *, brackets: bool = False) -> str:
        """A string as a reader sees it; what is unknown as its source, in braces for keys."""
        if not isinstance(node, ast.JoinedStr):
            value = self.value(node)
            return _shown(value, brackets=brackets)
        text = ""
        for part in node.values:
            if isinstance(part, ast.Constant):
                text += str(part.value)
                continue
            assert isinstance(part, ast.FormattedValue)
            value = self.value(part.value)
            if isinstance(value, _Unknown) and text.rstrip().endswith("=") and not brackets:
                text = text.rstrip()[:-1].rstrip()  # "drafter.block_size={…}" tells a value that only a run has
            else:
                text += _shown(value, brackets=brackets)
        return text


def _shown(value: object, *, brackets: bool) -> str:
    if isinstance(value, _Unknown):
        return f"{{{value.source}}}" if brackets else value.source
    if isinstance(value, tuple):
        return ", ".join(f"`{_shown(part, brackets=brackets)}`" for part in value)
    return str(value)


def read_rules(schemas: list[type]) -> list[Rule]:
    """The rules in the modules of these classes, in the order of the source."""
    modules = dict.fromkeys(sys.modules[schema.__module__] for schema in schemas)
    return [rule for module in modules for rule in _rules_of(module)]


def _rules_of(module: ModuleType) -> list[Rule]:
    rules: list[Rule] = []
    for node in ast.parse(inspect.getsource(module)).body:
        functions = node.body if isinstance(node, ast.ClassDef) else [node]
        for function in functions:
            if isinstance(function, ast.FunctionDef):
                known: dict[str, object] = {
                    name: one for name, one in vars(module).items() if isinstance(one, str | int | float | tuple)
                }
                known |= {one.arg: _Unknown(one.arg) for one in function.args.args}
                reader = _Reader(known, node.name if isinstance(node, ast.ClassDef) else "")
                reader.read(function.body)
                rules += reader.rules
    return rules
