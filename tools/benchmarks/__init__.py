"""What the tools share that time single steps, or count what a step does."""
