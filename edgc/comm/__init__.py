"""Talks: wire formats and collectives. The one room that uses ``torch.distributed``; it knows no gradients."""
