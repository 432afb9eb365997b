"""What was asked: the options, each declared once, and a call that was read and checked."""
