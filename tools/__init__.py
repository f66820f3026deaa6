"""The commands that users start, their parts in the rooms; what training itself runs does not belong here."""
