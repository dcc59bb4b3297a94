"""Reports health findings on the console, in events.jsonl and by webhook to a chat: {"text": ...}, as for Slack.

The webhook's URL is a secret: it allows writing to the chat. It comes from the environment and is never logged.
"""

import collections
import contextlib
import dataclasses
import email.utils
import http.client
import json
import math
import os
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxscale.runtime.monitor.config import HealthConfig
from jaxscale.runtime.monitor.events import Note
from jaxscale.runtime.monitor.health import Finding, Health, RunFacts, facts_from_config
from jaxscale.runtime.monitor.health.evidence import EVENTS, pair_with_events
from jaxscale.runtime.monitor.run_files import finite
from jaxscale.system import paths
from jaxscale.system.exits import BadInput
from jaxscale.system.redact import in_slack
from jaxscale.system.storage import is_loopback

Say = Callable[[str], None]
NameDocuments = Callable[[int], Sequence[str]]  # documents of batch n, those with the most tokens first
MAX_DOCUMENTS = 8  # named in an event
VARIABLE = "JAXSCALE_WEBHOOK_URL"
MAX_PENDING = 100  # messages; the oldest are dropped
TIMEOUT_SECONDS = 10.0  # for the connection and for each read
TRIES = 6
MAX_WAIT = 300.0  # seconds, for the Retry-After of a 429
MAX_TEXT = 3500  # characters; Slack truncates at 40,000 and recommends 4,000
LAST_SECONDS = 5.0  # timeout for pending messages when a run ends


def format_line(finding: Finding) -> str:
    """Returns the finding as one console line."""
    if finding.over:
        return f"health: step {finding.step}: {finding.kind} ended: {finding.seen}"
    likely = f"; likely: {finding.causes[0].what} ({finding.causes[0].evidence})" if finding.causes else ""
    advice = f"; try: {finding.advice[0]}" if finding.advice else ""
    documents = f"; {format_documents(finding, 2)}" if finding.documents else ""
    return f"health: step {finding.step}: {finding.kind}: {finding.seen}{likely}{documents}{advice}"


def format_documents(finding: Finding, most: int) -> str:
    """Formats text such as 'batch 30 has web a.txt, document 3; and 14 more documents', with up to `most` names."""
    named = finding.documents[:most]
    remaining = finding.numbers["documents"] - len(named)
    others = [f"and {remaining} more document{'s' * (remaining > 1)}"] if remaining else []
    return f"batch {finding.numbers['batch']} has {'; '.join([*named, *others])}"


def format_message(finding: Finding) -> str:
    """Returns the finding as a multi-line chat message."""
    if finding.over:
        return format_line(finding)
    causes = [f"- {cause.what}: {cause.evidence}" for cause in finding.causes]
    documents = [f"B{format_documents(finding, 4)[1:]}"] if finding.documents else []
    return "\n".join(
        [f"{finding.kind} at step {finding.step}: {finding.seen}", "Likely causes, in order:", *causes, *documents]
        + ["What to try:", *(f"- {advice}" for advice in finding.advice)]
        + [f"Thresholds: {'; '.join(finding.sources)}"]
    )


def finding_to_json(finding: Finding) -> dict[str, Any]:
    """Returns the finding as JSON values for events.jsonl."""
    return {
        "what": finding.kind,
        "over": finding.over,
        "seen": finding.seen,
        "numbers": finite(finding.numbers),
        "causes": [cause._asdict() for cause in finding.causes],
        "documents": list(finding.documents),
        "advice": list(finding.advice),
        "sources": list(finding.sources),
    }


def read_facts(
    folder: Any, config: Mapping[str, Any], stage_batches: Sequence[int] | None = None, say: Say = print
) -> RunFacts:
    """Returns the facts in a run's config.json and forecast.json. `stage_batches` overrides those in config.json."""
    facts = facts_from_config(config, str(folder))
    try:
        facts = facts_from_config(config, str(folder), paths.read_json(folder / "forecast.json"))
    except FileNotFoundError:
        pass
    except (BadInput, OSError) as error:
        say(f"health: the loss is not compared with {folder / 'forecast.json'}: {error}")
    return facts if stage_batches is None else dataclasses.replace(facts, stage_batches=tuple(stage_batches))


