"""Filters of content: lists, personal data, language, classifier, perplexity, and the settings of all."""

import functools
import json
import math
import random
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import phonenumbers
import pytest
from filter_texts import NOUNS, prose, sentence
from pydantic import ValidationError

from maxlm.base.errors import UserError
from maxlm.config.descriptions import descriptions
from maxlm.corpus.document import Document, Removed
from maxlm.corpus.filters import FilterSettings, build_filters, language as filters_language, run_filters
from maxlm.corpus.filters.language import sample_text
from maxlm.corpus.filters.personal_data import PersonalDataFilter, PersonalDataSettings
from maxlm.corpus.filters.phones import REGIONS, SHORTEST_PLAIN
from maxlm.corpus.urls import split_url

CASES = Path(__file__).parents[1] / "cases/corpus"


def judge(text, settings, scorer=None, **metadata):
    return run_filters(build_filters(FilterSettings.model_validate(settings), scorer), Document("file#0", text, metadata))


def reason(*args, **keywords):
    result = judge(*args, **keywords)
    return result.reason if isinstance(result, Removed) else None


# Lists


@pytest.fixture
def bad_words(tmp_path):
    path = tmp_path / "bad.txt"
    path.write_text("# comment\nass\nTwo  Words\n\nдурак\n坏词\n", encoding="utf-8")
    return {"bad_words": {"files": [str(path)]}}


@pytest.mark.parametrize(
    "text", ["What an ass.", "ASS", "(ass)", "the two words here", "two\nwords", "Two-words", "Он ДУРАК!", "这是坏词吗"]
)
def test_bad_words_are_found_as_whole_words(bad_words, text):
    assert reason(text, bad_words) == "bad_words"


@pytest.mark.parametrize("text", ["", "The class passed.", "two other words", "two", "words two", "дурака", "这是好词", "坏的词", "assess"])
def test_parts_of_words_are_not_bad_words(bad_words, text):
    assert reason(text, bad_words) is None


def test_bad_words_may_be_allowed_a_number_of_times(bad_words):
    bad_words["bad_words"]["max_matches"] = 2
    assert reason("ass ass", bad_words) is None
    assert reason("ass ass ass", bad_words) == "bad_words"


def test_urls(tmp_path):
    domains, urls = tmp_path / "domains", tmp_path / "urls"
    domains.write_text("bad.example\nhttps://www.other.example/\nmünchen.example\n", encoding="utf-8")
    urls.write_text("https://good.example/page/\n")
    section = {"urls": {"domain_files": [str(domains)], "url_files": [str(urls)]}}
    for url in (
        "http://bad.example/x",
        "https://a.b.BAD.example:80/",
        "bad.example",
        "//user:pass@bad.example.",
        "www.other.example/a?b",
        "xn--mnchen-3ya.example",
    ):
        assert reason("text", section, url=url) == "url_domain", url
    for url in ("https://good.example/page", "good.example/page/#part", "http://www.good.example/page?x=1"):
        assert reason("text", section, url=url) == "url_listed", url
    for url in (
        "https://notbad.example",
        "https://good.example/page2",
        "https://example",
        "",
        "http://[broken",
        "https://x.example/bad.example",
        "http://\ud800",
    ):
        assert reason("text", section, url=url) is None, url
    assert reason("text", section) is None
    assert split_url("HTTPS://WWW.Example.org:443/A/b/?q#f") == ("example.org", "/A/b")


@pytest.mark.parametrize(
    "section", [{"bad_words": {"files": ["{}"]}}, {"urls": {"domain_files": ["{}"]}}, {"boilerplate": {"files": ["{}"]}}]
)
def test_a_list_that_cannot_be_read_is_one_line(section, tmp_path):
    def build(path):
        name, inner = next(iter(section.items()))
        build_filters(FilterSettings.model_validate({name: {key: [str(path)] for key in inner}}))

    (tmp_path / "latin1").write_bytes(b"caf\xe9\n")
    for path in (tmp_path / "missing", tmp_path, tmp_path / "latin1"):
        with pytest.raises(UserError, match=path.name):
            build(path)


# Personal data

