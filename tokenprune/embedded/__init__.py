"""The embedded model: a small LLaVA trained by ``training/train.py``; this package holds only data."""
