"""Redaction of secrets and control characters in all output.

Secrets are recognized by the name of the environment variable that has them as its value, or by their format. Short
secrets, and secrets that libraries store elsewhere, are not recognized.
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
WORDS |= {"PGPASS", "SSHPASS", "DBPASS", "WEBHOOK"}  # the URL of a webhook is sufficient to write to a chat
ENDS = ("PASSWORD", "PASSPHRASE")  # as in PGPASSWORD
LAST = {"AUTH", "PWD", "KEY", "KEYS"}  # secret as the last of several words: MYSQL_PWD, not PWD or SSH_AUTH_SOCK
OPEN = {"PUBLIC", "PRIMARY", "FOREIGN", "SORT", "PARTITION", "CACHE", "INDEX", "GROUP"}  # before KEY: not a secret
KEYS = re.compile(r"(?:API|ACCESS|AUTH|PRIVATE|SECRET|ACCOUNT|ENCRYPTION|SIGNING|SERVICE)_?KEY(?:$|_)")
PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")  # a word of MYSQL_PWD, dbPassword or data.api-key
FEWEST_CHARACTERS = 8  # shorter values, such as 'true' or 'fake', would redact ordinary words
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
    r"|(?P<scheme>://)[^/\s:@'\"]*:[^/\s@'\"]+(?=@)"  # user name and password in a URL
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
UNSEEN = ("Cc", "Cf", "Cs", "Zl", "Zp")  # control, format and surrogate characters, line and paragraph separators
ESCAPE_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])")


# Markdown characters that start inline syntax. `_` within a word, as in bits_per_byte, does not.
SPECIAL = re.compile(r"[\\`*\[\]#!&<>|~]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|:(?=//)|(?<=www)\.", re.IGNORECASE)
BACKSLASHED = "\\`*[]#!_"  # escaped by a backslash, which all Markdown parsers support; others by character reference


def redact(text: str) -> str:
    """Replaces the values of secret variables, and other secrets in known formats, with `[redacted]`."""
    return without(known_values(frozenset(secret_values(os.environ))), text)


def redacted(value: Any) -> Any:
    """Returns nested data with redact() applied to every string, including keys."""
    return cleaned(value, known_values(frozenset(secret_values(os.environ))))


def cleaned(value: Any, values: re.Pattern | None) -> Any:
    """Returns nested data with matches of the pattern and known formats redacted."""
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
    """Returns the text with matches of the pattern and known formats redacted."""
    if values:
        text = values.sub(HIDDEN, text)
    return FORMS.sub(lambda found: (found["kept"] or found["scheme"] or found["hook"] or "") + HIDDEN, text)


# names repeat in records: searching 26 names takes 0.13 ms, or 0.01 ms from the cache (one core)
without_again = functools.lru_cache(maxsize=1024)(without)


def secret_values(environment: Mapping[str, str]) -> set[str]:
    """Returns the values of variables whose name indicates a secret."""
    values = {name: environment.get(name, "").strip() for name in environment if names_secret(name)}
    return {value for name, value in values.items() if is_secret(name, value)}


def is_secret(name: str, value: str) -> bool:
    """Returns True if the name indicates a secret, and the value is neither short nor an existing path."""
    return names_secret(name) and len(value) >= FEWEST_CHARACTERS and not os.path.exists(value)


@functools.lru_cache(maxsize=1024)
def names_secret(name: str) -> bool:
    """Returns True if a variable or setting with this name may contain a secret."""
    words = [word.upper() for word in PART.findall(name)]
    if len(words) > 1 and words[-1] in LAST and words[-2] not in OPEN:
        return True
    return any(word in WORDS or word.endswith(ENDS) for word in words) or bool(KEYS.search("_".join(words)))


@functools.lru_cache(maxsize=4)
def known_values(values: frozenset[str]) -> re.Pattern | None:
    """Returns a pattern that matches the values and their JSON, URL and HTML encodings, or None if there are none."""
    quoted = functools.partial(urllib.parse.quote, safe="", errors="surrogateescape")
    forms = {form for value in values for form in (value, json.dumps(value)[1:-1], quoted(value), html.escape(value))}
    return re.compile("|".join(re.escape(form) for form in sorted(forms, key=len, reverse=True))) if forms else None


def printable(text: str) -> str:
    """Returns untrusted text without escape sequences and control characters, except newlines and tabs."""
    if text.isprintable():
        return text
    text = ESCAPE_SEQUENCE.sub("", text.replace("\r\n", "\n"))
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) not in UNSEEN)


def on_one_line(name: Any) -> str:
    """Returns a name on one line. Control characters are escaped: a newline becomes `\\n`."""
    text = str(name)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shown(text: str) -> str:
    """Returns printable text with secrets redacted. Escape sequences are removed first, in case they split a secret."""
    return redact(printable(text))


def in_html(text: Any) -> str:
    """Returns HTML of the text, safe between tags and in quoted attributes. Secrets are redacted as in `shown`."""
    return html.escape(shown(str(text)), quote=True)


def in_markdown(text: Any) -> str:
    """Returns the text escaped for one line of Markdown, which can be in a table cell or heading.

    CommonMark and GitHub then render no emphasis, code, links, images or HTML. GitHub still links e-mail addresses
    and mentions (@name), and renders formulas between dollar signs.
    """
    line = redact(on_one_line(text))
    return SPECIAL.sub(lambda found: f"\\{found[0]}" if found[0] in BACKSLASHED else f"&#{ord(found[0])};", line)


def block_in_markdown(text: str) -> str:
    """Returns Markdown with the text as an indented code block. Secrets are redacted as in `shown`."""
    return "\n".join(f"    {line}" for line in shown(text).strip("\n").split("\n"))


def in_slack(text: str) -> str:
    """Returns a message escaped for Slack and similar chats, without mentions and hidden link targets."""
    text = html.escape(shown(text), quote=False)  # <http://..|..>, <!channel> and <@U1> are Slack's markup
    text = re.sub("@(?=(?:all|channel|everyone|here)\\b)", "@\u200b", text, flags=re.IGNORECASE)  # Mattermost, Discord
    return text.replace("](", "] (")  # Markdown links


def shown_traceback(error: BaseException) -> str:
    """Returns the traceback with its causes, processed by `shown`."""
    return shown("".join(traceback.format_exception(error)))
