"""Items and tasks of the tests of this room."""

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
