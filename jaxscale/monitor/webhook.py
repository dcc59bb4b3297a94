"""Messages to a chat by webhook: {"text": ...} as Slack takes it, from a thread that no step ever waits for.

The address is a secret: who has it may write to the chat. It comes from the environment alone and is in no message.
"""

import collections
import email.utils
import http.client
import json
import os
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping

from jaxscale.system.exits import BadInput
from jaxscale.system.redact import in_slack
from jaxscale.system.storage import is_loopback

VARIABLE = "JAXSCALE_WEBHOOK_URL"
MOST_WAITING = 100  # messages; the oldest make room
TIMEOUT_SECONDS = 10.0  # of a connection and of each wait for the answer
TRIES = 6
LONGEST_WAIT = 300.0  # seconds that a 429 is obeyed for
LONGEST_TEXT = 3500  # characters; Slack cuts at 40,000 and advises 4,000
LAST_SECONDS = 5.0  # for what is waiting, when a run ends


def webhook_url(environment: Mapping[str, str] = os.environ) -> str | None:
    """The address in JAXSCALE_WEBHOOK_URL; None where there is none.

    Raises: BadInput unless it is https, or http to this machine. The address is not in the error.
    """
    if not (url := environment.get(VARIABLE, "").strip()):
        return None
    try:
        parts = urllib.parse.urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host = None
    plain = url.isascii() and url.isprintable() and " " not in url
    if not plain or not host or not (parts.scheme == "https" or parts.scheme == "http" and is_loopback(host)):
        raise BadInput(f"{VARIABLE} must be an https:// address (http:// for this machine alone); unset it for none")
    return url


class NotFollowed(urllib.request.HTTPRedirectHandler):
    """A redirect is an error: the message is for the address that was given, and for no other."""

    def redirect_request(self, *args, **kwargs):
        """None, which urllib takes for a refusal."""
        return None


class Webhook:
    """Posts messages in their order, each tried a few times. Nothing here raises, blocks or ends a run.

    Why messages are lost is kept in `problem`, for whoever may speak to take: once, until one is delivered again.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float = TIMEOUT_SECONDS,
        first_wait: float = 1.0,
        clock: Callable[[], float] = time.time,
    ):
        self.url, self.timeout, self.first_wait, self.clock = url, timeout, first_wait, clock
        self.waiting: collections.deque[str] = collections.deque()
        self.changed = threading.Condition()
        self.ended, self.busy = False, False
        self.dropped, self.sent = 0, 0
        self.problem: str | None = None
        self.failing: str | None = None  # what was told since a message was last delivered
        self.thread: threading.Thread | None = None
        local = is_loopback(urllib.parse.urlsplit(url).hostname or "")
        self.opener = urllib.request.build_opener(NotFollowed, *([urllib.request.ProxyHandler({})] if local else []))

    def post(self, text: str) -> None:
        """Queues a message and returns at once."""
        with self.changed:
            if self.ended:
                return
            if len(self.waiting) >= MOST_WAITING:
                self.waiting.popleft()
                self.dropped += 1
                self.tell("messages come faster than it takes them, and the oldest are left out")
            self.waiting.append(text)
            if self.thread is None:
                self.thread = threading.Thread(target=self.work, name="webhook", daemon=True)
                self.thread.start()
            self.changed.notify_all()

    def tell(self, problem: str) -> None:
        """Keeps why messages are lost, unless that is known. To be called with the lock held."""
        if problem != self.failing:
            self.problem = self.failing = problem

    def take_problem(self) -> str | None:
        """Why messages are lost, once."""
        with self.changed:
            problem, self.problem = self.problem, None
            return problem

    def close(self, seconds: float = LAST_SECONDS) -> None:
        """Gives what is waiting so many seconds, then ends. May be called twice."""
        with self.changed:
            idle = self.changed.wait_for(lambda: not self.waiting and not self.busy, timeout=seconds)
            if not idle and not self.ended:
                left = len(self.waiting) + self.busy
                self.tell(f"the last {left} message{'s' * (left > 1)} may be lost: no answer in {seconds:g} s")
            self.ended = True
            self.changed.notify_all()

    def work(self) -> None:
        """Sends what is waiting, until the end."""
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.waiting or self.ended)
                if self.ended:
                    return
                text, self.busy = self.waiting.popleft(), True
            problem = self.deliver(text)
            with self.changed:
                self.busy, self.sent = False, self.sent + (problem is None)
                if problem is None:
                    self.failing = None
                elif not self.ended:
                    self.tell(problem)
                self.changed.notify_all()

    def deliver(self, text: str) -> str | None:
        """Tries a message until it is taken; why not, if it is not."""
        problem: str | None = None
        for attempt in range(TRIES):
            problem, wait = self.send(text)
            if wait is None or attempt == TRIES - 1:
                return problem
            with self.changed:
                pause = max(wait, self.first_wait * 2**attempt)
                if self.changed.wait_for(lambda: self.ended, timeout=pause):
                    return problem
        return problem

    def send(self, text: str) -> tuple[str | None, float | None]:
        """(why it failed, None if it did not; least seconds before it is worth another try, None if it is not)."""
        body = json.dumps({"text": in_slack(text[:LONGEST_TEXT])}).encode()
        headers = {"Content-Type": "application/json", "User-Agent": "jaxscale"}
        try:
            request = urllib.request.Request(self.url, body, headers, method="POST")
            with self.opener.open(request, timeout=self.timeout):
                return None, None
        except urllib.error.HTTPError as error:
            with error:
                problem = f"it answered {error.code}"
                if error.code == 429:
                    return problem, retry_after(error.headers.get("Retry-After"), self.clock())
                if 300 <= error.code < 400:
                    return f"{problem}, a redirect, which is not followed", None
                return problem, 0.0 if error.code >= 500 or error.code == 408 else None
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            return f"it could not be reached: {getattr(reason, 'strerror', None) or type(reason).__name__}", 0.0


def retry_after(header: str | None, now: float) -> float:
    """Seconds that a 429 asks for, as a number or a date; 1 where it does not say, 300 at most."""
    seconds = 1.0
    if header:
        try:
            seconds = float(header)
        except ValueError:
            try:
                seconds = email.utils.parsedate_to_datetime(header).timestamp() - now
            except (TypeError, ValueError, OverflowError):
                pass
    return min(max(seconds, 0.0), LONGEST_WAIT) if seconds == seconds else 1.0
