"""Made test items, documents in which they are planted, and documents that share with an item only what does not make it a test item.

Written without regard to tests/corpus/decontaminate_corpus.py, by which the search was tuned: other items, templates and rewording.
"""

import random
import textwrap
from dataclasses import dataclass
from itertools import accumulate

_WORDS = (
    "the of and to in a is that for it as was with be by on not he this are or his from at which but have an they you had we her all she "
    "there would their one so if about who when what can more no out up into do any your than then some could them other these may its only"
)
_ONSETS = "b bl c ch cr d dr f fl g gl gr h j k kl l m n p pl pr qu r s sh sk sl sp st t th tr v w y z"
_VOWELS = "a e i o u ai ea ee ie oa oo ou"
FUNCTION_WORDS, ONSETS, VOWELS = _WORDS.split(), _ONSETS.split(), _VOWELS.split()
CODAS = ["", "b", "ck", "d", "g", "l", "ll", "m", "n", "nd", "ng", "nt", "p", "r", "rd", "rm", "s", "sh", "ss", "st", "t", "x"]
FAMOUS = (
    "Ask not what your country can do for you, ask what you can do for your country, and pass on the torch to a new generation.",
    "Call me Ishmael. Some years ago, never mind how long precisely, having little or no money in my purse, I thought I would sail about.",
    "All happy families are alike; each unhappy family is unhappy in its own way, and everything was in confusion in the house.",
    "We shall fight on the beaches, we shall fight on the landing grounds, we shall fight in the fields and in the streets.",
)
NOTICE = (
    "Redistribution and use in source and binary forms, with or without modification, are permitted provided that the following conditions "
    "are met: redistributions of source code must retain the above copyright notice, this list of conditions and the following disclaimer."
)
PROMPTS = (
    "The following are multiple choice questions (with answers) about {0}.\n\n{1}\n{2}\nAnswer:",
    "### Instruction:\n{1}\n{2}\n\n### Response:\nThe answer is",
    "<|user|>\nPlease answer this exam question on {0}: {1}\n{2}\n<|assistant|>\nLet us think step by step.",
    "## Quiz on {0}\n\n17. {1}\n\n{2}\n\n*Solution on page 212.*",
    "Q: {1}\nOptions:\n{2}\nA:",
)
PLANTS = ("plain", "reworded", "template", "quoted")
NEGATIVES = ("same words", "only the template", "another item", "famous quotation", "licence", "other numbers")


@dataclass(frozen=True)
class Item:
    """A test item. `subject`: of which it has its words."""

    kind: str
    subject: int
    question: str
    options: tuple[str, ...]


