"""Training entries: what a GPT run on a GPU or a CPU needs beside EDGC. Nothing outside this room imports it."""
