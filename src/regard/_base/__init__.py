"""What everything stands on: errors, types, settings, files, and one view of both libraries."""