@dataclasses.dataclass(eq=False)
class Diagnosis:
    """Runs the health rules on every record of a live run and reports findings. Its errors never end the run."""

    cfg: HealthConfig
    facts: RunFacts
    note: Note
    documents: NameDocuments | None = None
    earlier: Sequence[Mapping[str, Any]] = ()  # events before this process started

    def __post_init__(self):
        self.health, self.url = Health(self.cfg, self.facts), webhook_url()
        self.say: Say = lambda text: None
        self.webhook: Webhook | None = None
        self.events: list[Mapping[str, Any]] = []
        self.broken = False

    def replay(self, records: Sequence[Mapping[str, Any]], say: Say) -> None:
        """Restores the state from the records of earlier starts, without reports. `say` logs later findings."""
        self.say, self.webhook = say, Webhook(self.url) if self.url else None
        for record, due in pair_with_events(records, self.earlier):
            self.events = due
            self.observe(record)
        self.earlier = ()

    def update(self, record: Mapping[str, Any]) -> None:
        """Adds a record of metrics.jsonl and reports its findings."""
        for finding in self.observe(record):
            self.report(self.with_documents(finding))
        self.log_webhook_problem()

    def report(self, finding: Finding) -> None:
        """Reports a finding everywhere; blocks on the console and events.jsonl only."""
        self.say(format_line(finding))
        self.note("alert", finding.step, **finding_to_json(finding))
        if self.webhook is not None:
            self.webhook.post(f"{self.facts.workdir}: {format_message(finding)}")

    def log_webhook_problem(self) -> None:
        """Logs a new problem of the webhook."""
        if self.webhook is not None and (problem := self.webhook.take_problem()):
            self.say(f"webhook: {problem}")

    def observe(self, record: Mapping[str, Any]) -> list[Finding]:
        """Returns the findings that a record opens or closes. Disables the diagnosis if a rule raises an error."""
        if self.broken:
            return []
        events, self.events = self.events, []
        try:
            return self.health.observe(record, events)
        except Exception as error:  # monitoring must not end a run
            self.broken = True
            self.say(f"health: alerts are disabled from step {record.get('step')} on by an internal error: {error!r}")
            self.note("alarm", record.get("step"), what="no diagnosis", cause=repr(error))
            return []

    def with_documents(self, finding: Finding) -> Finding:
        """Returns the finding with the largest documents of its batch."""
        number = finding.numbers.get("batch")
        if number is None or self.documents is None:
            return finding
        try:
            names = self.documents(number)
        except Exception as error:  # monitoring must not end a run
            self.documents = None
            self.say(f"health: alerts no longer name documents because of an internal error: {error!r}")
            return finding
        numbers = finding.numbers | {"documents": len(names)}
        return finding._replace(numbers=numbers, documents=tuple(names[:MAX_DOCUMENTS]))

    def wrap_note(self, note: Note) -> Note:
        """Wraps `note` so that events that may explain the next record are also saved."""

        def wrapped(kind: str, step: int | None = None, **facts: Any) -> None:
            if kind in EVENTS:
                self.events.append({"event": kind, "step": step})
            note(kind, step, **facts)

        return wrapped

    def close(self) -> None:
        """Waits a few seconds for pending messages."""
        if self.webhook is not None:
            self.webhook.close()
            self.log_webhook_problem()


