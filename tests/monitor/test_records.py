"""One rule for a torn last line and for damaged ones, whoever reads, and whatever was there before one appends."""

import json

import pytest

from jaxscale.runtime.monitor.records import Damage, Follower, abandon, append, read_records, tail_records
from jaxscale.runtime.monitor.writers import open_records

TEXT = b'{"step": 1, "a": "}"}\nrubbish\n[1]\n\n{"step": 2}\n{"step": 3, "b": {"c": [4]}}'
PLACES = range(len(TEXT) + 1)


@pytest.mark.parametrize("end", PLACES)
def test_every_reader_finds_the_same_wherever_the_file_ends(tmp_path, end):
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(TEXT[:end])
    whole = (
        [{"step": 1, "a": "}"}] * (end >= 21)
        + [{"step": 2}] * (end >= 46)
        + [json.loads(TEXT[47:])] * (end == len(TEXT))
    )
    damage, follower = Damage(), Follower(file)
    assert list(read_records(file, damage)) == tail_records(file) == follower.poll()[0] == whole
    assert damage.lines == follower.damaged == (end >= 30) + (end >= 34)
    assert damage.torn == (0 < end < len(TEXT) and TEXT[end - 1 : end] != b"\n" and end not in (21, 46))
    file.write_bytes(TEXT[:end])
    assert abandon(tmp_path, 0, 1) == len(whole)
    file.write_bytes(TEXT[:end])
    assert open_records(file, 9)[1].records == whole == list(read_records(file))


@pytest.mark.parametrize("end", PLACES)
def test_nothing_is_glued_to_a_torn_line_and_a_follower_misses_nothing(tmp_path, end):
    file = tmp_path / "events.jsonl"
    file.write_bytes(TEXT[:end])
    follower = Follower(file)
    before, _ = follower.poll()
    append(file, b'{"step": 9}\n')
    after, again = follower.poll()
    assert list(read_records(file)) == ([] if again else before) + after and after[-1] == {"step": 9}
    assert file.read_bytes().endswith(b'\n{"step": 9}\n' if end >= 21 else b'{"step": 9}\n')


def test_a_file_that_is_not_there_has_no_records_and_a_tail_begins_with_a_whole_line(tmp_path):
    file = tmp_path / "metrics.jsonl"
    assert tail_records(file) == list(read_records(file)) == []
    file.write_text("".join(f'{{"step": {n}}}\n' for n in range(40_000)))
    found = [record["step"] for record in tail_records(file)]
    assert 10_000 < len(found) < 20_000 and found == [*range(found[0], 40_000)]
