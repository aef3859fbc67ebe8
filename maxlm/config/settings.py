"""Facts about a setting for people: its type in words, its range, its default and its description, found by a dotted key."""

from collections.abc import Iterator
from difflib import get_close_matches
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from maxlm.base.errors import SHOWN, UserError, shorten, show
from maxlm.config.choices import choice_in, parts
from maxlm.config.descriptions import Description, descriptions
from maxlm.config.explain import kinds_of, leaves, sections_of
from maxlm.hardware.topologies import either

_WORDS = {int: "whole number", float: "number", bool: "true or false", str: "text"}
_UNBOUNDED = 2**53  # larger bounds of a number come from its representation


class Setting(NamedTuple):
    """A setting of a section. `kind`: the kind of the section, where it is one of several with different settings."""

    key: str
    name: str
    owner: type[BaseModel]
    kind: str
    info: FieldInfo
    description: Description

    @property
    def sections(self) -> list[type[BaseModel]]:
        """Sections that the setting holds, one for each kind."""
        return sections_of(self.info)

    @property
    def type(self) -> str:
        """Type in words, without the bounds."""
        return "one of these words" if choice_in(self.info) is not None else type_in_words(self.info.annotation)

    @property
    def choices(self) -> tuple[str, ...]:
        """Allowed values of a choice; empty for any other setting."""
        return tuple(dict.fromkeys(str(choice) for choice in _choices(self.info)))

    @property
    def parts(self) -> dict[str, str]:
        """Allowed values that name parts -> a line about each; empty for any other setting."""
        choice = choice_in(self.info)
        return {} if choice is None else {one.name: one.about for one in parts(choice.kind) if one.name in choice.names}

    @property
    def nullable(self) -> bool:
        """True if null is a value of the setting."""
        return type(None) in leaves(self.info.annotation)

    @property
    def range(self) -> str:
        """Bounds of a number, or of the length of a list, in words; empty where there are none."""
        found: dict[str, Any] = {}
        for item in _metadata(self.info):
            found |= {name: value for name in ("gt", "ge", "lt", "le") if (value := getattr(item, name, None)) is not None}
        numbers = _numbers({name: value for name, value in found.items() if abs(value) < _UNBOUNDED})
        return ", ".join(filter(None, (numbers, _entries(self.info))))

    @property
    def default(self) -> str:
        """Value of the setting that no config sets, in words."""
        if self.info.is_required():
            return "required"
        if self.description.default:
            return self.description.default
        default = self.info.get_default(call_default_factory=True, validated_data={})
        return "its defaults" if isinstance(default, BaseModel) else str(show(default))


def settings_of(section: type[BaseModel], key: str = "") -> list[Setting]:
    """The settings of a section with this dotted key, in their order."""
    texts, kinds = descriptions(section), kinds_of(section)
    kind = kinds[0] if len(kinds) == 1 else ""
    return [
        Setting(f"{key}.{name}" if key else name, name, section, kind, info, texts[name]) for name, info in section.model_fields.items()
    ]


def all_settings(section: type[BaseModel], key: str = "") -> Iterator[Setting]:
    """Every setting of a section and of the sections in it, outer ones first."""
    for setting in settings_of(section, key):
        yield setting
        for inner in setting.sections:
            yield from all_settings(inner, setting.key)


def find(schema: type[BaseModel], key: str) -> list[Setting]:
    """Settings with a dotted key: several where sections of different kinds have one of this name. A name in a group of sections, as in
    data.mixture.sources.NAME.store, or a number in a list of sections, may be given or left out. Raises UserError.
    """
    *outer, last = key.strip().split(".")
    sections, path = [schema], ""
    for part in outer:
        found = [setting for section in sections for setting in settings_of(section, path) if setting.name == part]
        if found:
            sections, path = [inner for setting in found for inner in setting.sections], found[0].key
        elif not path or not _holds_several(schema, path):
            break
    else:
        if found := [setting for section in sections for setting in settings_of(section, path) if setting.name == last]:
            return found
        if path and path != key and _holds_several(schema, path):
            return find(schema, path)
    raise UserError(f"there is no setting {shorten(key)}{_near(schema, key)}")


