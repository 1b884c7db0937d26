"""Benches: what the allocator costs, beside everything one would use instead."""
