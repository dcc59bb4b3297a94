"""Every kind of personal data is found where it is right, left alone where its proof fails, and redacted once."""

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxscale.runtime.text.document import Document
from jaxscale.tools.corpus.curate.pii import FILE_ENDINGS, KINDS, PIIConfig, find_pii, make_pii
from jaxscale.tools.corpus.curate.pii_numbers import NATIONAL_IDS, checker, find_national_ids

EMAIL = re.compile(r"[A-Za-z0-9._%+-]+@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)*\.[A-Za-z]{2,}")  # not our own pattern


def found(text, **options):
    """[(kind, text of the span)]"""
    return [(span.kind, text[span.start : span.end]) for span in find_pii(text, **options)]


def broken(number):
    """The number with its last digit one higher, so that a check digit is wrong."""
    place = max(i for i, char in enumerate(number) if char.isdigit())
    return number[:place] + str((int(number[place]) + 1) % 10) + number[place + 1 :]


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("Write to jo.doe+news@mail.example.co.uk.", "jo.doe+news@mail.example.co.uk"),
        ("mailto:jo@home.org?subject=x", "jo@home.org"),
        ("<o'brien@home.org>,", "o'brien@home.org"),
        ("x?mail=jo@home.org&y=1", "jo@home.org"),
        ("*jo@home.org*", "jo@home.org"),
        ("请联系jo@home.org谢谢", "jo@home.org"),
        ("почта@пример.рф", "почта@пример.рф"),
        ("j_@xn--e1afmkfd.xn--p1ai", "j_@xn--e1afmkfd.xn--p1ai"),
    ],
)
def test_e_mail_addresses_are_found_whole(text, address):
    assert found(text) == [("email", address)]


@pytest.mark.parametrize(
    "text", ["logo@2x.png", "@decorator", "jo@home", "pkg@1.2.3", "a @ b.com", "@user.name", "@@@.com"]
)
def test_what_only_has_an_at_sign_is_no_address(text):
    assert found(text) == []


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("from 58.74.121.78:8080", "58.74.121.78"),
        ("http://58.74.121.78/x", "58.74.121.78"),
        ("ping 9.9.9.9.", "9.9.9.9"),
        ("[2a00:1450:4001:81b::200e]", "2a00:1450:4001:81b::200e"),
        ("at 2606:4700:4700::1111: refused", "2606:4700:4700::1111"),
    ],
)
def test_public_ip_addresses_are_found(text, address):
    assert found(text) == [("ip", address)]


@pytest.mark.parametrize(
    "address", ["192.168.0.1", "10.218.6.131", "127.0.0.1", "203.0.113.7", "fe80::1", "2001:db8::1"]
)
def test_private_and_documentation_addresses_are_found_only_on_request(address):
    text = f"server {address} is down"
    assert found(text) == [] and found(text, public_ips_only=False) == [("ip", address)]


@pytest.mark.parametrize(
    "text",
    ["version 58.74.121.78", "v58.74.121.78", "release 4.5.6.7", "1.2.3.4.5", "300.58.74.1", "058.74.121.78",
     "12:30:45", "std::vector", "a::b::c", "section 8.24.41.5", "ab:cd:ef:12:34:56", "build 2.9.0.5"],
)  # fmt: skip
def test_versions_and_times_are_no_addresses(text):
    assert found(text) == []


@pytest.mark.parametrize(
    "number",
    ["4111111111111111", "4111 1111 1111 1111", "5555-5555-5555-4444", "2223003122003222", "378282246310005",
     "3782 822463 10005", "6011111111111117", "30569309025904", "3530111333300000", "6759649826438453"],
)  # fmt: skip
def test_payment_cards_need_an_issuer_and_a_check_digit(number):
    assert found(f"paid with {number}, thanks") == [("card", number)]
    assert found(f"paid with {broken(number)}, thanks") == []


@pytest.mark.parametrize(
    "text", ["9111111111111117", "4111 1111-1111 1111", "x4111111111111111", "41111111111111111111"]
)
def test_other_long_numbers_are_no_cards(text):
    assert ("card", text) not in found(text)


@pytest.mark.parametrize(
    "iban",
    ["GB82WEST12345698765432", "GB82 WEST 1234 5698 7654 32", "DE89370400440532013000", "NO9386011117947",
     "FR1420041010050500013M02606", "MT84MALT011000012345MTLCAST001S", "gb82west12345698765432", "BE68539007547034"],
)  # fmt: skip
def test_ibans_need_their_countrys_length_and_check_digits(iban):
    assert found(f"to {iban} PLEASE") == [("iban", iban)]
    assert found(f"to {broken(iban)} please", kinds=["iban"]) == []
    assert found(f"to {iban}0 please", kinds=["iban"]) == []


