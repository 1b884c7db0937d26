"""Where coba_core meets trainers: the reference GRPO loop and the adapters for other people's trainers.

Each integration is an extra of its own; importing this package imports none of them.
"""
