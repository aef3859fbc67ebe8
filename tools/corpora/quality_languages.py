"""Language labels of real messages, and what `keep` lets through."""

import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from corpora.quality import Messages, Row
from maxlm.corpus.document import Document
from maxlm.corpus.filters.language import LanguageFilter, LanguageSettings

# Locales of MediaWiki; the label that is right where it is not the locale's first part.
LOCALES = str.split(
    "af am ar az be bg bn ca cs cy da de el en eo es et eu fa fi fr ga gl gu he hi hu hy id is it ja ka kk-cyrl kn ko la lt lv mk ml mn "
    "mr ms nb ne nl nn or pa pl ps pt pt-br ro ru si sk sl sq sv sw ta te th tl tr ug-arab uk ur uz vi yue zh-hans zh-hant bs hr "
    "sr-ec sr-el"
)
RIGHT = {"nb": "no"}
GROUPS = {  # rows: locales, and the tag of `keep` under which they should stay
    "Chinese, traditional": (["zh-hant"], "zh"),
    "Chinese, simplified": (["zh-hans"], "zh"),
    "Cantonese": (["yue"], "yue"),
    "Traditional characters by keep: zh-Hant": (["zh-hant"], "zh-Hant"),
    "Norwegian by keep: no": (["nb", "nn"], "no"),
    "Bosnian, Croatian, Serbian by keep: sh": (["bs", "hr", "sr-ec", "sr-el"], "sh"),
    "Serbian in Cyrillic": (["sr-ec"], "sr"),
    "Croatian": (["hr"], "hr"),
    "Malay": (["ms"], "ms"),
    "Indonesian": (["id"], "id"),
    "Portuguese, both": (["pt", "pt-br"], "pt"),
}
SIZES = (60, 200, 600)
EACH = 20  # texts of a locale and size


def measure(folder: Path, seed: int) -> Iterator[Row]:
    """Labels of all locales by length, with no `keep`; then by group with one: texts of the group that stay, and others that do."""
    draw, messages = random.Random(seed), Messages(folder)
    texts = {(locale, size): [messages.text(locale, size, draw) for _ in range(EACH)] for locale in LOCALES for size in SIZES}
    judge, wrong, seconds = LanguageFilter(LanguageSettings.model_validate({})), Counter[str](), 0.0
    judge(Document("", "compiled once"))
    for size in SIZES:
        planted = found = 0
        for locale in (one for one in LOCALES if one not in ("bs", "hr", "sr-el")):  # a group of its own, below
            for text in texts[locale, size]:
                began = time.process_time()
                result = judge(Document("", text))
                seconds += time.process_time() - began
                label, right = str(getattr(result, "metadata", {}).get("language")), RIGHT.get(locale, locale.partition("-")[0])
                planted, found = planted + 1, found + (label == right)
                wrong[f"{locale} as {label}"] += label != right
        yield Row(f"labels of {len(LOCALES) - 3} locales, {size} characters", planted, found, planted - found, asked=0.97)
    most = ", ".join(f"{count} {name}" for name, count in wrong.most_common(4) if count)
    yield Row("labels, all lengths", len(wrong) and planted * len(SIZES), planted * len(SIZES) - wrong.total(), wrong.total(), note=most)
    for name, (locales, tag) in GROUPS.items():
        judge = LanguageFilter(LanguageSettings.model_validate({"keep": [tag]}))
        stay = {key: sum(isinstance(judge(Document("", text)), Document) for text in some) for key, some in texts.items()}
        mine = [key for key in texts if key[0] in locales]
        related = [key for key in texts if key not in mine and (tag, key[0]) not in COVERED]
        yield Row(name, EACH * len(mine), sum(stay[key] for key in mine), sum(stay[key] for key in related), EACH * len(related))


COVERED = {("zh", "yue"), ("zh", "zh-hans"), ("zh", "zh-hant"), ("zh-Hant", "yue"), ("sr", "sr-el")}  # which a tag covers, too
