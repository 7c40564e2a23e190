"""Facts about blocks other than who holds them: CXL pools that hold a copy, and MoE labels."""
