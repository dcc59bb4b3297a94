"""The format is read and written by its own rules, and a file that breaks one is refused by name."""

import json
import pathlib

import ml_dtypes
import numpy as np
import pytest
from hf_folders import read_file, write_file

from jaxscale.tools.interop.safetensors import LONGEST_HEADER, encode_header, read_header, stat_file

F32, F16, BF16 = np.dtype("<f4"), np.dtype("<f2"), np.dtype(ml_dtypes.bfloat16)


def made(path, header, data=b"", length=None):
    """A file with this header, right or wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    pathlib.Path(path).write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return stat_file(pathlib.Path(path))


def tensor(shape, begin, end, dtype="F32", **more):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]} | more


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_what_is_written_is_read_back_bit_for_bit(tmp_path, dtype):
    rng = np.random.default_rng(0)
    values = {
        name: rng.standard_normal(shape).astype(dtype)
        for name, shape in {"a": (3, 5), "b.ü": (), "none": (0, 4), "long": (1000,)}.items()
    }
    write_file(tmp_path / "f.safetensors", values)
    found = read_header(stat_file(tmp_path / "f.safetensors"))
    assert list(found) == list(values)
    for name, value in values.items():
        read = found[name].read()
        assert read.dtype == dtype and read.shape == value.shape and read.tobytes() == value.tobytes()
        assert read_file(tmp_path / "f.safetensors")[name].tobytes() == value.tobytes()


def test_the_tensors_of_a_file_begin_on_a_multiple_of_eight_bytes():
    for name in ("a", "ab", "abc", "abcdefg"):
        header = encode_header({name: (F32, (2,))})
        assert len(header) % 8 == 0 and int.from_bytes(header[:8], "little") == len(header) - 8


BROKEN = {
    "huge length": (b"{}", b"", 1 << 62, "the header length is 4611686018427387904 bytes"),
    "above the limit": (b"{}", b"", LONGEST_HEADER + 1, "the header length is 33554433 bytes"),
    "past the end": (b"{}", b"", 3, "the header length is 3 bytes, but the file has 10 bytes"),
    "no JSON": (b"not json", b"", None, "its header is not a JSON object"),
    "no UTF-8": (b'{"\xff\xfe": 1}', b"", None, "its header is not a JSON object"),
    "deep": (b"[" * 100_000, b"", None, "its header is not a JSON object"),
    "a list": ([1, 2], b"", None, "its header is not a JSON object"),
    "a name twice": (b'{"a": 1, "a": 2}', b"", None, "'a' appears more than once"),
    "no shape": ({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, b"1234", None, "'a' must have exactly dtype"),
    "more": ({"a": tensor([1], 0, 4, code="x")}, b"1234", None, "'a' must have exactly dtype"),
    "dtype": ({"a": tensor([1], 0, 4, "F33")}, b"1234", None, "'a' has dtype 'F33', not one of F32"),
    "dtype of no type": ({"a": tensor([1], 0, 4, [])}, b"1234", None, r"'a' has dtype \[\], not one of F32"),
    "negative": ({"a": tensor([-1], 0, 4)}, b"1234", None, r"'a' has shape \[-1\]"),
    "not whole": ({"a": tensor([1.0], 0, 4)}, b"1234", None, r"'a' has shape \[1.0\]"),
    "true": ({"a": tensor([True], 0, 4)}, b"1234", None, r"'a' has shape \[True\]"),
    "overflow": ({"a": tensor([1 << 40, 1 << 40], 0, 4)}, b"1234", None, "needs .* bytes but has 4"),
    "axes": ({"a": tensor([1] * 17, 0, 4)}, b"1234", None, "which is not a list of at most 16 sizes"),
    "too few bytes": ({"a": tensor([2], 0, 4)}, b"1234", None, "needs 8 bytes but has 4"),
    "backwards": ({"a": tensor([1], 4, 0)}, b"1234", None, "which are not .begin, end."),
    "behind the end": ({"a": tensor([2], 0, 8)}, b"1234", None, "but the file has .* bytes: it is truncated"),
    "overlap": ({"a": tensor([2], 0, 8), "b": tensor([2], 4, 12)}, b"1" * 12, None, "'a' and 'b' overlap"),
    "same place": ({"a": tensor([1], 0, 4), "b": tensor([1], 0, 4)}, b"1234", None, "'a' and 'b' overlap"),
    "a hole": ({"a": tensor([1], 0, 4), "b": tensor([1], 8, 12)}, b"1" * 12, None, "have a gap of 4 bytes"),
    "a hole in front": ({"a": tensor([1], 4, 8)}, b"1" * 8, None, "the header and 'a' have a gap of 4 bytes"),
    "more bytes": ({"a": tensor([1], 0, 4)}, b"1" * 6, None, "2 bytes after 'a' belong to no tensor"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_file_that_breaks_a_rule_is_refused_in_one_line(tmp_path, case):
    header, data, length, told = BROKEN[case]
    with pytest.raises(ValueError, match=told) as caught:
        read_header(made(tmp_path / "bad.safetensors", header, data, length))
    line = str(caught.value)
    assert "bad.safetensors is not a valid safetensors file" in line and "\n" not in line and len(line) < 500


def test_a_file_too_short_for_a_header_is_refused(tmp_path):
    (tmp_path / "f").write_bytes(b"123")
    with pytest.raises(ValueError, match="it has 3 bytes, too small for a header"):
        read_header(stat_file(tmp_path / "f"))


@pytest.mark.parametrize(
    ("kind", "size", "way_out"),
    [("F8_E4M3", 1, "use the unquantized model"), ("F64", 8, r"to\(torch.float32\)"), ("I64", 8, "torch.float32")],
)
def test_other_number_types_are_known_and_not_converted(tmp_path, kind, size, way_out):
    found = read_header(made(tmp_path / "f.safetensors", {"a": tensor([2], 0, 2 * size, kind)}, b"1" * 2 * size))
    with pytest.raises(ValueError, match=f"f.safetensors: a is {kind}; only F32, F16, BF16 are supported: .*{way_out}"):
        found["a"].read()
