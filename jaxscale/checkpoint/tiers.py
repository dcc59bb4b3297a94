"""Two tiers of checkpoints: those in the work folder, and local copies on the hosts, a few seconds old, for a restart.

On a restart the newest good copy wins. A local copy is taken if it belongs to the run as it went on (lineage.py), is
newer than the newest step in the work folder, which must not have gone back behind the one that it followed, and if a
good part of it is left for every process: on its own host, or at a neighbour's.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jaxscale.checkpoint import lineage, local_copy, restore
from jaxscale.checkpoint.fingerprint import fingerprints
from jaxscale.checkpoint.local_saver import LocalSaver, causes
from jaxscale.checkpoint.local_store import Copy, LocalStore, name_of
from jaxscale.checkpoint.manager import Checkpoints
from jaxscale.checkpoint.read_back import Damaged
from jaxscale.checkpoint.record import describe_leaf, named_leaves
from jaxscale.checkpoint.storage_errors import short_reason, written
from jaxscale.hosts import exchange
from jaxscale.hosts.agree import agreed, consulted, gathered, next_key
from jaxscale.system.exits import Exit, Stop

Log = Callable[[str], None]
OFFER_SECONDS = 300.0  # for the slowest host to list its copies


class Offer(NamedTuple):
    """A local copy that one process may go on from."""

    step: int
    token: str
    mark: str
    here: bool  # its part is on its own host
    elsewhere: list  # addresses of those that have its part too


class Taken(NamedTuple):
    """The local copy that a start resumes from."""

    offer: Offer
    record: dict[str, Any]
    pieces: Mapping[str, Any]


class Tiers(Checkpoints):
    """The checkpoints of a run, and its local copies where checkpoint.local.folder names a place for them."""

    def __init__(self, directory: Any, *arguments: Any, **settings: Any):
        super().__init__(directory, *arguments, **settings)
        self.local: LocalSaver | None = None
        self.store: LocalStore | None = None
        self.exchange: exchange.Exchange | None = None
        self.neighbour: Sequence | None = None  # the address of the process that stores a second copy
        self.offers: list[Offer] = []
        self.taken: Taken | None = None

    # On a start.

    def newest_readable(self, log: Log = print) -> int | None:
        """As Checkpoints.newest_readable; a step of local copies where there is a newer one that is good."""
        self.look(log)
        step = self.next_local(log)
        return super().newest_readable(log) if step is None else step

    def look(self, log: Log) -> None:
        """Finds, together with all processes, the local copies, their hosts and neighbours, where a folder is set."""
        if self.cfg.local.folder is None:
            return
        if self.store is None:
            self.store = LocalStore(self.cfg.local.folder, self.directory)
            if jax.process_count() > 1:
                self.exchange = exchange.Exchange(self.store.folder)
        copies, odd = self.store.copies()
        mine = {
            "at": self.exchange and list(self.exchange.address), "host": self.store.identity,
            "copies": [list(vars(copy).values()) for copy in copies], "odd": odd,
        }  # fmt: skip
        found = consulted(next_key("copies"), mine, self.answers, OFFER_SECONDS)
        for line in found["lines"]:
            self.tell(None, line, log)
        self.neighbour = found["neighbour"] if self.cfg.local.neighbour else None
        self.offers = [Offer(*one) for one in found["offers"]]

    def answers(self, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """What each process is to know, of what all have. At the first process."""
        newest = self.latest_step()
        whole, lines = whole_copies(found, lineage.read_starts(self.directory.parent), -1 if newest is None else newest)
        lines += [line for one in found for line in one["odd"]]
        hosts: dict[str, list[int]] = defaultdict(list)
        for process, one in enumerate(found):
            hosts[one["host"]].append(process)
        rows, answers = list(hosts.values()), []
        if len(found) > 1 and len(rows) == 1 and self.cfg.local.neighbour:
            lines.append("all processes keep their local copies in one folder, so that no neighbour has a second one")
        for process, one in enumerate(found):
            row = next(number for number, members in enumerate(rows) if process in members)
            other = rows[(row + 1) % len(rows)]
            near = other[rows[row].index(process) % len(other)] if len(rows) > 1 else None
            offers = []
            for (step, token, mark), owners in whole:
                holders = owners[process]
                here = any(found[holder]["host"] == one["host"] for holder in holders)
                others = [found[holder]["at"] for holder in holders if found[holder]["host"] != one["host"]]
                offers.append([step, token, mark, here, others])
            at = None if near is None else found[near]["at"]
            answers.append({"offers": offers, "neighbour": at, "lines": lines if process == 0 else []})
        return answers

    def next_local(self, log: Log) -> int | None:
        """The step of the newest local copy of which all processes have a good part now; None where there is none."""
        self.taken = None
        while self.offers:
            offer = self.offers.pop(0)
            cause, passed_over, about, pieces = None, None, {}, {}
            try:
                about, pieces, passed_over = self.load(offer)
            except (Damaged, OSError) as error:
                cause = reason(error)
            both = [cause, passed_over]
            failed, mended = gathered(next_key("local"), both, restore.RESTORE_SECONDS, causes_of_both)
            if failed:
                self.tell(offer.step, f"the local copy of step {offer.step} is passed over: {failed}", log)
                continue
            if mended:
                self.tell(offer.step, f"step {offer.step} is taken from a neighbour's copy: {mended}", log)
            record = agreed(lambda about=about: about["record"])
            self.taken = Taken(offer, record, pieces)
            log(f"step {offer.step} is taken from the local copies in {self.cfg.local.folder}")
            return offer.step
        return None

    def load(self, offer: Offer) -> tuple[dict[str, Any], dict[str, Any], str | None]:
        """(what the copy says of itself, its pieces, what is wrong with the place that was tried before).

        Of this process's part, wherever a good one is left. Raises: Damaged or OSError, of the last place.
        """
        assert self.store is not None, "look() opens the store before it makes offers"
        folder, name = self.store.folder, name_of(jax.process_index(), offer.step, offer.token)
        failure: Damaged | OSError | None = None
        for place in ([None] if offer.here else []) + offer.elsewhere:
            try:
                if place is not None:
                    exchange.get(place, folder, name)
                about = local_copy.read_about(folder / name)
                pieces = local_copy.read_pieces(folder / name, about)
                return about, pieces, failure and reason(failure)
            except (Damaged, OSError) as error:
                failure = error
        assert failure is not None, "whole_copies offers a copy only if a process has this part"
        raise failure

    def tell(self, step: int | None, cause: str, log: Log) -> None:
        """Says what is passed over, in an event as well."""
        self.note("alarm", step, cause=cause)
        log(f"WARNING: {cause}")

    def read_record(self, step: int) -> dict[str, Any]:
        """As Checkpoints.read_record; of the local copy where that was taken."""
        taken = self.taken_at(step)
        return super().read_record(step) if taken is None else taken.record

    def taken_at(self, step: int | None) -> Taken | None:
        """Returns the local copy that this start resumes from, if it is of this step."""
        return self.taken if self.taken is not None and step == self.taken.offer.step else None

    def restore(self, step: int, abstract_state: Any, *, partial: bool = False) -> Any:
        """As Checkpoints.restore; from the local copy where that was taken. It must have been made on the same mesh."""
        if (taken := self.taken_at(step)) is None:
            return super().restore(step, abstract_state, partial=partial)
        _, record, pieces = taken
        wanted, saved = named_leaves(abstract_state), record["leaves"]
        described = {name: describe_leaf(leaf) for name, leaf in wanted.items()}
        restore.check_fit(self.directory / str(step), saved, described, partial)
        cause, leaves = None, []
        try:
            leaves = [local_copy.on_devices(pieces[name], leaf) for name, leaf in wanted.items()]
        except KeyError:
            cause = "it was made on another mesh"
        cause = gathered(next_key("placed"), cause, restore.RESTORE_SECONDS, causes)
        if not cause:
            differing = [name for name, found in zip(wanted, fingerprints(leaves)) if found != saved[name][2]]
            # a copy that devices should share may differ on one host alone
            mine = f"the bits of {differing[0]} are not those that were saved" if differing else None
            cause = gathered(next_key("compared"), mine, restore.RESTORE_SECONDS, causes)
        if cause:
            raise Stop(Exit.CHECKPOINT_CORRUPT, f"the local copy of step {step} cannot be used: {cause}")
        return jax.tree.unflatten(jax.tree.structure(abstract_state), leaves)

    def fall_back(self, step: int | None, error: Stop, log: Log = print) -> int | None:
        """As Checkpoints.fall_back; where a local copy was tried, the next one, or the newest in the work folder."""
        if self.taken_at(step) is None or error.code != Exit.CHECKPOINT_CORRUPT:
            return super().fall_back(step, error, log)
        self.tell(step, f"{error}; it is passed over", log)
        older = self.next_local(log)
        return super().newest_readable(log) if older is None else older

    def log_changed_files(self, step: int, log: Log, small: bool = False) -> None:
        """As Checkpoints.log_changed_files; a local copy has no list of files."""
        if self.taken_at(step) is None:
            super().log_changed_files(step, log, small)

    def set_aside_after(self, step: int, why: str) -> list[int]:
        """As Checkpoints.set_aside_after; no local copy of a later step counts any more either."""
        workdir = self.directory.parent
        agreed(lambda: written(lambda: lineage.cut(workdir, step), workdir))
        return super().set_aside_after(step, why)

    def begin(self, step: int) -> None:
        """Starts to copy, from this step on; older copies that do not count any more are removed. For all processes."""
        workdir = self.directory.parent
        if self.store is None:  # copies of starts that made some count no further, or they would come back
            agreed(lambda: written(lambda: lineage.cut(workdir, step), workdir))
            return
        token = agreed(lambda: written(lambda: lineage.begin(workdir, step), workdir))
        starts, newest = agreed(lambda: lineage.read_starts(workdir)), None
        if self.taken is not None:
            newest = name_of(jax.process_index(), step, self.taken.offer.token)
        self.taken = None  # and its memory
        copies = self.store.files()
        valid = {name_of(owner, at, begun) for owner, at, begun, _ in copies if lineage.belongs(starts, begun, at)}
        self.store.keep_only(valid)
        self.local = LocalSaver(
            self.cfg.local, self.store, token, newest=newest, base=self.newest_saved(), neighbour=self.neighbour,
            note=self.note, prepared=lambda: self.preparing is None or not self.preparing.is_alive(),
        )  # fmt: skip

    def newest_saved(self) -> Callable[[], int]:
        """What gives the newest step in the work folder, without a look at it. Of the first process."""
        at_start = agreed(self.latest_step)
        known = -1 if at_start is None else at_start
        return lambda: max(known, -1 if self.saver.last_saved is None else self.saver.last_saved)

    # In training.

    def save(self, step: int, state: Any, run: Mapping[str, Any], *, wait: bool = False, **about: Any) -> float:
        """As Checkpoints.save; after the last save of a run its local copies are removed."""
        seconds = super().save(step, state, run, wait=wait, **about)
        if wait and self.local is not None:
            self.end_local()
            self.local.store.clear()
        return seconds

    def close(self, most_seconds: float | None = None) -> None:
        """As Checkpoints.close."""
        self.end_local()
        super().close(most_seconds)

    def end_local(self) -> None:
        """Ends the threads that copy, and that take a neighbour's copies."""
        if self.local is not None:
            self.local.close()
        if self.exchange is not None:
            self.exchange.close()


