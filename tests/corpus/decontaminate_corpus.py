"""A made corpus with planted test items, and documents that share with an item only what does not make it a test item. All from a seed.

Text is of made content words with Zipf's frequencies, English function words, and names that recur in all texts on a topic.
"""

import json
import random
import string
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from maxlm.corpus.document import Document

FUNCTION_WORDS = (
    "the of and to in a is that for it as was with be by on not he this are or his from at which but have an they you had we her all she "
    "there would their one so if about who when what can more no out up into do any your than then some could them other these may its only"
)
FUNCTION = FUNCTION_WORDS.split()
SYLLABLE_LIST = "ba ce di fo gu ha je ki lo mu na pe qui ro su ta ve wi xo ya zu bra cle dri flo gru pla ske tri sto ment ion ler nar"
SYLLABLES = SYLLABLE_LIST.split()
QUOTES = (
    "to be or not to be that is the question whether tis nobler in the mind to suffer the slings and arrows of outrageous fortune",
    "it was the best of times it was the worst of times it was the age of wisdom it was the age of foolishness",
    "we hold these truths to be self evident that all men are created equal that they are endowed with certain unalienable rights",
    "four score and seven years ago our fathers brought forth on this continent a new nation conceived in liberty",
    "it is a truth universally acknowledged that a single man in possession of a good fortune must be in want of a wife",
    "in the beginning god created the heaven and the earth and the earth was without form and void and darkness was upon the deep",
)
LICENCE = (
    "Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated documentation files, to "
    "deal in the software without restriction, including without limitation the rights to use, copy, modify, merge and publish. The "
    "software is provided as is, without warranty of any kind, express or implied, including but not limited to the warranties of "
    "merchantability, fitness for a particular purpose and noninfringement."
)
INSTRUCTION = (
    "Read the following question carefully and choose the best answer from the options given below. Think step by step before you answer, "
    "and finish your reply with the letter of the option that you have chosen."
)
TEMPLATES = (
    "Which of the following statements best describes {}?",
    "Which of the following is correct about {}?",
    "All of the following are true of {} EXCEPT which one of these?",
    "According to the most widely accepted theory, what is the main reason for {}?",
)
PLANTS = ("plain", "changed", "reworded", "template", "quoted")
NEGATIVES = ("clean", "only template", "only instruction", "quotation", "topic", "sibling", "licence")


@dataclass(frozen=True)
class MadeItem:
    kind: str  # choice, problem, trivia, passage or quote
    topic: int
    question: str
    options: tuple[str, ...]


@dataclass(frozen=True)
class Made:
    items: list[MadeItem]
    documents: list[Document]
    kinds: dict[str, str]  # id of a document: a name of PLANTS or NEGATIVES
    planted: dict[str, int]  # id of a document: number of its item


