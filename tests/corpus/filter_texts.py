"""Texts for the tests of filters: varied English prose, made from a seed."""

import random


def _words(text: str) -> list[str]:
    return text.split()


NOUNS = _words(
    """bridge letter map method railway price pottery experiment garden village instrument winter coast island machine game
photograph river building argument recipe song ship theory engineer reader neighbour committee student sister museum company
farmer author doctor council merchant program librarian orchestra teacher harbour newspaper expedition forest kitchen market
mountain library window family castle station story harvest telescope carpet festival painter traveller journal lantern
valley orchard tower"""
)
ADJECTIVES = _words(
    """narrow unusual old careful abandoned broken long careless forgotten heavy quiet bright early famous modest wooden distant
gentle rapid strange useful northern remarkable private rural simple second ancient expensive ordinary blue cold common
curious deep dusty elegant empty faithful fragile golden hidden honest lively lonely modern patient precious sensible shallow
silent slender warm weary young"""
)
VERBS = _words(
    """describes changed built replaced found remembers carried explained studied borrowed repaired followed sold measured painted
discovered ignored improved questioned prepared left collected visited compared guarded admired crossed opened expected
recorded supported watched praised received protected mentioned abandoned enjoyed inspected restored"""
)
PREPOSITIONS = _words("""in with near behind after before for without under beyond against during towards beside of to from across""")
ADVERBS = _words(
    """slowly often quickly rarely carefully gladly finally almost quietly soon never always again nearly once suddenly firmly"""
)
LINKS = ("However", "Later", "Since then", "By that time", "On the whole", "As a result", "For once", "In short", "Even so", "Long ago")
DETERMINERS = ["the", "the", "the", "a", "this", "our", "their", "every", "that", "one", "his", "her", "some"]


def phrase(rng: random.Random) -> str:
    adjective = f"{rng.choice(ADJECTIVES)} " if rng.random() < 0.6 else ""
    return f"{rng.choice(DETERMINERS)} {adjective}{rng.choice(NOUNS)}"


def clause(rng: random.Random) -> str:
    adverb = f"{rng.choice(ADVERBS)} " if rng.random() < 0.4 else ""
    text = f"{phrase(rng)} {adverb}{rng.choice(VERBS)} {phrase(rng)}"
    return f"{text} {rng.choice(PREPOSITIONS)} {phrase(rng)}" if rng.random() < 0.7 else text


def sentence(rng: random.Random) -> str:
    text = (f"{rng.choice(LINKS)}, " if rng.random() < 0.3 else "") + clause(rng)
    if rng.random() < 0.5:
        text += f"{rng.choice((' and', ', but', ' because', ' while', ', although', ' so that'))} {clause(rng)}"
    return text[0].upper() + text[1:] + rng.choice("......?!")


def paragraph(rng: random.Random, sentences: int = 6) -> str:
    return " ".join(sentence(rng) for _ in range(sentences))


def prose(seed: int, paragraphs: int = 5) -> str:
    rng = random.Random(seed)
    return "\n\n".join(paragraph(rng, rng.randint(3, 8)) for _ in range(paragraphs))
