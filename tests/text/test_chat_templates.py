"""Templates in Jinja: found where tokenizers have them, run in a sandbox, and followed in what is learned."""

import json

import chat_tokenizers
import pytest
from test_chat import ASSISTANT, USER, encode, learned_text, names

from jaxscale.runtime.text.chat.template import load_template
from jaxscale.runtime.text.config import ChatConfig
from jaxscale.runtime.text.tokenizer.load import load_tokenizer

pytest.importorskip("jinja2", reason="the extra chat")


def tokenizer_with(tmp_path, template=None, **about):
    return load_tokenizer(chat_tokenizers.write_folder(tmp_path / "t", template, **about))


def test_a_template_of_chatml_gives_what_the_built_in_one_does(tmp_path):
    built_in = tokenizer_with(tmp_path / ".", None)
    messages = [USER, ASSISTANT, {"role": "user", "content": "<|im_end|> "}, ASSISTANT]
    expected = [part.tolist() for part in encode(built_in, messages[:2])]
    own = load_tokenizer(chat_tokenizers.write_folder(tmp_path / "own", chat_tokenizers.CHATML))
    assert [part.tolist() for part in encode(own, messages[:2])] == expected
    ids, learned = encode(own, messages)
    assert (
        "user\n<|im_end|><|im_end|>\n" in names(own, ids) and learned_text(own, ids, learned).count("|assistant") == 1
    )
    assert (ids == own.special_ids["<|im_end|>"]).sum() == 4


def test_a_turn_that_ends_by_text_alone_has_the_end_of_the_document_learned_behind_it(tmp_path):
    spoken = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    tokenizer = tokenizer_with(tmp_path, spoken + "{% if add_generation_prompt %}assistant: {% endif %}")
    ids, learned = encode(tokenizer, [USER, ASSISTANT])
    assert learned_text(tokenizer, ids, learned) == "assistant says\n" and learned[-1]
    ids, learned = encode(tokenizer, [USER, ASSISTANT, USER])
    assert learned_text(tokenizer, ids, learned) == "assistant says\n" and not learned[-1]


def test_a_turn_without_a_text_is_learned_as_its_end_alone(tmp_path):
    tokenizer = tokenizer_with(tmp_path, chat_tokenizers.CHATML)
    ids, learned = encode(tokenizer, [USER, {"role": "assistant", "content": ""}, USER, ASSISTANT])
    assert learned_text(tokenizer, ids, learned) == "<|im_end|>|assistant says<|im_end|>"


@pytest.mark.parametrize("name", ["bytes", "chatml"])
def test_the_built_in_template_in_jinja_writes_the_same(tmp_path, name):
    tokenizer = load_tokenizer("bytes") if name == "bytes" else tokenizer_with(tmp_path)
    built_in = load_template(tokenizer, ChatConfig())
    (tmp_path / "kept.jinja").write_text(built_in.source)
    kept = load_template(tokenizer, ChatConfig(template=str(tmp_path / "kept.jinja")))
    for messages in ([], [USER], [USER, {"role": "assistant", "content": "a\n b \n"}, USER]):
        for asked in (True, False):
            assert kept.render(messages, None, asked) == built_in.render(messages, None, asked)


@pytest.mark.parametrize("where", ["jinja", "config", "named", "setting"])
def test_the_template_is_found_where_tokenizers_have_it(tmp_path, where):
    inside = {"config": chat_tokenizers.CHATML, "named": [{"name": "default", "template": chat_tokenizers.CHATML}]}
    tokenizer = tokenizer_with(tmp_path, inside.get(where, "{{ 1 }}"))
    path = tmp_path / ("t/chat_template.jinja" if where == "jinja" else "mine.jinja")
    path.write_text(chat_tokenizers.CHATML)
    cfg = ChatConfig(template=str(path)) if where == "setting" else ChatConfig()
    if where in ("jinja", "setting"):
        assert str(path) in load_template(tokenizer, cfg).name
    assert load_template(tokenizer, cfg).render([USER], None, True).endswith("<|im_start|>assistant\n")


def test_a_template_that_drops_what_was_thought_is_learned_as_it_is_written(tmp_path):
    tokenizer = tokenizer_with(tmp_path, chat_tokenizers.FORGETFUL)
    ids, learned = encode(tokenizer, [USER, ASSISTANT, USER, ASSISTANT])
    assert learned_text(tokenizer, ids, learned) == "assistant says<|im_end|>|<think>assistant says<|im_end|>"


def test_a_template_that_marks_what_is_generated_is_followed(tmp_path):
    tokenizer = tokenizer_with(tmp_path, chat_tokenizers.MARKED)
    ids, learned = encode(tokenizer, [USER, ASSISTANT, USER, ASSISTANT | {"weight": 0}])
    assert learned_text(tokenizer, ids, learned) == "assistant says<|im_end|>"
    assert names(tokenizer, ids) == "U:user says\nA:assistant says<|im_end|>" * 2


def test_a_template_whose_prompt_is_no_beginning_of_the_whole_is_refused(tmp_path):
    tokenizer = tokenizer_with(tmp_path, "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(ValueError, match="has a turn 2 that cannot be located: .* renders its prompt and the text"):
        encode(tokenizer, [USER, ASSISTANT])


def test_names_variables_dates_and_tools_reach_the_template(tmp_path):
    source = "{{ bos_token }}{{ name }}{{ strftime_now('%Y') }}{{ tools[0] | tojson }}"
    tokenizer = tokenizer_with(tmp_path, source, bos_token={"content": "<|im_start|>"}, add_bos_token=True)
    template = load_template(tokenizer, ChatConfig(variables={"name": "é"}, today="2026-11-22"))
    assert template.render([], [{"a": "é"}], False) == '<|im_start|>é2026{"a": "é"}' and template.begin == (
        "<|im_start|>",
    )
    with pytest.raises(ValueError, match="data.chat.today"):
        load_template(tokenizer, ChatConfig()).render([], [1], False)


@pytest.mark.fault("H1")
@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "is unsafe"),
        ("{{ messages.append(1) }}", "'append' of 'list' object is unsafe"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.nothing.more }}", "no attribute 'nothing'"),
    ],
)
def test_what_a_template_must_not_do_or_refuses_is_one_line(tmp_path, source, told):
    template = load_template(tokenizer_with(tmp_path, source), ChatConfig())
    with pytest.raises(ValueError, match="cannot be rendered by the template") as error:
        template.render([USER], None, False)
    assert told in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("about", "told"),
    [
        ({"chat_template": "{% if %}"}, "line 1 is not a valid chat template"),
        (
            {"chat_template": [{"name": "rag", "template": "x"}]},
            "has the chat templates rag, but none is named default",
        ),
    ],
)
def test_a_file_without_a_usable_template_is_named(tmp_path, about, told):
    tokenizer = tokenizer_with(tmp_path, **about)
    with pytest.raises(ValueError, match=told) as error:
        load_template(tokenizer, ChatConfig())
    assert "tokenizer_config.json" in str(error.value)
    with pytest.raises(ValueError, match="data.chat.template=.* cannot be read: No such file"):
        load_template(tokenizer, ChatConfig(template=str(tmp_path / "gone")))
    (tmp_path / "t" / "tokenizer_config.json").write_text(json.dumps([1]))
    with pytest.raises(ValueError, match="is not a JSON object"):
        load_template(tokenizer, ChatConfig())
