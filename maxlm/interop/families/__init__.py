"""The published families. A new one is a `Family` in one of these files: import and export read its record.

Export takes the first family that can state a model, in this order.
"""

from maxlm.interop.families import dense, experts, gemma
from maxlm.interop.families.record import Family

FAMILIES: dict[str, Family] = {family.model_type: family for family in (*dense.FAMILIES, *experts.FAMILIES, *gemma.FAMILIES)}

__all__ = ["FAMILIES", "Family"]
