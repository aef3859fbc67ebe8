"""Parameters from tensors of a published model, straight onto their shards, and back."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from maxlm.base.errors import UserError, some
from maxlm.config.schema import ModelConfig
from maxlm.interop.copying import bounds_of, copy_part, empty_aligned, is_inside
from maxlm.interop.families import Family
from maxlm.interop.families.decoder import EMBEDDING, UNEMBEDDING
from maxlm.interop.layouts import Rule, Shape, expert_axis
from maxlm.interop.tensor_files import TensorFiles
from maxlm.models.adapters import put
from maxlm.models.parameters import declarations, model_state_specs, parameter_specs
from maxlm.models.stack import Names, within_layer

READERS = 4  # tensors that are read and turned at a time
T = TypeVar("T")
Step = Callable[[int, int], None]  # (bytes read, of so many)


@dataclass(frozen=True)
class Piece:
    """Part of one of our parameters, and the tensor in which it lies."""

    index: tuple[int | slice, ...]  # in ours: layers, then the expert if theirs is of one
    theirs: str
    row: int | None  # of their tensor, where its first dim counts experts


@dataclass(frozen=True)
class Target:
    """One of our parameters: its shape without layers and experts, and the pieces that make it."""

    name: Names
    rule: Rule
    shape: Shape
    piece: Shape
    pieces: tuple[Piece, ...]

    @property
    def part(self) -> str:
        """Name by which the rule knows it."""
        return next(part for part in self.rule.ours if "/".join(self.name).endswith(part))


def targets(config: ModelConfig, family: Family) -> list[Target]:
    """List all parameters and model state of a model, by rule. Raises UserError for a parameter that the family has no tensor for."""
    table = family.rules(config)
    rules = {(rule.per_layer, ours): rule for rule in table for ours in rule.ours}
    found = []
    for name, variable in declarations(config):
        within = within_layer(config, name)
        inner, depths = (name, np.array(0)) if within is None else within
        rule = rules.get((within is not None, "/".join(inner)))
        if rule is None:
            raise UserError(f"models of the family {family.model_type} have no place for our parameter {'/'.join(name)}.")
        found.append(_target(config, name, rule, tuple(variable.shape), depths))
    return sorted(found, key=lambda target: table.index(target.rule))


def _target(config: ModelConfig, name: Names, rule: Rule, shape: Shape, depths: np.ndarray) -> Target:
    piece = list(shape[depths.ndim :])
    experts = piece.pop(expert_axis(name[-1])) if rule.per_expert else 0
    pieces = []
    for stacked in np.ndindex(depths.shape):
        for expert in range(experts) if rule.per_expert else (None,):
            index: tuple[int | slice, ...] = stacked
            if expert is not None:
                index = (*stacked, *([slice(None)] * expert_axis(name[-1])), expert)
            theirs = rule.theirs.format(layer=depths[stacked], expert=expert)
            pieces.append(Piece(index, theirs, expert if rule.by_expert else None))
    return Target(name, rule, shape, tuple(piece), tuple(pieces))


def their_shapes(config: ModelConfig, found: list[Target]) -> dict[str, Shape]:
    """Name -> shape of every tensor of theirs."""
    experts = config.moe.n_experts if config.moe else 0
    return {piece.theirs: target.rule.shape(target.piece, experts) for target in found for piece in target.pieces}


def check(config: ModelConfig, family: Family, found: list[Target], files: TensorFiles) -> list[str]:
    """Refuse files that lack a tensor, or have one of another shape or an unknown one. Returns notes on tensors that are not read."""
    wanted = their_shapes(config, found)
    files.prefix(family.prefix, keep=UNEMBEDDING)
    if missing := sorted(wanted.keys() - files.keys()):
        raise UserError(f"The source lacks {some(missing)}, which its config.json asks for.")
    notes, unknown, repeated = list(files.notes), [], copies(config, family)
    if config.tie_embeddings:
        repeated[UNEMBEDDING] = next(target.pieces[0].theirs for target in found if target.name == ("embedding_VD",))
    for name in sorted(files.keys() - wanted.keys()):
        ignored = (what for pattern, what in family.ignored if re.fullmatch(re.escape(pattern).replace(r"\{layer\}", r"\d+"), name))
        if name in repeated:
            if not files.same(name, repeated[name]):
                raise UserError(f"{name} differs from {repeated[name]}, and a model of this config.json has one matrix for both.")
            notes.append(f"{name} is a copy of {repeated[name]}: not read")
        elif (what := next(ignored, None)) is not None:
            notes.append(f"{name} is {what}: not read")
        else:
            unknown.append(name)
    if unknown:
        raise UserError(f"The source holds {some(unknown)}, which a model of its config.json does not have.")
    for name, shape in wanted.items():
        if files[name] != shape:
            raise UserError(f"{name} has shape {list(files[name])} in the source, and its config.json makes it {list(shape)}.")
    return notes


def copies(config: ModelConfig, family: Family) -> dict[str, str]:
    """Tensors of modules that predict further -> the tensor of the model that each repeats."""
    tied = {UNEMBEDDING: EMBEDDING} if config.tie_embeddings else {}
    ahead = range(config.n_layers, config.n_layers + config.mtp_depth)
    return {name.format(layer=layer): tied.get(repeated, repeated) for layer in ahead for name, repeated in family.copies}


def load(config: ModelConfig, found: list[Target], files: TensorFiles, mesh: Mesh, step: Step) -> dict[str, Any]:
    """{"params", "model_state"} in float32, each leaf on its sharding over `mesh`.

    A tensor is read once for each of ours that it holds, and only where a device of this process wants it: a host holds `READERS`
    of them, and its own shards.
    """
    tree: dict[str, Any] = {"params": {}, "model_state": {}}
    specs = {"params": parameter_specs(config, mesh), "model_state": model_state_specs(config, mesh)}
    total, done = 4 * sum(math.prod(target.shape) for target in found), 0
    for target in found:
        kind = "params" if entry(specs["params"], target.name) is not None else "model_state"
        sharding = NamedSharding(mesh, entry(specs[kind], target.name))
        put(tree[kind], target.name, _leaf(target, files, sharding))
        done += 4 * math.prod(target.shape)
        step(done, total)
    return tree


def nested(name: Names, value: Any) -> dict[str, Any]:
    """A tree with one leaf."""
    return {name[0]: nested(name[1:], value) if len(name) > 1 else value}


def entry(tree: Mapping[str, Any], name: Names) -> Any:
    """The leaf of this name, or None."""
    branch: Any = tree
    for part in name:
        branch = branch.get(part) if isinstance(branch, Mapping) else None
    return branch


def _leaf(target: Target, files: TensorFiles, sharding: NamedSharding) -> jax.Array:
    """The parameter, of which only this process's shards are ever in memory."""
    indices = sharding.addressable_devices_indices_map(target.shape)
    where = {device: bounds_of(index or (), target.shape) for device, index in indices.items()}
    shards = {bounds: empty_aligned(tuple(stop - start for start, stop in bounds)) for bounds in set(where.values())}

    def fill(piece: Piece) -> None:
        fitting = [bounds for bounds in shards if all(is_inside(at, *b) for at, b in zip(piece.index, bounds, strict=False))]
        if fitting:
            bits = not target.rule.layout.computes
            theirs = target.rule.part(files.read(piece.theirs, piece.row, bits=bits), target.part)
            ours = target.rule.layout.read(theirs, target.piece)
            for bounds in fitting:
                copy_part(ours, shards[bounds], piece.index, bounds)

    with ThreadPoolExecutor(READERS) as pool:  # pieces do not overlap
        list(pool.map(fill, target.pieces))
    return jax.make_array_from_single_device_arrays(
        target.shape, sharding, [jax.device_put(shards[bounds], device) for device, bounds in where.items()]
    )


def with_copies(tensors: Iterable[tuple[str, T]], repeated: Mapping[str, str]) -> Iterator[tuple[str, T]]:
    """`tensors`, each followed by its copies."""
    for name, value in tensors:
        yield name, value
        yield from ((copy, value) for copy, original in repeated.items() if original == name)


def tensors(found: list[Target], leaf: Callable[[Names], np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor of theirs, in the order of `their_shapes`, from our parameters as `leaf` gives them."""
    together: dict[tuple[str, ...], list[Target]] = {}
    for target in found:  # the parts of one tensor
        together.setdefault(tuple(piece.theirs for piece in target.pieces), []).append(target)
    for parts in together.values():
        rule = parts[0].rule
        parts.sort(key=lambda target: (target.rule.rows or (0,), target.rule.ours.index(target.part)))
        values = [leaf(target.name) for target in parts]
        pieces = zip(*(target.pieces for target in parts), strict=True)
        for name, experts in groupby(pieces, key=lambda pieces: pieces[0].theirs):
            split = [[part.rule.layout.write(v[piece.index]) for part, v, piece in zip(parts, values, row, strict=True)] for row in experts]
            rows = [rule.join(columns) for columns in split]
            yield name, np.stack(rows) if rule.by_expert else rows[0]
