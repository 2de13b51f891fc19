"""Texts that tokenizers stumble over."""

NASTY = (
    "hello world",
    " leading and  double   spaces ",
    "tabs\tand\nnewlines\r\n",
    "emoji 😀👩‍👩‍👧‍👦🇫🇷",
    "combining e\u0301 a\u0308 \u1e9b\u0323",
    "fullwidth ＡＢＣ １２３",
    "שלום עולם مرحبا",
    "日本語のテキスト 한국어",
    "zero\u200bwidth\u200d and\u00a0no-break\u3000spaces",
    "</s> <pad> <unk> <s> in a text",
    "▁ @@ ｟x｠ &amp; '\"",
    "x" * 10_000,
    "a\u0000b",
    "ﬁ ligature ½ ™",
    "𝕬𝖇𝖈 \U0010ffff",
)
EMPTY = ("", " ", "\t\n")
