"""Published thresholds and word lists of the quality rules, each with its source. Settings take their defaults from here."""

# Gopher, quality rules: Rae et al. 2021, arXiv 2112.11446, appendix A.1.1 ("Quality Filtering").
GOPHER_MIN_WORDS = 50
GOPHER_MAX_WORDS = 100_000
GOPHER_MIN_MEAN_WORD_LENGTH = 3.0  # characters
GOPHER_MAX_MEAN_WORD_LENGTH = 10.0
GOPHER_MAX_HASH_TO_WORD_RATIO = 0.1
GOPHER_MAX_ELLIPSIS_TO_WORD_RATIO = 0.1
GOPHER_MAX_BULLET_LINES = 0.9  # fraction of lines
GOPHER_MAX_ELLIPSIS_LINES = 0.3  # fraction of lines
GOPHER_MIN_ALPHABETIC_WORDS = 0.8  # fraction of words with at least one letter
GOPHER_MIN_STOP_WORDS = 2  # different ones
GOPHER_STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")  # English

# Gopher, repetition rules: Rae et al. 2021, arXiv 2112.11446, table A1. A document is removed above any of these fractions.
GOPHER_MAX_DUPLICATE_LINES = 0.30
GOPHER_MAX_DUPLICATE_PARAGRAPHS = 0.30
GOPHER_MAX_DUPLICATE_LINE_CHARACTERS = 0.20
GOPHER_MAX_DUPLICATE_PARAGRAPH_CHARACTERS = 0.20
GOPHER_MAX_TOP_NGRAM = {2: 0.20, 3: 0.18, 4: 0.16}  # words of the n-gram -> fraction of characters
GOPHER_MAX_DUPLICATE_NGRAM = {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}

# C4: Raffel et al. 2020, arXiv 1910.10683, section 2.2. The longest word and the phrases of policies are those of the authors' program
# (TensorFlow Datasets, text/c4_utils.py), which the paper does not name.
C4_MIN_SENTENCES = 3
C4_MIN_WORDS_IN_LINE = 5
C4_MAX_WORD_LENGTH = 1000  # characters
C4_LINE_ENDS = ".!?\"”’'"  # "a period, exclamation mark, question mark, or end quotation mark"
C4_LINE_PHRASES = ("javascript", "terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")
C4_PAGE_PHRASES = ("lorem ipsum",)
C4_CURLY_BRACKET = "{"

# FineWeb: Penedo et al. 2024, arXiv 2406.17557, section 3.6.
FINEWEB_MAX_UNPUNCTUATED = 0.12  # a document is removed where the fraction of lines that end with punctuation is this or less
FINEWEB_MIN_SHORT_LINES = 0.67  # removed where the fraction of short lines is this or more
FINEWEB_SHORT_LINE = 30  # characters; a line is short below it
FINEWEB_MIN_DUPLICATE_LINE_CHARACTERS = 0.10  # removed where the fraction of characters in duplicate lines is this or more

# FineWeb as released: its program (examples/fineweb.py of datatrove) and the defaults of datatrove 0.10.1's filters, where they differ
# from the papers: section -> field -> value.
FINEWEB_RELEASED: dict[str, dict[str, object]] = {
    "c4": {"terminal_punctuation": False, "min_words_in_line": 3, "min_sentences": 5},
    "fineweb": {"min_duplicate_line_characters": 0.01, "max_newlines_per_word": 0.3},
}
RELEASED_LINE_ENDS = (".", "?", "!", '"', "'")
RELEASED_BULLETS = ("•", "-")
RELEASED_SIGNS = (  # a word of these alone does not count, nor does one of the terminal marks below or of control characters
    "\"#$%&'()*+,-/:;<=>@[\\]^_`{|}~«´»–—’“”„…∶━►、〈〉《》「」【】％（），１：；～"
)
RELEASED_TERMINALS = (  # marks that end a line (Unicode's Sentence_Terminal and three signs of Khmer): code points and ranges, in hex
    "21 2e 3f 589 61d-61f 6d4 700-702 7f9 837 839 83d-83e 964-965 104a-104b 1362 1367-1368 166e 1735-1736 17d4-17d6 17d9-17da "
    "1803 1809 1944-1945 1aa8-1aab 1b5a-1b5b 1b5e-1b5f 1b7d-1b7e 1c3b-1c3c 1c7e-1c7f 203c-203d 2047-2049 2e2e 2e3c 2e53-2e54 3002 "
    "a4ff a60e-a60f a6f3 a6f7 a876-a877 a8ce-a8cf a92f a9c8-a9c9 aa5d-aa5f aaf0-aaf1 abeb fe52 fe56-fe57 ff01 ff0e ff1f ff61 "
    "10a56-10a57 10f55-10f59 10f86-10f89 11047-11048 110be-110c1 11141-11143 111c5-111c6 111cd 111de-111df 11238-11239 "
    "1123b-1123c 112a9 1144b-1144c 115c2-115c3 115c9-115d7 11641-11642 1173c-1173e 11944 11946 11a42-11a43 11a9b-11a9c "
    "11c41-11c42 11ef7-11ef8 11f43-11f44 16a6e-16a6f 16af5 16b37-16b38 16b44 16e98 1bc9f 1da88"
)

# RefinedWeb, line-wise corrections: Penedo et al. 2023, arXiv 2306.01116, section 3.2 and appendix G.2.
REFINEDWEB_MAX_REMOVED_WORDS = 0.05  # a document is removed where the removed lines hold more than this fraction of its words
REFINEDWEB_MAX_UPPERCASE = 0.5  # "mainly composed of uppercase characters": fraction of letters
REFINEDWEB_COUNTERS = (
    "like",
    "share",
    "comment",
    "retweet",
    "repost",
    "quote",
    "bookmark",
    "upvote",
    "downvote",
    "download",
    "view",
    "follower",
)
REFINEDWEB_SHORT_WORDS = 10  # a line of at most so many words is removed where it matches one of the three lists below
REFINEDWEB_LINE_STARTS = ("sign-in", "sign in", "log in", "subscribe to", "skip to content", "share this", "click here")
REFINEDWEB_LINE_ENDS = ("read more...", "read more", "read more…", "sign up", "all rights reserved.", "all rights reserved")
REFINEDWEB_LINE_PARTS = ("items in cart", "add to cart", "back to top")

# Language identification: FineWeb keeps English at a fastText score of 0.65 and above (arXiv 2406.17557, section 3.3).
LANGUAGE_MIN_SCORE = 0.65

# Marks that end a sentence, in scripts that the papers above do not treat as well (Unicode 15, property Sentence_Terminal); closing quotes.
SENTENCE_ENDS = ".!?…。！？．｡؟۔।॥։።፧។៕‼⁇⁈⁉"
CLOSING_QUOTES = "\"'”’»›」』"
BULLETS = "•●◦‣▪■□▫–-*∙·○◆◇►▶"
