"""What a bucket's service does to single requests, and to all: slow, busy, down, or closed for want of a permission.

    gcs.weather = Weather(every=7, status=503)          # every seventh request
    gcs.weather = Weather(burst=20, status=429)         # the next twenty
    gcs.weather = Weather(down=True)                    # every connection is cut
    gcs.weather = Weather(lacks={"storage.objects.create"})
    gcs.weather = Weather(share=0.25)                   # of all requests, by chance, in each way of BAD

Which permission a request takes is from cloud.google.com/storage/docs/access-control/iam-json.
"""

import dataclasses
import itertools
import random


@dataclasses.dataclass
class Fault:
    """Something that goes wrong with the next `times` requests that it fits.

    status: answers with `status`, and Retry-After if set. reset: cuts the connection after `after` bytes of the body.
    refuse: cuts it while a body is sent to the server, half of which was read. lost: does what is asked, and cuts the
    connection instead of an answer. hang: sleeps `seconds`, does nothing and cuts it.
    slow: sleeps `seconds` before each piece of the body. flip: one bit of the body is another one, at byte `after`, or
    in the first byte of a body that is sent to the server.
    ignore_range: sends the whole object where a part was asked for.
    """

    kind: str
    path: str = ""  # part of the object's name or of the path
    method: str = "GET"
    media: bool | None = None  # only requests for content (True), or only those for metadata (False)
    times: int = 1
    status: int = 503
    retry_after: str = ""
    after: int = 0
    seconds: float = 0.0


CUTS = tuple(Fault(kind, after=after) for kind, after in [("reset", 0), ("reset", 100), ("refuse", 0), ("lost", 0)])
BAD = (*(Fault("status", status=status) for status in (429, 500, 503)), *CUTS, Fault("hang", seconds=2.0))


@dataclasses.dataclass
class Weather:
    """Fair, unless told otherwise."""

    every: int = 0  # each n-th request is answered with `status`
    burst: int = 0  # and so are the next n
    status: int = 503
    latency: float = 0.0  # seconds before each answer
    down: bool = False
    lacks: frozenset | set = frozenset()  # permissions
    unauthorised: bool = False  # 401 for all
    share: float = 0.0  # of requests that meet one of `kinds`
    kinds: tuple[Fault, ...] = BAD
    only: str = ""  # part of the object's name or of the path; '': all requests

    def __post_init__(self):
        self.numbers = itertools.count(1)  # next() of it is safe between threads
        self.chance = random.Random(1)

    def fault(self, path: str) -> Fault | None:
        """What the next request meets by chance."""
        meets = self.share > 0 and self.only in path and self.chance.random() < self.share
        return self.chance.choice(self.kinds) if meets else None

    def answer(self, method: str, parts: list[str], path: str, exists: bool) -> tuple[int, str] | None:
        """(status, message) instead of an answer; None to answer; (0, '') to cut the connection."""
        if self.only not in path:
            return None
        if self.down:
            return 0, ""
        if self.unauthorised:
            return 401, "Invalid Credentials"
        for permission in needed(method, parts, exists):
            if permission in self.lacks:
                return 403, (
                    f"trainer@project.iam.gserviceaccount.com does not have {permission} access to the Google Cloud "
                    f"Storage object. Permission '{permission}' denied on resource (or it may not exist)."
                )
        number = next(self.numbers)
        if number <= self.burst or self.every and number % self.every == 0:
            return self.status, "try again"
        return None


def needed(method: str, parts: list[str], exists: bool) -> list[str]:
    """The permissions that a request takes. exists: there is an object of that name, which a write would replace."""
    if len(parts) == 2:
        return ["storage.buckets.get"]
    if method == "GET":
        return ["storage.objects.get" if len(parts) > 3 else "storage.objects.list"]
    if method == "DELETE":
        return ["storage.objects.delete"]
    return ["storage.objects.create"] + (["storage.objects.delete"] if exists else [])
