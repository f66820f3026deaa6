"""Real runs between network namespaces whose links are limited."""
