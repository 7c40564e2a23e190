"""Everything between values and Kafka: clients, records, deliveries, topics."""
