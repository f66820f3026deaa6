"""What communication takes by a model, on the probed link, and in the steps of the run itself."""
