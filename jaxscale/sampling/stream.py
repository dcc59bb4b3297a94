"""Text out of tokens as they come: never half a character, and nothing of what ends it."""

from collections.abc import Callable, Sequence

from jaxscale.system.exits import BadInput

REPLACED = "\ufffd"  # what a decoder shows for bytes that are no character, or not one yet
CHARACTER_TOKENS = 4  # a character has at most four bytes (RFC 3629), and a token at least one
CONTEXT = 8  # tokens of the prompt that the first new one is read with: some decoders drop a space at the beginning


class TextStream:
    """Tokens in, text out that will not change any more.

    stops: the text ends before the first of these to be complete, wherever tokens begin and end, and `stopped` is true.
    Raises BadInput for an empty one.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int] = (), stops: Sequence[str] = ()):
        if "" in stops:
            raise BadInput("a stop text is empty, and would end every text before it begins; leave it out")
        self.decode, self.stops = decode, tuple(stops)
        self.ids = list(prompt)[-CONTEXT:]  # that the text is read from; those before `begin` are only context
        self.begin, self.told = len(self.ids), 0  # told: characters behind the context's that are out
        self.context = decode(self.ids) if self.ids else ""
        self.held, self.stopped = "", False

    def push(self, token: int) -> str:
        """The text that is certain now and was not before."""
        if self.stopped:
            return ""
        self.ids.append(token)
        text = self.decode(self.ids)
        whole = not text.endswith(REPLACED)
        if not whole:  # perhaps a character that is not complete: only what the newest bytes cannot change is certain
            older = self.ids[: -(CHARACTER_TOKENS - 1)]
            text = text[: common_prefix(self.decode(older), text)] if len(older) > self.begin else self.context
        found = text[common_prefix(self.context, text) :]
        new, self.told = found[self.told :], max(self.told, len(found))
        if whole:  # the newest token is context enough for those to come
            self.ids, self.begin, self.told = self.ids[-CONTEXT:], min(CONTEXT, len(self.ids)), 0
            self.context = self.decode(self.ids)
        return self.checked(new)

    def end(self) -> str:
        """What was held back, when no token comes any more."""
        if self.stopped:
            return ""
        text = self.decode(self.ids) if self.ids else ""
        found = text[common_prefix(self.context, text) :]
        return self.checked(found[self.told :], last=True)

    def checked(self, new: str, last: bool = False) -> str:
        """`new` and what was held, up to what may be the beginning of a stop text."""
        self.held += new
        found = [(place + len(stop), place) for stop in self.stops if (place := self.held.find(stop)) >= 0]
        if found:
            self.stopped, out = True, self.held[: min(found)[1]]  # the first to be complete, as if it came by letters
            self.held = ""
            return out
        keep = 0 if last else max((overlap(self.held, stop) for stop in self.stops), default=0)
        out, self.held = self.held[: len(self.held) - keep], self.held[len(self.held) - keep :]
        return out


def overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` with which `stop` begins."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)


def common_prefix(left: str, right: str) -> int:
    """Characters with which both begin."""
    size = min(len(left), len(right))
    return next((i for i in range(size) if left[i] != right[i]), size)
