"""The parts of a layer by kind and name, and where the code of each is: a sequence mixer, a residual rule, a feed-forward part, a memory.

A new part is a file under `maxlm/models` and its line in one of these tables. `model.layer_pattern` names mixers; a name may be followed by
`+` and the name of a memory. Residual rules are the values of `model.norm_position`, and `model.moe` chooses the feed-forward part.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

_ATTENTION, _ADDITIVE = "maxlm.models.mixers.attention:Attention", "maxlm.models.decoder:Additive"
MIXERS = {
    "global": _ATTENTION,
    "local": _ATTENTION,  # over a window of `model.window` tokens
    "latent_attention": "maxlm.models.mixers.latent_attention:LatentAttention",
}
BY_SECTION = {"latent": {"global": "latent_attention", "local": "latent_attention"}}  # mixers in place of others where this section is set
RESIDUAL_RULES = {"pre": _ADDITIVE, "sandwich": _ADDITIVE}
FEED_FORWARD = {"dense": "maxlm.models.feed_forward.dense:Mlp", "experts": "maxlm.models.feed_forward.experts:Moe"}
MEMORIES: dict[str, str] = {}

_NAMED = [name for name in MIXERS if name not in {new for by in BY_SECTION.values() for new in by.values()}]

if TYPE_CHECKING:
    PatternEntry = str
    ResidualRule = str
else:
    PatternEntry = Literal[(*_NAMED, *(f"{name}+{memory}" for name in _NAMED for memory in MEMORIES))]
    ResidualRule = Literal[(*RESIDUAL_RULES,)]


class LayerParts(NamedTuple):
    """Names of the parts of a layer."""

    mixer: str  # as in the layer pattern
    feed_forward: str
    memory: str = ""  # empty: none


def layer_parts(model: Any, depth: int) -> LayerParts:
    """Names of the parts of the layer at this depth of a `ModelConfig`; modules of multi-token prediction follow the last layer."""
    mixer, _, memory = model.layer_pattern[depth % len(model.layer_pattern)].partition("+")
    return LayerParts(mixer, "dense" if model.moe is None or depth < model.n_dense else "experts", memory)


def mixers_of(model: Any) -> tuple[str, ...]:
    """The mixers' names in the layer pattern, each once."""
    return tuple(dict.fromkeys(layer_parts(model, depth).mixer for depth in range(len(model.layer_pattern))))


def mixer_class(model: Any, name: str) -> Any:
    """The class of the mixer of this name in the layer pattern of a `ModelConfig`."""
    replaced = [by[name] for section, by in BY_SECTION.items() if getattr(model, section) is not None and name in by]
    return load_part(MIXERS[replaced[0] if replaced else name])


def load_part(path: str) -> Any:
    """The class at a path of `layer_parts`, `module:class`."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
