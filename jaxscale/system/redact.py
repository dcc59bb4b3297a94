"""Text made fit for others' eyes: every place that writes takes secrets out, and what could drive a terminal.

A secret is known by the name of the environment variable that holds it, or by its own form. One that is short, or that
a library keeps for itself, is not known.
"""

import functools
import html
import json
import os
import re
import traceback
import unicodedata
import urllib.parse
from collections.abc import Mapping
from typing import Any

HIDDEN = "[redacted]"
WORDS = {"TOKEN", "SECRET", "SECRETS", "PASS", "PASSWD", "PAT", "APIKEY", "CREDENTIAL", "CREDENTIALS", "DSN"}
WORDS |= {"PGPASS", "SSHPASS", "DBPASS"}
WORDS |= {"WEBHOOK"}  # its address is all that one needs to write to a chat
ENDS = ("PASSWORD", "PASSPHRASE")  # PGPASSWORD and its like
LAST = {
    "AUTH",
    "PWD",
    "KEY",
    "KEYS",
}  # secret behind another word: REDIS_AUTH and no SSH_AUTH_SOCK, MYSQL_PWD and no PWD
OPEN = {"PUBLIC", "PRIMARY", "FOREIGN", "SORT", "PARTITION", "CACHE", "INDEX", "GROUP"}  # keys that are none
KEYS = re.compile(r"(?:API|ACCESS|AUTH|PRIVATE|SECRET|ACCOUNT|ENCRYPTION|SIGNING|SERVICE)_?KEY(?:$|_)")
PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")  # of MYSQL_PWD, dbPassword and data.api-key
FEWEST_CHARACTERS = 8  # a shorter value, such as 'true' or 'fake', would blank ordinary words
FORMS = re.compile(
    r"(?:(?<![A-Za-z0-9])(?:"
    r"hf_[A-Za-z0-9]{16,}"  # Hugging Face
    r"|sk-[A-Za-z0-9_-]{20,}"  # OpenAI and others
    r"|AIza[A-Za-z0-9_-]{30,}|ya29\.[A-Za-z0-9._-]{10,}|1//0[A-Za-z0-9_-]{20,}"  # Google: keys, access, refresh
    r"|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_[A-Za-z0-9_]{20,}|glpat-[A-Za-z0-9_-]{16,}"  # GitHub, GitLab
    r"|xox[abeprs]-[A-Za-z0-9-]{10,}"  # Slack
    r"|eyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*"  # JSON web tokens
    r"))"
    r"|(?P<hook>https?://(?:hooks\.slack\.com/(?:services|workflows|triggers)|discord(?:app)?\.com/api/webhooks)/)"
    r"[^\s'\"<>]+"
    r"|(?P<kept>(?i:\bbearer )|(?i:[?&](?:access_token|token|key|sig|signature|x-goog-signature|x-amz-signature)=))"
    r"[^\s&'\"]{8,}"
    r"|(?P<scheme>://)[^/\s:@'\"]*:[^/\s@'\"]+(?=@)"  # name and password in an address
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
UNSEEN = ("Cc", "Cf", "Cs", "Zl", "Zp")  # controls, those that reorder text or end a line among them; half characters
ESCAPE_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])")


# Of Markdown: what begins anything inside a line. `_` within a word, as in bits_per_byte, begins nothing.
SPECIAL = re.compile(r"[\\`*\[\]#!&<>|~]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|:(?=//)|(?<=www)\.", re.IGNORECASE)
BACKSLASHED = "\\`*[]#!_"  # by every reader; the others are written by their number


def redact(text: str) -> str:
    """The text with `[redacted]` for each secret in it: the values of secret variables, and what looks like one."""
    return without(known_values(frozenset(secret_values(os.environ))), text)


def redacted(value: Any) -> Any:
    """Nested plain data with redact() on every text in it, names included; numbers stay as they are."""
    return cleaned(value, known_values(frozenset(secret_values(os.environ))))


