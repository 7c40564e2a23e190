"""What engines say: dialects and ledger (pure), the publisher for engines that embed it, the bridge."""
