"""The exported configurations of tests/export, which all passes are tried on."""

from tests.export.conftest import export_configuration, exported

__all__ = ["export_configuration", "exported"]