class Author:
    """Writes items and documents, all from a seed. Words follow Zipf's law; each subject has 40 words of its own."""

    def __init__(self, seed: int, subjects: int = 60) -> None:
        self.draw = random.Random(seed)
        words = dict.fromkeys(self._word() for _ in range(60_000))
        self.words = list(words)[:20_000]
        self.weights = list(accumulate(1 / (rank + 20) for rank in range(len(self.words))))
        self.subjects = [self.draw.sample(self.words[500:], 40) for _ in range(subjects)]

    def _word(self) -> str:
        parts = self.draw.choices((1, 2, 3), (2, 5, 3))[0]
        return "".join(self.draw.choice(ONSETS) + self.draw.choice(VOWELS) + self.draw.choice(CODAS) for _ in range(parts))

    def phrase(self, subject: int, count: int) -> str:
        """Words of which half are frequent function words, and an eighth belong to the subject."""
        out = []
        for _ in range(count):
            chance = self.draw.random()
            if chance < 0.48:
                out.append(self.draw.choice(FUNCTION_WORDS))
            elif chance < 0.6:
                out.append(self.draw.choice(self.subjects[subject]))
            else:
                out += self.draw.choices(self.words, cum_weights=self.weights)
        return " ".join(out)

    def prose(self, subject: int, sentences: int) -> str:
        lines = [self.phrase(subject, self.draw.randint(8, 24)).capitalize() + self.draw.choice("..?;") for _ in range(sentences)]
        return "\n\n".join(" ".join(lines[start : start + 4]) for start in range(0, len(lines), 4))

    def item(self, kind: str) -> Item:
        """`kind`: exam, sums, fact, ending or code."""
        draw, subject = self.draw, self.draw.randrange(len(self.subjects))
        words = self.phrase
        if kind == "exam":
            start = draw.choice(("Which one of these explains why", "What is the most likely cause of", "In the theory of", "Why does"))
            question = f"{start} {words(subject, draw.randint(9, 24))}?"
            return Item(kind, subject, question, tuple(words(subject, draw.randint(2, 8)) for _ in range(4)))
        if kind == "sums":
            return Item(kind, subject, self._sums(subject, *(draw.choice(self.words).capitalize() for _ in range(2))), ())
        if kind == "fact":
            start = draw.choice(("Who was the first to", "In what year did", "Which river flows past", "What do you call"))
            return Item(kind, subject, f"{start} {words(subject, draw.randint(9, 13))}?", ())
        if kind == "ending":
            return Item(kind, subject, self.prose(subject, 2), tuple(words(subject, draw.randint(6, 14)) for _ in range(4)))
        name = "_".join(draw.sample(self.subjects[subject], 2))
        body = f"Return {words(subject, draw.randint(14, 30))}."
        return Item(
            "code", subject, f'def {name}(values: list[int]) -> int:\n    """{body}\n    >>> {name}([{draw.randrange(99)}, 2])\n    """', ()
        )

    def _sums(self, subject: int, *names: str) -> str:
        a, b, c = (self.draw.randint(2, 400) for _ in range(3))
        thing, place = self.draw.sample(self.subjects[subject], 2)
        return (
            f"{names[0]} has {a} {thing}s that {self.phrase(subject, 7)}, and {names[1]} brings {b} more from the {place}. After "
            f"{self.phrase(subject, 6)} they sell {c} of them. How many {thing}s are left at the end of the day?"
        )

    def reworded(self, text: str) -> str:
        """One word in eight replaced or left out, two neighbours exchanged, and a few words put in front."""
        words = text.split()
        for place in sorted(self.draw.sample(range(len(words)), max(1, len(words) // 8)), reverse=True):
            if self.draw.random() < 0.7:
                words[place] = self.draw.choice(self.words)
            else:
                del words[place]
        if len(words) > 12:
            place = self.draw.randrange(len(words) - 1)
            words[place], words[place + 1] = words[place + 1], words[place]
        return self.draw.choice(("So tell me: ", "A friend asked: ", "Exercise 4. ", "")) + " ".join(words)

    def planted(self, kind: str, item: Item) -> str:
        """A document with `item` in it. `kind`: of PLANTS."""
        draw = self.draw
        whole = "\n".join([item.question, *item.options])
        if kind == "plain":
            return self._among(whole, draw.randrange(len(self.subjects)), draw.randint(0, 5), draw.randint(0, 5))
        if kind == "reworded":
            return self._among(self.reworded(whole), draw.randrange(len(self.subjects)), draw.randint(0, 5), draw.randint(0, 5))
        if kind == "template":
            options = list(item.options)
            draw.shuffle(options)
            listed = "\n".join(f"({letter}) {one}" for letter, one in zip("ABCD", options, strict=False))
            return draw.choice(PROMPTS).format(self.subjects[item.subject][0], item.question, listed)
        lines = textwrap.wrap(whole, 60) if item.kind != "code" else whole.split("\n")
        quoted = draw.choice(("\n".join("> " + line for line in lines), f"\u201c{whole}\u201d", "    " + "\n    ".join(lines)))
        return self._among(f"Somebody wrote on the list:\n{quoted}\n", item.subject, draw.randint(15, 60), draw.randint(15, 60))

    def negative(self, kind: str, item: Item) -> str:
        """A document without any item, but with what items have. `kind`: of NEGATIVES."""
        draw = self.draw
        if kind == "same words":
            return self.prose(item.subject, draw.randint(8, 50))
        if kind == "only the template":
            options = "\n".join(f"({letter}) {self.phrase(item.subject, 4)}" for letter in "ABCD")
            return draw.choice(PROMPTS).format(self.subjects[item.subject][0], self.phrase(item.subject, 14).capitalize() + "?", options)
        middle = {
            "another item": lambda: self.planted("template", self.item(item.kind)),
            "famous quotation": lambda: draw.choice(FAMOUS),
            "licence": lambda: NOTICE,
            "other numbers": lambda: self._sums(item.subject, *(draw.choice(self.words).capitalize() for _ in range(2))),
        }[kind]()
        return self._among(middle, item.subject, draw.randint(2, 12), draw.randint(2, 12))

    def _among(self, middle: str, subject: int, before: int, after: int) -> str:
        return "\n".join(part for part in (self.prose(subject, before), middle, self.prose(subject, after)) if part)
