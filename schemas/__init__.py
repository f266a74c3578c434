"""Contracts of xtok: configurations, Arrow tables, plan and manifest. Only pydantic and pyarrow are imported here."""
