"""What is shown of a small attention: its steps, and its weights as a picture."""
