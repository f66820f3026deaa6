"""A budget of bytes for the whole run, spent where it lowers the noise in what the optimizer gets."""
