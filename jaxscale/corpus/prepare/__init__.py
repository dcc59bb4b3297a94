"""Raw files become token shards: stages over blocks of documents, joins between them, and a report of it all."""
