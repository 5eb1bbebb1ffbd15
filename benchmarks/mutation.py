"""Mistakes of one line, made on the syntax tree: each operator finds the places where it applies in a file.

The kinds are those that a refactoring makes: a term or factor left out, operands or arguments exchanged, an index or
axis off by one, a comparison turned, a condition dropped, a setting not passed on, a collective, cast or call left out;
in a module's table, a row left out or with the next row's value. Texts, annotations, assertions, and what an error says
are left alone: they decide no result.
"""

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# Calls that return something like their first argument, which takes their place.
KEEPS_ITS_ARGUMENT = frozenset(
    "psum psum_scatter pmean pmax all_gather all_to_all ppermute add_up add_up_late varying jnp.abs jnp.maximum "
    "jnp.minimum jnp.clip jnp.sqrt jnp.square stop_gradient round max min abs sorted reversed".split()
)
# Barriers change bits only in compiled programs, and what checks is tried with bad input.
LEFT_ALONE = ("materialised", "optimization_barrier", "isinstance", "print", "named_scope", "getattr", "hasattr")
# Calls whose result does not depend on the order of their arguments.
COMMUTES = frozenset("min max gcd lcm isclose suppress maximum minimum jnp.maximum jnp.minimum jnp.logaddexp".split())
TURNED = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
OPERATORS = {ast.Sub: "-", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**"}


class Mutant(NamedTuple):
    """A mistake. line: 1-based, its first. start, stop: offsets in the text of `file` of what `new` replaces."""

    file: str
    line: int
    kind: str
    start: int
    stop: int
    new: str

    def applied(self, text: str) -> str:
        """The text of the file with the mistake."""
        return text[: self.start] + self.new + text[self.stop :]


def mutants_of(path: Path, file: str) -> list[Mutant]:
    """All mutants of a file. file: its name in them. Mutants that do not parse are left out."""
    text = path.read_text()
    source = _Source(text)
    by_place = {}
    tree = ast.parse(text)
    for statement in tree.body:
        begin, end = source.span(statement)
        nodes = _mutable(ast.Module([statement], []))
        for kind, replaced, new in itertools.chain(
            *(_mistakes(x, source) for x in nodes), _in_table(statement, source)
        ):
            start, stop = source.span(replaced)
            if new != text[start:stop] and _parses(text[begin:start] + new + text[stop:end]):
                by_place[start, stop, new] = Mutant(file, replaced.lineno, kind, start, stop, new)
    return sorted(by_place.values(), key=lambda m: (m.start, m.stop, m.new))


class _Source:
    """The text of a file, by the positions of a syntax tree."""

    def __init__(self, text: str):
        self.text = text
        self._lines = [0]
        for line in text.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))
        self._rows = text.splitlines(keepends=True)

    def _offset(self, line: int, column: int) -> int:
        """The offset of a position; columns of a syntax tree count bytes of UTF-8."""
        return self._lines[line - 1] + len(self._rows[line - 1].encode()[:column].decode())

    def span(self, node: ast.expr | ast.stmt | ast.keyword) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        start = self._offset(node.lineno, node.col_offset)
        return start, self._offset(node.end_lineno, node.end_col_offset)

    def of(self, node: ast.expr) -> str:
        """The text of an expression, in parentheses where its place might read it otherwise."""
        start, stop = self.span(node)
        text = self.text[start:stop]
        simple = isinstance(node, ast.Name | ast.Constant | ast.Call | ast.Attribute | ast.Subscript)
        return text if simple else f"({text})"


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def _mutable(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below this one that decide results."""
    skipped: list[ast.AST] = []
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        skipped += [x for x in (node.returns, *node.decorator_list) if x is not None]
    if isinstance(node, ast.AnnAssign | ast.arg) and node.annotation is not None:
        skipped.append(node.annotation)
    for child in ast.iter_child_nodes(node):
        texts = isinstance(child, ast.JoinedStr) or (isinstance(child, ast.Constant) and isinstance(child.value, str))
        checks = isinstance(child, ast.Raise | ast.Assert | ast.Import | ast.ImportFrom)
        checks |= isinstance(child, ast.keyword) and child.arg == "strict"  # of zip
        if child in skipped or texts or checks or (isinstance(child, ast.Call) and _name(child.func) in LEFT_ALONE):
            continue
        yield child
        yield from _mutable(child)


def _name(function: ast.expr) -> str:
    """The last name of a called function, or its last two if the first is jnp."""
    if isinstance(function, ast.Attribute):
        before = function.value.id if isinstance(function.value, ast.Name) else ""
        return f"jnp.{function.attr}" if before == "jnp" else function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _mistakes(node: ast.AST, source: _Source) -> Iterator[tuple[str, ast.expr | ast.stmt | ast.keyword, str]]:
    """(kind, the node to replace, its new text) for each operator that applies to a node."""
    match node:
        case ast.BinOp(left, op, right):
            if isinstance(op, ast.Add | ast.Sub):
                yield "a term left out", node, source.of(left)
            if isinstance(op, ast.Add):
                yield "a term left out", node, source.of(right)
            if isinstance(op, ast.Mult | ast.Div | ast.FloorDiv | ast.Mod):
                yield "a factor left out", node, source.of(left)
            if isinstance(op, ast.Mult):
                yield "a factor left out", node, source.of(right)
            if type(op) in OPERATORS and not isinstance(left, ast.Constant | ast.JoinedStr):
                yield "operands exchanged", node, f"({source.of(right)} {OPERATORS[type(op)]} {source.of(left)})"
        case ast.UnaryOp(ast.Not(), operand):
            yield "a condition turned", node, source.of(operand)
        case ast.UnaryOp(ast.USub(), ast.Name() | ast.Call() | ast.Attribute() as operand):
            yield "a sign left out", node, source.of(operand)
        case ast.BoolOp(values=values):
            for value in values:
                others = [source.of(x) for x in values if x is not value]
                word = " and " if isinstance(node.op, ast.And) else " or "
                yield "a condition left out", node, f"({word.join(others)})"
        case ast.Compare(left, [op], [right]):
            yield "a comparison turned", node, f"{source.of(left)} {TURNED[type(op)]} {source.of(right)}"
        case ast.IfExp(body=body, orelse=orelse):
            yield "a case left out", node, source.of(body)
            yield "a case left out", node, source.of(orelse)
        case ast.Constant(value=bool() as value):
            yield "a switch turned", node, str(not value)
        case ast.Constant(value=int() as value) if value < 64:
            yield "off by one", node, str(value + 1)
        case ast.Call(function, args, keywords):
            plain = [x for x in args if not isinstance(x, ast.Starred)]
            if plain and (_name(function) in KEEPS_ITS_ARGUMENT):
                yield "a call left out", node, source.of(plain[0])
            if isinstance(function, ast.Attribute) and function.attr == "astype":
                yield "a cast left out", node, source.of(function.value)
            if len(plain) == len(args) >= 2 and _name(function) not in COMMUTES:
                for a, b in itertools.pairwise(args):
                    yield from _exchanged(node, a, b, source)
            for keyword in keywords:
                if keyword.arg and not isinstance(keyword.value, ast.Constant):
                    yield "a setting not passed on", node, _without(node, keyword, source)
        case ast.Expr(ast.Call()) | ast.AugAssign():
            yield "a statement left out", node, "pass"
        case ast.If(test=test):
            yield "a branch never taken", test, "False"


def assigned_names(statement: ast.stmt) -> set[str]:
    """The names that a statement assigns to."""
    if not isinstance(statement, ast.Assign | ast.AnnAssign):
        return set()
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    nodes = itertools.chain.from_iterable(map(ast.walk, targets))
    return {node.id for node in nodes if isinstance(node, ast.Name)}


def _in_table(statement: ast.stmt, source: _Source) -> Iterator[tuple[str, ast.expr, str]]:
    """`_mistakes` in a table that a statement of a module assigns, of at least three rows.

    A table is a literal, also as the argument of, say, frozenset.
    """
    if not isinstance(statement, ast.Assign | ast.AnnAssign) or statement.value is None:
        return
    table = statement.value
    if isinstance(table, ast.Call) and isinstance(table.func, ast.Name) and len(table.args) == 1:
        table = table.args[0]
    start, stop = source.span(table)
    text = source.text
    begins: list[int] = []
    match table:
        case ast.Call(ast.Attribute(ast.Constant(str(words)), "split"), []):
            for word in words.split():
                others = " ".join(x for x in words.split() if x != word)
                yield "a row left out", table, f'"{others}".split()'
        case ast.Dict(keys, values):
            pairs = zip(keys, values, strict=True)
            begins = [source.span(k)[0] if k else text.rindex("**", 0, source.span(v)[0]) for k, v in pairs]
            own = [v for k, v in zip(keys, values, strict=True) if k] if len(begins) > 2 else []
            for value, after in zip(own, [*own[1:], *own[:1]], strict=True):
                if ast.dump(value) != ast.dump(after):
                    yield "a row like the next", value, source.of(after)
        case ast.Tuple(elements) | ast.List(elements) | ast.Set(elements):
            begins = [source.span(element)[0] for element in elements]
    if len(begins) > 2:
        for begin, after in itertools.pairwise([*begins, stop - 1]):
            yield "a row left out", table, text[start:begin] + text[after:stop]


def _exchanged(call: ast.Call, a: ast.expr, b: ast.expr, source: _Source) -> Iterator:
    """The call with two neighbouring arguments exchanged."""
    start, _ = source.span(call)
    (a_start, a_stop), (b_start, b_stop) = source.span(a), source.span(b)
    text = source.text
    head = text[start:a_start] + text[b_start:b_stop]
    yield (
        "arguments exchanged",
        call,
        head + text[a_stop:b_start] + text[a_start:a_stop] + text[b_stop : source.span(call)[1]],
    )


def _without(call: ast.Call, keyword: ast.keyword, source: _Source) -> str:
    """The text of a call without a keyword."""
    start, stop = source.span(call)
    begin, end = source.span(keyword)
    after = source.text[end:stop].lstrip()
    kept = after.removeprefix(",") if after.startswith(",") else after
    return source.text[start:begin] + kept
