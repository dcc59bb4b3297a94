"""Reports health findings on the console, in events.jsonl and by webhook."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxscale.runtime.monitor.config import HealthConfig
from jaxscale.runtime.monitor.events import Note
from jaxscale.runtime.monitor.health import Finding, Health, RunFacts, facts_from_config
from jaxscale.runtime.monitor.health.evidence import EVENTS, pair_with_events
from jaxscale.runtime.monitor.webhook import Webhook, webhook_url
from jaxscale.system import paths
from jaxscale.system.exits import BadInput

Say = Callable[[str], None]
NameDocuments = Callable[[int], Sequence[str]]  # of batch n, those with the most tokens in it first
MAX_DOCUMENTS = 8  # in an event


class Alerts:
    """Reports findings of one run. Only the first process has one."""

    def __init__(self, note: Note, say: Say, *, run: str = "", url: str | None = None):
        """run: name in messages. url: of the webhook, from webhook_url(), or None."""
        self.note, self.say, self.run = note, say, run
        self.webhook = Webhook(url) if url else None

    def report(self, finding: Finding) -> None:
        """Reports a finding everywhere; blocks on the console and events.jsonl only."""
        self.say(format_line(finding))
        self.note("alert", finding.step, **finding_to_json(finding))
        if self.webhook is not None:
            self.webhook.post(f"{self.run}: {format_message(finding)}" if self.run else format_message(finding))
        self.log_webhook_problem()

    def log_webhook_problem(self) -> None:
        """Logs a problem of the webhook, once."""
        if self.webhook is not None and (problem := self.webhook.take_problem()):
            self.say(f"webhook: {problem}")

    def close(self) -> None:
        """Waits a few seconds for pending messages."""
        if self.webhook is not None:
            self.webhook.close()
            self.log_webhook_problem()


def format_line(finding: Finding) -> str:
    """Returns the finding as one console line."""
    if finding.over:
        return f"health: step {finding.step}: {finding.kind} is over: {finding.seen}"
    likely = f"; likely: {finding.causes[0].what} ({finding.causes[0].evidence})" if finding.causes else ""
    advice = f"; try: {finding.advice[0]}" if finding.advice else ""
    documents = f"; {format_documents(finding, 2)}" if finding.documents else ""
    return f"health: step {finding.step}: {finding.kind}: {finding.seen}{likely}{documents}{advice}"


def format_documents(finding: Finding, most: int) -> str:
    """Returns 'batch 30 holds web a.txt, document 3; and 14 more documents', with at most `most` named."""
    named = finding.documents[:most]
    remaining = finding.numbers["documents"] - len(named)
    others = [f"and {remaining} more document{'s' * (remaining > 1)}"] if remaining else []
    return f"batch {finding.numbers['batch']} holds {'; '.join([*named, *others])}"


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
        "numbers": finite_or_none(finding.numbers),
        "causes": [cause._asdict() for cause in finding.causes],
        "documents": list(finding.documents),
        "advice": list(finding.advice),
        "sources": list(finding.sources),
    }


def read_facts(
    folder: Any, config: Mapping[str, Any], stage_batches: Sequence[int] | None = None, say: Say = print
) -> RunFacts:
    """Returns the facts of the run in a folder with this config.json; logs an unreadable forecast.json.

    Args: stage_batches: first batches of the mixture stages, where known more exactly than from the config.
    """
    name = str(folder)
    try:
        facts = facts_from_config(config, name, paths.read_json(folder / "forecast.json"))
    except FileNotFoundError:
        facts = facts_from_config(config, name)
    except (BadInput, OSError) as error:
        say(f"health: no alert will rest on {folder / 'forecast.json'}: {error}")
        facts = facts_from_config(config, name)
    return facts if stage_batches is None else dataclasses.replace(facts, stage_batches=tuple(stage_batches))


def finite_or_none(value: Any) -> Any:
    """Returns nested data with None for non-finite numbers."""
    if isinstance(value, Mapping):
        return {name: finite_or_none(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite_or_none(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Diagnosis:
    """Runs the health rules on every record of a live run and reports findings. An error in it never ends the run."""

    def __init__(
        self,
        cfg: HealthConfig,
        facts: RunFacts,
        note: Note,
        documents: NameDocuments | None = None,
        earlier: Sequence[Mapping[str, Any]] = (),
    ):
        """documents: returns the document names of a batch. earlier: events from before this start.

        Raises: BadInput for an invalid webhook URL. Accesses no file and no network.
        """
        self.documents, self.earlier = documents, earlier
        self.health, self.note, self.run, self.url = Health(cfg, facts), note, facts.workdir, webhook_url()
        self.alerts = Alerts(note, lambda text: None)
        self.events: list[Mapping[str, Any]] = []
        self.broken = False

    def replay(self, records: Sequence[Mapping[str, Any]], say: Say) -> None:
        """Restores the state from records before this start, which were reported then. say: logs later findings."""
        self.alerts = Alerts(self.note, say, run=self.run, url=self.url)
        for record, due in pair_with_events(records, self.earlier):
            self.events = due
            self.observe(record)
        self.earlier = ()

    def update(self, record: Mapping[str, Any]) -> None:
        """Adds a record of metrics.jsonl and reports its findings."""
        for finding in self.observe(record):
            self.alerts.report(self.with_documents(finding))
        self.alerts.log_webhook_problem()

    def observe(self, record: Mapping[str, Any]) -> list[Finding]:
        """Returns the findings of a record. An error in a rule is logged and disables the diagnosis."""
        if self.broken:
            return []
        events, self.events = self.events, []
        try:
            return self.health.observe(record, events)
        except Exception as error:  # monitoring must not end a run
            self.broken = True
            self.alerts.say(f"health: no diagnosis from step {record.get('step')} on, by a fault in it: {error!r}")
            self.note("alarm", record.get("step"), what="no diagnosis", cause=repr(error))
            return []

    def with_documents(self, finding: Finding) -> Finding:
        """Returns the finding with the largest documents of its batch."""
        number = finding.numbers.get("batch")
        if number is None or self.documents is None:
            return finding
        try:
            names = self.documents(number)
        except Exception as error:  # as above
            self.documents = None
            self.alerts.say(f"health: alerts do not name documents any more, by a fault: {error!r}")
            return finding
        numbers = finding.numbers | {"documents": len(names)}
        return finding._replace(numbers=numbers, documents=tuple(names[:MAX_DOCUMENTS]))

    def wrap_note(self, note: Note) -> Note:
        """Returns a `note` that also saves events which may explain the next record."""

        def wrapped(kind: str, step: int | None = None, **facts: Any) -> None:
            if kind in EVENTS:
                self.events.append({"event": kind, "step": step})
            note(kind, step, **facts)

        return wrapped

    def close(self) -> None:
        """Closes the webhook."""
        self.alerts.close()
