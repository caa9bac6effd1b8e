# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/reference/http.md, one for each body and answer, made from the contract."""

from __future__ import annotations

import inspect
import re
from typing import Any

import msgspec

from kvrouter.contract.fleet_event import FleetEvent
from kvrouter.router.serve.api.openapi import SCHEMAS

TYPES = {"string": "text", "integer": "integer", "number": "number", "boolean": "true or false", "null": "null"}
# The structs that are listed here stand between this line and END.
BEGIN = re.compile(r"^<!-- contract: ([\w ]+) -->$", re.MULTILINE)
END = "<!-- end -->"


def structs() -> dict[str, type[msgspec.Struct]]:
    """Return every struct of the API by its name, nested ones too."""
    found: dict[str, type[msgspec.Struct]] = {}

    def visit(kind: Any) -> None:
        if isinstance(kind, msgspec.inspect.Metadata):
            visit(kind.type)
        elif isinstance(kind, msgspec.inspect.StructType):
            if kind.cls.__name__ not in found:
                found[kind.cls.__name__] = kind.cls
                for field in kind.fields:
                    visit(field.type)
                if kind.cls.__base__ is not msgspec.Struct:
                    visit(msgspec.inspect.type_info(kind.cls.__base__))
        else:
            nested = (getattr(kind, "item_type", None), getattr(kind, "value_type", None))
            for part in (*getattr(kind, "types", ()), *getattr(kind, "item_types", ()), *filter(None, nested)):
                visit(part)

    for root in (*SCHEMAS, FleetEvent):
        visit(msgspec.inspect.type_info(root))
    return found


def is_sent_always(kind: type[msgspec.Struct], field: msgspec.structs.FieldInfo) -> bool:
    """Return whether every answer of this kind has the field."""
    if field.default is msgspec.UNSET:
        return False
    return field.default is msgspec.NODEFAULT or not kind.__struct_config__.omit_defaults


def table(kind: type[msgspec.Struct]) -> str:
    """Return the table of one body or answer, below a line that names it."""
    is_body = kind.__name__.endswith(("Body", "Patch", "DynamoWorker"))
    properties = msgspec.json.schema_components([kind])[1][kind.__name__]["properties"]
    rows = []
    for field in msgspec.structs.fields(kind):
        if field.name not in kind.__annotations__:
            continue
        schema = properties[field.encode_name]
        is_optional = not field.required if is_body else not is_sent_always(kind, field)
        shown = type_text(schema)
        if is_optional:
            # Null means the same as an absent field there.
            shown = shown.removesuffix(" or null")
        if is_optional != is_body:
            shown += ", optional" if is_optional else ", required"
        rows.append(f"| `{field.encode_name}` | {shown} | {description(schema)} |\n")
    first = (inspect.getdoc(kind) or "").partition("\n\n")[0].replace("\n", " ")
    base = kind.__base__
    inherited = "" if base in (None, msgspec.Struct) else f" The fields of `{base.__name__}` belong to it too."
    return f"**`{kind.__name__}`**: {first}{inherited}\n\n| field | type | |\n|---|---|---|\n{''.join(rows)}"


def description(schema: dict[str, Any]) -> str:
    """Return what the contract says about a field."""
    text: str = schema["description"]
    return text.replace("|", "\\|")


def type_text(schema: dict[str, Any]) -> str:
    """Return a field's type in words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"`{name}`"
    parts = schema.get("anyOf") or schema.get("allOf")
    if parts:
        return " or ".join(dict.fromkeys(map(type_text, parts)))
    if "enum" in schema:
        return " or ".join("null" if value is None else f"`{value}`" for value in schema["enum"])
    kind = schema.get("type")
    if kind == "array":
        places = schema.get("prefixItems")
        return f"list of {type_text(places[0] if places else schema.get('items') or {})}"
    if kind == "object":
        values = schema.get("additionalProperties")
        return f"object of {type_text(values)}" if isinstance(values, dict) and values else "object"
    return TYPES.get(kind or "", "any")


def filled(page: str) -> str:
    """Return the page with each table as the contract has it now."""
    kinds = structs()
    pieces, at = [], 0
    for begin in BEGIN.finditer(page):
        end = page.index(END, begin.end())
        tables = "\n".join(table(kinds[name]) for name in begin[1].split())
        pieces.append(f"{page[at : begin.end()]}\n\n{tables}\n")
        at = end
    return "".join(pieces) + page[at:]
