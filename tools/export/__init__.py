"""A Megatron checkpoint as a Hugging Face model, for ``export_hf.py``; what runs that model does not belong here."""
