"""Items, tasks and folders of the tests of this room."""

import json
import shutil

ITEMS = [{"q": f"document {n}:", "options": ["ax0 by1", "zz9 zz9", "b"], "right": n % 3, "a": "ax0"} for n in range(6)]
TASKS = {
    "choice": {
        "kind": "multiple_choice",
        "data": "items.jsonl",
        "prompt": "{q}",
        "choices": "options",
        "gold": "right",
        "unconditional": "",
    },
    "words": {"kind": "exact_match", "data": "items.jsonl", "prompt": "{q}", "answer": "{a}", "max_new_tokens": 4},
    "text": {"kind": "perplexity", "data": "items.jsonl", "text_field": "q"},
    "held_out": {"kind": "perplexity", "store": "store", "limit": 3},
}


def with_bos(folder, source):
    """The export with a tokenizer that puts a token before every text, as many published ones do."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    tokenizer, settings = (json.loads((folder / name).read_text()) for name in ("tokenizer.json", "tokenizer_config.json"))
    end = settings["eos_token"]
    pieces = [{"SpecialToken": {"id": end, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    number = next(added["id"] for added in tokenizer["added_tokens"] if added["content"] == end)
    special = {end: {"id": end, "ids": [number], "tokens": [end]}}
    tokenizer["post_processor"] = {"type": "TemplateProcessing", "single": pieces, "pair": pieces, "special_tokens": special}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "bos_token": end}))
    return folder
