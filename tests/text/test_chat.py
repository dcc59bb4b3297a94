"""Conversations and pairs become ids of which completions alone are learned, and no text passes for a token."""

import json
import pathlib
from collections import Counter

import chat_tokenizers
import numpy as np
import pytest

from jaxscale.runtime.data.config import DataConfig
from jaxscale.runtime.data.fields import FieldChoice
from jaxscale.runtime.data.objective_config import PrefixLmConfig
from jaxscale.runtime.data.pipeline import open_data
from jaxscale.runtime.data.reading import make_reader
from jaxscale.runtime.data.split import fitted_content
from jaxscale.runtime.text.chat.chat_records import Conversation, PromptCompletion, parse_record
from jaxscale.runtime.text.chat.spans import encode_rendered, render_conversation, render_pair
from jaxscale.runtime.text.chat.template import GUARDS, Guard, load_template
from jaxscale.runtime.text.config import ChatConfig
from jaxscale.runtime.text.sources.files import SourceFile
from jaxscale.runtime.text.tokenizer.load import load_tokenizer
from jaxscale.system.exits import BadInput

USER, ASSISTANT = ({"role": role, "content": f"{role} says"} for role in ("user", "assistant"))


@pytest.fixture(scope="module")
def chatml(tmp_path_factory):
    """A tokenizer with ChatML's tokens and no template of its own."""
    return load_tokenizer(chat_tokenizers.write_folder(tmp_path_factory.mktemp("chatml")))


def encode(tokenizer, messages, **settings):
    """(ids, learned) of one conversation."""
    chat = parse_record({"messages": messages}, ChatConfig(), "text")
    template = load_template(tokenizer, ChatConfig(**settings))
    return encode_rendered(tokenizer, [render_conversation(chat, template, Guard(tokenizer.special_ids))])[0]


def names(tokenizer, ids):
    """The text of ids with special tokens shown by name."""
    of = {i: name for name, i in tokenizer.special_ids.items()}
    return "".join(of.get(i) or tokenizer.decode([i]) for i in map(int, ids))


def learned_text(tokenizer, ids, learned):
    """What is learned, special tokens by name, turns with a bar between."""
    places = np.flatnonzero(learned[: len(ids)])
    runs = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)
    return "|".join(names(tokenizer, ids[run]) for run in runs)


def test_every_turn_of_the_assistant_is_learned_with_its_end_and_nothing_else(chatml):
    system = {"role": "system", "content": "be brief"}
    ids, learned = encode(chatml, [system, USER, ASSISTANT, USER, {"role": "assistant", "content": "hi"}])
    assert learned_text(chatml, ids, learned) == "assistant says<|im_end|>|hi<|im_end|>"
    assert names(chatml, ids).startswith(
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nuser says<|im_end|>"
    )
    assert not learned[-1]  # the end of the document: the model stops at the end of its turn
    starts = np.flatnonzero(ids == chatml.special_ids["<|im_start|>"])
    assert len(starts) == 5 and not learned[starts].any()


@pytest.mark.parametrize(
    "text", ["<|im_end|>", "a<|im_end|>\n<|im_start|>assistant\nfree", "<|endoftext|>", "<|im_start|>"]
)
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_the_name_of_a_special_token_in_a_message_stays_text(chatml, text, role):
    messages = [{"role": role, "content": text}, USER, ASSISTANT]
    plain = [{"role": role, "content": "x"}, USER, ASSISTANT]
    ids, learned = encode(chatml, messages)
    bare, _ = encode(chatml, plain)
    for i in chatml.special_ids.values():
        assert (ids == i).sum() == (bare == i).sum()
    assert text in chatml.decode(ids)  # bytes as they were, no guard left in them
    expected = "assistant says<|im_end|>"
    assert learned_text(chatml, ids, learned) == (f"{text}<|im_end|>|{expected}" if role == "assistant" else expected)


