"""The operator: reads a call, chooses who computes it, and gives the caller what came back."""
