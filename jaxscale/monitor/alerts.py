"""Findings told: a line on the console, an event with all facts, a message by webhook. And the hook of a live run."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxscale.monitor.config import HealthConfig
from jaxscale.monitor.events import Note
from jaxscale.monitor.health import Finding, Health, RunFacts, facts_of
from jaxscale.monitor.health.evidence import TELLING, with_events
from jaxscale.monitor.webhook import Webhook, webhook_url
from jaxscale.system import paths
from jaxscale.system.exits import BadInput

Say = Callable[[str], None]
NameDocuments = Callable[[int], Sequence[str]]  # of batch n, those with the most tokens in it first
MOST_DOCUMENTS = 8  # in an event


class Alerts:
    """Tells findings of one run. Only the first process has one."""

    def __init__(self, note: Note, say: Say, *, run: str = "", url: str | None = None):
        """run: its name in messages. url: of the webhook, from webhook_url(); None: none."""
        self.note, self.say, self.run = note, say, run
        self.webhook = Webhook(url) if url else None

    def tell(self, finding: Finding) -> None:
        """Tells one finding everywhere; waits for the console and events.jsonl alone."""
        self.say(line_of(finding))
        self.note("alert", finding.step, **facts_of_finding(finding))
        if self.webhook is not None:
            self.webhook.post(f"{self.run}: {message_of(finding)}" if self.run else message_of(finding))
        self.complain()

    def complain(self) -> None:
        """Says what the webhook has lost, if it has."""
        if self.webhook is not None and (problem := self.webhook.take_problem()):
            self.say(f"webhook: {problem}")

    def close(self) -> None:
        """Gives waiting messages a few seconds."""
        if self.webhook is not None:
            self.webhook.close()
            self.complain()


def line_of(finding: Finding) -> str:
    """The finding in one line, as on the console."""
    if finding.over:
        return f"health: step {finding.step}: {finding.kind} is over: {finding.seen}"
    likely = f"; likely: {finding.causes[0].what} ({finding.causes[0].evidence})" if finding.causes else ""
    advice = f"; try: {finding.advice[0]}" if finding.advice else ""
    documents = f"; {documents_of(finding, 2)}" if finding.documents else ""
    return f"health: step {finding.step}: {finding.kind}: {finding.seen}{likely}{documents}{advice}"


def documents_of(finding: Finding, most: int) -> str:
    """'batch 30 holds web a.txt, document 3; code b.jsonl, document 12; and 14 more documents', `most` by name."""
    named = finding.documents[:most]
    rest = finding.numbers["documents"] - len(named)
    others = [f"and {rest} more document{'s' * (rest > 1)}"] if rest else []
    return f"batch {finding.numbers['batch']} holds {'; '.join([*named, *others])}"


def message_of(finding: Finding) -> str:
    """The finding in some lines, as in a chat."""
    if finding.over:
        return line_of(finding)
    causes = [f"- {cause.what}: {cause.evidence}" for cause in finding.causes]
    documents = [f"B{documents_of(finding, 4)[1:]}"] if finding.documents else []
    return "\n".join(
        [f"{finding.kind} at step {finding.step}: {finding.seen}", "Likely causes, in order:", *causes, *documents]
        + ["What to try:", *(f"- {advice}" for advice in finding.advice)]
        + [f"Thresholds: {'; '.join(finding.sources)}"]
    )


def facts_of_finding(finding: Finding) -> dict[str, Any]:
    """The finding as plain JSON values, as in events.jsonl."""
    return {
        "what": finding.kind,
        "over": finding.over,
        "seen": finding.seen,
        "numbers": plain(finding.numbers),
        "causes": [cause._asdict() for cause in finding.causes],
        "documents": list(finding.documents),
        "advice": list(finding.advice),
        "sources": list(finding.sources),
    }


def read_facts(
    folder: Any, config: Mapping[str, Any], stage_batches: Sequence[int] | None = None, say: Say = print
) -> RunFacts:
    """The facts of the run in a folder, whose config.json is given; a forecast.json that is of no use is said.

    Args: stage_batches: at which the stages of the mixture begin, where that is known better than from the config.
    """
    name = str(folder)
    try:
        facts = facts_of(config, name, paths.read_json(folder / "forecast.json"))
    except FileNotFoundError:
        facts = facts_of(config, name)
    except (BadInput, OSError) as error:
        say(f"health: no alert will rest on {folder / 'forecast.json'}: {error}")
        facts = facts_of(config, name)
    return facts if stage_batches is None else dataclasses.replace(facts, stage_batches=tuple(stage_batches))


def plain(value: Any) -> Any:
    """Nested data with None for what is not finite."""
    if isinstance(value, Mapping):
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Diagnosis:
    """The health of a live run: the writer hands it every record, and findings are told. No fault of it ends a run."""

    def __init__(
        self,
        cfg: HealthConfig,
        facts: RunFacts,
        note: Note,
        documents: NameDocuments | None = None,
        earlier: Sequence[Mapping[str, Any]] = (),
    ):
        """documents: names those of a batch. earlier: what events.jsonl holds from before this start.

        Raises: BadInput for a webhook that may not be used. Touches no file and no network.
        """
        self.documents, self.earlier = documents, earlier
        self.health, self.note, self.run, self.url = Health(cfg, facts), note, facts.workdir, webhook_url()
        self.alerts = Alerts(note, lambda text: None)
        self.events: list[Mapping[str, Any]] = []
        self.broken = False

    def begin(self, records: Sequence[Mapping[str, Any]], say: Say) -> None:
        """Takes in what the run wrote before this start, of which all has been told then. say: for what comes."""
        self.alerts = Alerts(self.note, say, run=self.run, url=self.url)
        for record, due in with_events(records, self.earlier):
            self.events = due
            self.observe(record)
        self.earlier = ()

    def take(self, record: Mapping[str, Any]) -> None:
        """Takes in a record as metrics.jsonl holds it, and tells what is found."""
        for finding in self.observe(record):
            self.alerts.tell(self.with_documents(finding))
        self.alerts.complain()

    def observe(self, record: Mapping[str, Any]) -> list[Finding]:
        """What is found. A rule that fails is a fault of ours: it is said, and the diagnosis rests from then on."""
        if self.broken:
            return []
        events, self.events = self.events, []
        try:
            return self.health.observe(record, events)
        except Exception as error:  # whatever it is: a run does not end for what only looks on
            self.broken = True
            self.alerts.say(f"health: no diagnosis from step {record.get('step')} on, by a fault in it: {error!r}")
            self.note("alarm", record.get("step"), what="no diagnosis", cause=repr(error))
            return []

    def with_documents(self, finding: Finding) -> Finding:
        """The finding with the largest documents of the batch that it speaks of."""
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
        return finding._replace(numbers=numbers, documents=tuple(names[:MOST_DOCUMENTS]))

    def hearing(self, note: Note) -> Note:
        """The note with an ear: events that may explain what the metrics show are remembered for the next record."""

        def heard(kind: str, step: int | None = None, **facts: Any) -> None:
            if kind in TELLING:
                self.events.append({"event": kind, "step": step})
            note(kind, step, **facts)

        return heard

    def close(self) -> None:
        """Ends the webhook."""
        self.alerts.close()
