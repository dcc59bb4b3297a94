"""Two tiers of checkpoints: steps in the work folder, and more recent local copies on the hosts.

A restart resumes from the newest valid local copy. A local copy is valid if it belongs to the run's history
(lineage.py), if it is newer than the newest step in the work folder, if that step is not older than the newest step at
the time of the copy, and if a valid part exists for every process, on the same host or a neighbour host.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jaxscale.runtime.checkpoint import lineage, local_copy, restore
from jaxscale.runtime.checkpoint.fingerprint import fingerprints
from jaxscale.runtime.checkpoint.local_copy import LocalCopy, LocalSaver, LocalStore, copy_name, join_causes
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.runtime.checkpoint.record import describe_leaf, named_leaves
from jaxscale.runtime.checkpoint.storage_errors import short_reason, stop_if_unwritable
from jaxscale.runtime.checkpoint.verify import DamagedCheckpoint
from jaxscale.runtime.hosts import exchange
from jaxscale.runtime.hosts.agree import agreed, consulted, gathered, next_key
from jaxscale.system.exits import Exit, Stop

Log = Callable[[str], None]
OFFER_SECONDS = 300.0  # timeout for the slowest host to list its copies


class Offer(NamedTuple):
    """A local copy from which a process may resume."""

    step: int
    token: str
    state_digest: str
    is_local: bool  # True: this process's part is on the same host
    remote_addresses: list  # addresses of other hosts with this process's part


class ResumedCopy(NamedTuple):
    """The local copy from which a start resumes."""

    offer: Offer
    record: dict[str, Any]
    pieces: Mapping[str, Any]


class TieredCheckpoints(Checkpoints):
    """The checkpoints of a run, with local copies if checkpoint.local.folder is set."""

    def __init__(self, directory: Any, *arguments: Any, **settings: Any):
        super().__init__(directory, *arguments, **settings)
        self.local: LocalSaver | None = None
        self.store: LocalStore | None = None
        self.exchange: exchange.Exchange | None = None
        self.offers: list[Offer] = []
        self.resumed_copy: ResumedCopy | None = None

    # Start.

    def newest_readable(self, log: Log = print) -> int | None:
        """Returns the step of the newest valid local copy, or else the result of Checkpoints.newest_readable()."""
        self.find_local_copies(log)
        step = self.next_local(log)
        return super().newest_readable(log) if step is None else step

    def find_local_copies(self, log: Log) -> None:
        """Lists the local copies of all hosts. Sets `offers` and the neighbour of this process."""
        if self.cfg.local.folder is None:
            return
        if self.store is None:
            self.store = LocalStore(self.cfg.local.folder, self.directory)
            if jax.process_count() > 1:
                self.exchange = exchange.Exchange(self.store.folder)
        copies, unreadable = self.store.copies()
        mine = {
            "at": self.exchange and list(self.exchange.address), "host": self.store.identity,
            "copies": [list(vars(copy).values()) for copy in copies], "unreadable": unreadable,
        }  # fmt: skip
        found = consulted(next_key("copies"), mine, self.make_offers, OFFER_SECONDS)
        for line in found["lines"]:
            self.warn(None, line, log)
        self.store.neighbour = found["neighbour"] if self.cfg.local.neighbour else None
        self.offers = [Offer(*one) for one in found["offers"]]

    def make_offers(self, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns the offered copies, neighbour and warnings for each process. Runs only in the first process."""
        newest = self.latest_step()
        whole, lines = whole_copies(found, lineage.read_starts(self.directory.parent), -1 if newest is None else newest)
        lines += [line for one in found for line in one["unreadable"]]
        hosts: dict[str, list[int]] = defaultdict(list)
        for process, one in enumerate(found):
            hosts[one["host"]].append(process)
        rows, neighbours, answers = list(hosts.values()), {}, []
        for row, members in enumerate(rows if len(rows) > 1 else ()):
            next_host = rows[(row + 1) % len(rows)]
            neighbours |= {process: next_host[number % len(next_host)] for number, process in enumerate(members)}
        if len(found) > 1 and len(rows) == 1 and self.cfg.local.neighbour:
            lines.append(
                "all processes store their local copies in the same folder, so no other host has a second copy"
            )
        for process, one in enumerate(found):
            offers = []
            for key, owners in whole:
                holders = [found[holder] for holder in owners[process]]
                addresses = [holder["at"] for holder in holders if holder["host"] != one["host"]]
                offers.append([*key, len(addresses) < len(holders), addresses])
            address = found[neighbours[process]]["at"] if neighbours else None
            answers.append({"offers": offers, "neighbour": address, "lines": lines if process == 0 else []})
        return answers

    def next_local(self, log: Log) -> int | None:
        """Returns the step of the newest local copy that all processes can read, or None."""
        self.resumed_copy = None
        while self.offers:
            offer = self.offers.pop(0)
            cause, skipped, description, pieces = None, None, {}, {}
            try:
                description, pieces, skipped = self.load(offer)
            except (DamagedCheckpoint, OSError) as error:
                cause = copy_error(error)
            join_both = lambda found: [join_causes(list(causes)) for causes in zip(*found)]
            failed, replaced = gathered(next_key("local"), [cause, skipped], restore.RESTORE_SECONDS, join_both)
            if failed:
                self.warn(offer.step, f"the local copy of step {offer.step} is skipped: {failed}", log)
                continue
            if replaced:
                self.warn(offer.step, f"step {offer.step} is restored from a neighbour's copy: {replaced}", log)
            record = agreed(lambda description=description: description["record"])
            self.resumed_copy = ResumedCopy(offer, record, pieces)
            log(f"step {offer.step} is restored from the local copies in {self.cfg.local.folder}")
            return offer.step
        return None

    def load(self, offer: Offer) -> tuple[dict[str, Any], dict[str, Any], str | None]:
        """Returns (description, pieces, error of a failed location or None). Raises an error if all locations fail."""
        assert self.store is not None, "find_local_copies() opens the store before it makes offers"
        folder, name = self.store.folder, copy_name(jax.process_index(), offer.step, offer.token)
        failure: DamagedCheckpoint | OSError | None = None
        for place in ([None] if offer.is_local else []) + offer.remote_addresses:
            try:
                if place is not None:
                    exchange.get(place, folder, name)
                description = local_copy.read_description(folder / name)
                pieces = local_copy.read_pieces(folder / name, description)
                return description, pieces, failure and copy_error(failure)
            except (DamagedCheckpoint, OSError) as error:
                failure = error
        assert failure is not None, "whole_copies offers only copies with a part for every process"
        raise failure

    def read_record(self, step: int) -> dict[str, Any]:
        """Same as Checkpoints.read_record(), but reads a local copy if this process resumes from it."""
        copy = self.resumed_copy_of(step)
        return super().read_record(step) if copy is None else copy.record

    def resumed_copy_of(self, step: int | None) -> ResumedCopy | None:
        """Returns the local copy from which this process resumes, or None if that copy has a different step."""
        return self.resumed_copy if self.resumed_copy is not None and step == self.resumed_copy.offer.step else None

    def restore(self, step: int, abstract_state: Any, *, partial: bool = False) -> Any:
        """Same as Checkpoints.restore(). A local copy is restored onto the mesh that saved it."""
        if (copy := self.resumed_copy_of(step)) is None:
            return super().restore(step, abstract_state, partial=partial)
        _, record, pieces = copy
        wanted, saved = named_leaves(abstract_state), record["leaves"]
        described = {name: describe_leaf(leaf) for name, leaf in wanted.items()}
        restore.check_formats(self.directory / str(step), saved, described, partial)
        cause, leaves = None, []
        try:
            leaves = [local_copy.array_from_pieces(pieces[name], leaf) for name, leaf in wanted.items()]
        except KeyError:
            cause = "it was saved on a different mesh"
        cause = gathered(next_key("placed"), cause, restore.RESTORE_SECONDS, join_causes)
        if not cause:
            differing = [name for name, found in zip(wanted, fingerprints(leaves)) if found != saved[name][2]]
            # the copy of a replicated array may be damaged on a single host
            mine = f"the bits of {differing[0]} are not those that were saved" if differing else None
            cause = gathered(next_key("compared"), mine, restore.RESTORE_SECONDS, join_causes)
        if cause:
            raise Stop(Exit.CHECKPOINT_CORRUPT, f"the local copy of step {step} cannot be restored: {cause}")
        return jax.tree.unflatten(jax.tree.structure(abstract_state), leaves)

    def fall_back(self, step: int | None, error: Stop, log: Log = print) -> int | None:
        """Same as Checkpoints.fall_back(). If a local copy is damaged, tries the next copy, then the newest step."""
        if self.resumed_copy_of(step) is None or error.code != Exit.CHECKPOINT_CORRUPT:
            return super().fall_back(step, error, log)
        self.warn(step, f"{error}; it is skipped", log)
        older = self.next_local(log)
        return super().newest_readable(log) if older is None else older

    def log_changed_files(self, step: int, log: Log, small: bool = False) -> None:
        """Same as Checkpoints.log_changed_files(). Does nothing for a local copy, which has no list of files."""
        if self.resumed_copy_of(step) is None:
            super().log_changed_files(step, log, small)

    def set_aside_after(self, step: int, reason: str) -> list[int]:
        """Like Checkpoints.set_aside_after(), but also invalidates local copies of later steps."""
        workdir = self.directory.parent
        agreed(lambda: stop_if_unwritable(lambda: lineage.invalidate_after(workdir, step), workdir))
        return super().set_aside_after(step, reason)

    def begin(self, step: int) -> None:
        """Begins local copying in a run that started at `step`. Removes invalid copies. Call in all processes."""
        workdir = self.directory.parent
        if self.store is None:  # invalidates copies of earlier starts, so that later starts do not resume from them
            agreed(lambda: stop_if_unwritable(lambda: lineage.invalidate_after(workdir, step), workdir))
            return
        token = agreed(lambda: stop_if_unwritable(lambda: lineage.record_start(workdir, step), workdir))
        starts, newest = agreed(lambda: lineage.read_starts(workdir)), None
        if self.resumed_copy is not None:
            newest = copy_name(jax.process_index(), step, self.resumed_copy.offer.token)
        self.resumed_copy = None  # frees its memory
        copies = self.store.files()
        valid = {copy_name(owner, at, of) for owner, at, of, _ in copies if lineage.is_in_history(starts, of, at)}
        self.store.keep_only(valid)
        at_start = agreed(self.latest_step)
        known = -1 if at_start is None else at_start
        self.local = LocalSaver(
            self.cfg.local,
            self.store,
            token,
            newest=newest,
            base=lambda: max(known, -1 if self.saver.last_saved is None else self.saver.last_saved),
            note=self.note,
            prepared=lambda: self.preparing is None or not self.preparing.is_alive(),
        )

    # Training.

    def save(self, step: int, state: Any, run: Mapping[str, Any], *, wait: bool = False, **about: Any) -> float:
        """Like Checkpoints.save(), but also removes the local copies after the last save of a run."""
        seconds = super().save(step, state, run, wait=wait, **about)
        if wait and self.local is not None:
            self.end_local()
            self.local.store.clear()
        return seconds

    def close(self, most_seconds: float | None = None) -> None:
        """Like Checkpoints.close(), but also ends the local copies."""
        self.end_local()
        super().close(most_seconds)

    def end_local(self) -> None:
        """Stops the threads that write local copies and receive copies from a neighbour host."""
        if self.local is not None:
            self.local.close()
        if self.exchange is not None:
            self.exchange.close()


