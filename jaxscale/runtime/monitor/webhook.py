"""Webhook messages to a chat, {"text": ...} as for Slack, sent by a thread so that no step waits.

The URL is a secret: it allows writing to the chat. It comes from the environment and is never logged.
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
MAX_PENDING = 100  # messages; the oldest are dropped
TIMEOUT_SECONDS = 10.0  # of a connection and of each read
TRIES = 6
MAX_WAIT = 300.0  # seconds, for the Retry-After of a 429
MAX_TEXT = 3500  # characters; Slack truncates at 40,000 and recommends 4,000
LAST_SECONDS = 5.0  # for pending messages, when a run ends


def webhook_url(environment: Mapping[str, str] = os.environ) -> str | None:
    """Returns the URL in JAXSCALE_WEBHOOK_URL, or None.

    Raises: BadInput unless it is https, or http to this machine. The error does not contain the URL.
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


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: messages go only to the configured URL."""

    def redirect_request(self, *args, **kwargs):
        """Returns None, which urllib treats as a refusal."""
        return None


class Webhook:
    """Posts messages in order, with retries. Never raises, blocks or ends a run.

    `take_problem` returns why messages are lost, once until one is delivered again.
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
        self.pending: collections.deque[str] = collections.deque()
        self.changed = threading.Condition()
        self.ended, self.busy = False, False
        self.dropped, self.sent = 0, 0
        self.problem: str | None = None
        self.failing: str | None = None  # the problem since a message was last delivered
        self.thread: threading.Thread | None = None
        local = is_loopback(urllib.parse.urlsplit(url).hostname or "")
        self.opener = urllib.request.build_opener(NoRedirect, *([urllib.request.ProxyHandler({})] if local else []))

    def post(self, text: str) -> None:
        """Queues a message and returns at once."""
        with self.changed:
            if self.ended:
                return
            if len(self.pending) >= MAX_PENDING:
                self.pending.popleft()
                self.dropped += 1
                self.set_problem("messages come faster than it takes them, and the oldest are left out")
            self.pending.append(text)
            if self.thread is None:
                self.thread = threading.Thread(target=self.work, name="webhook", daemon=True)
                self.thread.start()
            self.changed.notify_all()

    def set_problem(self, problem: str) -> None:
        """Sets the problem if it is new. Call with the lock held."""
        if problem != self.failing:
            self.problem = self.failing = problem

    def take_problem(self) -> str | None:
        """Returns why messages are lost, once."""
        with self.changed:
            problem, self.problem = self.problem, None
            return problem

    def close(self, seconds: float = LAST_SECONDS) -> None:
        """Waits for pending messages up to `seconds`, then stops. May be called twice."""
        with self.changed:
            idle = self.changed.wait_for(lambda: not self.pending and not self.busy, timeout=seconds)
            if not idle and not self.ended:
                left = len(self.pending) + self.busy
                self.set_problem(f"the last {left} message{'s' * (left > 1)} may be lost: no answer in {seconds:g} s")
            self.ended = True
            self.changed.notify_all()

    def work(self) -> None:
        """Sends pending messages until `close`."""
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.pending or self.ended)
                if self.ended:
                    return
                text, self.busy = self.pending.popleft(), True
            problem = self.deliver(text)
            with self.changed:
                self.busy, self.sent = False, self.sent + (problem is None)
                if problem is None:
                    self.failing = None
                elif not self.ended:
                    self.set_problem(problem)
                self.changed.notify_all()

    def deliver(self, text: str) -> str | None:
        """Sends a message with retries; returns the last error, or None."""
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
        """Tries once; returns (error or None, seconds before a retry or None if it is not worth one)."""
        body = json.dumps({"text": in_slack(text[:MAX_TEXT])}).encode()
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
    """Returns the seconds of a Retry-After header, a number or a date; 1 without one, at most MAX_WAIT."""
    seconds = 1.0
    if header:
        try:
            seconds = float(header)
        except ValueError:
            try:
                seconds = email.utils.parsedate_to_datetime(header).timestamp() - now
            except (TypeError, ValueError, OverflowError):
                pass
    return min(max(seconds, 0.0), MAX_WAIT) if seconds == seconds else 1.0