TOKEN = "AKIA" + "ABCDEFGH12345678"
PEM = "-----BEGIN RSA " + "PRIVATE KEY-----\nMIIEow\nabc=\n-----END RSA " + "PRIVATE KEY-----"
SECRET = "wJalrXUtnFEMI/K7MDENG/" + "bPxRfiCYzzKQ3mD1aT"
MASKED = [
    ("電話：０３－１２３４－５６７８ です", "電話：<PHONE> です"),
    ("mail jane＠ｅｘａｍｐｌｅ．ｃｏｍ now", "mail <EMAIL> now"),
    ("Contact No: 98765 43210", "Contact No: <PHONE>"),
    ("jane@pose.world, matrix@host.org", "<EMAIL>, <EMAIL>"),
    ("Write to jane.doe+x@mail.example.co.uk, please.", "Write to <EMAIL>, please."),
    ("<a@b.com>;c_d@e-f.org.", "<<EMAIL>>;<EMAIL>."),
    ("müller@größe.de and o'neil@x.ie", "<EMAIL> and <EMAIL>"),
    ("print('Mail:\\njane@x.org')", "print('Mail:\\n<EMAIL>')"),
    ("'jane@x.org' or mailto:jane@x.org?subject=Hi", "'<EMAIL>' or mailto:<EMAIL>?subject=Hi"),
    ("jane@x.com.Then he left", "<EMAIL>.Then he left"),
    ("at 8.8.8.8 and 8.8.4.4:53.", "at <IP_ADDRESS> and <IP_ADDRESS>:53."),
    ("ping 5.6.7.8, http://2.3.4.5/x, 151.101.1.69/24", "ping <IP_ADDRESS>, http://<IP_ADDRESS>/x, <IP_ADDRESS>/24"),
    ("at 2a00:1450:4001:81b::200e now", "at <IP_ADDRESS> now"),
    ("Call +49 (0)30 1234-5678 or +1 650 253 0000.", "Call <PHONE> or <PHONE>."),
    ("(212) 555-2368, 212-555-2368, 1 212.555.2368", "<PHONE>, <PHONE>, <PHONE>"),
    ("Tel.: 030 / 123 45 67; Fax 0301234568", "Tel.: <PHONE>; Fax <PHONE>"),
    ("(+44 20 7946 0958) or (voice: 212-555-2368)", "(<PHONE>) or (voice: <PHONE>)"),
    ("+44 20 7946 0958 2 times", "<PHONE> 2 times"),
    ("reach my mobile at 0171 2345678, Tél. : 01 42 68 53 00", "reach my mobile at <PHONE>, Tél. : <PHONE>"),
    ("IBAN DE89 3704 0044 0532 0130 00 and GB29NWBK60161331926819 OK", "IBAN <IBAN> and <IBAN> OK"),
    ("4111 1111 1111 1111, 3782-822463-10005, Visa card 4539578763621486", "<CARD>, <CARD>, Visa card <CARD>"),
    (f"key {TOKEN} used", "key <KEY> used"),
    (f"{TOKEN}\naws_secret_access_key = {SECRET}", "<KEY>\naws_secret_access_key = <KEY>"),
    (f"x\n{PEM}\ny", "x\n<KEY>\ny"),
    ("ghp_" + "a1B2" * 9, "<KEY>"),
    ("sk-proj-" + "a1B2_-c3" * 6 + " xoxb-" + "1234567890-abcdef", "<KEY> <KEY>"),
    ("https://hooks.slack" + ".com/services/T00000000/B00000000/" + "aB3" * 8, "https://hooks.slack.com/services/<KEY>"),
    ("postgres://bob:s3cr3t-X@db.host:5432/x", "postgres://bob:<KEY>@db.host:5432/x"),
    ("api_key = '" + "a1b2c3d4e5f6g7h8'", "api_key = '<KEY>'"),
    *(
        (form.format(SECRET), form.format("<KEY>"))
        for form in (
            "AWS_SECRET_ACCESS_KEY={}",
            "-e aws_secret_access_key={} x",
            '"SecretAccessKey": "{}"',
            "Authorization: Bearer {}",
            '"Authorization": "Basic {}"',
        )
    ),
    ("Authorization: Bearer " + "abcdef0123456789" * 2, "Authorization: Bearer <KEY>"),
    ("Authorization: Basic " + "QWxhZGRpbjpvcGVuIHNlc2FtZQ==", "Authorization: Basic <KEY>"),
    *(
        (form.format("4111111111111111"), form.format("<CARD>"))
        for form in ('"card_number": "{}"', "cardNumber:{}", "credit_card={}", "卡号：{}")
    ),
    *(
        (form.format("62.4.15.31"), form.format("<IP_ADDRESS>"))
        for form in ("remote_addr={}", "client_ip={}", "clientIp: {}", "ip.addr=={}")
    ),
    *(
        (form.format("62.4.15.31"), form.format("<IP_ADDRESS>"))
        for form in ("from {} port 22", "{} - - [10/Oct", "64 bytes from {}: seq=1")
    ),
    *(
        (form.format("2001:4860:4860::8888"), form.format("<IP_ADDRESS>"))
        for form in ("64 bytes from {}: icmp_seq=1", "host:{}", "interface:{}", "src:{}", "[{}]:443", "{}.")
    ),
    *(
        (form.format("2125552187"), form.format("<PHONE>"))
        for form in (
            "phone_number={}",
            "user_phone: {}",
            "userPhone: {}",
            "home_tel={}",
            "'phone' => '{}'",
            "<phone>{}</phone>",
            "Phones: {}",
        )
    ),
    *((form.format("13812345678"), form.format("<PHONE>")) for form in ("手机：{}", "电话：{}", "联系电话: {}", "手机号码：{}")),
    ("手机号 138 1234 5678", "手机号 <PHONE>"),
    ("тел.：89161234567; Телефоны: 495 123-45-67", "тел.：<PHONE>; Телефоны: <PHONE>"),
    ("Teléfonos: 912 345 678", "Teléfonos: <PHONE>"),
    ("Mobile Number: 9876543210; Phone(s): 212 555 2187", "Mobile Number: <PHONE>; Phone(s): <PHONE>"),
    ("Tel 6123 4567, phone: 6123 4567", "Tel <PHONE>, phone: <PHONE>"),
    ("eyJ" + "hbGciOiJIUzI1NiJ9.eyJ" + "zdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N", "<KEY>"),
]
KEPT = [
    "",
    *(  # dates, years and pairs of numbers after a word for a telephone
        "phone: 2021-01-01",
        "phone: 2021-01-01 12:30",
        "Fax 2003-12-24",
        "whatsapp: 2021-01-04 release",
        "invented the telephone 1876-1877 in Boston",
        "Telephone (1876-1976)",
        "Phone, 1999-2004",
        "fax 2400 4800",
        "phone 1920-1080",
        "phone_id=2125552187",
    ),
    *(  # code points, times
        "0435 0308 ; # CYRILLIC SMALL LETTER IO",
        "5427 5428 5429\n542E 542F 5430 5431 5432 5433\n5434",
        "5430 5431 5432 5433 543A",
        "open 0830 1730",
        "trains 0715 0845 0930",
        "0212 0313 0414",
        "GenBank accession 020 7946 0958",
    ),
    *(  # enzymes, versions
        "EC 3.4.21.105, (EC 2.7.101.137), EC:1.1.1.145, enzyme 2.4.1.255",
        "OpenSSL 1.0.2.200",
        "2.6.32.120 is out",
        "pkg==2.13.1.150, pkg==2.130.1.150",
        "Skype 8.96.0.207",
        "VirtualBox 6.1.38.153",
        "cudnn 8.9.2.126",
    ),
    *(  # products of arrays
        "x = q@k.mT",
        "attn = q@k.mH @ v",
        "out = a@self.weight.data",
        "x@self.net",
        "z = A@b.re",
        "weights@u.at[0].set(1)",
        "weights@u.at[idx]",
        "pose@camera.center",
        "R = rotation@pose.world",
        "new_fax 0 12345 1, $Id: new_fax.th,v 1.1 1998/08/31 20:25:38",
        "J@v.dev",
    ),
    "2023:10:12:13:14:15:16:17, a[2000::2]",
    "user@localhost, @handle, a @ b.com, 3@ 4, logo@2x.png, foo@1.2.3, getty@tty1.service, W@v.T",
    "x@np.dot(y), [+353123456, 0]",
    "git@github.com:user/repo.git, scp file jane@host.org:/tmp, ssh jane@host.org, ssh://git@host.org/x, @pytest.fixture",
    "Message-ID: <20040101.1234@mail.host.com>, by host id <m0uGteh-53C@x.de>, https://lists.debian.org/2014.GX24@rz.edu",
    "$user@other.host is a variable, ^[[:alnum:]]+@my.com$ an expression; 8b 83 3c 01 00 00 89 44 24, 1890 2790 1350 1170 1350 2",
    "10.0.0.1, 192.168.1.1, 127.0.0.1, 999.1.1.1, version 1.2.3 and 1.2.3.4.5, v8.8.8.8, 192.0.2.1, 198.51.100.7, 203.0.113.9, 224.0.0.1",
    "Linux 2.6.38.6, doxygen 1.8.1.2, OID 2.5.29.15, section 12.1.1.3. Text, Bump to 3.9.3.0, released 100.1.2.3",
    "::1, fe80::1, 2001:db8::1, 3fff::1, std::vector, at 12:30:45, RFC 2822::",
    "In 1914-1918 and on 2024-11-23 at 10:15, 1,234,567.89 or 3.14159265358979 were counted; ISBN 978-3-16-148410-0.",
    "Boston, MA 02110-1301; 07-10-1986; CVE-2022-1615; 6.02214076e23; doi:10.1000/182.4; arXiv:2406.17557v2; $x_{12} = 1.602 176 634$",
    "47.6205, -122.3493; +0.3333333 +1234567 +2147483647 -2147483648; 0x7fffffff; 2^52 = 4503599627370496; 1700000000; 01 02 03 04 05 06",
    "sha1 da39a3ee5e6b4b0d3255bfef95601890afd80709; id 4111111111111111; 4111 1111 1111 1112; DE89 3704 0044 0532 0130 01",
    "http://user:password@host.org, ftp://me:${PASS}@host.org, password = get_password_hash1(user), secret_key = my-secret-key-1",
    "ask-me-anything-about-the-skeleton-of-the-whale, PASSWORD: see the manual, the key = value pair",
    "He will call 3 people, call 2147483647 times, or call 555 on page 212-555-2368.",
]
CASES = Path(__file__).parents[1] / "cases/corpus"


