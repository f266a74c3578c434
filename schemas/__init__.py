"""Contracts: pydantic configurations, Arrow table schemas, plan and manifest. Imports nothing of ours."""
