"""How every test runs."""

from hypothesis import settings

# The same examples on every machine, and no deadline: a slow machine is no failure.
settings.load_profile("ci")
