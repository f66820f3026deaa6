"""The ways of gradients through a reduction, by what compresses them."""
