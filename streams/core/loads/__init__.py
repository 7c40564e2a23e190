"""Active load: bookings, folded in any order, and the blocks that they use on each rank."""
