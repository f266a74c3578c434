"""Training: configuration to trained student and draft, on one rank or many. Launched by torchrun as `python -m xtok.train`."""
