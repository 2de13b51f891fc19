"""The exported configurations of tests/export."""

from tests.export.conftest import export_configuration, exported

__all__ = ["export_configuration", "exported"]
