"""Curation stages: filters, edits and deduplication sketches, each a pure function of documents."""
