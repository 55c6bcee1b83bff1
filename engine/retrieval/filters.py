"""Conditions on metadata: one SQL expression, evaluated by DuckDB on the metadata alone.

The words are parsed first and only a tree of comparisons, arithmetic and the functions in `FUNCTIONS` is let through:
no statement, no query inside the expression, no table or file. The database that evaluates it is an empty one in
memory, cut off from files, network and extensions, with its settings locked.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import duckdb
import numpy as np
import pyarrow as pa

from engine.forks import OwnLock
from engine.retrieval.identifiers import as_text
from engine.retrieval.metadata import RESERVED
from engine.retrieval.snapshot import Snapshot

# What an expression may call; operators are functions to the parser.
FUNCTIONS = frozenset(
    {
        *("+", "-", "*", "/", "//", "%", "**", "^", "||", "~~", "!~~", "~~*", "!~~*", "~~~", "~", "!~", "&", "|"),
        *("like_escape", "not_like_escape", "ilike_escape", "not_ilike_escape", "&&", "@>", "<@", "^@"),
        *("abs", "ceil", "ceiling", "floor", "round", "trunc", "sign", "sqrt", "exp", "ln", "log", "log10", "log2"),
        *("pow", "power", "mod", "greatest", "least", "isnan", "isfinite", "isinf", "coalesce", "ifnull", "nullif"),
        *("lower", "upper", "lcase", "ucase", "length", "strlen", "trim", "ltrim", "rtrim", "substring", "substr"),
        *("left", "right", "replace", "contains", "starts_with", "ends_with", "prefix", "suffix", "concat", "reverse"),
        *("regexp_matches", "regexp_full_match", "regexp_extract", "split_part", "strpos", "instr", "position"),
        *("len", "list_contains", "array_contains", "list_has", "array_has", "list_has_any", "list_has_all"),
        *("list_extract", "array_extract", "struct_extract", "map_extract", "element_at", "list_value", "row"),
        *("year", "month", "day", "hour", "minute", "second", "quarter", "week", "dayofweek", "isodow", "dayofyear"),
        *("date_part", "datepart", "date_trunc", "date_diff", "datediff", "strftime", "strptime", "make_date"),
        *("epoch", "epoch_ms", "to_timestamp", "levenshtein", "jaccard", "jaro_winkler_similarity"),
    }
)
# Kinds of expression that look at one row and nothing else.
_PLAIN = frozenset(
    {
        *("COLUMN_REF", "CONSTANT", "COMPARISON", "CONJUNCTION", "OPERATOR", "FUNCTION"),
        *("CAST", "TYPE", "CASE", "BETWEEN", "COLLATE"),
    }
)
_REFUSED = {
    "SUBQUERY": "a query inside it", "WINDOW": "a window function", "STAR": "*", "PARAMETER": "a parameter (?)",
    "LAMBDA": "a lambda", "POSITIONAL_REFERENCE": "a column by its number", "DEFAULT": "DEFAULT",
}  # fmt: skip
_ROWS = "metadata"
_FRAME = "SELECT (\n{}\n) AS kept FROM " + _ROWS
# In a database of its own for each filter.
_SETTINGS: dict[str, str | bool | int | float | list[str]] = {
    "enable_external_access": "false", "autoload_known_extensions": "false", "autoinstall_known_extensions": "false",
    "allow_community_extensions": "false", "python_enable_replacements": "false", "threads": "1",
    "memory_limit": "4GB", "temp_directory": "",
}  # fmt: skip
# Conditions remembered of a snapshot, a byte a row each.
REMEMBERED = 8
_remembered: WeakKeyDictionary[Snapshot, dict[str, np.ndarray]] = WeakKeyDictionary()
_remembering = OwnLock()


@dataclass(frozen=True)
class Filter:
    """A condition that was found harmless, with the columns it reads.

    Attributes:
        where: the words.
        columns: names as the metadata spells them.
    """

    where: str
    columns: tuple[str, ...]

    @classmethod
    def parse(cls, where: str, names: list[str]) -> Filter:
        """Check a condition against the names of the columns.

        Raises:
            TypeError: no string.
            ValueError: what is no single expression, calls what is not in `FUNCTIONS`, or names a column that is not
                there; the message names the place.

        >>> Filter.parse("year > 2020 and Tag = 'cat'", ["tag", "year"]).columns
        ('year', 'tag')
        """
        if not isinstance(where, str):
            raise TypeError(f"where: must be a string, got {type(where).__name__}")
        if not where.strip():
            raise ValueError("where: must hold a condition such as \"year > 2020 and tag = 'cat'\", got none")
        if any("\ud800" <= sign <= "\udfff" for sign in where):
            raise ValueError(f"where: must be whole characters, got {where!r:.120}")
        spelled = {name.lower(): name for name in names}
        found: dict[str, None] = {}
        for node in _expressions(_tree(where)):
            _check(node)
            if node["class"] == "COLUMN_REF":
                # The first of a dotted name is the column, what follows are fields of a struct.
                name = node["column_names"][0]
                if name.lower() not in spelled:
                    raise ValueError(
                        f"where: there is no column {name!r}, the metadata has {', '.join(names) or 'none'}"
                        "; text stands in 'single quotes'"
                    )
                found[spelled[name.lower()]] = None
        return cls(where, tuple(found))

    def mask(self, table: pa.Table) -> np.ndarray:
        """bool `(rows,)`: where the condition is true of a row; where it is NULL it is not.

        `table` must hold `columns`. Raises ValueError for values that the condition cannot be applied to.
        """
        # Of a column less table DuckDB would not know the number of rows.
        held = table.select(list(self.columns)) if self.columns else _numbers(table.num_rows)
        with _database() as database:
            try:
                database.register(_ROWS, held)
                relation = database.sql(_FRAME.format(self.where))
                kind = str(relation.types[0])
                # A bare NULL has a type of its own, which is called so in quotes or without.
                if kind.strip('"') not in ("BOOLEAN", "NULL"):
                    raise ValueError(f"where: must be true or false for each row, {self.where!r} is {kind}")
                kept = relation.to_arrow_table().column("kept")
            except duckdb.Error as error:
                raise ValueError(f"where: {_words(error)}, in {self.where!r}") from error
        if pa.types.is_null(kept.type):
            return np.zeros(table.num_rows, dtype=bool)
        return kept.combine_chunks().fill_null(False).to_numpy(zero_copy_only=False)


def rows_where(snapshot: Snapshot, where: str) -> np.ndarray:
    """bool `(snapshot.rows,)`: rows of which a condition on the metadata is true; `id` stands for the ids.

    The last few conditions on a snapshot, which never changes, are remembered. Raises what `Filter` raises.
    """
    with _remembering:
        held = _remembered.setdefault(snapshot, {})
        found = held.get(where) if isinstance(where, str) else None
    if found is None:
        found = _evaluated(snapshot, where)
        with _remembering:
            while len(held) >= REMEMBERED:
                held.pop(next(iter(held)))
            held[where] = found
    return found


def _evaluated(snapshot: Snapshot, where: str) -> np.ndarray:
    names = [RESERVED, *snapshot.schema.names]
    found = Filter.parse(where, names)
    table = snapshot.metadata([name for name in found.columns if name != RESERVED])
    if RESERVED in found.columns:
        ids = pa.array([as_text(name) for name in snapshot.ids(np.arange(snapshot.rows))], pa.string())
        table = pa.table({RESERVED: ids, **{name: table.column(name) for name in table.column_names}})
    elif not found.columns:
        table = _numbers(snapshot.rows)
    return found.mask(table)


def _tree(where: str) -> dict[str, Any]:
    """The parsed expression. Raises ValueError for what is not exactly one."""
    with _database() as database:
        found, frame = _parsed(database, where), _parsed(database, "true")
    if found["error"]:
        raise ValueError(f"where: must be one SQL condition, got {where!r} ({_first_line(found['error_message'])})")
    statements = found["statements"]
    node = statements[0]["node"] if len(statements) == 1 else {}
    # All but the expression must be the frame's own: what closes the bracket and goes on is no expression.
    expression = node.get("select_list", [])
    if len(expression) != 1 or _without_places({**node, "select_list": []}) != _without_places(
        {**frame["statements"][0]["node"], "select_list": []}
    ):
        raise ValueError(f"where: must be one SQL condition and nothing else, got {where!r}")
    return expression[0]


def _parsed(database: duckdb.DuckDBPyConnection, where: str) -> dict[str, Any]:
    row = database.execute("SELECT json_serialize_sql(?)", [_FRAME.format(where)]).fetchone()
    assert row is not None
    found: dict[str, Any] = json.loads(row[0])
    return found


def _check(node: dict[str, Any]) -> None:
    """Raise ValueError for an expression that may reach beyond the row."""
    kind = node["class"]
    if kind not in _PLAIN:
        raise ValueError(f"where: must not hold {_REFUSED.get(kind, kind.lower().replace('_', ' '))}")
    if kind == "FUNCTION" and (
        node["function_name"].lower() not in FUNCTIONS or node.get("schema") or node.get("catalog")
    ):
        allowed = ", ".join(sorted(name for name in FUNCTIONS if name[0].isalpha()))
        raise ValueError(f"where: {node['function_name']} is no function for conditions; there are {allowed}")


def _expressions(node: Any) -> Iterator[dict[str, Any]]:
    """Every expression below a node of the tree, the node itself among them."""
    if isinstance(node, dict):
        if "class" in node:
            yield node
            if node["class"] == "CONSTANT":
                return
        for value in node.values():
            yield from _expressions(value)
    elif isinstance(node, list):
        for value in node:
            yield from _expressions(value)


def _without_places(value: Any) -> Any:
    """The tree without where in the text each part stands."""
    if isinstance(value, dict):
        return {key: _without_places(item) for key, item in value.items() if not key.startswith("query_location")}
    if isinstance(value, list):
        return [_without_places(item) for item in value]
    return value


def _database() -> duckdb.DuckDBPyConnection:
    """An empty database that reaches nothing outside itself."""
    database = duckdb.connect(":memory:", config=_SETTINGS)
    database.execute("SET lock_configuration = true")
    return database


def _numbers(rows: int) -> pa.Table:
    """A table for conditions that read no column."""
    return pa.table({"row_number": np.arange(rows)})


def _words(error: Exception) -> str:
    """What DuckDB says, without its drawing of the place."""
    return _first_line(str(error))


def _first_line(text: str) -> str:
    return " ".join(text.split("\n\n")[0].split())