VALID_IDS = {
    "us": ["536-22-8176", "SSN: 536228176", "social security no. 536 22 8176"],
    "gb": ["AB123456C", "AB 12 34 56 C"],
    "es": ["12345678Z", "12345678-Z", "X1234567L"],
    "de": ["86095742719", "47036892816", "65 929 970 489"],
    "fr": ["255081416802538", "2 55 08 14 168 025 38"],
    "it": ["RSSMRA85T10A562S"],
    "in": ["2341 2341 2346", "Aadhaar 234123412346"],
}
WRONG_IDS = {
    "us": ["000-22-8176", "666-22-8176", "936-22-8176", "536-00-8176", "536-22-0000", "078-05-1120", "536228176"],
    "gb": ["BG123456A", "DA123456A", "AO123456A", "AB123456E", "ZZ123456A"],
    "es": ["12345678A", "X1234567A"],
    "de": ["86095742718", "12345678901", "00000000000", "11111111111", "12345678903"],
    "fr": ["255081416802539", "355081416802538", "255131416802538"],
    "it": ["RSSMRA85T10A562T", "RSSMRA85F10A562S"],
    "in": ["2341 2341 2347", "234123412346", "1341 2341 2346", "2019 2020 2000"],
}


@pytest.mark.parametrize("country", NATIONAL_IDS)
def test_national_numbers_are_proved(country):
    for text in VALID_IDS[country]:
        number = re.search(r"(?:[A-Z]{2}\b ?|[A-Z]{2,6}(?=[0-9]))?[A-Z]?[0-9][0-9A-Z -]*$", text)[0]
        (kind, span), *more = found(f"note {text}, end", countries=(country,), kinds=["national_id"])
        assert kind == "national_id" and span == number and not more
        assert found(f"note {text}, end", countries=tuple(set(NATIONAL_IDS) - {country}), kinds=["national_id"]) == []
    for text in WRONG_IDS[country]:
        assert list(find_national_ids(f"note {text}, end", 0, len(text) + 5, (country,))) == [], text


@given(st.integers(0, 10**11), st.integers(0, 11), st.integers(1, 9))
def test_check_digits_see_every_single_wrong_digit(number, place, change):
    digits = f"{number:011d}"
    for check in (checker("luhn"), checker("verhoeff")):
        right = [digits + str(last) for last in range(10) if check(digits + str(last))]
        assert len(right) == 1
        wrong = list(right[0])
        wrong[place] = str((int(wrong[place]) + change) % 10)
        assert not check("".join(wrong))


PHONES = [
    "+44 20 7946 0958", "+46 (0)157 548 89", "+41 (0)96 471 07 95", "+447700900123", "(+49) 30 901820",
    "0044 20 7946 0958", "(212) 555-0123", "212-555-0123", "1-212-555-0123", "212.555.0123", "(227)664-8546x506",
    "001-420-335-7509x38548",
    "01.84.17.61.18", "(07) 5331 0577", "020 7946 0958", "07700900123", "(11) 4706-6184",
]  # fmt: skip
CALLED = ["467 3395", "72 128 827", "9472 7916", "60-56-85-91", "33 93 31", "2813882583", "212 555 0123", "0431/199794"]
NOT_PHONES = [
    "1939-1945 1946-1950", "in 2012-2013", "on 12.10.2012", "2012-10-12", "10-12-2012", "3.14159265", "1,234,567",
    "version 10.15.7", "$ 212-555-0123", "ISBN 978-0-306-40615-7", "978-0-306-40615-7", "0-306-40615-2",
    "21-14 28-7 14-3", "pp. 1234-1267", "34 (12) 1234-1267", "192.168.0.1", "12:30:45", "1 234 567 people",
    "call 1 500 000 people", "call 12 345 678 people", "100000000", "2400/200 phones",
    "12345678", "id=2125550123", "x-212-555-0123-9", "0.8-20031228", "call 12.10.2012",
    "text WIN to 80086", "+12 345", "+999 123 456 789", "0123456789012", "call 1 234 567 dollars", "tel. ext 555",
]  # fmt: skip


@pytest.mark.parametrize("number", PHONES)
def test_telephone_numbers_are_known_by_their_shape(number):
    assert found(f"see {number}, or not", kinds=["phone"]) == [("phone", number)]


@pytest.mark.parametrize("number", CALLED)
@pytest.mark.parametrize("around", ["Phone: {}", "You can call {}", "Telefon:\n{}\n", "{} office", "{}-Fax", "☎ {}"])
def test_other_numbers_are_telephones_where_a_word_says_so(number, around):
    if number == "2813882583" or not around.startswith("{"):
        assert found(around.format(number), kinds=["phone"]) == [("phone", number)]
    assert found(f"about {number} of them", kinds=["phone"]) == []


@pytest.mark.parametrize("text", NOT_PHONES)
def test_dates_prices_versions_and_book_numbers_are_no_telephones(text):
    assert found(f"it was {text} then", kinds=["phone"]) == []


