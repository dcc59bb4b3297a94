"""A setting that nothing reads is refused, and what is refused is really read by nothing."""

import ast
import functools
import inspect
import json
import pathlib
import sys
import typing

import jax
import numpy as np
import pytest
import reads
import tiny

from jaxscale import schema
from jaxscale.build import make_program
from jaxscale.config import RunConfig
from jaxscale.main import main
from jaxscale.program.budget import resolve_budget
from jaxscale.runtime.data.pipeline import open_data
from jaxscale.runtime.monitor import health
from jaxscale.runtime.monitor.config import RULES
from jaxscale.runtime.run.resume_checks import check_same_run
from jaxscale.settings.conditions import parse
from jaxscale.settings.config_file import load_config
from jaxscale.settings.unread import as_read, leaves, refuse_unread, unread
from jaxscale.system.exits import BadInput, Exit, Stop

PACKAGE = pathlib.Path(schema.__file__).parent
QUICKSTART = str(PACKAGE.parent / "configs" / "quickstart.py")
SHIPPED = sorted(file.name for file in (PACKAGE.parent / "configs").glob("*.py"))
VOCAB = {"vocab_size": 300}
LONGER = {"seq_len": 32, "batch_tokens": 512}
MODES = {"mode_ids": {"R": 290, "S": 291, "X": 292}, "first_sentinel_id": 260, "num_sentinels": 20}
FROZEN, REST = {"pattern": "blocks", "frozen": True}, {"pattern": "."}
CHOICES = {
    "synthetic": {},
    "stdlib": {"data.name": "stdlib"},
    "files": {"data.name": "files", "data.files": "{}/a.txt"},
    "chat": {"data.name": "chat", "data.files": "{}/chat.jsonl"} | LONGER,
    "tokens": {"data.name": "tokens", "data.files": "{}/ids.bin"},
    "gated": {"data.name": "files", "data.files": "{}/a.txt", "data.gate.on": True},
    "gpt2": {"model": tiny.GPT2 | VOCAB},
    "relative": {"model": tiny.RELATIVE | VOCAB},
    "encoder": {"model": tiny.ENCODER | VOCAB, "data.objective": {"name": "masked_lm"}},
    "t5": {"model": tiny.T5 | VOCAB, "data.objective": {"name": "span_corruption"}} | LONGER,
    "prefix": {"data.objective": {"name": "prefix_lm"}},
    "ul2": {"data.objective": {"name": "ul2", "layout": "one_row", **MODES}} | LONGER,
    "linear_rope": {"model.rope_scaling": {"name": "linear"}},
    "llama3_rope": {"model.rope_scaling": {"name": "llama3"}},
    "yarn_rope": {"model.rope_scaling": {"name": "yarn", "mscale": 1.0, "mscale_all_dim": 0.5}},
    "dynamic_rope": {"model.rope_scaling": {"name": "dynamic"}},
    "longrope": {"model.rope_scaling": {"name": "longrope", "short_factor": (1.0,) * 4, "long_factor": (2.0,) * 4}},
    "experts": {
        "model.experts": dict(number=4, chosen=2, mlp_dim=8, first_dense=1, bias=True, groups=2, groups_chosen=1)
    },
    "mup": {"model.mup": dict(base_dim=8, base_head_dim=4, base_layers=1)},
    "sgd": {"optim.name": "sgd", "optim.groups": [FROZEN, REST]},
    "lion": {"optim.name": "lion", "optim.decay": "linear"},
    "muon": {"optim.name": "muon", "optim.qk_clip": 100.0},
    "adafactor": {"optim.name": "adafactor"},
    "lamb": {"optim.name": "lamb", "optim.moment_dtype": "bfloat16"},
    "constant": {"optim.decay": "constant", "optim.min_lr": 3e-5},
    "wsd": {"optim.decay": "wsd"},
    "wsd_tokens": {"optim.decay": "wsd", "optim.decay_tokens": "5 steps", "optim.decay_shape": "one_minus_sqrt"},
    "inverse_sqrt": {"optim.decay": "inverse_sqrt", "optim.min_lr": 3e-5},
    "piecewise": {"optim.decay": "piecewise", "optim.min_lr": 3e-5},
    "no_decay": {"optim.weight_decay": 0.0, "optim.clip_norm": 0.0, "train.guard.spike_ratio": 0.0},
    "float16": {"model.compute_dtype": "float16"},
    "static_scale": {"train.loss_scale.mode": "static"},
    "all_on": {"train.ema.decay": 0.9, "lora.rank": 2, "train.guard.spike_sigma": 6.0, "train.guard.grad_ratio": 3.0,
               "model.remat": "save", "model.remat_save": ("query",)},
}  # fmt: skip
# What a step and its data do not show: the file that reads it, when something happens or of files of a certain kind.
ELSEWHERE = {
    **dict.fromkeys(("steps", "max_skipped_in_window", "max_cuts", "max_rewinds", "norm_alarm", "spike_alarm",
                     "plateau_steps", "plateau_ratio", "max_skipped_in_row"), "runtime/training/recovery.py"),
    **dict.fromkeys(("cut_factor", "cut_steps", "rewind_margin_steps", "max_rewind_steps", "clean_source",
                     "clean_steps"), "runtime/training/autopilot.py"),
    **dict.fromkeys(("every_steps", "max_passing"), "runtime/training/replicas.py"),
    **dict.fromkeys(("verify", "cache_bytes"), "runtime/data/token_files.py"),
    "skip_batches": "runtime/run/resume_checks.py",
    "transforms": "runtime/data/pipeline.py",
    **dict.fromkeys(("variables", "today"), "runtime/text/chat/template.py"),
    "max_repeated_share": "runtime/data/row_filter.py", "grad_ratio": "core/guard.py",
    "name": "runtime/run/startup_log.py",
    "long_factor": "kernels/rope.py",
}  # fmt: skip
# Another value of what is handed on, and read by nobody there.
OTHER = {
    "decay_fraction": 0.5, "decay_shape": "one_minus_sqrt", "factors": ("50%=>0.5",), "min_lr": 2e-3,
    "min": 0.5, "start_id": 7, "encoding": "latin-1", "eos_token": "x",
    "text_field": "t", "id_field": "t", "url_field": "t", "licence_field": "t", "html_text": "trafilatura",
    "html_mode": "fast",
    "record_format": "json", "max_unpacked_bytes": 9, "max_unpacked_ratio": 9.0, "weight_decay_all": True,
    "grad_ratio": 3.0, "row_parts": 2,
    **dict.fromkeys(("lr_multiplier", "weight_decay"), [FROZEN | {"lr_multiplier": 2.0, "weight_decay": 0.5}, REST]),
}  # fmt: skip
# Refused by the rules of its own group; or nothing can be made of it, since random ids are of no source and fill each
# row; or in the step, but behind what is never true there (max_spikes_in_row: no verdict is the window's).
NEVER_ANOTHER = {
    "global_every", "local_rope_base", "qk_norm_over", "remat_save", "remat_offload", "bos_token", "mixture", "on",
    "ids_field", "max_spikes_in_row",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unread")
    (folder / "a.txt").write_text("some words of text, again and again.\n\n" * 300)
    talks = [json.dumps({"prompt": f"say {i}", "completion": " ok"}) for i in range(200)]
    (folder / "chat.jsonl").write_text("\n".join(talks))
    (np.arange(3000) % 250).astype(np.uint16).tofile(folder / "ids.bin")
    return folder


def chosen(folder, choice, more=None):
    """The tiny run with this choice."""
    place = lambda value: value.format(folder) if isinstance(value, str) else value
    settings = {name: place(value) for name, value in CHOICES[choice].items()}
    cache = {"data.cache_dir": str(folder / "cache")} if "data.name" in settings else {}
    return tiny.config({"model.vocab_size": 300} | cache | settings | (more or {}))


def what_it_is(cfg):
    """(the step as jax traces it, learning rates, a batch): all that a run computes, and nothing compiled."""
    data = dict(seq_len=cfg.seq_len, vocab_size=cfg.model.vocab_size, seed=cfg.seed, say=lambda line: None)
    corpus = open_data(cfg.data, **data)
    batch = corpus.batches(cfg.rows_per_step).batch(0)
    program = make_program(cfg, resolve_budget(cfg, corpus.epoch_tokens), jax.devices()[:1])
    jaxpr = jax.make_jaxpr(program.train_step)(program.abstract_state, batch)
    return str(jaxpr), [float(program.schedule(step)) for step in range(20)], jax.tree.map(np.asarray, batch)


def last(name):
    """'peak_lr' of 'optim.peak_lr'."""
    return name.rpartition(".")[2]


def read_in(file, field):
    """Whether the file reads a setting of this name."""
    return file is not None and field in attributes_of(file)


@functools.cache
def attributes_of(file):
    """Names of attributes that the file reads outside the checks of a group of settings."""
    found, waiting = set(), [ast.parse((PACKAGE / file).read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        if getattr(node, "name", "") != "__post_init__":
            waiting += ast.iter_child_nodes(node)
    return found


SIMILAR = {  # to others
    "stdlib", "ul2", "linear_rope", "dynamic_rope", "lion", "lamb", "constant", "wsd", "wsd_tokens", "inverse_sqrt",
    "piecewise", "no_decay", "float16", "prefix", "files", "relative", "llama3_rope", "longrope", "static_scale",
}  # fmt: skip


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    "choice", [pytest.param(name, marks=[pytest.mark.soak] * (name in SIMILAR)) for name in CHOICES]
)
def test_each_setting_of_the_step_and_its_data_is_read_or_refused(folder, choice):
    cfg = chosen(folder, choice)
    with reads.noted() as read:
        before = what_it_is(cfg)
    idle, places = unread(cfg), reads.placed(cfg)
    ours = [name for name in places if name.split(".")[0] in ("model", "optim", "train", "lora", "data")]
    silent = [name for name in ours if places[name] not in read and name not in idle]
    lost = [name for name in silent if not read_in(ELSEWHERE.get(last(name)), last(name))]
    assert not lost, "nothing reads them, and nothing refuses them"
    handed_on = [name for name in ours if places[name] in read and name in idle]
    others = {name.partition("[")[0]: OTHER[last(name)] for name in handed_on if last(name) not in NEVER_ANOTHER}
    names = {last(name) for name in others}
    if names and (choice == "synthetic" or not names <= {"decay_fraction", "decay_shape", "factors", "min"}):
        after = what_it_is(chosen(folder, choice, others))
        assert after[:2] == before[:2], f"one of {others} is refused and changes the step"
        jax.tree.map(np.testing.assert_array_equal, after[2], before[2])
        with pytest.raises(BadInput):
            refuse_unread(chosen(folder, choice, others))
    refuse_unread(cfg)


@pytest.mark.slow
def test_every_other_setting_is_read_by_some_file():
    files = [file.relative_to(PACKAGE) for file in PACKAGE.rglob("*.py")]
    known = set().union(*map(attributes_of, files))
    by_fields = {"HangConfig", "MeshConfig"}  # read by the names of their fields: phases of the watchdog, mesh axes
    names = {
        (cls.__name__, name)
        for cls in reads.groups()
        for name in typing.get_type_hints(cls)
        if cls.__name__ not in by_fields and name in {field.name for field in schema.dataclasses.fields(cls)}
    }
    assert len(names) > 250 and not [name for name in sorted(names) if name[1] not in known]


def test_conditions_name_settings_and_values_that_there_are():
    words = {"true", "false", "none", "bytes", *RULES}  # and what any setting may be that has a list of choices
    words |= {"1"}  # of a mesh axis
    for hint in (hint for cls in reads.groups() for hint in typing.get_type_hints(cls).values()):
        parts = [part for option in schema.options(hint) for part in (option, *typing.get_args(option))]
        words |= {word for part in parts if typing.get_origin(part) is typing.Literal for word in typing.get_args(part)}
    every = {name for name, *_ in schema.describe(RunConfig)}
    clauses = {
        (leaf.name, clause)
        for settings in ({}, *CHOICES.values())
        for leaf in leaves(tiny.config({"model.vocab_size": 300} | without_files(settings)))
        for condition in leaf.conditions
        for way in parse(condition)
        for clause in way
    }
    assert len({name for name, _ in clauses}) > 100
    for name, clause in clauses:
        assert clause.name in every or "[" in clause.name, f"{name} asks for {clause.name}, which is no setting"
        assert set(clause.values) <= words, f"{name} asks for {clause}"


def without_files(settings):
    """The choice where no files are looked for."""
    return {name: value for name, value in settings.items() if "{}" not in str(value)}


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ({"data.files": "no/such/file.txt"}, ["data.files='no/such/file.txt' has no effect with data.name='stdlib'",
          "set data.name to files, chat, hf or tokens, or remove --config.data.files"]),
        ({"data.name": "synthetic", "sample.prompt": "x"}, ["sample.prompt='x' has no effect with",
          "set data.name to something other than synthetic, or remove --config.sample.prompt"]),
        ({"optim.decay": "constant", "optim.min_lr": 1e-5}, ["optim.min_lr=1e-05 has no effect with optim.decay="]),
        ({"optim.name": "lion", "optim.eps": "1e-6"}, ["optim.eps=1e-06 has no effect with optim.name='lion'"]),
        ({"lora.alpha": "3"}, ["lora.alpha=3.0 has no effect with lora.rank=0; set lora.rank above 0"]),
        ({"export.dtype": "float32"}, ["export.dtype='float32'", "set export.every_steps above 0"]),
        ({"train.recovery.cut_steps": "7"}, ["add cut_lr to train.recovery.steps, or"]),
        ({"monitor.health.on": "false", "monitor.health.grad_norm": "3"}, ["set monitor.health.on to true"]),
        ({"monitor.health.off": "('spike',)", "monitor.health.spike_ratio": "3"},
         ["remove spike from monitor.health.off, or"]),
        ({"evals.w": {"kind": "text", "files": "a", "encoding": "latin-1"}}, ["set evals.w.invalid_utf8 to repair"]),
        ({"optim.groups": [{"pattern": ".", "frozen": True, "lr_multiplier": 2.0}]}, ["optim.groups[0].frozen"]),
        ({"data.val_files": "x", "data.val_fraction": "0.1"}, ["leave data.val_files empty"]),
        ({"eval.num_rows": "0", "eval.every_steps": "7"}, ["eval.every_steps=7 has no effect with eval.num_rows=0"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_the_line_names_the_setting_the_choice_and_the_way_out(overrides, told):
    with pytest.raises(BadInput) as error:
        load_config(QUICKSTART, overrides)
    line = str(error.value)
    assert all(part in line for part in told) and len(line.splitlines()) == 1


@pytest.mark.parametrize("overrides", [
    {"eval.num_rows": "0", "eval.every_steps": "0", "data.val_fraction": "0"},
    {"eval.num_rows": "0", "sample.num_tokens": "0"},  # whose cadence and prompt the file has
    {"monitor.health.on": "false"},
    {"data.name": "files", "data.files": "a.txt", "data.text_field": "t", "data.gate.on": "true"},
    {"optim.decay": "wsd", "optim.decay_fraction": "0.5"},
    {"data.name": "synthetic"},  # whose prompt the file has
    {"optim.decay": "constant"},
    {"optim.decay": "constant", "optim.peak_lr": "1e-5", "optim.min_lr": "3e-5"},  # the default, above the peak
], ids=lambda value: ",".join(value))  # fmt: skip
def test_what_is_read_or_asks_for_nothing_is_let_through(overrides):
    cfg = load_config(QUICKSTART, overrides)
    refuse_unread(schema.from_dict(RunConfig, as_read(cfg)))


def test_what_a_file_sets_for_a_choice_that_it_does_not_make_is_refused():
    switched = load_config(QUICKSTART, {"data.name": "synthetic"})
    with pytest.raises(BadInput, match=r"sample\.prompt='def '.* have no effect with data\.name='synthetic'") as error:
        refuse_unread(switched)
    back = "add --config.sample.num_tokens=0 --config.sample.prompt=$'\\n' --config.sample.temperature=0.8"
    assert str(error.value).endswith(back)


@pytest.mark.parametrize("name", SHIPPED)
def test_each_config_takes_another_source_and_schedule_on_the_command_line(name):
    for override in ({"data.name": "synthetic"}, {"optim.decay": "constant"}):
        load_config(str(PACKAGE.parent / "configs" / name), override)


def test_a_run_that_holds_such_a_setting_goes_on_with_it_and_without_it(tmp_path):
    flags = [f"--config={QUICKSTART}", f"--workdir={tmp_path}", "--config.data.files=x.txt"]
    with pytest.raises(BadInput, match=r"data\.files='x\.txt' has no effect"):
        main(flags)
    old = load_config(QUICKSTART)
    kept = schema.merge(schema.to_dict(old), {"data.files": "x.txt"})
    assert load_config(QUICKSTART, {"data.files": "x.txt"}, lambda: kept).data.files == "x.txt"
    with pytest.raises(BadInput, match=r"data\.files='y\.txt'"):
        load_config(QUICKSTART, {"data.files": "y.txt"}, lambda: kept)
    recorded = {"config": schema.merge(schema.to_dict(old), {"data.files": "x.txt", "lora.alpha": 32.0})}
    assert check_same_run(old, tmp_path, recorded) == []
    with pytest.raises(Stop) as stop:
        check_same_run(load_config(QUICKSTART, {"lora.rank": "2"}), tmp_path, recorded)
    assert stop.value.code is Exit.CONFIG_MISMATCH and "lora.alpha: 32.0 -> 16.0" in str(stop.value)


@pytest.mark.parametrize("overrides", [
    {"optim.groups": [FROZEN | {"lr_multiplier": 2.0}, REST]},
    {"evals": {"w": {"kind": "text", "files": "a", "encoding": "latin-1"}}},
    {"data.name": "synthetic", "data.mixture": {"a": 1.0, "b": 2.0}},
], ids=lambda value: [*value][-1])  # fmt: skip
def test_so_does_one_that_holds_it_in_a_list_or_a_dict(tmp_path, overrides):
    plain = schema.merge(schema.to_dict(load_config(QUICKSTART)), overrides)
    old = schema.from_dict(RunConfig, plain)
    with pytest.raises(BadInput, match="no effect with"):
        load_config(QUICKSTART, overrides)
    kept = schema.to_dict(old)
    cfg = load_config(QUICKSTART, overrides, lambda: json.loads(json.dumps(kept)))
    without = schema.from_dict(RunConfig, as_read(cfg))
    refuse_unread(without)
    assert without != cfg and as_read(without) == as_read(cfg)
    assert check_same_run(cfg, tmp_path, {"config": kept}) == []


def test_a_setting_of_a_group_in_a_list_that_nothing_reads_may_be_taken_out(tmp_path):
    old, new = ({"optim.groups": [FROZEN | more, REST]} for more in ({"lr_multiplier": 2.0}, {}))
    plain = schema.to_dict(load_config(QUICKSTART))
    cfg = load_config(QUICKSTART, new)
    assert check_same_run(cfg, tmp_path, {"config": schema.merge(plain, old)}) == []
    read = schema.merge(plain, {"optim.groups": [FROZEN, REST | {"lr_multiplier": 2.0}]})
    with pytest.raises(Stop, match=r"optim\.groups: "):
        check_same_run(cfg, tmp_path, {"config": read})


@pytest.mark.cases(10)
@pytest.mark.parametrize("rule", health.ALL, ids=lambda rule: rule.kind)
def test_what_a_health_rule_reads_is_read_where_it_alone_speaks(rule):
    cfg = tiny.config({"monitor.health.off": tuple(kind for kind in RULES if kind != rule.kind)})
    read = {f"monitor.health.{name}" for name in {"on", "off", *thresholds_of(rule)}}
    assert read == {leaf.name for leaf in leaves(cfg) if leaf.name.startswith("monitor.health.")} - {*unread(cfg)}


def thresholds_of(rule):
    """Names of the settings that the rule's class, those that it is made of, and what these call ask `view.cfg` for."""
    asked, seen = set(), set()
    waiting = [cls for cls in rule.__mro__ if cls.__module__.startswith(health.__name__)]
    while waiting:
        part = waiting.pop()
        seen.add(part)
        nodes = [*ast.walk(ast.parse(inspect.getsource(part)))]
        reads = [node for node in nodes if isinstance(node, ast.Attribute) and getattr(node.value, "attr", "") == "cfg"]
        assert len(reads) == sum(getattr(node, "attr", "") == "cfg" for node in nodes), f"{part} hands all of cfg on"
        asked |= {node.attr for node in reads}
        known = vars(sys.modules[part.__module__])
        called = [known.get(node.id) for node in nodes if isinstance(node, ast.Name)]
        waiting += [one for one in called if inspect.isfunction(one) and one not in seen
                    and one.__module__.startswith(health.__name__)]  # fmt: skip
    return asked