def mask(text):
    return PersonalDataFilter(PersonalDataSettings())(Document("f#0", text))


@pytest.mark.parametrize(("text", "expected"), MASKED)
def test_personal_data_is_masked(text, expected):
    assert mask(text).text == expected


@pytest.mark.parametrize("text", KEPT)
def test_what_only_looks_like_it_stays(text):
    assert mask(text) == Document("f#0", text)


def test_numbers_of_real_texts_are_no_personal_data():
    """Constants, limits, versions, identifiers, names of files: all were masked once."""
    for line in (CASES / "pii_false.jsonl").read_text("utf-8").splitlines():
        document = Document("f#0", json.loads(line)["text"])
        assert PersonalDataFilter(PersonalDataSettings())(document) == document


@pytest.mark.parametrize("region", sorted(set(REGIONS)))
def test_phones_of_many_countries_are_masked(region):
    """The numbering plan's own example: written internationally, without spaces, and nationally after a label."""
    for kind in (phonenumbers.PhoneNumberType.FIXED_LINE, phonenumbers.PhoneNumberType.MOBILE):
        number = phonenumbers.example_number_for_type(region, kind)
        international, plain, national = (
            phonenumbers.format_number(number, getattr(phonenumbers.PhoneNumberFormat, name))
            for name in ("INTERNATIONAL", "E164", "NATIONAL")
        )
        assert mask(f"Write or ring {international}, thanks.").text == "Write or ring <PHONE>, thanks."
        assert mask(f"or {plain}.").text == "or <PHONE>." or len(plain) <= SHORTEST_PLAIN
        assert mask(f"Tel.: {national}, or by letter").text == "Tel.: <PHONE>, or by letter"


