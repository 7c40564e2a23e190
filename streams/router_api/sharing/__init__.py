"""What routers share through Kafka: bookings (`router-loads`), and changes of the registry (`workers`).

What lives here: writing both, and folding bookings. What must not: which rank is chosen (deciding), and HTTP (http).
"""
