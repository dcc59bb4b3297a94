"""Curation: which documents and lines are kept, by rules that are pure functions over documents."""
