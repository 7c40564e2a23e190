"""The transactional tables (docs/architecture.md): their rows (records), their copies on disk (store), how one
partition's batches become transactions (partition), what records mean (index_reducer, cxl_reducer), how a changelog is
read (changelog), and who follows it to take over (standby)."""
