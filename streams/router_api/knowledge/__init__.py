"""What a router knows: the fleet, the index, predictions and engines' reports, and how far it can trust them.

What lives here: reading topics, and folding their records. What must not: bookings (sharing), and any write to Kafka.
"""
