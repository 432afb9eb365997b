"""The base of all modules: errors, types, settings, files, and one view of both libraries."""
