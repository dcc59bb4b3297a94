"""An amount of training, however it is written, becomes one number of tokens, or one clear line."""

import random

import pytest

from jaxscale import units

KNOWN = dict(seq_len=128, batch_tokens=1024, train_tokens=1_000_000, epoch_tokens=50_000)


@pytest.mark.parametrize(
    ("amount", "tokens"),
    [
        (0, 0), (4096, 4096), ("4096", 4096), ("4_096", 4096), ("1e9", 10**9), ("1.5e3 tokens", 1500), ("7 token", 7),
        ("2000 steps", 2_048_000), ("1 step", 1024), ("0.5 steps", 512), ("1%", 10_000), ("2.5 %", 25_000),
        ("1 epoch", 50_000), ("1.5 epochs", 75_000), ("512 rows", 65_536), ("1 row", 128), (" 3  Steps ", 3072),
        ("1 EPOCH", 50_000), ("2steps", 2048),
    ],
)  # fmt: skip
def test_every_form_becomes_tokens(amount, tokens):
    assert units.resolve("train_tokens", amount, **KNOWN) == tokens
    assert type(units.resolve("train_tokens", amount, **KNOWN)) is int


@pytest.mark.parametrize(
    "amount", ["", "many", "-5", "-5 steps", "1 parsec", "1,000", "5 5", "1e", "nan", "inf", "%", "True"]
)
def test_what_is_no_amount_is_named_with_the_forms_there_are(amount):
    with pytest.raises(
        ValueError, match="optim.warmup_tokens=.* is not an amount of training; write an integer"
    ) as error:
        units.resolve("optim.warmup_tokens", amount, **KNOWN)
    assert "'2000 steps', '1%' or '1 epoch'" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("amount", "needs"),
    [("1 epoch", "the length of the data set"), ("1%", "train_tokens"), ("3 steps", "batch_tokens")],
)
def test_a_unit_that_needs_something_unknown_says_what(amount, needs):
    with pytest.raises(ValueError, match=f"x={amount!r} needs {needs}"):
        units.resolve("x", amount, seq_len=128)


def test_the_way_out_is_one_that_works():
    with pytest.raises(ValueError) as error:
        units.resolve("batch_tokens", "3 steps", seq_len=128)
    assert "steps" not in str(error.value).split(";")[1]


def test_half_a_token_is_refused():
    with pytest.raises(ValueError, match="train_tokens='1.5' must be a whole number of tokens"):
        units.resolve("train_tokens", "1.5", **KNOWN)


@pytest.mark.parametrize(
    ("tokens", "steps"), [(0, 0), (1, 1), (1023, 1), (1024, 1), (1025, 2), (10**15 + 1, 976562500001)]
)
def test_steps_are_whole_and_hold_at_least_the_tokens(tokens, steps):
    assert units.steps(tokens, 1024) == steps


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (6.74e9, "6.74B"),
        (124_439_808, "124M"),
        (950, "950"),
        (2_000, "2K"),
        (1.35e12, "1.35T"),
        (0, "0"),
        (-2e6, "-2M"),
        (999_999, "1M"),
        (999_499, "999K"),
        (999_999_488, "1B"),
        (1.5e16, "15,000T"),
    ],
)
def test_large_numbers_are_short(number, text):
    assert units.count(number) == text


@pytest.mark.parametrize(
    ("amount", "text"),
    [(0, "$0.00"), (0.00314, "$0.0031"), (0.42, "$0.42"), (4.2, "$4.20"), (250, "$250"), (12_345.6, "$12,346"),
     (999_499, "$999,499"), (999_600, "$1M"), (1.234e6, "$1.23M"), (5e9, "$5,000M")],
)  # fmt: skip
def test_money_is_never_an_exponent_or_nothing(amount, text):
    assert units.dollars(amount) == text


@pytest.mark.parametrize(
    ("number", "text"), [(1, "1 batch"), (2, "2 batches"), (1234, "1,234 batches"), (0, "0 batches")]
)
def test_a_number_of_things_is_spelt(number, text):
    assert units.plural(number, "batch") == text and units.plural(number, "row") == text.replace(
        "batches", "rows"
    ).replace("batch", "row")


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (2048, "2.0 KiB"),
        (2**20 - 1, "1.0 MiB"),
        (26.2e9, "24.4 GiB"),
        (3 * 2**40, "3.0 TiB"),
    ],
)
def test_sizes_are_in_powers_of_1024(num_bytes, text):
    assert units.size(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (4.2, "4.2s"), (65, "1m05s"), (3725, "1h02m"), (3600, "1h00m"), (3 * 86400 + 7200, "3d02h"), (59.99, "1m00s"),
        (-3, "0.0s"), (700 * 86400, "700d00h"), (14148.68 * 86400, "38.7 years"), (1e15, "31,688,088 years"),
    ],
)  # fmt: skip
def test_durations_are_short(seconds, text):
    assert units.duration(seconds) == text


def test_divisors_of_huge_numbers_are_found_at_once():
    assert units.divisors(12) == [1, 2, 3, 4, 6, 12] and units.divisors(1) == [1] and units.divisors(13) == [1, 13]
    assert units.divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36]
    assert len(units.divisors(2**40)) == 41 and len(units.divisors(10**12 + 39)) == 2
    assert units.or_list([1, 2, 4]) == "1, 2 or 4" and units.or_list([1]) == "1"


@pytest.mark.parametrize("seed", range(40))
def test_batches_that_grow_lie_where_a_plain_loop_puts_them(seed):
    draw = random.Random(seed)
    sizes, ends, until = sorted(draw.sample(range(1, 40), draw.randint(1, 4))), [], 0
    for size in sizes[:-1]:
        until += size + draw.randint(1, 150)  # past the last batch of the size before, which is smaller
        ends.append((size, until))
    batches, place = units.BatchSizes.growing(ends, sizes[-1]), 0
    for n in range(50):
        size = next((size for size, until in ends if place < until), sizes[-1])
        assert (batches.size(n), batches.begin(n)) == (size, place)
        assert [batches.find(place + row) for row in range(size)] == [(n, row) for row in range(size)]
        assert [batches.holding(place + row) for row in range(size)] == [n] + [n + 1] * (size - 1)
        assert batches.times(7).begin(n) == 7 * place
        place += size


def test_batches_of_one_size_are_found_by_one_division():
    for batches in (units.BatchSizes.of(8), units.recorded_sizes({"batch_tokens": 1024}, row_tokens=128)):
        assert not batches.vary and batches.largest == batches.size(10**12) == 8
        assert batches.begin(10**12) == 8 * 10**12 and batches.find(8 * 10**12 + 3) == (10**12, 3)


def test_a_record_tells_the_sizes_of_a_ramp():
    recorded = {"batch_tokens": 4096, "ramp": [[0, 1024], [5, 4096]]}  # as config.json has it
    assert units.recorded_sizes(recorded, row_tokens=128) == units.BatchSizes(((0, 8), (5, 32)))


def test_a_size_that_no_batch_would_have_is_refused():
    with pytest.raises(ValueError, match="no batch has size 16, because earlier batches reach 24"):
        units.BatchSizes.growing([(8, 17), (16, 20)], 32)
