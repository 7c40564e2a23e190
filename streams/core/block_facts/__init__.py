"""Facts about blocks in addition to who holds them: placements in CXL pools, and MoE labels."""
