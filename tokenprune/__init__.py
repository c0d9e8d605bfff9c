"""Compress the visual tokens of large vision-language models."""
