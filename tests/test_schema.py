"""What a person writes becomes typed settings, or one line that says what is wrong and how to put it right."""

import dataclasses
import json
import string
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxscale import schema
from jaxscale.schema import setting
from jaxscale.system.exits import BadInput


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adam:
    name: Literal["adam"] = setting("adam", "update rule")
    peak_lr: float = setting(1e-3, "highest learning rate")
    clip_norm: float | None = setting(None, "none: no clipping")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sgd:
    name: Literal["sgd"] = setting("sgd", "update rule")
    momentum: float = setting(0.9, "decay of the running mean")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    vocab_size: int = setting(help="number of tokens")
    num_heads: int = setting(4, "query heads")
    num_kv_heads: int = setting(2, "key-value heads")
    dtype: Literal["float32", "bfloat16"] = setting("float32", "of activations")

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise BadInput(f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    pattern: str = setting(help="regular expression")
    lr: float = setting(1.0, "multiplier")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    seed: int = setting(0, "of everything random")
    tokens: int | str = setting("1 epoch", "amount", may_change=True)
    scan: bool = setting(True, "stack the layers")
    workdir: str | None = setting(None, "folder")
    betas: tuple[float, float] = setting((0.9, 0.95), "decay rates")
    groups: tuple[Group, ...] = setting((), "ordered")
    mixture: dict[str, float] = setting({"web": 1.0}, "weights")
    limits: dict[str, bool | int | str] = setting({}, "by name")
    batch: Literal["auto"] | int = setting("auto", "rows")
    model: Model = setting(lambda: Model(vocab_size=256), "the model")
    optim: Adam | Sgd = setting(Adam, "the optimizer")
    backup: Adam | Sgd | None = setting(None, "another", may_change=True)


def build(**values):
    return schema.from_dict(Run, values)


def complaint(**values):
    with pytest.raises(ValueError) as error:
        build(**values)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_nothing_given_is_the_defaults():
    assert build() == Run()


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("seed", "7", 7),
        ("seed", "1e9", 1_000_000_000),
        ("seed", 1e9, 1_000_000_000),
        ("seed", "1_000", 1000),
        ("seed", " -3 ", -3),
        ("tokens", "2000 steps", "2000 steps"),
        ("tokens", "1e9", 1_000_000_000),
        ("scan", "false", False),
        ("scan", "True", True),
        ("workdir", "runs/a", "runs/a"),
        ("workdir", "none", None),
        ("workdir", "12", "12"),
        ("workdir", "[1]", "[1]"),
        ("betas", "(0.9, 0.99)", (0.9, 0.99)),
        ("betas", "0,1", (0.0, 1.0)),
        ("betas", [0, 1], (0.0, 1.0)),
        ("groups", "[{'pattern': 'wq', 'lr': 2}]", (Group(pattern="wq", lr=2.0),)),
        ("mixture", "{'web': 1, 'code': 3}", {"web": 1.0, "code": 3.0}),
        ("mixture", '{"web": 1, "code": 3e0}', {"web": 1.0, "code": 3.0}),
        ("groups", '[{"pattern": "null"}]', (Group(pattern="null"),)),
        ("limits", '{"x": true, "y": "no"}', {"x": True, "y": "no"}),
        ("optim", '{"peak_lr": 2, "clip_norm": null}', Adam(peak_lr=2.0)),
        ("batch", "auto", "auto"),
        ("batch", "8", 8),
        ("optim", {"name": "sgd", "momentum": "0.5"}, Sgd(momentum=0.5)),
        ("optim", "{'name': 'sgd'}", Sgd()),
        ("optim", {"peak_lr": 2}, Adam(peak_lr=2.0)),  # without a name, the default's
        ("optim", Sgd(), Sgd()),
        ("backup", "none", None),
        ("backup", {"name": "adam", "clip_norm": 1}, Adam(clip_norm=1.0)),
    ],
)
def test_text_becomes_the_type_of_the_setting(name, text, value):
    got = getattr(build(**{name: text}), name)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"sede": 1}, "sede is not a setting of Run; did you mean 'seed'?"),
        ({"model": {"vocab_sise": 1}}, "model.vocab_sise is not a setting of Model; did you mean 'vocab_size'?"),
        ({"momentum": 1}, "momentum is not a setting of Run; did you mean 'optim.momentum'?"),
        ({"zzz": 1}, "zzz is not a setting of Run; settings: seed, tokens, scan"),
        ({5: 1}, "5 is not a setting of Run; settings: seed"),
        ({"optim": {"name": "sgd", "peak_lr": 1}}, "optim.peak_lr is not a setting of Sgd; settings: name, momentum"),
        ({"model": {"num_heads": 4}}, "model.vocab_size must be given: number of tokens"),
        ({"model": 3}, "model must be a group of settings of Model, not 3"),
        (
            {"model": "{num_heads: 3}"},
            "model must be a group of settings of Model, not '{num_heads: 3}'; write model='{",
        ),
        ({"mixture": '{"x": tru}'}, "mixture='{\"x\": tru}' is not a dict of name to (a number); write mixture='{"),
        ({"limits": '{"x": null}'}, "limits.x=None is not true or false or an integer or text"),
        ({"seed": "many"}, "seed='many' is not an integer"),
        ({"seed": 1.5}, "seed=1.5 is not an integer"),
        ({"seed": "1e999"}, "seed=inf is not an integer"),
        ({"seed": 2**63}, "seed=9223372036854775808 is not an integer of at most 64 bits"),
        ({"seed": "9" * 5000}, f"seed='{'9' * 79}... (5002 characters) is not an integer"),
        ({"seed": True}, "seed=True is not an integer"),
        ({"seed": None}, "seed=None is not an integer"),
        ({"seed": "{[]: 1}"}, "seed='{[]: 1}' is not an integer"),
        ({"scan": "yes"}, "scan='yes' is not true or false"),
        ({"scan": 1}, "scan=1 is not true or false"),
        ({"workdir": 5}, "workdir=5 is not none or text"),
        ({"betas": "(1, 2, 3)"}, "betas=(1, 2, 3) is not a list of (a number, a number)"),
        ({"betas": "(1, 'x')"}, "betas[1]='x' is not a number"),
        ({"betas": (0.9, float("nan"))}, "betas[1]=nan is not a number"),
        ({"betas": (0.9, float("inf"))}, "betas[1]=inf is not a number"),
        ({"groups": [{"patern": "x"}]}, "groups[0].patern is not a setting of Group; did you mean 'pattern'?"),
        ({"mixture": {"web": "much"}}, "mixture.web='much' is not a number"),
        ({"batch": "aut"}, "batch='aut' is not an integer or one of auto; did you mean 'auto'?"),
        (
            {"model": {"vocab_size": 1, "dtype": "float23"}},
            "model.dtype='float23' is not one of float32, bfloat16; did you",
        ),
        ({"optim": {"name": "adamm"}}, "optim.name='adamm' must be one of ['adam', 'sgd']; did you mean 'adam'?"),
        ({"optim": {"name": ["adam"]}}, "optim.name=['adam'] must be one of ['adam', 'sgd']"),
        ({"optim": "adam"}, "optim='adam' must be a group of settings whose name is one of ['adam', 'sgd']"),
        ({"optim": None}, "optim=None must be a group of settings whose name"),
        ({"backup": {"peak_lr": 1}}, "backup.name must be given; set it to one of ['adam', 'sgd']"),
        ({"model": {"vocab_size": 1, "num_heads": 3}}, "model: num_heads=3 must be a multiple of num_kv_heads=2"),
    ],
    ids=str,
)
def test_a_mistake_is_one_line_with_the_path_the_value_and_the_way_out(values, told):
    with pytest.raises(ValueError) as error:
        schema.from_dict(Run, values)
    assert str(error.value).startswith(told)
    assert "\n" not in str(error.value)