@pytest.mark.parametrize("name", ["Tel.", "Phone (private):", "☎", "联系电话：", "\u260e\n"])
def test_a_name_right_beside_a_number_lets_its_gaps_differ(name):
    assert found(f"{name} 431 55-33955", kinds=["phone"]) == [("phone", "431 55-33955")]
    assert found("I will call on 431 55-33955", kinds=["phone"]) == []


def test_two_numbers_side_by_side_are_two():
    assert [span for _, span in found("212-555-0123 415-555-0199")] == ["212-555-0123", "415-555-0199"]


MIXED = (
    "Jo (jo@home.org, tel. 467 3395) paid GB82WEST12345698765432 with 4111 1111 1111 1111 from 58.74.121.78; "
    "SSN 536-22-8176, again jo@home.org."
)


def test_each_kind_is_redacted_by_its_placeholder_and_counted():
    (outcome,) = make_pii(PIIConfig(phone_placeholder="[no.]"))([Document(MIXED, id="1")])
    assert outcome.document == Document(
        "Jo (<EMAIL>, tel. [no.]) paid <IBAN> with <CARD> from <IP>; SSN <ID>, again <EMAIL>.", id="1"
    )
    assert dict(outcome.edits) == {name: 1 + (name == "e-mail") for name in KINDS.values()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_can_drop_its_document_or_be_left_alone(kind):
    (outcome,) = make_pii(PIIConfig(**{kind: "drop"}))([Document(MIXED)])
    assert outcome.document is None and outcome.reason == f"personal data: {KINDS[kind]}"
    off = {other: "off" for other in KINDS if other != kind}
    (outcome,) = make_pii(PIIConfig(**off))([Document(MIXED)])
    assert [name for name, _ in outcome.edits] == [KINDS[kind]]


def test_numbers_may_be_written_with_other_spaces_and_hyphens():
    text = "tel. 020\u00a07946\u20090958, card 4111\u202f1111\u202f1111\u202f1111"
    assert [kind for kind, _ in found(text)] == ["phone", "card"]


def test_a_placeholder_may_be_an_address_of_its_own_but_hold_no_other():
    stage = make_pii(PIIConfig(email_placeholder="email@example.com", ip_placeholder="22.214.171.124"))
    (once,) = stage([Document("jo@home.org at 58.74.121.78")])
    assert once.document.text == "email@example.com at 22.214.171.124"
    assert stage([once.document])[0] == (once.document, "", (), "")
    with pytest.raises(ValueError, match="phone_placeholder='jo@home.org'"):
        PIIConfig(phone_placeholder="jo@home.org")
    with pytest.raises(ValueError, match=r"unsupported \['xx'\]; supported: "):
        PIIConfig(countries=("us", "xx"))


pieces = st.one_of(
    st.text(max_size=12),
    st.text("0123456789 .-+()/@:x", max_size=30),
    st.emails(),
    st.ip_addresses().map(str),
    st.sampled_from(
        [*PHONES, *CALLED, "call", "tel. ", "SSN ", "GB82WEST12345698765432", "4111111111111111", "@", " "]
    ),
    st.sampled_from([number for numbers in VALID_IDS.values() for number in numbers]),
)


@pytest.mark.slow
@settings(deadline=None, max_examples=120)
@given(st.lists(st.lists(pieces, max_size=8).map("".join), max_size=3))
def test_redacting_twice_changes_nothing_and_leaves_no_address(texts):
    stage = make_pii(PIIConfig())
    docs = [Document(text) for text in texts]
    outcomes = stage(docs)
    assert len(outcomes) == len(docs)
    for doc, outcome in zip(docs, outcomes):
        assert not outcome.reason and bool(outcome.edits) == (outcome.document.text != doc.text)
        assert stage([outcome.document])[0] == (outcome.document, "", (), "")
        left = [match[0] for match in EMAIL.finditer(outcome.document.text)]
        assert all(address.rpartition(".")[2].lower() in FILE_ENDINGS for address in left)
        spans = find_pii(doc.text)
        assert all(a.end <= b.start for a, b in zip(spans, spans[1:]))


@settings(deadline=None)
@given(st.emails(domains=st.sampled_from(["home.org", "a.b.co.uk", "xn--e1afmkfd.com"])))
def test_any_address_of_the_standard_is_redacted(address):
    (outcome,) = make_pii(PIIConfig())([Document(f"Write to {address} now")])
    assert "@" not in outcome.document.text.replace("<EMAIL>", "")


LONG = ["1", "1 ", "1-2)", "a@", "1.2.", "::1", "(", "+1 (", "a.", "a.b@", "GB82 ", "4111 ", "01 "]


@pytest.mark.cases(4)
@pytest.mark.parametrize("piece", LONG)
def test_no_text_takes_long(piece):
    begin = time.process_time()
    find_pii(piece * (100_000 // len(piece)) + "x")
    assert time.process_time() - begin < 2  # a quadratic search would take minutes
