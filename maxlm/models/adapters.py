"""A model with adapters on disk and in memory: where its parameters are stored, adapters merged into them, and a model given adapters."""

from functools import reduce
from operator import getitem
from typing import Any, NamedTuple

from maxlm.config.schema import ModelConfig
from maxlm.models.adapted_matrix import merged
from maxlm.models.layers import StateVariable
from maxlm.models.parameters import Parameters, declarations
from maxlm.models.stack import Names, group_of


class Stored(NamedTuple):
    """Where a parameter, or model state, of the merged model is stored: the entry of the state (`params` or `model_state`) and its name
    there. With `a` and `b`, names of parameters, it is the sum of a matrix and scale A B, stacked along so many leading dims.
    """

    entry: str
    name: Names
    a: Names | None = None
    b: Names | None = None
    scale: float = 0.0
    stacked: int = 0


def stored(config: ModelConfig) -> dict[tuple[str, Names], Stored]:
    """For each (entry of the state, name) of the merged model, where a model of `config` stores it."""
    own = {name for name, _ in declarations(config)}
    found = {}
    for name, variable in declarations(config.merged):
        entry = "model_state" if isinstance(variable, StateVariable) else "params"
        if (base := (*name, "base")) in own:
            assert config.lora is not None, "only adapters make a base"
            group = group_of(config.merged, name)
            stacked, scale = 0 if group is None else len(group.stacked), config.lora.alpha / config.lora.rank
            found[entry, name] = Stored("model_state", base, (*name, "a"), (*name, "b"), scale, stacked)
        else:
            found[entry, name] = Stored(entry if config.lora is None else "model_state", name)
    return found


def frozen(config: ModelConfig, params: Parameters, model_state: Parameters) -> Parameters:
    """The model state of a model with adapters, from the parameters and the model state of the merged model."""
    trees = {"params": params, "model_state": model_state}
    state: Parameters = {}
    for (entry, name), place in stored(config).items():
        put(state, place.name, leaf(trees[entry], name))
    return state


def merge(config: ModelConfig, params: Parameters, model_state: Parameters) -> tuple[Parameters, Parameters]:
    """(parameters, model state) of the merged model (`config.merged`): a matrix with adapters becomes W + scale A B."""
    if config.lora is None:
        return params, model_state
    trees = {"params": params, "model_state": model_state}
    found: dict[str, Parameters] = {"params": {}, "model_state": {}}
    for (entry, name), place in stored(config).items():
        value = leaf(trees[place.entry], place.name)
        if place.a is not None and place.b is not None:
            value = merged(value, leaf(params, place.a), leaf(params, place.b), place.scale, place.stacked)
        put(found[entry], name, value)
    return found["params"], found["model_state"]


def leaf(tree: Parameters, name: Names) -> Any:
    """The leaf of this name. Raises KeyError."""
    return reduce(getitem, name, tree)


def put(tree: Parameters, name: Names, value: Any) -> None:
    """Add a leaf to `tree`."""
    for part in name[:-1]:
        tree = tree.setdefault(part, {})
    tree[name[-1]] = value