def test_a_number_too_large_for_a_float_is_refused():
    assert complaint(betas=(0.9, 10**400)).startswith("betas[1]=1000")


def test_a_literal_of_numbers_keeps_their_type():
    assert schema.convert("2", Literal[1, 2], "width") == 2
    with pytest.raises(ValueError, match=r"width=2.0 is not one of 1, 2"):
        schema.convert(2.0, Literal[1, 2], "width")
    with pytest.raises(ValueError, match="width=True"):
        schema.convert(True, Literal[1, 2], "width")


def test_overrides_reach_settings_that_the_file_names_and_those_it_omits():
    file = {"model": {"vocab_size": 9}, "seed": 1}
    overrides = {"model.num_heads": "6", "optim.peak_lr": "3e-4", "seed": "2", "mixture.code": "1"}
    run = schema.from_dict(Run, schema.merge(file, overrides))
    assert (run.model, run.optim, run.seed) == (Model(vocab_size=9, num_heads=6), Adam(peak_lr=3e-4), 2)
    assert run.mixture == {"code": 1.0}
    assert file == {"model": {"vocab_size": 9}, "seed": 1}, "merge must not write into the file's dict"


def test_an_override_cannot_reach_into_a_value():
    with pytest.raises(ValueError, match="seed.x='1' cannot be set: seed is 5, not a group of settings"):
        schema.merge({"seed": 5}, {"seed.x": "1"})