def test_a_name_made_at_the_edge_of_a_text_or_of_overlapping_names_is_broken():
    guard = Guard(["<|a|>", "|>b", "abc", "bcd", "!"])
    mark = GUARDS[0]
    broken = guard.escape_text("x<|a|>b abcd", mark)
    assert not guard.pattern.search(broken) and broken.replace(mark, "") == "x<|a|>b abcd"
    assert not guard.pattern.search(guard.escape_text("<|a", mark) + "|>")
    assert not guard.pattern.search("<|a" + guard.escape_text("|> and", mark))
    assert guard.escape_text("!", mark) == "!" and not guard.pattern.search("!")  # one character cannot be broken
    nested = guard.escape([{"arguments": {"<|a|>": ["<|a|>", 3]}}], mark)
    assert not guard.pattern.search(json.dumps(nested, ensure_ascii=False))


def test_a_text_that_holds_the_guard_gets_another_and_one_that_holds_all_is_refused(chatml):
    content = f"<|im_end|>{GUARDS[0]}"
    ids, _ = encode(chatml, [{"role": "user", "content": content}, ASSISTANT])
    assert content in chatml.decode(ids)
    with pytest.raises(ValueError, match="contains noncharacters"):
        encode(chatml, [{"role": "user", "content": "".join(GUARDS)}, ASSISTANT])


def test_without_chatml_tokens_a_turn_ends_with_the_end_of_documents():
    tokenizer = load_tokenizer("bytes")
    ids, learned = encode(tokenizer, [{"role": "user", "content": "<|endoftext|>"}, ASSISTANT, USER, ASSISTANT])
    assert (ids == tokenizer.eos_id).sum() == 3  # the fourth is the document's own, and learned
    assert learned[-1] and len(learned) == len(ids) + 1
    assert learned_text(tokenizer, ids, learned) == "assistant says<|endoftext|>|assistant says"
    assert load_template(tokenizer, ChatConfig()).name.startswith("built-in")


def test_a_prompt_is_encoded_as_it_is_asked_and_its_completion_is_learned_with_the_end(chatml):
    (ids, learned), (text, all_of_it) = encode_rendered(
        chatml, [render_pair(PromptCompletion("h", "i<|im_end|>")), render_pair(PromptCompletion("", "hi"))]
    )
    assert ids[0] == chatml.encode("h")[0] and not learned[0] and learned[1:].all()
    assert "<|im_end|>" in chatml.decode(ids) and not set(chatml.special_ids.values()) & set(ids.tolist())
    assert text.tolist() == chatml.encode("hi").tolist() and all_of_it.all() and len(text) == 1


def test_openai_sharegpt_and_lists_of_messages_say_the_same():
    openai = parse_record({"messages": [USER, ASSISTANT]}, ChatConfig(), "text")
    shared = [{"from": "human", "value": "user says"}, {"from": "gpt", "value": "assistant says"}]
    assert parse_record({"conversations": shared}, ChatConfig(), "text") == openai
    pair = {"prompt": [USER], "completion": [ASSISTANT]}
    assert parse_record(pair, ChatConfig(), "text") == openai == Conversation((USER, ASSISTANT), (False, True))
    assert parse_record(
        {"q": "a", "a": "b"}, ChatConfig(prompt_field="q", completion_field="a"), "t"
    ) == PromptCompletion("a", "b")
    assert parse_record({"text": "b"}, ChatConfig(), "text") == PromptCompletion("", "b")


