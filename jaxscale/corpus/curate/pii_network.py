"""E-mail and IP addresses, located from a rare character so that other texts cost nothing."""

import ipaddress
import re
from collections.abc import Iterator

# Local part and domain as RFC 5321 and 6531 have them, less quoted local parts, which nobody publishes. Letters of
# other scripts count only where the part has no Latin ones: running Chinese has no space before an address.
# =/?&#| are allowed in a local part, but what stands before them is nearly always a query: ?mail=me@home.org
AT = re.compile(r"@(?=[^\W_])")
LATIN = "A-Za-z0-9\u00c0-\u024f_.!$%'*+^`{}~-"
LOCAL = re.compile(rf"[{LATIN}]*[=/?&#|]*\Z")
FOREIGN_LOCAL = re.compile(r"[\w.!$%'*+^`{}~-]*[=/?&#|]*\Z")
LOCAL_CHARS = 64  # RFC 5321, section 4.5.3.1.1
DOMAIN = re.compile(
    r"(?:[^\W_](?:[\w-]{0,61}[^\W_])?\.)+(?:xn--[a-z0-9-]{2,59}|[a-z]{2,63}|[^\W\d_a-z]{2,63})", re.IGNORECASE
)
FILE_ENDINGS = frozenset(  # logo@2x.png and main@1a2b.js are files
    "avif bmp css gif gz htm html ico jpeg jpg js json jsx map mjs mp3 mp4 pdf php png scss svg tar tgz ts tsx ttf txt "
    "webm webp woff xml yaml yml zip".split()
)

IPV4_SIGN = re.compile(r"\.[0-9]{1,3}\.[0-9]")
IPV4 = re.compile(r"(?<![\w.])(?:[0-9]{1,3}\.){3}[0-9]{1,3}(?!\.?[\w])")
DIGITS_BEFORE = re.compile(r"[0-9]*\Z")
IPV6_SIGN = re.compile(r":[0-9A-Fa-f]{0,4}:")
IPV6_CHARS = 45  # of the longest, which ends in an IPv4 address
IPV6_BEFORE = re.compile(r"[0-9A-Fa-f:]*\Z")
IPV6_AFTER = re.compile(r"[0-9A-Fa-f:]*(?:[0-9]{1,3}(?:\.[0-9]{1,3}){3})?")
GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")  # RFC 4291, section 2.4: the rest is nobody's, as a::b in C++
GOES_ON = re.compile(r"\w|:[\w:]")
VERSION_BEFORE = re.compile(
    r"(?:\bv|\bver\.?|\bversion|\brelease|\bbuild|\bfirmware|§|\bsections?)\s*\Z", re.IGNORECASE
)

ADDRESS_BEFORE = re.compile(r"\b(?:ip|ips|ipv4|address|addr|server|host|dns|ping|proxy|from)\b", re.IGNORECASE)


def find_emails(text: str) -> Iterator[tuple[int, int]]:
    """Yields (start, end) of each e-mail address."""
    floor = 0
    for sign in AT.finditer(text):
        at = sign.start()
        domain = DOMAIN.match(text, at + 1)
        if domain and domain[0].rpartition(".")[2].lower() not in FILE_ENDINGS:
            head = text[max(floor, at - LOCAL_CHARS) : at]
            local = LOCAL.search(head)[0] or FOREIGN_LOCAL.search(head)[0]
            name = local.lstrip(".!$%'*+^`{}~-") or local  # 'me@home.org', *me@home.org*
            if name:
                yield at - len(name), domain.end()
                floor = domain.end()


def is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Whether it can belong to somebody: neither private, local, reserved nor for documentation (IANA's registries)."""
    unicast = address.version == 4 or address in GLOBAL_UNICAST
    return unicast and address.is_global and not address.is_multicast


def find_ips(text: str, public_only: bool) -> Iterator[tuple[int, int]]:
    """Yields (start, end) of each IPv4 and IPv6 address. A number after "version" and its like is none."""
    for sign in IPV4_SIGN.finditer(text):
        start = sign.start() - len(DIGITS_BEFORE.search(text[max(0, sign.start() - 3) : sign.start()])[0])
        match = IPV4.match(text, start)
        if match and accept(match[0], public_only) and not is_version(text, match):
            yield match.span()
    floor = 0
    for sign in IPV6_SIGN.finditer(text):
        if sign.start() < floor:
            continue
        begin = max(floor, sign.start() - IPV6_CHARS)
        start = sign.start() - len(IPV6_BEFORE.search(text[begin : sign.start()])[0])
        end = IPV6_AFTER.match(text, start).end()
        floor = end
        while end > start and text[end - 1] == ":" and text[end - 2 : end] != "::":
            end -= 1  # "fe80::1: unreachable"
        clear = not (start and (text[start - 1].isalnum() or text[start - 1] in "_:.")) and not GOES_ON.match(text, end)
        if clear and 2 < end - start <= IPV6_CHARS and accept(text[start:end], public_only):
            yield start, end


def is_version(text: str, match: re.Match) -> bool:
    """Whether four numbers read as a version or a section: said so, or single digits that nothing calls an address."""
    before = text[max(0, match.start() - 32) : match.start()]
    if VERSION_BEFORE.search(before):
        return True
    host = text.startswith((":", "/"), match.end()) or before.endswith(("@", "://")) or ADDRESS_BEFORE.search(before)
    return len(match[0]) == 7 and not host


def accept(written: str, public_only: bool) -> bool:
    """Whether it is an address at all, and of the wanted kind."""
    try:
        address = ipaddress.ip_address(written)
    except ValueError:  # 300.1.2.3, 01.2.3.4, a time of day
        return False
    return is_public(address) or not public_only
