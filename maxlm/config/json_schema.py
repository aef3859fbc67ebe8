"""JSON schema of a settings file, by which editors complete and check it as it is written.

A file may extend others, and then holds only a part of the settings. So nothing is required but in the entries of lists, which no other
file completes, and a section of several kinds may lack its `kind`. All else is as strict as the loader.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, cast

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core.core_schema import ModelSchema

from maxlm.config.descriptions import descriptions
from maxlm.config.loader import MOST_EXTENDS

_EXTENDS = {
    "description": "Configs that this file extends, merged from left to right: paths, or names under configs/ such as models/llama3-8b.",
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "maxItems": MOST_EXTENDS}],
}
Schema = dict[str, Any]


class _Described(GenerateJsonSchema):
    """pydantic's schema, with the description of each setting."""

    def model_schema(self, schema: ModelSchema) -> Schema:
        """The schema of a section."""
        made, section = super().model_schema(schema), cast("Any", schema["cls"])
        for name, description in descriptions(section).items():
            if text := description.sentences:
                made["properties"][name] = {**made["properties"][name], "description": text}
        return made


def schema_text(model: type[BaseModel], title: str) -> str:
    """The schema of files with these settings, as JSON."""
    return json.dumps(file_schema(model, title), indent=1, ensure_ascii=False)


def file_schema(model: type[BaseModel], title: str) -> Schema:
    """The schema of files with these settings (JSON Schema 2020-12)."""
    made = model.model_json_schema(schema_generator=_Described)
    entries = set(_entries(made))
    definitions = {name: _loosened(one, whole=name in entries) for name, one in made.pop("$defs", {}).items()}
    top = _loosened(made, whole=False)
    top["properties"] = {"extends": _EXTENDS, **top["properties"]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **top, "title": title, "$defs": definitions}


def _entries(schema: Any, *, entry: bool = False) -> Iterator[str]:
    """Names of the definitions that are entries of lists."""
    if isinstance(schema, list):
        for inner in schema:
            yield from _entries(inner, entry=entry)
    elif isinstance(schema, Mapping):
        if entry and "$ref" in schema:
            yield schema["$ref"].rpartition("/")[2]
        for name, inner in schema.items():
            yield from _entries(inner, entry=name == "items" or (entry and name in ("anyOf", "oneOf")))


def _loosened(schema: Any, *, whole: bool) -> Any:
    """The schema without titles, with `anyOf` for `oneOf`; without required settings unless the section is always `whole`."""
    if isinstance(schema, list):
        return [_loosened(one, whole=whole) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    left_out = {"discriminator"} | (set() if whole else {"required"}) | ({"title"} if isinstance(schema.get("title"), str) else set())
    if isinstance(schema.get("default"), dict):  # a section at its defaults, which its own settings state
        left_out |= {"default"}
    found = {("anyOf" if name == "oneOf" else name): inner for name, inner in schema.items() if name not in left_out}
    return {name: inner if name == "default" else _properties(name, inner, whole=whole) for name, inner in found.items()}


def _properties(name: str, schema: Any, *, whole: bool) -> Any:
    """A part of a schema; names of properties are no keywords."""
    if name == "properties":
        return {key: _loosened(inner, whole=whole) for key, inner in schema.items()}
    return _loosened(schema, whole=whole)
