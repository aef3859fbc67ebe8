"""`maxlm export --adapter`: the adapters of a run as the PEFT library stores them (`adapter_config.json`, `adapter_model.safetensors`).

PEFT computes x W + alpha / r * B A x with A [r, in] and B [out, r], both outputs first (huggingface/peft, tuners/lora/layer.py).
"""

import json
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from maxlm.config import UserError
from maxlm.config.sections.lora import LoraConfig
from maxlm.interop import weights
from maxlm.interop.exporting import Exported
from maxlm.interop.hf_config import family_of
from maxlm.interop.importing import ADAPTER
from maxlm.interop.layouts import Linear, Matrix, Reordered
from maxlm.interop.new_folder import new_folder
from maxlm.interop.published_files import CONFIG, object_or_none, write_tokenizer
from maxlm.interop.tensor_files import ADAPTERS, write_tensors
from maxlm.models.adapters import leaf
from maxlm.training.saved_run import PUBLISHED, SavedRun, open_run

FEED_FORWARD = ("gate", "up", "down")
Tensors = dict[str, np.ndarray]
Pair = tuple[np.ndarray, np.ndarray]  # A [rank, in] and B [out, rank]


def export_adapter(run: Path, out: Path, step: int | None, kind: str) -> Exported:
    """Export the adapters of the newest checkpoint of `run`, or of `step`, into the new folder `out`, in float32, with the tokenizer
    and the chat template that they were trained with.

    The base that they belong to is the model of `train.start_from`. Raises UserError; then nothing is left.
    """
    saved = open_run(run)
    lora = saved.trained.model.lora
    if lora is None:
        raise UserError(f"{run} was trained without model.lora, so it has no adapter: leave --adapter out.")
    feed_forward = [name for name in lora.matrices or saved.config.model.adaptable if name in FEED_FORWARD]
    if saved.config.model.moe is not None and feed_forward:
        raise UserError(
            f"{run}: model.lora adapts `{feed_forward[0]}` in a model with experts, and PEFT (0.21) takes modules of that name for "
            "the experts: export the merged model (leave --adapter out), or train adapters of attention alone (model.lora.matrices)."
        )
    family, _ = family_of(saved.config.model, saved.config.data.seq_len, object_or_none(run / PUBLISHED / CONFIG))
    found = weights.targets(saved.config.model, family)
    tensors, config = _adapter(saved, lora, found, step, kind)
    with new_folder(out) as made:
        write_tensors(tensors, made / ADAPTERS)
        (made / ADAPTER).write_text(json.dumps(config, indent=1), encoding="utf-8")
        write_tokenizer(saved, made)
    return Exported(family.architecture, sum(tensor.size for tensor in tensors.values()), 1)


def _adapter(saved: SavedRun, lora: LoraConfig, found: list[weights.Target], step: int | None, kind: str) -> tuple[Tensors, dict[str, Any]]:
    """(tensors by name, adapter_config.json)."""
    params = saved.adapters(step, kind)
    pairs = [
        (piece.theirs.removesuffix(".weight"), target, _pair(leaf(params, target.name), target, piece.index))
        for target in found
        if target.name[0] != "ahead" and weights.entry(params, (*target.name, "a")) is not None
        for piece in target.pieces
    ]
    tensors: Tensors = {}
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    pairs.sort(key=lambda pair: pair[0])
    for module, parts in groupby(pairs, key=lambda pair: pair[0]):
        a, b = _side_by_side([(target, pair) for _, target, pair in parts])
        tensors[f"base_model.model.{module}.lora_A.weight"] = np.ascontiguousarray(a)
        tensors[f"base_model.model.{module}.lora_B.weight"] = np.ascontiguousarray(b)
        if len(a) != lora.rank:
            ranks[module], alphas[module] = len(a), lora.alpha * len(a) / lora.rank
    modules = sorted({module for module, _, _ in pairs})
    return tensors, {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": any(not isinstance(_matrix(target), Linear) for _, target, _ in pairs),
        "target_modules": modules,
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "inference_mode": True,
    }


def _matrix(target: weights.Target) -> Matrix:
    layout = target.rule.layout
    inner = layout.layout if isinstance(layout, Reordered) else layout
    assert isinstance(inner, Matrix), "adapted tensors are matrices"
    return inner


def _pair(adapter: dict[str, Any], target: weights.Target, index: tuple[int | slice, ...]) -> Pair:
    """A and B of one layer. Outputs are in the order of their tensor, inputs as ours."""
    a, b = np.asarray(adapter["a"])[index], np.asarray(adapter["b"])[index]
    layout = _matrix(target)
    if isinstance(target.rule.layout, Reordered):
        b = b[..., np.argsort(target.rule.layout.order)]
    written = replace(layout, inputs=1).write(b)
    return a.reshape(-1, a.shape[-1]).T, written if isinstance(layout, Linear) else written.T


def _side_by_side(parts: list[tuple[weights.Target, Pair]]) -> Pair:
    """The pair of one tensor of theirs. Where it holds several of ours (GPT-2's queries, keys and values), B is block by block, so the rank
    is the sum of theirs.
    """
    parts.sort(key=lambda part: part[0].rule.rows or (0,))
    own = {target.part: (target, pair) for target, pair in parts}
    target, (a, b) = parts[0]
    ours = target.rule.ours
    if target.rule.rows is not None:
        joined, first = np.zeros((target.rule.rows[2], sum(len(a) for _, (a, _) in parts)), np.float32), 0
        for part, (a, b) in parts:
            assert part.rule.rows is not None, "rules of one tensor all say their rows"
            joined[slice(*part.rule.rows[:2]), first : first + len(a)] = b
            first += len(a)
        return np.concatenate([a for _, (a, _) in parts]), joined
    if len(ours) == 1:
        return a, b
    assert not target.rule.interleaved, "only experts are"
    blocks, ranks = [], [len(pair[0]) for _, pair in parts]
    for name in ours:
        place = [len(own[other][1][0]) for other in ours[: ours.index(name)] if other in own]
        block = np.zeros((len(b), sum(ranks)), np.float32)
        if name in own:
            block[:, sum(place) : sum(place) + len(own[name][1][0])] = own[name][1][1]
        blocks.append(block)
    return np.concatenate([own[name][1][0] for name in ours if name in own]), np.concatenate(blocks)
