"""Raw files to token shards: stages over blocks of documents, deduplication joins, and a report."""
