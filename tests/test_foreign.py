"""JSON that somebody else wrote is read by one function, which no nesting brings down."""

import json

import pytest
from test_threats import files_that_use

from jaxscale.runtime.checkpoint.lock_stores import read_owner
from jaxscale.runtime.data.array_folder import open_arrays
from jaxscale.runtime.data.shards import read_header
from jaxscale.runtime.monitor import records
from jaxscale.runtime.monitor.events import read_events
from jaxscale.runtime.monitor.records import abandon
from jaxscale.runtime.monitor.run_files import read_lines
from jaxscale.runtime.run.replay import last_measured
from jaxscale.runtime.text.chat.chat_records import parse_record
from jaxscale.runtime.text.config import ChatConfig
from jaxscale.runtime.text.sources.jsonl import strict_loads
from jaxscale.system import paths
from jaxscale.system.exits import BadInput

pytestmark = pytest.mark.fault("H17")
DEEP = '{"step": 1, "a": ' + "[" * 100_000 + "]" * 100_000 + "}"
OWN = {  # read what this program, or a library of ours, has just made
    "jaxscale/runtime/checkpoint/record.py", "jaxscale/runtime/checkpoint/saver.py", "jaxscale/cli/bench_against.py",
    "jaxscale/cli/rehearse.py", "jaxscale/tools/interop/post_processor.py", "jaxscale/runtime/text/chat/template.py",
    "jaxscale/runtime/text/chat/jinja.py", "jaxscale/runtime/data/shards.py", "jaxscale/runtime/text/tokenizer/bpe.py",
    "jaxscale/runtime/text/tokenizer/huggingface.py", "jaxscale/runtime/hosts/agree.py",
    "jaxscale/runtime/hosts/roll_call.py", "jaxscale/tools/corpus/prepare/beam.py",
    "jaxscale/runtime/data/array_folder.py",
}  # fmt: skip
READERS = {
    "jaxscale/system/foreign.py",
    "jaxscale/runtime/text/sources/jsonl.py", "jaxscale/schema.py",
}  # fmt: skip  # the last two catch RecursionError by themselves


@pytest.mark.slow
def test_json_of_others_is_read_by_one_function():
    assert files_that_use("json.loads") <= OWN | READERS


def test_nested_json_is_told_where_a_file_must_be_good(tmp_path):
    for name in ("config.json", "plan.json", "events.jsonl", "shard.json"):
        (tmp_path / name).write_text(f"{DEEP}\n")
    with pytest.raises(BadInput, match="config.json is not valid JSON .it is nested deeper than 64 levels"):
        paths.read_json(tmp_path / "config.json")
    with pytest.raises(BadInput, match="the index .* cannot be read: it is nested deeper"):
        open_arrays(tmp_path, tmp_path)
    with pytest.raises(BadInput, match="events.jsonl:1 is not an event"):
        read_events(tmp_path)
    assert read_header(tmp_path / "shard.json") is None and read_owner(DEEP.encode()) is None
    with pytest.raises(BadInput, match="nested too deeply"):
        strict_loads(DEEP)


def test_nested_json_is_left_out_where_a_line_may_be_torn(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{DEEP}\n{{"step": 2}}\n')
    problems = []
    assert [row["step"] for row in read_lines(tmp_path / "metrics.jsonl", problems)] == [1, 2]
    assert problems == ["metrics.jsonl: 1 damaged line skipped"]
    assert last_measured(tmp_path) == 2 and records.parse_record(DEEP.encode()) is None
    assert abandon(tmp_path, 1, 1) == 1


@pytest.mark.parametrize("depth", [100, 900])
def test_a_conversation_that_nests_is_one_line(depth):
    record = {"messages": [{"role": "user", "content": "x", "more": json.loads("[" * depth + "]" * depth)}]}
    with pytest.raises(BadInput, match="cannot be read: it is nested deeper than 64 levels"):
        parse_record(record, ChatConfig(), "text")
