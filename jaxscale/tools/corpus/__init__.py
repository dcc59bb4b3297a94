"""Builds token shards from raw text: curation, preparation, publication. Training never imports it."""