def webhook_url(environment: Mapping[str, str] = os.environ) -> str | None:
    """Returns JAXSCALE_WEBHOOK_URL or None. Raises BadInput unless it is https or local; the error omits the URL."""
    if not (url := environment.get(VARIABLE, "").strip()):
        return None
    try:
        parts = urllib.parse.urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host = None
    plain = url.isascii() and url.isprintable() and " " not in url
    if not plain or not host or not (parts.scheme == "https" or parts.scheme == "http" and is_loopback(host)):
        raise BadInput(
            f"{VARIABLE} must be an https:// URL, or an http:// URL of this machine; unset it to disable the webhook"
        )
    return url


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: messages go only to the configured URL."""

    def redirect_request(self, *args, **kwargs):
        return None  # urllib then raises HTTPError


class Webhook:
    """Posts messages in order, with retries, in a thread. Never raises, blocks or ends a run."""

    def __init__(self, url: str, *, timeout: float = TIMEOUT_SECONDS, first_wait: float = 1.0):
        self.url, self.timeout, self.first_wait = url, timeout, first_wait
        self.pending: collections.deque[str] = collections.deque()
        self.changed = threading.Condition()
        self.ended, self.busy = False, False
        self.problem: str | None = None
        self.failing: str | None = None  # the problem since the last delivered message
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
                self.set_problem("the server is too slow: the oldest messages are dropped")
            self.pending.append(text)
            if self.thread is None:
                self.thread = threading.Thread(target=self.work, name="webhook", daemon=True)
                self.thread.start()
            self.changed.notify_all()

    def set_problem(self, problem: str) -> None:
        """Sets the problem if it is new. The caller must hold the lock."""
        if problem != self.failing:
            self.problem = self.failing = problem

    def take_problem(self) -> str | None:
        """Returns the reason for lost messages. Returns each reason once until a message is delivered."""
        with self.changed:
            problem, self.problem = self.problem, None
            return problem

    def close(self, seconds: float = LAST_SECONDS) -> None:
        """Waits up to `seconds` for pending messages, then stops. May be called twice."""
        with self.changed:
            idle = self.changed.wait_for(lambda: not self.pending and not self.busy, timeout=seconds)
            if not idle and not self.ended:
                left = len(self.pending) + self.busy
                self.set_problem(
                    f"the last {left} message{'s' * (left > 1)} may be lost: no response within {seconds:g} s"
                )
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
                self.busy = False
                if problem is None:
                    self.failing = None
                elif not self.ended:
                    self.set_problem(problem)
                self.changed.notify_all()

    def deliver(self, text: str) -> str | None:
        """Sends a message with retries; returns the last error, or None."""
        problem = None
        for attempt in range(TRIES):
            problem, wait = self.send(text)
            if wait is None or attempt == TRIES - 1:
                break
            with self.changed:
                if self.changed.wait_for(lambda: self.ended, timeout=max(wait, self.first_wait * 2**attempt)):
                    break
        return problem

    def send(self, text: str) -> tuple[str | None, float | None]:
        """Sends a message once. Returns (error, seconds before a retry); each is None if there is none."""
        body = json.dumps({"text": in_slack(text[:MAX_TEXT])}).encode()
        headers = {"Content-Type": "application/json", "User-Agent": "jaxscale"}
        try:
            request = urllib.request.Request(self.url, body, headers, method="POST")
            with self.opener.open(request, timeout=self.timeout):
                return None, None
        except urllib.error.HTTPError as error:
            with error:
                problem = f"the server returned {error.code}"
                if error.code == 429:
                    return problem, retry_after(error.headers.get("Retry-After"), time.time())
                if 300 <= error.code < 400:
                    return f"{problem}, a redirect, which is not followed", None
                return problem, 0.0 if error.code >= 500 or error.code == 408 else None
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            return f"the server cannot be reached: {getattr(reason, 'strerror', None) or type(reason).__name__}", 0.0


def retry_after(header: str | None, now: float) -> float:
    """Returns the seconds in a Retry-After header (a number or a date), at most MAX_WAIT. The default is 1."""
    seconds = math.nan
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        seconds = email.utils.parsedate_to_datetime(header or "").timestamp() - now
    with contextlib.suppress(ValueError):
        seconds = float(header or "")
    return 1.0 if math.isnan(seconds) else min(max(seconds, 0.0), MAX_WAIT)