def type_in_words(annotation: Any) -> str:
    """A type of a setting in words, as "list of whole numbers"."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return "one of these words" if choice_in(annotation) is not None else type_in_words(arguments[0])
    if origin is tuple:
        return f"list of {_plural(type_in_words(arguments[0]))}"
    if origin is dict:
        words = type_in_words(arguments[1])
        return f"{'values' if words == 'value' or ' or ' in words else _plural(words)} by name"
    if origin is Literal:
        return "one of these words" if isinstance(arguments[0], str) else "one of these numbers"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    inner = (type_in_words(one) for one in arguments if one is not type(None))
    return _WORDS.get(annotation) or " or ".join(dict.fromkeys(inner)) or "value"


def _plural(words: str) -> str:
    return {"text": "texts", "one of these words": "these words"}.get(words, words if words.endswith("s") else f"{words}s")


def _choices(annotated: Any) -> Iterator[Any]:
    annotation = annotated.annotation if isinstance(annotated, FieldInfo) else annotated
    choice = choice_in(annotated)
    if choice is not None:
        yield from choice.names
    elif get_origin(annotation) is Literal:
        yield from get_args(annotation)
    else:
        for inner in get_args(annotation)[: 1 if get_origin(annotation) is Annotated else None]:
            yield from _choices(inner)


def _metadata(info: FieldInfo) -> Iterator[Any]:
    """Constraints in an annotation, outer ones first, so that an inner one does not hide the bound that tightens it."""
    inner = list(_nested(info.annotation))
    for item in (*inner, *info.metadata):
        yield from item.metadata if isinstance(item, FieldInfo) else (item,)


def _nested(annotation: Any) -> Iterator[Any]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return
    for argument in get_args(annotation)[: 1 if get_origin(annotation) is Annotated else None]:
        yield from _nested(argument)
    yield from getattr(annotation, "__metadata__", ())


def _numbers(bounds: dict[str, Any]) -> str:
    low = f"above {bounds['gt']:g}" if "gt" in bounds else f"at least {show(bounds['ge'])}" if "ge" in bounds else ""
    high = f"below {bounds['lt']:g}" if "lt" in bounds else f"at most {show(bounds['le'])}" if "le" in bounds else ""
    if "ge" in bounds and "le" in bounds:
        return f"{show(bounds['ge'])} to {show(bounds['le'])}"
    return " and ".join(filter(None, (low, high)))


def _entries(info: FieldInfo) -> str:
    """Bounds of the number of entries of a list or of a group of named values."""
    if not ({tuple, dict} & {get_origin(one) for one in _parts(info.annotation)}):
        return ""
    found = {name: value for item in _metadata(info) for name in ("min_length", "max_length") if (value := getattr(item, name, None))}
    least, most = found.get("min_length"), found.get("max_length")
    if least and most:
        return f"{least} to {most} entries"
    return f"at least {least} {'entry' if least == 1 else 'entries'}" if least else f"at most {most} entries" if most else ""


def _parts(annotation: Any) -> Iterator[Any]:
    yield annotation
    for inner in get_args(annotation):
        yield from _parts(inner)


def _holds_several(schema: type[BaseModel], path: str) -> bool:
    """True if the setting of this key holds a list of sections, or sections by name."""
    return any({tuple, dict} & {get_origin(one) for one in _parts(setting.info.annotation)} for setting in find(schema, path))


def _near(schema: type[BaseModel], key: str) -> str:
    keys = list(dict.fromkeys(setting.key for setting in all_settings(schema)))
    last = key.rpartition(".")[2]
    named = [known for known in keys if known.rpartition(".")[2] == last]
    worded = [known for known in keys if last in known.rpartition(".")[2].split("_")]
    near = list(dict.fromkeys((*named, *worded)))[:3] or get_close_matches(key[:SHOWN], keys, n=3, cutoff=0.6)
    return f": did you mean {either(near)}?" if near else f": the sections are {', '.join(schema.model_fields)}."
