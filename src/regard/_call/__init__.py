"""The options, each declared once, and a call that was read and checked."""
