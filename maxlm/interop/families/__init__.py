"""The published families. One of maxlm is a `Family` in a file of this folder with `FAMILIES`; one of another package is an object that a
`Part` of the kind "family" places. Import and export read these records.
"""

import pkgutil
from collections.abc import Mapping
from functools import lru_cache
from importlib import import_module

from maxlm.base.errors import UserError
from maxlm.config import choices, extensions
from maxlm.interop.families.record import Family


@lru_cache(maxsize=1)
def own_families() -> tuple[Family, ...]:
    """The families of maxlm, a file after another."""
    files = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return tuple(family for file in files for family in getattr(import_module(f"{__name__}.{file}"), "FAMILIES", ()))


def families() -> Mapping[str, Family]:
    """All families by `model_type`, families of other packages last. Export takes the first that can state a model. Extensions that the
    command line names are loaded, since an import reads a config.json before any config of ours. Raises UserError.
    """
    extensions.load(extensions.accepted()[0], extensions.COMMAND_LINE)
    found = {family.model_type: family for family in own_families()}
    for part in choices.parts("family"):
        family = choices.implementation(part)
        if not isinstance(family, Family) or family.model_type != part.name:
            raise UserError(f"{part.key}: {part.place} is no Family of the model_type {part.name}; mend the package that registers it.")
        if part.name in found:
            raise UserError(f"{part.key}: maxlm has a family of that model_type; choose another name.")
        found[part.name] = family
    return found


__all__ = ["Family", "families"]