def reason(error: Exception) -> str:
    """What is wrong with a copy, in words."""
    return str(error) if isinstance(error, Damaged) else short_reason(error)


def causes_of_both(found: list[list[str | None]]) -> list[str]:
    """[what failed, what was only passed over], of all processes."""
    return [causes([one[which] for one in found]) for which in range(2)]


Key = tuple[int, str, str]  # step, token, mark


def whole_copies(
    found: Sequence[Mapping[str, Any]], starts: lineage.Starts, newest: int
) -> tuple[list[tuple[Key, dict[int, list[int]]]], list[str]]:
    """([(copy, {owner: the processes whose host has its part})] newest first, why newer ones are passed over).

    newest: the newest step in the work folder, -1 for none.
    """
    parts: dict[Key, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    facts: dict[Key, Copy] = {}
    for process, one in enumerate(found):
        for copy in (Copy(*fields) for fields in one["copies"]):
            key = copy.step, copy.token, copy.mark
            parts[key][copy.owner].append(process)
            facts[key] = copy
    whole, lines = [], []
    for key in sorted(parts, reverse=True):
        copy, why = facts[key], ""
        if copy.step <= newest or not lineage.belongs(starts, copy.token, copy.step):
            continue
        missing = sorted(set(range(copy.parts)) - set(parts[key]))
        if copy.base > newest:
            why = f"it followed step {copy.base}, which is not there any more"
        elif copy.parts != len(found):
            why = f"{copy.parts} processes made it, and there are {len(found)} now"
        elif missing:
            why = f"the part of process {missing[0]} is left nowhere"
        if why:
            lines.append(f"the local copy of step {copy.step} is passed over: {why}")
        else:
            whole.append((key, parts[key]))
    return whole, lines
