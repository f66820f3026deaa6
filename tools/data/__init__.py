"""From text to Megatron's indexed files, for ``preprocess_data.py``; what reads these files does not belong here."""