def copy_error(error: Exception) -> str:
    """Returns the message of an error of a local copy."""
    return str(error) if isinstance(error, DamagedCheckpoint) else short_reason(error)


Key = tuple[int, str, str]  # step, token, state digest


def whole_copies(
    found: Sequence[Mapping[str, Any]], starts: lineage.Starts, newest: int
) -> tuple[list[tuple[Key, dict[int, list[int]]]], list[str]]:
    """Returns (complete copies, newest first; warnings). A copy is (key, {owner: processes whose hosts have its part}).

    found: copies on the host of each process. newest: newest step in the work folder; -1 if there is none.
    """
    parts: dict[Key, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    facts: dict[Key, LocalCopy] = {}
    for process, one in enumerate(found):
        for copy in (LocalCopy(*fields) for fields in one["copies"]):
            key = copy.step, copy.token, copy.state_digest
            parts[key][copy.owner].append(process)
            facts[key] = copy
    whole, lines = [], []
    for key in sorted(parts, reverse=True):
        copy, problem = facts[key], ""
        if copy.step <= newest or not lineage.is_in_history(starts, copy.token, copy.step):
            continue
        missing = sorted(set(range(copy.parts)) - set(parts[key]))
        if copy.base > newest:
            problem = f"it depends on step {copy.base}, which no longer exists"
        elif copy.parts != len(found):
            problem = f"it was saved by {copy.parts} processes, but there are {len(found)} now"
        elif missing:
            problem = f"no host has the part of process {missing[0]}"
        if problem:
            lines.append(f"the local copy of step {copy.step} is skipped: {problem}")
        else:
            whole.append((key, parts[key]))
    return whole, lines
