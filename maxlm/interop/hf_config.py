"""config.json of the Hugging Face library, read and written.

Read: our model settings, also of models of several modalities. Written: by the family that reads the same settings from it.
"""

from collections.abc import Mapping
from typing import Any

from maxlm.base.errors import UserError
from maxlm.config.fields import flatten
from maxlm.config.schema import ModelConfig
from maxlm.config.sections.mtp import MtpConfig
from maxlm.config.sections.rope import DynamicScaling
from maxlm.config.table import model_class
from maxlm.interop import packed
from maxlm.interop.families import Family, families
from maxlm.interop.families.keys import HARMLESS, NEUTRAL, OF_NETWORKS, Json, Keys, Section, shown
from maxlm.interop.families.rope import POSITIONS, positions

# Beginnings of names of the text tower in files of several modalities, and of a text model; other towers and bridges.
TEXT_TOWER = {"language_model.model.": "model.", "language_model.lm_head.": "lm_head.", "model.language_model.": "model."}
OTHER_TOWERS = tuple(
    f"{outer}{name}." for outer in ("", "model.") for name in ("vision_tower", "multi_modal_projector", "mm_projector", "vision_model")
)
# Models of several modalities; their text tower is imported: model_type -> model_type of `text_config` where `text_config` names none.
TOWERS = {"gemma3": "gemma3_text", "mistral3": "mistral", "kimi_k25": "kimi_k2"}
_OF_TOWERS = frozenset(  # keys of other towers, and of how they are joined
    [
        "boi_token_index",
        "eoi_token_index",
        "image_token_id",
        "image_token_index",
        "media_placeholder_token_id",
        "mm_tokens_per_image",
        "multimodal_projector_bias",
        "projector_hidden_act",
        "spatial_merge_size",
        "text_config",
        "vision_config",
        "vision_feature_layer",
    ]
)


def has_towers(values: Mapping[str, Any]) -> bool:
    """True for the config.json of a model of several modalities."""
    return isinstance(kind := values.get("model_type"), str) and kind in TOWERS