def cleaned(value: Any, values: re.Pattern | None) -> Any:
    """Nested plain data without what the pattern finds, and without what looks like a secret."""
    if isinstance(value, str):
        return without(values, value)
    if isinstance(value, Mapping):
        return {
            without_again(values, name) if isinstance(name, str) else name: cleaned(inner, values)
            for name, inner in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [cleaned(inner, values) for inner in value]
    return value


def without(values: re.Pattern | None, text: str) -> str:
    """The text without what the pattern finds, and without what looks like a secret."""
    if values:
        text = values.sub(HIDDEN, text)
    return FORMS.sub(lambda found: (found["kept"] or found["scheme"] or found["hook"] or "") + HIDDEN, text)


# a record's names are those of the record before: 26 take 0.13 ms to search, 0.01 ms to remember (one core)
without_again = functools.lru_cache(maxsize=1024)(without)


def secret_values(environment: Mapping[str, str]) -> set[str]:
    """The values of those variables whose names say that they hold a secret."""
    named = [environment.get(name, "").strip() for name in environment if names_secret(name)]
    return {value for value in named if may_be_secret(value)}


def is_secret(name: str, value: str) -> bool:
    """True for HF_TOKEN, WANDB_API_KEY and their like. A path that is there says where a secret lies, and is none."""
    return names_secret(name) and may_be_secret(value)


@functools.lru_cache(maxsize=1024)
def names_secret(name: str) -> bool:
    """True if a variable or a setting of this name holds a secret, unless its value cannot be one."""
    words = [word.upper() for word in PART.findall(name)]
    if len(words) > 1 and words[-1] in LAST and words[-2] not in OPEN:
        return True
    return any(word in WORDS or word.endswith(ENDS) for word in words) or bool(KEYS.search("_".join(words)))


def may_be_secret(value: str) -> bool:
    """False for what is too short to be one, and for a path that is there."""
    return len(value) >= FEWEST_CHARACTERS and not os.path.exists(value)


@functools.lru_cache(maxsize=4)
def known_values(values: frozenset[str]) -> re.Pattern | None:
    """What finds any of the values, also as JSON, an address or a page would spell them; None without values."""
    spelt = {form for value in values for form in (value, json.dumps(value)[1:-1], quoted(value), html.escape(value))}
    return re.compile("|".join(re.escape(form) for form in sorted(spelt, key=len, reverse=True))) if spelt else None


def quoted(value: str) -> str:
    """The value as a part of an address."""
    return urllib.parse.quote(value, safe="", errors="surrogateescape")


def printable(text: str) -> str:
    """The text without what could move the cursor, recolour, ring or reorder a terminal; newlines and tabs stay.

    Data decide what a sample or an error says, so escape sequences in it must not reach the terminal of who watches.
    """
    if text.isprintable():
        return text
    text = ESCAPE_SEQUENCE.sub("", text.replace("\r\n", "\n"))
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) not in UNSEEN)


def on_one_line(name: Any) -> str:
    """A name as one line that shows all that is in it: a newline as `\\n`, a character that reorders as `\\u202e`."""
    text = str(name)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shown(text: str) -> str:
    """Text for a person: printable, then without secrets, which a sequence in their middle would have hidden."""
    return redact(printable(text))


def in_html(text: Any) -> str:
    """HTML that shows the text, safe between tags and in quoted attributes; else as `shown`."""
    return html.escape(shown(str(text)), quote=True)


def in_markdown(text: Any) -> str:
    """Markdown that shows the text on one line, also in a cell of a table or a heading: nothing in it is obeyed.

    As CommonMark and GitHub read it: no emphasis, code, link, image or HTML, and no web address becomes a link. GitHub
    still links an e-mail address and a mention (@name), and sets what stands between dollar signs as a formula.
    """
    line = redact(on_one_line(text))
    return SPECIAL.sub(lambda found: f"\\{found[0]}" if found[0] in BACKSLASHED else f"&#{ord(found[0])};", line)


def block_in_markdown(text: str) -> str:
    """Markdown that shows the text in lines of code, which nothing in it can end; else as `shown`.

    It stands between blank lines, behind a paragraph or a heading.
    """
    return "\n".join(f"    {line}" for line in shown(text).strip("\n").split("\n"))


def in_slack(text: str) -> str:
    """A message as Slack and its relatives show it: no link hides where it leads, and nobody is called by it."""
    text = html.escape(shown(text), quote=False)  # <http://..|..>, <!channel> and <@U1> are Slack's own markup
    text = re.sub("@(?=(?:all|channel|everyone|here)\\b)", "@\u200b", text, flags=re.IGNORECASE)  # Mattermost, Discord
    return text.replace("](", "] (")  # and their links


def shown_traceback(error: BaseException) -> str:
    """The traceback that Python would print, with all that it was raised from, as `shown`."""
    return shown("".join(traceback.format_exception(error)))
