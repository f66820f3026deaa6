"""The paper's way to ranks: from windows of entropy to a rank for each pipeline stage, aligned in time."""