class Writer:
    """Text on topics, from one generator of random numbers."""

    def __init__(self, seed: int, topics: int = 60) -> None:
        self.random = random.Random(seed)
        content: dict[str, None] = {}
        while len(content) < 6000:
            content["".join(self.random.choices(SYLLABLES, k=self.random.randint(2, 4)))] = None
        self.content = list(content)
        self.content_weights = list(accumulate(1 / (rank + 20) for rank in range(len(self.content))))  # cumulated, as the next
        self.function_weights = list(accumulate(1 / (rank + 2) for rank in range(len(FUNCTION))))
        self.topics = [self.random.choices(self.content, k=120) for _ in range(topics)]
        self.names = [[" ".join(self.random.choices(words, k=self.random.randint(2, 3))) for _ in range(25)] for words in self.topics]

    def phrase(self, topic: int, length: int) -> str:
        """About `length` words."""
        words: list[str] = []
        while len(words) < length:
            draw = self.random.random()
            if draw < 0.45:
                words += self.random.choices(FUNCTION, cum_weights=self.function_weights)
            elif draw < 0.53 and length - len(words) > 2:
                words += self.random.choice(self.names[topic]).split()
            elif draw < 0.8:
                words.append(self.random.choice(self.topics[topic]))
            else:
                words += self.random.choices(self.content, cum_weights=self.content_weights)
        return " ".join(words)

    def text(self, topic: int, sentences: int) -> str:
        lines = (self.phrase(topic, self.random.randint(7, 22)).capitalize() + "." for _ in range(sentences))
        return "".join(line + ("\n\n" if self.random.random() < 0.2 else " ") for line in lines).strip()

    def item(self, kind: str) -> MadeItem:
        pick, topic = self.random, self.random.randrange(len(self.topics))
        options: tuple[str, ...] = ()
        if kind == "choice":
            question = pick.choice(TEMPLATES).format(self.phrase(topic, pick.randint(2, 18)))
            options = tuple(self.phrase(topic, pick.randint(3, 9)) for _ in range(4))
        elif kind == "problem":
            a, b, c = (pick.randint(3, 900) for _ in range(3))
            name, things = pick.choice(self.content).capitalize(), self.phrase(topic, 2)
            question = (
                f"{name} has {a} {things} and buys {b} more at the {self.phrase(topic, pick.randint(3, 6))}. Then {name} gives {c} "
                f"of them to the {self.phrase(topic, pick.randint(3, 8))}. How many {things} does {name} have left in total?"
            )
        elif kind == "trivia":
            start = pick.choice(("In which year did the", "What is the name of the person who first", "Where in the world was the"))
            question = f"{start} {pick.choice(self.names[topic])} {self.phrase(topic, pick.randint(5, 9))}?"
        elif kind == "passage":
            question = self.text(topic, pick.randint(2, 4))
        else:
            part = " ".join(pick.choice(QUOTES).split()[:12])
            question = f'Who said "{part}" when {self.phrase(topic, pick.randint(8, 14))}?'
        return MadeItem(kind, topic, question, options)

    def changed(self, text: str) -> str:
        """Other case, punctuation and whitespace."""
        words = [self.random.choice((str.upper, str.lower, str.title))(word.strip(string.punctuation)) for word in text.split()]
        return "".join(word + self.random.choice((" ", " ", "  ", ", ", " - ", "\n", ' "', "; ", "\u00a0", "\u2019 ")) for word in words)

    def reworded(self, text: str, topic: int, share: float = 0.12) -> str:
        """`share` of the words, and one at least, replaced, or others inserted before them."""
        words = text.split()
        for place in sorted(self.random.sample(range(len(words)), max(1, round(share * len(words)))), reverse=True):
            other = self.random.choice([self.random.choice(FUNCTION), self.random.choice(self.topics[topic])])
            words[place : place + 1] = [other] if self.random.random() < 0.6 else [other, words[place]]
        return " ".join(words)

    def in_template(self, item: MadeItem) -> str:
        options = list(item.options)
        self.random.shuffle(options)
        lines = "\n".join(f"{letter}) {option}" for letter, option in zip("ABCD", options, strict=False))
        return (
            f"{self.random.choice((INSTRUCTION, 'Answer the question.'))}\n\nQ: {item.question}\n{lines}\nA: {self.random.choice('ABCD')}"
        )

    def plain(self, item: MadeItem) -> str:
        return item.question + "".join("\n" + option for option in item.options)

    def around(self, middle: str, topic: int, before: int, after: int) -> str:
        return f"{self.text(topic, before)}\n{middle}\n{self.text(topic, after)}"

    def plant(self, kind: str, item: MadeItem) -> str:
        draw = self.random.randint
        if kind == "quoted":
            return self.around(self.plain(item), item.topic, draw(20, 80), draw(20, 80))
        text = self.in_template(item) if kind == "template" else self.plain(item)
        text = {"changed": self.changed, "reworded": lambda text: self.reworded(text, item.topic)}.get(kind, str)(text)
        return self.around(text, self.random.randrange(len(self.topics)), draw(0, 6), draw(0, 6))

    def negative(self, kind: str, item: MadeItem) -> str:
        draw = self.random.randint
        if kind == "clean":
            return self.text(self.random.randrange(len(self.topics)), draw(5, 40))
        if kind == "topic":
            return self.text(item.topic, draw(20, 60))
        middle = {
            "only template": lambda: self.random.choice(TEMPLATES).format(self.phrase(item.topic, draw(4, 12))),
            "only instruction": lambda: f"{INSTRUCTION}\nQ: {self.phrase(item.topic, 12)}?\nA: {self.random.choice('ABCD')}",
            "quotation": lambda: f'"{self.random.choice(QUOTES)}"',
            "sibling": lambda: self.in_template(self.item(item.kind)),
            "licence": lambda: LICENCE,
        }[kind]()
        return self.around(middle, item.topic, draw(2, 12), draw(2, 12))


