"""What is special about SentencePiece."""

SPACE_MARK = "\u2581"  # SentencePiece writes a space as this character and so reads the character back as a space