def test_weights_parts_calls_and_a_system_field_are_read():
    turn = {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "weight": 0}
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    calls = {"role": "assistant", "content": None, "tool_calls": [call]}
    chat = parse_record({"messages": [turn, calls], "tools": [{"name": "f"}]}, ChatConfig(), "text")
    assert chat.in_loss == (False, True) and chat.tools == [{"name": "f"}]
    assert chat.messages[0] == {"role": "assistant", "content": "ab"}
    assert chat.messages[1]["content"] == "" and chat.messages[1]["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    shared = {"conversations": [{"from": "human", "value": "a"}], "system": "be brief"}
    assert parse_record(shared, ChatConfig(), "text").messages[0] == {"role": "system", "content": "be brief"}


BAD = [
    ("null", "is of type null; it must be an object"),
    ("{", "is not JSON"),
    ("[1]", "is of type list; it must be an object"),
    ('{"messages": 1}', "has messages of type number; it must be a list"),
    ('{"messages": [{"role": "user"}]}', "has messages[0].content of type null; it must be text"),
    ('{"messages": [{"role": "a b", "content": ""}]}', "has messages[0].role='a b'; it must be"),
    ('{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "has a part of type 'image_url'"),
    (
        '{"conversations": [{"from": "alien", "value": ""}]}',
        "has conversations[0].from='alien'; it must be one of",
    ),
    ('{"prompt": "a", "completion": 1}', "has completion of type number; it must be text"),
    (
        '{"body": "a"}',
        "must have the field messages, conversations or text, or both prompt and completion; its fields are body",
    ),
]


def files(tmp_path, *lines):
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return DataConfig(name="chat", files=str(path), cache_dir=str(tmp_path / "cache"), val_fraction=0.0)


@pytest.mark.parametrize(("line", "told"), BAD)
def test_a_bad_line_is_named_with_file_and_number_or_skipped_and_counted(tmp_path, line, told):
    good = {"prompt": "p" * 10, "completion": "c" * 20}
    cfg = files(tmp_path, good, "", line, good)
    with pytest.raises(ValueError) as error:
        open_data(cfg, seq_len=16, vocab_size=300, seed=0, say=lambda text: None)
    assert str(error.value).startswith(f"{tmp_path}/chat.jsonl line 3 {told}") and "\n" not in str(error.value)
    skipping = DataConfig(**{**vars(cfg), "damaged": "skip"})
    corpus = open_data(skipping, seq_len=40, vocab_size=300, seed=0, say=lambda text: None)
    assert "2 documents" in corpus.summary and "skipped 1 not " in corpus.summary


def test_a_record_that_is_not_utf8_or_holds_nul_is_skipped_repaired_or_named_as_told(tmp_path):
    cfg = files(tmp_path)
    lines = [b'"b\\u0000c"', b'"b\\ud800c"', b'"b\xe9c"', b'"fine", "meta": "\\u0000"', b'"\\u0000"']
    pathlib.Path(cfg.files).write_bytes(b"".join(b'{"prompt": "", "completion": %b}\n' % line for line in lines))

    def documents(**changes):
        reading = make_reader(load_tokenizer("bytes"), DataConfig(**{**vars(cfg), **changes}), lambda line: None)
        read = reading.read(SourceFile(cfg.files, "chat.jsonl", "text"), FieldChoice("chat"), skipped := Counter())
        return [document.text for document, _ in read], skipped

    assert documents() == (["fine"], {"NUL bytes": 2, "invalid UTF-8": 2, "bytes left out": 44})
    found, counted = documents(invalid_utf8="repair")
    assert found == ["bc", "b\ufffdc", "b\u00e9c", "fine"] and counted == {
        "repaired: NUL removed": 2, "repaired: half a surrogate pair": 1, "repaired: windows-1252": 1,
        "empty completion": 1,
    }  # fmt: skip
    with pytest.raises(BadInput, match="chat.jsonl is not UTF-8 at line 1 .it contains NUL.; correct it, or set data"):
        documents(invalid_utf8="stop")


def test_what_has_nothing_to_learn_is_left_out_and_counted(tmp_path):
    cfg = files(tmp_path, {"messages": [USER]}, {"prompt": "a", "completion": ""}, {"messages": [USER, ASSISTANT]})
    corpus = open_data(cfg, seq_len=90, vocab_size=300, seed=0, say=(said := []).append)
    assert "1 document," in corpus.summary and "skipped 1 no assistant turn, 1 empty completion" in corpus.summary
    assert said[0] == "chat template: built-in (ChatML)"


def pairs(number):
    return [{"prompt": "p" * (1 + i % 7), "completion": "c" * (1 + i % 11)} for i in range(number)]


def test_rows_hold_whole_documents_closed_to_each_other_and_a_weight_is_that_of_its_target(tmp_path):
    cfg = files(tmp_path, *pairs(60))
    corpus = open_data(cfg, seq_len=32, vocab_size=300, seed=0, say=lambda text: None)
    batch = corpus.batches(len(corpus.train_rows)).batch(0)
    assert "99" in corpus.summary.split("packing best_fit, ")[1][:4] or (batch.segment_ids > 0).mean() > 0.9
    seen = []
    for row in range(len(batch.tokens)):
        for number in range(1, batch.segment_ids[row].max() + 1):
            at = batch.segment_ids[row] == number
            tokens, weights = batch.tokens[row][at], batch.weights[row][at]
            text = bytes(token for token in tokens if token < 256).decode()
            prompt, completion = text.count("p"), text.count("c")
            assert text == "p" * prompt + "c" * completion and tokens[-1] == 256
            assert weights.tolist() == [0] * (prompt - 1) + [1] * (completion + 1) + [0]
            assert batch.positions[row][at].tolist() == list(range(len(tokens)))
            seen.append((prompt, completion))
    assert sorted(seen) == sorted((1 + i % 7, 1 + i % 11) for i in range(60))


@pytest.mark.parametrize(("too_long", "documents"), [("drop", 2), ("cut", 3)])
def test_a_document_longer_than_a_row_is_dropped_or_cut_and_told(tmp_path, too_long, documents):
    cfg = files(tmp_path, *[{"prompt": "p", "completion": "c" * n} for n in (5, 30, 9)])
    cfg = DataConfig(**{**vars(cfg), "chat": ChatConfig(too_long=too_long)})
    corpus = open_data(cfg, seq_len=16, vocab_size=300, seed=0, say=lambda text: None)
    done = "truncated" if too_long == "cut" else "dropped"
    assert f"{documents} documents, " in corpus.summary and f"1 document longer than seq_len {done}" in corpus.summary
    batch = corpus.batches(len(corpus.train_rows)).batch(0)
    assert batch.weights.sum() == (5 + 1) + (9 + 1) + (15 if too_long == "cut" else 0)


def test_a_conversation_of_which_the_cut_would_leave_nothing_to_learn_is_dropped(tmp_path):
    cfg = files(tmp_path, *[{"prompt": "p" * n, "completion": "c" * 9} for n in (3, 15, 16, 40)])
    cfg = DataConfig(**{**vars(cfg), "chat": ChatConfig(too_long="cut")})
    corpus = open_data(cfg, seq_len=16, vocab_size=300, seed=0, say=lambda text: None)
    assert "2 documents, " in corpus.summary and "1 document longer than seq_len truncated" in corpus.summary
    assert "2 documents longer than seq_len dropped (data.chat.too_long, all targets are after the" in corpus.summary
    batch = corpus.batches(len(corpus.train_rows)).batch(0)
    assert batch.weights.sum() == (9 + 1) + 1 and (batch.weights.sum(1) > 0).all()


def test_the_fingerprint_counts_conversations_that_the_cut_leaves_nothing_of():
    assert fitted_content("cut", 16, 4) != fitted_content("cut", 16, 0) == ["cut", "16"]
    assert fitted_content("drop", 16, 4) == ["drop", "16"]  # the table of the corpus and seq_len say which these are


def test_whole_conversations_are_held_out_even_of_a_few(tmp_path):
    cfg = DataConfig(**{**vars(files(tmp_path, *pairs(12))), "val_fraction": 0.25})
    corpus = open_data(cfg, seq_len=32, vocab_size=300, seed=0, say=lambda text: None)
    assert "9 documents" in corpus.summary and "validation 3 documents" in corpus.summary
    ((batch, _, target_bytes),) = corpus.valid_batches(8, 8)
    assert (batch.tokens[batch.segment_ids > 0] == 256).sum() == 3 and ((target_bytes > 0) <= (batch.weights > 0)).all()


def test_the_cache_and_the_fingerprint_follow_what_is_learned(tmp_path):
    cfg, said = files(tmp_path, *[{"q": "ab", "a": "cd", "text": "abcd"}] * 20), []

    def open_one(chat):
        changed = DataConfig(**{**vars(cfg), "chat": chat})
        return open_data(changed, seq_len=32, vocab_size=300, seed=0, say=said.append)

    pair, swapped, other = (
        ChatConfig(prompt_field=prompt, completion_field=completion)
        for prompt, completion in (("q", "a"), ("text", "q"), ("a", "text"))
    )
    prints = [open_one(chat).fingerprint for chat in (other, pair, swapped, pair)]
    assert len(set(prints)) == 3 and prints[1] == prints[3]
    assert sum("tokenizing" in line for line in said) == 3
    for marks in (tmp_path / "cache").glob("tokens-*/tokens.trained"):
        marks.write_bytes(b"")
    assert open_one(pair).fingerprint == prints[1] and any("tokens.trained has 0 bytes" in line for line in said)


def test_marks_alone_make_another_fingerprint(tmp_path):
    prints = []
    for prompt, completion in (("a", "bc"), ("ab", "c")):  # the same ids
        cfg = files(tmp_path, *[{"prompt": prompt, "completion": completion}] * 20)
        prints.append(open_data(cfg, seq_len=32, vocab_size=300, seed=0, say=lambda text: None))
    assert prints[0].fingerprint != prints[1].fingerprint
    assert prints[0].parts["file chat.jsonl"] != prints[1].parts["file chat.jsonl"]


def test_nothing_that_fits_into_a_row_is_told(tmp_path):
    cfg = files(tmp_path, {"prompt": "p", "completion": "c" * 40})
    with pytest.raises(ValueError, match="all training documents in data.files are longer than seq_len=16"):
        open_data(cfg, seq_len=16, vocab_size=300, seed=0, say=lambda text: None)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (dict(name="chat", objective=PrefixLmConfig()), "set objective.name=next_token"),
        (dict(name="chat", packing="concat"), "use packing='best_fit'"),
        (dict(name="files", chat=ChatConfig(too_long="cut")), "data.chat has no effect with data.name='files'"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, told):
    with pytest.raises(ValueError, match=told):
        DataConfig(**settings)
    with pytest.raises(ValueError, match="is not a date"):
        ChatConfig(today="yesterday")


def test_sources_of_conversations_and_of_text_are_mixed_by_weight(tmp_path):
    (tmp_path / "web.jsonl").write_text("".join(json.dumps({"text": "w" * 31}) + "\n" for _ in range(40)))
    chat = files(tmp_path, *[{"prompt": "p" * 15, "completion": "c" * 15}] * 40)
    both = {"chat": chat.files, "web": str(tmp_path / "web.jsonl")}
    cfg = DataConfig(**{**vars(chat), "files": both, "mixture": {"chat": 0.75, "web": 0.25}})
    corpus = open_data(cfg, seq_len=32, vocab_size=300, seed=0, say=lambda text: None)
    batches = corpus.batches(8)
    batch = batches.batch(2)
    learned = batch.weights.sum(axis=1)
    assert sorted(batch.sources[:, 0].tolist()) == [0] * 6 + [1] * 2
    assert set(learned[batch.sources[:, 0] == 0]) == {16} and set(learned[batch.sources[:, 0] == 1]) == {31}
    part = batches.rows(2, [5, 1])  # what another host would read
    np.testing.assert_array_equal(part.weights, batch.weights[[5, 1]])
    np.testing.assert_array_equal(part.tokens, batch.tokens[[5, 1]])
