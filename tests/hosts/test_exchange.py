"""Files go from process to process whole or not at all, and to nobody who does not know the secret."""

import json
import socket

import pytest

from jaxscale.runtime.hosts.exchange import Exchange, get, put

NAME = "3/17-0123456789abcdef"


@pytest.fixture
def two(tmp_path):
    """The folder of one process, and what another one offers from a folder of its own."""
    for name in ("here/3", "there"):
        (tmp_path / name).mkdir(parents=True)
    there = Exchange(tmp_path / "there", "127.0.0.1")
    yield tmp_path / "here", there
    there.close()


def names(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_a_file_that_was_put_comes_back_bit_for_bit_and_older_ones_go(two, tmp_path):
    here, there = two
    content = bytes(range(256)) * 12_345  # some pieces, and a part of one
    older = [NAME.replace("17", step) for step in ("9", "13")]
    for name in (*older, NAME):
        (here / name).write_bytes(content + name.encode())
        put(there.address, here, name, [older[1].partition("/")[2]])
    assert names(there.folder) == sorted([older[1], NAME])
    (here / NAME).unlink()
    get(there.address, here, NAME)
    assert (here / NAME).read_bytes() == content + NAME.encode()


def test_what_cannot_be_done_is_told_and_leaves_nothing(two):
    here, there = two
    with pytest.raises(OSError, match="127.0.0.1: No such file"):
        get(there.address, here, NAME)
    (here / NAME).write_bytes(b"x")
    (there.folder / "3").write_text("in the way")
    with pytest.raises(OSError, match="127.0.0.1: "):
        put(there.address, here, NAME)
    assert names(there.folder) == ["3"] and names(here) == [NAME]


@pytest.mark.fault("H8")
@pytest.mark.parametrize(
    "line",
    [
        {"secret": "wrong", "name": NAME},
        {"name": NAME},
        ["no", "object"],
        {"secret": "right", "name": "../3/17-0123456789abcdef"},
        {"secret": "right", "name": "/etc/passwd"},
        {"secret": "right", "put": True, "name": "3/../../x", "bytes": 1},
    ],
    ids=str,
)
def test_a_stranger_and_an_odd_name_are_given_nothing(two, line):
    here, there = two
    (there.folder / "3").mkdir()
    (there.folder / NAME).write_bytes(b"a state")
    if isinstance(line, dict) and line.get("secret") == "right":
        line = line | {"secret": there.address.secret}
    with socket.create_connection(there.address[:2], timeout=10) as sock:
        sock.sendall(json.dumps(line).encode() + b"\n")
        answer = sock.makefile("rb").read()
    assert answer == b"" or "is not a valid file name" in json.loads(answer)["error"]
    assert names(there.folder.parent) == [f"there/{NAME}"]
    get(there.address, here, NAME)  # it still serves


def test_a_file_whose_sender_is_killed_leaves_nothing(two):
    _, there = two
    asked = {"secret": there.address.secret, "put": True, "name": NAME, "bytes": 1000}
    with socket.create_connection(there.address[:2], timeout=10) as sock:
        sock.sendall(json.dumps(asked).encode() + b"\n" + bytes(500))
        sock.shutdown(socket.SHUT_WR)
        ready, error = sock.makefile("rb").read().splitlines()
    assert json.loads(ready) == {"ready": True} and "500 bytes before the end" in json.loads(error)["error"]
    assert names(there.folder) == []
