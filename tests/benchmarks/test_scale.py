"""benchmarks/scale.py: the cost of each stage of a preparation as the number of documents grows."""

from benchmarks import scale


def test_every_stage_of_a_preparation_is_measured_and_what_grows_is_named(tmp_path):
    found = scale.prepare_costs(str(tmp_path), 300)
    assert list(found["stages"]) == [
        "reading the recipe", "pass 1: reading", "exact_dedup: comparing all documents",
        "near_dedup: comparing all documents", "pass 2: tokens", "writing shards",
    ]  # fmt: skip
    costs = found["stages"]["pass 1: reading"]
    assert costs["opened"] > 4 and 0 < costs["cpu_seconds"] < 60 and costs["memory_bytes"] < 1e9
    more = {"documents": 1200, "stages": {**found["stages"], "pass 1: reading": costs | {"cpu_seconds": 4.5 * 10}}}
    before = {"documents": 300, "stages": {**found["stages"], "pass 1: reading": costs | {"cpu_seconds": 10.0}}}
    loader = [{"documents": 300, "index_bytes": 7.5, "names_bytes": 16.0, "stages": {}}]
    text = "\n".join(scale.scale_lines({"prepare": [before, more], "loader": loader}))
    assert "pass 1: reading: cpu_seconds grows 4.50 times while the documents grow 4.00 times, to 1,200" in text
    assert text.endswith("nothing grows faster than the documents")  # of loading