def random_pieces(seed):
    """Texts that set personal data, parts of them and separators side by side."""
    rng = random.Random(seed)
    pieces = (
        [text for pair in MASKED for text in pair]
        + KEPT
        + ["@", ".", "+", "-", " ", "\n", "1", "a", "<", ">", "8.8.8.8", "a@b.co", ":", "+1", "é"]
    )
    return "".join(rng.choice(pieces)[: rng.choice((3, 9, 99))] for _ in range(rng.randint(1, 25)))


def test_masking_twice_changes_nothing():
    """And the compiled search for hints leaves nothing out."""
    for seed in range(300):
        text = random_pieces(seed)
        once = mask(text)
        assert mask(once.text).text == once.text, seed
        padded = mask(text + "\n\n" + " 1.1.1 2000: +1 123 4567 12345678901a a1a1a1a1a1a1a1")  # every hint is set
        assert padded.text.startswith(once.text.rstrip()) or not text, seed


def test_masks_are_counted_and_can_be_switched_off():
    text = "a@b.com, c@d.org, 8.8.8.8"
    masked = mask(text)
    assert masked.metadata == {"masked_email": 2, "masked_ip": 1}
    assert [(cut.reason, cut.detail) for cut in masked.cuts] == [("masked_email", {"masked": 2}), ("masked_ip", {"masked": 1})]
    assert all(cut.example in masked.text for cut in masked.cuts)  # around the placeholder, and not what it stands for
    only = PersonalDataFilter(PersonalDataSettings(email=False, phone=False, key=False, iban=False, card=False))(Document("f#0", text))
    assert only.text == "a@b.com, c@d.org, <IP_ADDRESS>"
    assert "8" not in mask("8.8.8.8 " * 99).text


