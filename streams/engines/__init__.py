"""From engines to Kafka: dialects and ledger (pure), the publisher for engines that embed it, and the bridge."""
