"""What several commands use; what only one of them needs belongs in its room."""