BLOCK = "-----BEGIN " + "PRIVATE KEY-----"
SLOW = [
    "a@",
    "@a.",
    "a@a.",
    "1.",
    "1.1.1.1",
    "+1",
    "+1 ",
    "(212) ",
    "212-",
    "tel ",
    "tel 1 ",
    "call1",
    "2000:",
    "2:",
    "a" * 70 + "@",
    "sk-",
]
SLOW += ["eyJa", "eyJ" + "a" * 12 + ".", "password=", "password=aaaaaaaaaaaa", BLOCK, BLOCK + "a" * 30000 + BLOCK.replace("BEGIN", "END")]


@pytest.mark.parametrize("pattern", SLOW)
def test_masking_is_linear(pattern):
    times = []
    for size in (100_000, 800_000):
        text, began = pattern * (size // len(pattern)), time.process_time()
        mask(text)
        times.append(time.process_time() - began)
    assert times[1] < 4.0
    assert times[1] < 40 * times[0] + 0.3  # 8 if linear, 64 if quadratic


# Language

TEXTS = {
    "en": "The engineer described the narrow bridge behind our old house, because the weather had turned and nobody wanted to leave.",
    "de": "Der Ingenieur beschrieb die schmale Brücke hinter unserem alten Haus, weil das Wetter umschlug und niemand gehen wollte.",
    "fr": "L'ingénieur a décrit le pont étroit derrière notre vieille maison, parce que le temps avait changé et que nul ne partait.",
    "ru": "Инженер описал узкий мост за нашим старым домом, потому что погода испортилась и никто не хотел уходить.",
    "zh": "工程师描述了我们老房子后面的窄桥，因为天气变了，没有人愿意离开。今天我们去公园散步。",
}


@pytest.fixture(scope="module", autouse=True)
def one_model():
    """Read py3langid's model once: that takes a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filters_language, "_py3langid", functools.cache(filters_language._py3langid))
        yield


@pytest.fixture(scope="module")
def language():
    pytest.importorskip("py3langid")
    return build_filters(FilterSettings.model_validate({"language": {"keep": ["en", "de"]}}))[0]


def test_languages(language):
    for code, text in TEXTS.items():
        result = language(Document("f#0", text))
        if code in ("en", "de"):
            assert (result.metadata["language"], result.text) == (code, text)
            assert 0.65 <= result.metadata["language_score"] <= 1.0
        else:
            assert (result.reason, result.detail["language"]) == ("language_not_kept", code)
    for text in ("", "12 34 ++", "\n", "\0", "\ud800 1"):
        assert language(Document("f#0", text)).detail["language"] == "und"
    assert language(Document("f#0", "the a\ud800b of")) is not None


VARIANTS = {  # messages of MediaWiki: language and script, text
    "zh-Hant": "您可以在使用者設定中更改您的電子郵件地址，請確認信件內的連結，並於二十四小時內完成驗證，否則帳號將無法使用。",
    "zh-Hans": "您可以在用户设置中更改您的电子邮件地址，请确认邮件内的链接，并于二十四小时内完成验证，否则账号将无法使用。",
    "yue-Hant": "你可以喺用戶設定度改你嘅電郵地址，請撳封信入面條連結，喺廿四個鐘頭之內搞掂，唔係個戶口就唔用得㗎喇。",
    "nb-Latn": "Du kan endre e-postadressen din i innstillingene dine, og deretter må du bekrefte den ved å følge lenken i brevet.",
    "nn-Latn": "Du kan endra e-postadressa di i innstillingane dine, og etterpå må du stadfesta henne ved å fylgja lenkja i brevet.",
    "sr-Cyrl": "Можете да промените своју адресу електронске поште у подешавањима, а затим морате да је потврдите преко везе у писму.",
    "hr-Latn": "Svoju adresu elektroničke pošte možete promijeniti u postavkama, a zatim je morate potvrditi putem poveznice u pismu.",
    "pt-Latn": "Você pode alterar o seu endereço de e-mail nas preferências, e depois precisa confirmá-lo pela ligação na mensagem.",
}


@pytest.mark.parametrize(
    ("keep", "stays"),
    [
        ("zh", {"zh-Hant", "zh-Hans", "yue-Hant"}),
        ("zh-Hant", {"zh-Hant", "yue-Hant"}),
        ("zh_Hans", {"zh-Hans"}),
        ("cmn", {"zh-Hant", "zh-Hans", "yue-Hant"}),
        ("yue", {"yue-Hant"}),
        ("no", {"nb-Latn", "nn-Latn"}),
        ("nb", {"nb-Latn"}),
        ("nn", {"nn-Latn"}),
        ("sh", {"sr-Cyrl", "hr-Latn"}),
        ("sh-Latn", {"hr-Latn"}),
        ("sr", {"sr-Cyrl"}),
        ("sr-Cyrl", {"sr-Cyrl"}),
        ("por", {"pt-Latn"}),
    ],
)
def test_what_a_tag_of_keep_covers(keep, stays):
    """A macrolanguage covers its members in any script, a tag with a script that script alone; codes of ISO 639-3 are the same."""
    pytest.importorskip("py3langid")
    found = {name: judge(text, {"language": {"keep": [keep]}}) for name, text in VARIANTS.items()}
    assert {name for name, one in found.items() if isinstance(one, Document)} == stays
    for name in stays:
        assert found[name].metadata["language"] == name.partition("-")[0].replace("nb", "no")


@pytest.mark.parametrize(
    ("keep", "says"), [("pt-BR", "regions"), ("zh-TW", "Hant"), ("english", "ISO 639"), ("zh-Hant-TW", "regions"), ("", "ISO")]
)
def test_a_tag_that_nothing_tells_is_refused(keep, says):
    with pytest.raises(ValidationError, match=says):
        FilterSettings.model_validate({"language": {"keep": [keep]}})


def test_a_language_that_no_text_gets_is_refused():
    """Klingon would remove every document."""
    pytest.importorskip("py3langid")
    with pytest.raises(UserError, match=r"language\.keep: tlh .* af, am, an, ar"):
        judge("text", {"language": {"keep": ["en", "tlh"]}})


def test_language_is_only_labelled_without_a_list():
    pytest.importorskip("py3langid")
    assert judge(TEXTS["fr"], {"language": {}}).metadata["language"] == "fr"
    assert judge("123", {"language": {}}).metadata == {"language": "und", "language_score": 0.0}


def test_sample_is_of_the_whole_text():
    text = "a" * 5000 + "b" * 5000 + "c" * 5000
    sample = sample_text(text, 300)
    assert [sample.count(char) for char in "abc"] == [100, 100, 100]
    assert sample_text("short\ntext", 300) == "short text"


def test_a_missing_model_is_one_line(tmp_path):
    pytest.importorskip("fasttext")
    (tmp_path / "not_a_model").write_text("text")
    for name in ("missing.ftz", "not_a_model"):
        with pytest.raises(UserError, match=name):
            judge("text", {"language": {"backend": "fasttext", "model": str(tmp_path / name)}})
    with pytest.raises(ValidationError, match="model"):
        FilterSettings.model_validate({"language": {"backend": "fasttext"}})


# Classifier


def junk(seed):
    rng = random.Random(seed)
    return " ".join(rng.choice(["buy", "cheap", "click", "offer", "now", "free", rng.choice(NOUNS), "shipping", "deal"]) for _ in range(80))


def test_a_classifier_of_fasttext_keeps_documents_of_its_label():
    """A model of two labels, hq and lq, that fastText trained on prose() and junk()."""
    pytest.importorskip("fasttext")
    section = {"classifier": {"model": str(CASES / "quality.ftz"), "label": "hq"}}
    assert all(judge(prose(1000 + i, 2), section).metadata["classifier_score"] > 0.5 for i in range(20))
    assert {reason(junk(1000 + i), section) for i in range(20)} == {"classifier_score"}
    other = {"classifier": {"model": str(CASES / "quality.ftz"), "label": "lq"}}
    assert judge(junk(7), other).metadata["classifier_score"] > 0.5 and reason(prose(7), other) == "classifier_score"
    assert reason(f"{junk(7)}\n\ud800{junk(8)}", section) == "classifier_score", "line feeds, at which fastText ends a text, and surrogates"
    with pytest.raises(UserError, match=r"filters\.classifier\.label: .*quality\.ftz has no label good; it has hq, lq"):
        judge("text", {"classifier": section["classifier"] | {"label": "good"}})


def test_a_broken_classifier_is_one_line(tmp_path):
    pytest.importorskip("fasttext")
    (tmp_path / "text.bin").write_text("no model")
    for name in ("text", "missing"):
        with pytest.raises(UserError, match=rf"{name}\.bin: "):
            judge("text", {"classifier": {"model": str(tmp_path / f"{name}.bin"), "label": "hq"}})


# Perplexity


class Lengths:
    """A scorer for tests: the text's number of words."""

    def __init__(self):
        self.calls = []

    def score(self, texts):
        self.calls.append(list(texts))
        return [math.nan if text == "nan" else float(len(text.split())) for text in texts]


def test_perplexity_bounds_with_a_scorer_that_is_passed():
    section = {"perplexity": {"checkpoint": "runs/x", "max_bits_per_byte": 4, "min_bits_per_byte": 2}}
    assert judge("a b c", section, Lengths()).metadata == {"bits_per_byte": 3.0}
    assert reason("a b c d e", section, Lengths()) == "perplexity_too_high"
    assert reason("a", section, Lengths()) == "perplexity_too_low"
    assert reason("nan", section, Lengths()) == "perplexity_too_high"
    for models in ({}, {"checkpoint": "a", "kenlm": "b"}):
        with pytest.raises(ValidationError, match="set one of them"):
            FilterSettings.model_validate({"perplexity": {"max_bits_per_byte": 4, **models}})


def test_documents_are_scored_together():
    scorer = Lengths()
    section = {"checkpoint": "runs/x", "max_bits_per_byte": 2, "sample_characters": 100}
    [each] = build_filters(FilterSettings.model_validate({"perplexity": section}), scorer)
    documents = [Document(f"f#{i}", "a " * i) for i in range(4)] + [Document("f#4", "b" * 1000)]
    results = each.filter_many(documents)
    assert [result.id for result in results] == [document.id for document in documents]
    assert [isinstance(result, Removed) for result in results] == [False, False, False, True, False]
    assert len(scorer.calls) == 1
    assert len(scorer.calls[0][4]) == 100


def write_bigram_arpa(path, texts):
    """A bigram model with backing off (absolute discounting, 0.5), in the format that lmplz writes."""
    sentences = [["<s>", *line.lower().split(), "</s>"] for text in texts for line in text.split("\n") if line]
    words = sorted({word for sentence_ in sentences for word in sentence_} - {"<s>"})
    counts, pairs = dict.fromkeys(words, 0), {}
    for tokens in sentences:
        for first, second in pairwise(tokens):
            counts[second] += 1
            pairs.setdefault(first, {}).setdefault(second, 0)
            pairs[first][second] += 1
    total = sum(counts.values()) + len(words) + 1
    one = {word: (count + 1) / total for word, count in counts.items()}
    lines = [
        "\\data\\",
        f"ngram 1={len(words) + 2}",
        f"ngram 2={sum(map(len, pairs.values()))}",
        "",
        "\\1-grams:",
        f"{math.log10(1 / total)}\t<unk>\t0",
    ]
    for word in ["<s>", *words]:
        following = pairs.get(word, {})
        n = sum(following.values())
        left = (0.5 * len(following) / n) / (1 - sum(one[w] for w in following)) if following else 1.0
        lines.append(f"{math.log10(one[word]) if word in one else -99}\t{word}\t{math.log10(left)}")
    lines += ["", "\\2-grams:"]
    for first, following in sorted(pairs.items()):
        n = sum(following.values())
        lines += [f"{math.log10((c - 0.5) / n + 0.5 * len(following) / n * one[w] / 9)}\t{first} {w}" for w, c in sorted(following.items())]
    path.write_text("\n".join([*lines, "", "\\end\\", ""]))


def test_kenlm_finds_shuffled_text(tmp_path):
    """At a bound that 5% of unseen prose exceeds, 95% of shuffled texts do."""
    pytest.importorskip("kenlm")
    model = tmp_path / "model.arpa"
    write_bigram_arpa(model, [prose(i, 8) for i in range(150)])
    [each] = build_filters(FilterSettings.model_validate({"perplexity": {"kenlm": str(model), "max_bits_per_byte": 99}}))
    plain = [prose(5000 + i, 4) for i in range(100)]
    shuffled = []
    for i, text in enumerate(plain):
        words = text.split()
        random.Random(i).shuffle(words)
        shuffled.append(" ".join(words))
    scores, others = each.scorer.score(plain), each.scorer.score(shuffled)
    bound = sorted(scores)[94]
    assert sum(score > bound for score in others) >= 95
    assert each.scorer.score([""]) == [0.0]
    assert reason(shuffled[0], {"perplexity": {"kenlm": str(model), "max_bits_per_byte": bound}}) == "perplexity_too_high"


def test_kenlm_errors_are_one_line(tmp_path, monkeypatch):
    section = {"perplexity": {"kenlm": str(tmp_path / "missing.arpa"), "max_bits_per_byte": 4}}
    monkeypatch.setitem(sys.modules, "kenlm", None)
    with pytest.raises(UserError, match="pip install kenlm"):
        judge("text", section)
    monkeypatch.undo()
    pytest.importorskip("kenlm")
    with pytest.raises(UserError, match=r"missing\.arpa"):
        judge("text", section)
    (tmp_path / "missing.arpa").write_text("no model")
    with pytest.raises(UserError, match="not a KenLM model"):
        judge("text", section)


# All together


def test_an_absent_section_is_off_and_the_order_is_that_of_the_settings():
    assert build_filters(FilterSettings()) == []
    every = ["length", "boilerplate", "c4", "gopher_quality", "gopher_repetition", "fineweb", "personal_data"]
    built = build_filters(FilterSettings.model_validate({name: {} for name in reversed(every)}))
    assert [each.name for each in built] == every


def test_settings_have_descriptions_and_refuse_what_they_do_not_know():
    for name, info in FilterSettings.model_fields.items():
        if name == "rules":
            continue
        section = next(t for t in info.annotation.__args__ if t is not type(None))
        assert section.model_config["frozen"] and section.model_config["extra"] == "forbid"
        assert [key for key in section.model_fields if not descriptions(section)[key].text] == [], name
        with pytest.raises(ValidationError):
            FilterSettings.model_validate({name: {"no_such_field": 1}})
    with pytest.raises(ValidationError):
        FilterSettings.model_validate({"gopher_repetition": {"max_top_ngram": {7: 0.1}}})


def test_results_do_not_depend_on_the_hash_seed():
    """Another process with another seed judges as this one does."""
    sections = {name: {} for name in ("boilerplate", "c4", "gopher_quality", "gopher_repetition", "fineweb", "personal_data")}
    texts = [prose(number) + MASKED[number][0] for number in range(10)]
    program = (
        "import json, sys; from maxlm.corpus.document import Document\n"
        "from maxlm.corpus.filters import FilterSettings, build_filters, run_filters\n"
        "texts, sections = json.load(sys.stdin)\n"
        "filters = build_filters(FilterSettings.model_validate(sections))\n"
        "print([run_filters(filters, Document('f#0', text)) for text in texts])"
    )
    environment = {"PYTHONHASHSEED": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    given = json.dumps([texts, sections])
    there = subprocess.run([sys.executable, "-c", program], env=environment, input=given, capture_output=True, text=True, check=True).stdout
    filters = build_filters(FilterSettings.model_validate(sections))
    assert there.strip() == str([run_filters(filters, Document("f#0", text)) for text in texts]) and "Document" in there


def test_random_characters_never_crash_a_filter():
    rng = random.Random(11)
    filters = build_filters(
        FilterSettings.model_validate({name: {} for name in ("boilerplate", "c4", "fineweb", "gopher_repetition", "personal_data")})
    )
    for _ in range(100):
        text = "".join(chr(rng.choice((rng.randrange(128), rng.randrange(0x110000)))) for _ in range(200)) + sentence(rng)
        for each in filters:
            assert isinstance(each(Document("f#0", text)), Document | Removed)
