"""How long a step takes, computed before anything is rented: schedules, links, what compresses."""
