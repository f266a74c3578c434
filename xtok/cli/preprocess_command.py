"""Build and publish a dataset on this machine, without Prefect: the same pipeline, the same bytes.

The configuration is a YAML file (see README.md); relative paths in it begin in the current directory. A relaunch after an
interruption continues where it stopped and ends with the same bytes.
"""
