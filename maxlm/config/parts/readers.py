"""The formats of files of documents, in the order in which first bytes are compared."""

from maxlm.config.part import Part, ReaderFacts

PROSE = (".txt", ".text", ".md", ".markdown", ".mdx", ".rst", ".adoc", ".org", ".tex", ".bib", ".srt", ".vtt")
# Source code and its settings, without the dots.
_CODE = """
py pyi pyx c h cc cpp cxx hpp hh cu cuh m mm cs java kt kts scala groovy js mjs cjs jsx ts tsx vue svelte go rs zig swift rb php pl pm lua r
jl hs ml mli fs fsx clj cljs ex exs erl elm dart nim d f f90 for pas adb ads asm s v sv vhd vhdl lean coq agda lisp el scm rkt sh bash zsh
fish ps1 bat cmd sql proto graphql thrift tf hcl cmake mk gradle bzl css scss sass less yaml yml toml ini cfg conf properties diff patch
"""
CODE = tuple(f".{name}" for name in _CODE.split())
# Block header and chunk header at the start of every file (Riegeli's specification, "Records file format").
ARRAY_RECORD = b"\x83\xaf\x70\xd1\x0d\x88\x4a\x3f"


def _reader(name: str, place: str, about: str, *suffixes: str, **facts: object) -> Part:
    return Part(kind="reader", name=name, place=f"maxlm.documents.{place}", about=about, facts=ReaderFacts(suffixes, **facts))  # type: ignore[arg-type]


PARTS = (
    _reader("jsonl", "json_records:read_jsonl", "A JSON object a line.", ".jsonl", ".ndjson", ".jsonlines", fields=True),
    _reader("json", "json_records:read_json", "A list of JSON objects, or one object.", ".json", fields=True),
    _reader("csv", "csv_records:read_commas", "Rows with commas; the first row names the fields.", ".csv", fields=True),
    _reader("tsv", "csv_records:read_tabs", "Rows with tabs; the first row names the fields.", ".tsv", ".tab", fields=True),
    _reader("parquet", "tables:read_parquet", "Apache Parquet.", ".parquet", ".pq", fields=True, magic=b"PAR1", access="file"),
    _reader(
        "array_record",
        "tables:read_array_record",
        "ArrayRecord, of JSON objects or texts.",
        ".arrayrecord",
        ".array_record",
        fields=True,
        magic=ARRAY_RECORD,
        access="local",
    ),
    _reader("html", "reader:read_html", "The main content of a page.", ".html", ".htm", ".xhtml", whole=True),
    _reader("warc", "reader:read_archive", "Web archives: pages and texts.", ".warc", ".wet", magic=b"WARC/"),
    _reader("wikipedia", "reader:read_dump", "Articles of a MediaWiki dump; any other XML is unknown.", ".xml"),
    _reader("text", "reader:read_text", "The whole file is one text.", *PROSE, *CODE, whole=True),
)
