"""The transactional table (docs/architecture.md): what is written (records), where it lies on disk (store), how one
partition's batches become transactions (partition), and how a changelog is read to its end (changelog)."""
