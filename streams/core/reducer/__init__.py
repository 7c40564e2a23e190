"""What events do to the ranks of one partition: verdicts, runs, restatements, leases, resync requests."""
