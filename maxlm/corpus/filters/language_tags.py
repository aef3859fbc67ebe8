"""Language tags of documents in the form of settings: the HTML attribute lang has BCP 47 (en-US), WET files have ISO 639-3 (eng)."""

import unicodedata

_CODES = """
aa aar ab abk ae ave af afr ak aka am amh an arg ar ara as asm av ava ay aym az aze ba bak be bel bg bul bh bih bi bis bm bam bn ben
bo bod br bre bs bos ca cat ce che ch cha co cos cr cre cs ces cu chu cv chv cy cym da dan de deu dv div dz dzo ee ewe el ell en eng
eo epo es spa et est eu eus fa fas ff ful fi fin fj fij fo fao fr fra fy fry ga gle gd gla gl glg gn grn gu guj gv glv ha hau he heb
hi hin ho hmo hr hrv ht hat hu hun hy hye hz her ia ina id ind ie ile ig ibo ii iii ik ipk io ido is isl it ita iu iku ja jpn jv jav
ka kat kg kon ki kik kj kua kk kaz kl kal km khm kn kan ko kor kr kau ks kas ku kur kv kom kw cor ky kir la lat lb ltz lg lug li lim
ln lin lo lao lt lit lu lub lv lav mg mlg mh mah mi mri mk mkd ml mal mn mon mr mar ms msa mt mlt my mya na nau nb nob nd nde ne nep
ng ndo nl nld nn nno no nor nr nbl nv nav ny nya oc oci oj oji om orm or ori os oss pa pan pi pli pl pol ps pus pt por qu que rm roh
rn run ro ron ru rus rw kin sa san sc srd sd snd se sme sg sag si sin sk slk sl slv sm smo sn sna so som sq sqi sr srp ss ssw st sot
su sun sv swe sw swa ta tam te tel tg tgk th tha ti tir tk tuk tl tgl tn tsn to ton tr tur ts tso tt tat tw twi ty tah ug uig uk ukr
ur urd uz uzb ve ven vi vie vo vol wa wln wo wol xh xho yi yid yo yor za zha zh zho zu zul
"""  # ISO 639-1, each followed by ISO 639-3 (of ISO 639-2/T where they differ)
_BIBLIOGRAPHIC = """
sq alb hy arm eu baq my bur zh chi cs cze nl dut fr fre ka geo de ger el gre is ice mk mac mi mao ms may fa per ro rum sk slo bo tib cy wel
"""  # ISO 639-2/B
_MEMBERS = "zh cmn ar arb et ekk fa pes lv lvs ms zsm ne npi or ory sw swh uz uzn mn khk az azj sq als"  # of macrolanguages, ISO 639-3
# Codes that a code of `keep` covers in addition to itself: members of a macrolanguage (ISO 639-3) that identifiers label apart, and codes
# for the same language. Indonesian, a member of Malay by ISO 639-3, is not covered by ms.
_COVERED = {
    "ar": "aeb apc apd arq ars ary arz acm",
    "fa": "prs",
    "ku": "ckb kmr sdh lki",
    "lv": "ltg",
    "nb": "no",
    "no": "nb nn",
    "om": "gax hae",
    "sh": "bs cnr hr sr",
    "uz": "uzs",
    "zh": "cdo cjy gan hak hsn lzh mnp nan wuu yue",
}
_SCRIPTS = {
    "Arab": "ARABIC",
    "Cyrl": "CYRILLIC",
    "Deva": "DEVANAGARI",
    "Grek": "GREEK",
    "Hebr": "HEBREW",
    "Latn": "LATIN",
    "Mong": "MONGOLIAN",
}
_SCRIPTS |= {"Beng": "BENGALI", "Guru": "GURMUKHI", "Tfng": "TIFINAGH", "Ethi": "ETHIOPIC", "Armn": "ARMENIAN", "Geor": "GEORGIAN"}
_CHINESE = ("Hans", "Hant")
# Characters of written Cantonese that texts in Mandarin do not have, in either script.
_CANTONESE = frozenset("嘅咗喺唔佢哋嚟冇啲嗰嘢噉咁乜㗎喎嘥咩啱搵諗")
_CANTONESE_SHARE = 0.02  # of the Chinese characters; in messages of MediaWiki it is 0 in zh, and 0.03 to 0.18 in yue from 60 characters
_WORDS = f"{_CODES} {_BIBLIOGRAPHIC} {_MEMBERS}".split()
_TWO_LETTERS = dict(zip(_WORDS[1::2], _WORDS[::2], strict=True))


def primary_language(tag: str) -> str:
    """The language of a tag without region and script, as ISO 639-1 where that has a code: en-US, eng -> en; zh_Hant -> zh; sco."""
    language = tag.replace("_", "-").partition("-")[0].strip().lower()
    return _TWO_LETTERS.get(language, language)


def covered(tag: str) -> tuple[frozenset[str], str | None]:
    """Labels that a tag of `keep` covers, and the script that it asks for: zh -> zh, yue, wuu ...; sr-Latn -> sr in Latin letters.

    Raises ValueError: a tag with a part that no identifier tells, such as a region.
    """
    head, *parts = tag.replace("_", "-").split("-")
    script = parts[0].title() if parts else None
    if not head.isalpha() or not 2 <= len(head) <= 3:
        raise ValueError(f"keep: {tag!r} is no language tag; give codes of ISO 639, such as en, zh or sr-Latn")
    if len(parts) > 1 or (script is not None and script not in (*_SCRIPTS, *_CHINESE)):
        known = ", ".join(sorted((*_SCRIPTS, *_CHINESE)))
        raise ValueError(
            f"keep: {tag!r}: variants and regions of a language are not told apart; give {head}, or {head}- and a script ({known})"
        )
    language = primary_language(head)
    return frozenset((language, *_COVERED.get(language, "").split())), script


def label_of(label: str, text: str) -> str:
    """The language of `text`, which an identifier labelled `label`, in the form of settings. Cantonese is told by its own characters alone:
    identifiers take Chinese in traditional characters for it.
    """
    language = primary_language(label)
    if language not in ("zh", "yue"):
        return language
    chinese = sum("\u3400" <= char <= "\u9fff" for char in text)
    return "yue" if sum(map(_CANTONESE.__contains__, text)) >= max(1, _CANTONESE_SHARE * chinese) else "zh"


def has_script(text: str, script: str) -> bool:
    """True if most letters of `text` are of `script` (ISO 15924); for Hans and Hant, of the characters that only one of both has."""
    if script in _CHINESE:
        simple, traditional = (
            sum(_encodes(char, codec) > _encodes(char, other) for char in text) for codec, other in (_GB_BIG5, _GB_BIG5[::-1])
        )
        return simple >= traditional if script == "Hans" else traditional > simple
    letters = [char for char in text if char.isalpha()]
    return 2 * sum(unicodedata.name(char, "").startswith(_SCRIPTS[script]) for char in letters) > len(letters)


_GB_BIG5 = ("gb2312", "big5")  # the national character sets: of simplified and of traditional characters


def _encodes(char: str, codec: str) -> bool:
    try:
        return bool(char.encode(codec))
    except UnicodeEncodeError:
        return False