def make(seed: int, items: int = 300, plants: int = 200, negatives: int = 220) -> Made:
    """`items` items, `plants` documents of each kind of plant and `negatives` of each kind of negative, in random order."""
    writer = Writer(seed)
    made = [writer.item(("choice", "problem", "trivia", "passage", "quote")[number % 5]) for number in range(items)]
    texts = []
    for kind in PLANTS:
        for number in writer.random.sample(range(items), plants):
            texts.append((kind, number, writer.plant(kind, made[number])))
    for kind in NEGATIVES:
        texts += [(kind, -1, writer.negative(kind, writer.random.choice(made))) for _ in range(negatives)]
    writer.random.shuffle(texts)
    documents = [Document(f"made.jsonl#{number}", text) for number, (_, _, text) in enumerate(texts)]
    kinds = {document.id: kind for document, (kind, _, _) in zip(documents, texts, strict=True)}
    planted = {document.id: number for document, (_, number, _) in zip(documents, texts, strict=True) if number >= 0}
    return Made(made, documents, kinds, planted)


def write_set(path: Path, items: list[MadeItem]) -> None:
    """A set with the fields `question` and `choices.text`."""
    lines = (json.dumps({"question": item.question, "choices": {"text": list(item.options)}}) for item in items)
    path.write_text("\n".join(lines) + "\n")


def main() -> None:
    """Print found and planted documents by kind, for several seeds: `python tests/corpus/decontaminate_corpus.py [SEED ...]`."""
    import sys
    import tempfile

    from maxlm.corpus.decontaminate import DecontaminateSettings, Decontaminator, EvalIndex, EvalSet, Frequencies
    from maxlm.corpus.document import Removed

    for seed in map(int, sys.argv[1:] or ["0"]):
        made = make(seed)
        with tempfile.TemporaryDirectory() as folder:
            write_set(Path(folder) / "set.jsonl", made.items)
            one = EvalSet(path=f"{folder}/set.jsonl", fields=("question",), options=("choices.text",))
            settings = DecontaminateSettings(sets={"made": one})
            index = EvalIndex.build(settings, Frequencies.learn(settings, made.documents))
        removed = {one.id: one for one in Decontaminator(index).run(made.documents) if isinstance(one, Removed)}
        print(f"seed {seed}: {len(made.documents)} documents, {len(removed)} removed, {index.report()}")
        for kind in PLANTS + NEGATIVES:
            ids = [id for id, one in made.kinds.items() if one == kind]
            right = sum(id in removed and removed[id].detail["item"] == made.planted.get(id) for id in ids)
            print(f"  {kind:17s} {sum(id in removed for id in ids):4d} of {len(ids)} removed, {right} for the planted item")
        found = sum(id in made.planted for id in removed)
        print(f"  recall {found / len(made.planted):.4f}, precision {found / max(1, len(removed)):.4f}")
        for id in [id for id in made.planted if id not in removed][:6]:
            print("  missed", made.kinds[id], made.items[made.planted[id]])
        for id in [id for id in removed if id not in made.planted][:6]:
            print("  false", made.kinds[id], removed[id].detail, removed[id].example)


if __name__ == "__main__":
    main()
