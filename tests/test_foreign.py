"""JSON that somebody else wrote is read by one function, which no nesting brings down."""

import json

import pytest
from test_threats import files_that_use

from jaxscale.checkpoint.lock_stores import read_owner
from jaxscale.data.array_folder import read_folder
from jaxscale.data.shards import read_header
from jaxscale.monitor import records
from jaxscale.monitor.events import read_events
from jaxscale.monitor.records import abandon
from jaxscale.reporting.json_lines import read_lines
from jaxscale.run.replay import last_measured
from jaxscale.system import paths
from jaxscale.system.exits import BadInput
from jaxscale.text.chat.records import parse_record
from jaxscale.text.config import ChatConfig
from jaxscale.text.sources.jsonl import strict_loads

pytestmark = pytest.mark.fault("H17")
DEEP = '{"step": 1, "a": ' + "[" * 100_000 + "]" * 100_000 + "}"
OWN = {  # read what this program, or a library of ours, has just made
    "jaxscale/checkpoint/record.py", "jaxscale/checkpoint/saver.py", "jaxscale/cli/bench_against.py",
    "jaxscale/cli/rehearsal.py", "jaxscale/interop/post_processor.py", "jaxscale/text/chat/sandbox.py",
    "jaxscale/text/chat/jinja.py", "jaxscale/data/header.py", "jaxscale/text/tokenizer/bpe.py",
    "jaxscale/text/tokenizer/huggingface.py", "jaxscale/hosts/agree.py", "jaxscale/hosts/reports.py",
    "jaxscale/hosts/roll_call.py", "jaxscale/corpus/prepare/beam.py", "jaxscale/data/array_folder.py",
}  # fmt: skip
READERS = {
    "jaxscale/system/foreign.py",
    "jaxscale/text/sources/jsonl.py", "jaxscale/schema.py",
}  # fmt: skip  # the last two catch RecursionError by themselves


def test_json_of_others_is_read_by_one_function():
    assert files_that_use("json.loads") <= OWN | READERS


def test_nested_json_is_told_where_a_file_must_be_good(tmp_path):
    for name in ("config.json", "plan.json", "events.jsonl", "shard.json"):
        (tmp_path / name).write_text(f"{DEEP}\n")
    with pytest.raises(BadInput, match="config.json is not valid JSON .it is nested deeper than 64 levels"):
        paths.read_json(tmp_path / "config.json")
    with pytest.raises(BadInput, match="the index .* cannot be read: it is nested deeper"):
        read_folder(tmp_path)
    with pytest.raises(BadInput, match="events.jsonl:1 is not an event"):
        read_events(tmp_path)
    assert read_header(tmp_path / "shard.json") is None and read_owner(DEEP.encode()) is None
    with pytest.raises(BadInput, match="nested too deeply"):
        strict_loads(DEEP)


def test_nested_json_is_left_out_where_a_line_may_be_torn(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{DEEP}\n{{"step": 2}}\n')
    problems = []
    assert [row["step"] for row in read_lines(tmp_path / "metrics.jsonl", problems)] == [1, 2]
    assert problems == ["metrics.jsonl: 1 damaged line left out"]
    assert last_measured(tmp_path) == 2 and records.parse_record(DEEP.encode()) is None
    assert abandon(tmp_path, 1, 1) == 1


@pytest.mark.parametrize("depth", [100, 900])
def test_a_conversation_that_nests_is_one_line(depth):
    record = {"messages": [{"role": "user", "content": "x", "more": json.loads("[" * depth + "]" * depth)}]}
    with pytest.raises(BadInput, match="cannot be read: it is nested deeper than 64 levels"):
        parse_record(record, ChatConfig(), "text")
