"""The users' columns: tables out of what users give, and one schema for all segments."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet

Metadata: TypeAlias = "pa.Table | Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Any]]"
# What filters call the ids.
RESERVED = "id"


def encoded_schema(schema: pa.Schema) -> str:
    """The schema as base64 of its IPC bytes; empty without columns."""
    return base64.b64encode(schema.serialize()).decode() if len(schema) else ""


def decoded_schema(text: str) -> pa.Schema:
    """What `encoded_schema` wrote."""
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text))) if text else pa.schema([])


def as_table(metadata: Metadata, rows: int, known: pa.Schema) -> pa.Table:
    """Metadata of `rows` rows as a table whose columns have the types of the index where it has them.

    Columns that hold nothing but nulls and that the index does not know are left out.

    Raises:
        ValueError: another number of rows, a column of another type, of several or of one that Parquet has not, one
            called "id", or two whose names differ in case alone.
        TypeError: what is no table, mapping of columns or list of rows.
    """
    if isinstance(metadata, pa.Table):
        table = metadata
    elif isinstance(metadata, Mapping):
        table = _built(metadata)
    elif isinstance(metadata, Sequence) and all(isinstance(row, Mapping) for row in metadata):
        names = list(dict.fromkeys(name for row in metadata for name in row))
        table = _built({name: [row.get(name) for row in metadata] for name in names})
        if not names:
            return _empty(rows) if len(metadata) == rows else _refused(len(metadata), rows)
    else:
        raise TypeError(
            "Index: metadata must be an Arrow table, a mapping of columns or a list of mappings, got "
            f"{type(metadata).__name__}"
        )
    if table.num_rows != rows and table.num_columns:
        _refused(table.num_rows, rows)
    columns = {}
    spelled = {name.lower(): name for name in reversed([*known.names, *table.column_names])}
    for place, name in enumerate(table.column_names):
        if name.lower() == RESERVED:
            raise ValueError(f"Index: metadata must not have a column {name!r}, which filters take for the ids")
        other = spelled[name.lower()]
        if other != name or name in columns:
            # SQL knows no difference: a filter would read either of them.
            raise ValueError(f"Index: metadata columns must differ in more than case, got {name!r} beside {other!r}")
        column = _plain(table.column(place))
        if name in known.names:
            column = _cast(name, column, known.field(name).type)
        elif pa.types.is_null(column.type):
            continue
        else:
            _check_kept(name, column.type)
        columns[name] = column
    return pa.table(columns) if columns else _empty(rows)


def joined_schema(known: pa.Schema, table: pa.Table | None) -> pa.Schema:
    """The schema with the columns of the table that it lacks."""
    if table is None:
        return known
    return pa.schema([*known, *(item.remove_metadata() for item in table.schema if item.name not in known.names)])


def filled(table: pa.Table | None, rows: int, schema: pa.Schema) -> pa.Table:
    """The columns of `schema` alone, nulls where the table has none."""
    if not len(schema):
        return _empty(rows)
    held = [] if table is None else table.column_names
    columns = [
        table.column(item.name).cast(item.type) if item.name in held else pa.nulls(rows, item.type)  # type: ignore[union-attr]
        for item in schema
    ]
    return pa.table(columns, schema=schema)


def _empty(rows: int) -> pa.Table:
    """A table of so many rows without a column."""
    return pa.table({RESERVED: pa.nulls(rows)}).select([])


def _refused(found: int, wanted: int) -> pa.Table:
    raise ValueError(f"Index: metadata must have one row for each of {wanted} images, got {found}")


def _built(columns: Mapping[str, Sequence[Any]]) -> pa.Table:
    """A table of lists. Raises TypeError for what is none and ValueError for values of no type or of several."""
    arrays = {}
    for name, values in columns.items():
        if not isinstance(name, str):
            raise TypeError(f"Index: metadata columns must have strings as names, got {name!r}")
        if values is None or isinstance(values, str | bytes):
            raise TypeError(
                f"Index: metadata column {name!r} must be a list with a value for each image, got "
                f"{type(values).__name__}"
            )
        try:
            arrays[name] = values if isinstance(values, pa.ChunkedArray) else pa.array(values)
        except (pa.ArrowException, TypeError, UnicodeEncodeError, OverflowError) as error:
            raise ValueError(
                f"Index: metadata column {name!r} must hold values of one type that Arrow has, got others "
                f"({error!s:.120})"
            ) from error
    lengths = {name: len(values) for name, values in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"Index: metadata columns must be equally long, got {lengths}")
    return pa.table(arrays)


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The same values in a type that is stored and that filters read.

    Dictionaries, whose numbers differ from table to table, runs and views become values, float16 becomes float32.
    """
    if pa.types.is_run_end_encoded(column.type):
        column = pa.chunked_array([pa.compute.run_end_decode(chunk) for chunk in column.chunks], column.type.value_type)
    kind = column.type
    if pa.types.is_dictionary(kind):
        return column.cast(kind.value_type)
    plain = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary(), pa.float16(): pa.float32()}
    return column.cast(plain[kind]) if kind in plain else column


def _check_kept(name: str, kind: pa.DataType) -> None:
    """Raise ValueError for a type that Parquet cannot hold: here, before anything is written."""
    try:
        pa.parquet.write_table(pa.table({name: pa.array([], kind)}), pa.BufferOutputStream())
    except (pa.ArrowException, UnicodeEncodeError) as error:
        raise ValueError(
            f"Index: metadata column {name!r} must be of a type that Parquet holds, got {kind} ({error!s:.120})"
        ) from error


def _cast(name: str, column: pa.ChunkedArray, wanted: pa.DataType) -> pa.ChunkedArray:
    try:
        return column.cast(wanted)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise ValueError(
            f"Index: metadata column {name!r} must hold {wanted} as in the index, got {column.type} ({error!s:.80})"
        ) from error
