"""config.json of the Hugging Face library, also of models of several modalities, to our model settings."""

from collections.abc import Mapping
from typing import Any

from maxlm.interop import packed
from maxlm.interop.families import FAMILIES, Family
from maxlm.interop.families.keys import Json, Keys, Section, shown
from maxlm.interop.families.rope import POSITIONS
from maxlm.interop.known_keys import HARMLESS, NEUTRAL, OF_NETWORKS

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
    family = FAMILIES.get(str(joined["model_type"]))
    return joined if family is None else {**joined, "architectures": [family.architecture]}


def _ends(stated: Any) -> list[Any]:
    return stated if isinstance(stated, list) else [] if stated is None else [stated]


def read_config(values: Mapping[str, Any], source: str) -> tuple[Family, Section]:
    """Return (family, our `model` section) of a config.json. Raises UserError naming the first key that is not supported."""
    values = text_tower(values, source)
    keys, model_type = Keys(values, source), values.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        keys.refuse("model_type", model_type, f"is not a family that maxlm imports: {', '.join(FAMILIES)}")
    quantized = values.get("quantization_config")
    if isinstance(quantized, dict) and quantized.get("quant_method") in packed.METHODS:
        if rule := packed.problem(quantized):
            keys.refuse("quantization_config", quantized, rule)
        values = {name: value for name, value in values.items() if name != "quantization_config"}
    if keys.get(POSITIONS) is not None:
        keys.count(POSITIONS)
    return FAMILIES[model_type], FAMILIES[model_type].read(values, source)