def test_later_overrides_win():
    assert schema.merge({}, {"a": {"b": 1, "c": 2}, "a.b": 3}) == {"a": {"b": 3, "c": 2}}
    assert schema.merge({}, {"a": '{"b": true, "c": 2}', "a.b": "3"}) == {"a": {"b": "3", "c": 2}}


def test_defaults_are_not_shared_between_runs():
    build().mixture["web"] = 9.0
    assert build().mixture == {"web": 1.0}


def test_the_difference_names_each_leaf():
    old, new = schema.to_dict(Run()), schema.to_dict(Run(seed=1, optim=Sgd(), betas=(0.9, 0.5)))
    assert schema.difference(old, new) == {
        "betas": ([0.9, 0.95], [0.9, 0.5]),
        "optim.momentum": (None, 0.9),
        "optim.name": ("adam", "sgd"),
        "optim.peak_lr": (1e-3, None),
        "seed": (0, 1),
    }
    assert schema.difference(old, old) == {}


def test_what_may_change_on_resume_is_known_by_name():
    assert schema.changeable(Run) == {"tokens", "backup"}


def test_every_setting_is_described():
    rows = {name: rest for name, *rest in schema.describe(Run)}
    assert rows["seed"] == ["an integer", "0", "of everything random"]
    assert rows["model.vocab_size"] == ["an integer", "required", "number of tokens"]
    assert rows["optim.peak_lr"] == ["a number", "0.001", "highest learning rate"]
    assert rows["optim.momentum"] == ["a number", "0.9", "decay of the running mean"]
    assert rows["betas"] == ["a list of (a number, a number)", "(0.9, 0.95)", "decay rates"]
    assert rows["mixture"] == ["a dict of name to (a number)", "{'web': 1.0}", "weights"]


numbers = st.floats(allow_nan=False, allow_infinity=False)
names = st.text(string.printable, max_size=8)
integers = st.integers(-schema.MAX_INTEGER, schema.MAX_INTEGER)
runs = st.builds(
    Run,
    seed=integers,
    tokens=integers,
    scan=st.booleans(),
    betas=st.tuples(numbers, numbers),
    groups=st.lists(st.builds(Group, pattern=names, lr=numbers), max_size=2).map(tuple),
    mixture=st.dictionaries(names, numbers, max_size=3),
    batch=integers | st.just("auto"),
    model=st.builds(Model, vocab_size=integers, dtype=st.sampled_from(["float32", "bfloat16"])),
    optim=st.builds(Adam, peak_lr=numbers, clip_norm=numbers | st.none()) | st.builds(Sgd, momentum=numbers),
    backup=st.builds(Sgd, momentum=numbers) | st.none(),
)


@settings(max_examples=60, deadline=None)
@given(run=runs)
def test_settings_survive_a_journey_through_json(run):
    assert schema.from_dict(Run, json.loads(json.dumps(schema.to_dict(run)))) == run


@settings(max_examples=60, deadline=None)
@given(run=runs)
def test_each_setting_survives_a_journey_through_the_command_line(run):
    for name, value in schema.to_dict(run).items():
        assert getattr(build(**{name: str(value)}), name) == getattr(run, name), name


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=12), name=st.sampled_from([field.name for field in dataclasses.fields(Run)]))
def test_any_text_is_a_value_or_a_one_line_error(text, name):
    try:
        build(**{name: text})
    except ValueError as error:
        assert "\n" not in str(error)
        assert str(error).startswith(name)
