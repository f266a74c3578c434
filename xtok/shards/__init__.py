"""The offline path: plan, build parts, verify, publish, read and look inside. Torch-free; import from the modules by name."""
