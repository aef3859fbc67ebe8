"""The parts of a layer of a model, by their names: a sequence mixer, a memory where there is one, and a feed-forward part.

`maxlm/config/parts/layers.py` lists the parts. `model.layer_pattern` names mixers; a name may be followed by `+` and the name of a memory.
`model.norm_position` names the residual rule. A feed-forward part is chosen by its section, such as `model.moe`, and is dense without one.
"""

from typing import Annotated, Any, NamedTuple

from maxlm.config.choices import Choice, implementation, names, part, parts


def _entries() -> tuple[str, ...]:
    mixers = [one.name for one in parts("mixer") if not one.facts.by_section]
    return (*mixers, *(f"{mixer}+{memory}" for mixer in mixers for memory in names("memory")))


PatternEntry = Annotated[str, Choice("mixer", _entries)]
ResidualRule = Annotated[str, Choice("residual")]


class LayerParts(NamedTuple):
    """Names of the parts of a layer."""

    mixer: str  # as in the layer pattern
    feed_forward: str
    memory: str = ""  # empty: none


def layer_parts(model: Any, depth: int) -> LayerParts:
    """Names of the parts of the layer at this depth of a `ModelConfig`; modules of multi-token prediction follow the last layer."""
    mixer, _, memory = model.layer_pattern[depth % len(model.layer_pattern)].partition("+")
    return LayerParts(mixer, _feed_forward(model) if model.moe is None or depth < model.n_dense else "experts", memory)


def _feed_forward(model: Any) -> str:
    """The feed-forward part of layers without experts."""
    return next((one.name for one in other_feed_forward() if getattr(model, one.name, None) is not None), "dense")


def other_feed_forward() -> tuple[Any, ...]:
    """Feed-forward parts that a section of their own chooses."""
    return tuple(one for one in parts("feed_forward") if one.section is not None and not one.facts.by_section)


def mixers_of(model: Any) -> tuple[str, ...]:
    """The mixers' names in the layer pattern, each once."""
    return tuple(dict.fromkeys(layer_parts(model, depth).mixer for depth in range(len(model.layer_pattern))))


def mixer_class(model: Any, name: str) -> Any:
    """The class of the mixer of this name in the layer pattern of a `ModelConfig`."""
    replacing = (one for one in parts("mixer") if name in one.facts.replaces and getattr(model, one.facts.by_section) is not None)
    return implementation(next(replacing, None) or part("mixer", name))