def text_tower(values: Mapping[str, Any], source: str) -> Json:
    """config.json of the text tower of a model of several modalities; other values as they are. As the library does it reads the network
    from `text_config` alone; facts are of both levels, and so are the ends of texts. Raises UserError for a setting of the outer level
    that is no fact, or says something else than `text_config`.
    """
    if not has_towers(values):
        return dict(values)
    keys = Keys(values, source)
    text = keys.section("text_config")
    if not text:
        keys.refuse("text_config", values.get("text_config"), f"is missing, which a model of the type {values['model_type']} has")
    outer = {name: value for name, value in values.items() if name not in _OF_TOWERS | {"model_type"} and value is not None}
    for name in ("tie_word_embeddings", "bos_token_id"):
        if None is not text.get(name) != outer.get(name, text.get(name)):
            keys.refuse(name, outer[name], f"contradicts text_config, where it is {shown(text[name])}: make them the same")
    known = (HARMLESS - OF_NETWORKS) | {"quantization_config", "tie_word_embeddings"}
    for name in sorted(outer.keys() - known):
        if name not in text and outer[name] not in NEUTRAL.get(name, ()):
            rule = "is a setting that maxlm does not know outside text_config, where the library reads the network from: move or remove it"
            keys.refuse(name, outer[name], rule)
    facts = {name: value for name, value in outer.items() if name in known and text.get(name) is None}
    ends = [end for level in (outer, text) for end in _ends(level.get("eos_token_id"))]
    if ends := [end for i, end in enumerate(ends) if end not in ends[:i]]:
        facts["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    joined = {"model_type": TOWERS[values["model_type"]], **text, **facts}
    family = families().get(str(joined["model_type"]))
    return joined if family is None else {**joined, "architectures": [family.architecture]}


def _ends(stated: Any) -> list[Any]:
    return stated if isinstance(stated, list) else [] if stated is None else [stated]


def read_config(values: Mapping[str, Any], source: str) -> tuple[Family, Section]:
    """Return (family, our `model` section) of a config.json. Raises UserError naming the first key that is not supported."""
    values = text_tower(values, source)
    keys, model_type = Keys(values, source), values.get("model_type")
    if not isinstance(model_type, str) or model_type not in families():
        keys.refuse("model_type", model_type, f"is not a family that maxlm imports: {', '.join(families())}")
    quantized = values.get("quantization_config")
    if isinstance(quantized, dict) and quantized.get("quant_method") in packed.METHODS:
        if rule := packed.problem(quantized):
            keys.refuse("quantization_config", quantized, rule)
        values = {name: value for name, value in values.items() if name != "quantization_config"}
    if keys.get(POSITIONS) is not None:
        keys.count(POSITIONS)
    return families()[model_type], families()[model_type].read(values, source)


# Settings of training, which say nothing about the network.
TRAINING = (
    "init_std",
    "mtp.loss_weight",
    *(f"moe.router.{name}" for name in ("balance_loss", "balance_over", "z_loss", "jitter", "capacity", "bias_rate")),
)


_UNREADABLE = 1000  # differences of a family with a config.json that cannot be read again
_LEAST_POSITIONS = 2048  # the least that a family of the library has by default, but for GPT-2
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")  # null where there is none: the library has defaults of its own
_OLDER_ROPE = ("rope_scaling", "rope_theta", "rope_local_base_freq", "partial_rotary_factor")  # next to `rope_parameters`


def family_of(config: ModelConfig, seq_len: int, published: Json | None = None) -> tuple[Family, Json]:
    """Return (family, config.json) that describe `config`. `published`: the config.json of the imported model, restated except for keys
    that differ now. `seq_len`: tokens of its sequences in training here, 0 without. Raises UserError naming the settings that the nearest
    family cannot state, or the library cannot run.
    """
    base = None if published is None else _base(published)
    if base is not None and (restated := _restated(config, seq_len, *base)) is not None:
        return restated
    known = {} if base is None else base[1]
    seq_len = max(seq_len, known.get(POSITIONS) or 0)
    nearest: tuple[int, str] = (1 << 30, "")
    for family in families().values():
        values = family.write(config)
        if family.states_positions:
            values |= {POSITIONS: positions(config.rope, config.max_seq_len or seq_len)}
        differing = _differing(config, values)
        if not differing:
            facts = {key: known.get(key) for key in _TOKENS}
            return family, {"architectures": [family.architecture], **values, **facts}
        nearest = min(nearest, (len(differing), f"{family.architecture} cannot say {', '.join(differing[:3])}"))
    raise UserError(f"This model cannot be exported: no published architecture is like it; the nearest, {nearest[1]}.")


def _base(published: Json) -> tuple[Family, Json]:
    """(family, config.json) of the published model, or of its text tower, by a type that the library has."""
    try:
        values = text_tower(published, "the published config.json")
        family = read_config(values, "the published config.json")[0]
    except UserError as error:  # imported by another version of maxlm
        raise UserError(f"{error} To export without what the source said, remove the folder `published` from the run.") from None
    known = next(name for name, one in families().items() if one.architecture == family.architecture)
    if known != published["model_type"]:
        values = {key: value for key, value in values.items() if key != "auto_map"}
        values |= {"model_type": known, "architectures": [family.architecture]}
    return families()[known], values


def _restated(config: ModelConfig, seq_len: int, family: Family, published: Json) -> tuple[Family, Json] | None:
    """Return the published config with the settings of `config` that differ; None if this is no model of its family any more."""
    try:
        section = read_config(published, "the published config.json")[1]
        depth = published.get("num_nextn_predict_layers") or 0
        mtp = config.mtp if config.mtp_depth in (0, depth) else MtpConfig(depth=depth)  # not all releases have the modules' weights
        was = model_class()(**{**section, "mtp": mtp})
    except ValueError:
        return None
    before, after = (family.write(model) for model in (was, config))
    changed = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    left_out = {key for key in changed if key not in after} | set(_OLDER_ROPE if "rope_parameters" in changed else ())
    values = {key: value for key, value in published.items() if key not in left_out} | {key: after[key] for key in changed if key in after}
    known = values.get(POSITIONS)
    scaled = positions(config.rope, seq_len) if config.rope != was.rope or isinstance(config.rope.scaling, DynamicScaling) else seq_len
    if scaled and family.states_positions and scaled > (known or _LEAST_POSITIONS):
        values[POSITIONS] = scaled
    return None if _differing(config, values) else (family, values)


def _differing(config: ModelConfig, values: Json) -> list[str]:
    try:
        section = read_config(values, "config.json")[1]
        further = MtpConfig(depth=config.mtp_depth) if config.mtp and families()[values["model_type"]].copies else None
        again = model_class()(**{**section, "mtp": further})
    except (UserError, ValueError) as error:
        return [str(error).splitlines()[0]] * _UNREADABLE
    mine, theirs = (dict(flatten(model.model_dump(mode="json"))) for model in (config, again))
    differing = [
        f"model.{key} = {mine.get(key)}" for key in {**mine, **theirs} if mine.get(key) != theirs.get(key) and not key.startswith(TRAINING)
    ]
    if config.moe is not None and not config.n_dense:  # then no layer is as wide as d_ff
        differing = [text for text in differing if not text.startswith("model.d_ff ")]
    differing += families()[values["model_type"]].problems(values)
    balanced = [bool(model.moe and model.moe.router.bias_rate) for model in (config, again)]
    return differing + (["model.moe.router.bias_rate"] if balanced[0] != balanced[1] else [])
